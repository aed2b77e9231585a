"""Entry point of group `vllm.general_plugins`: vLLM calls it in every process; one more way in for the prelude."""

from __future__ import annotations

import os

from verl_patches.patching.switches import VARIABLE


def register() -> None:
    """Put the catalogue's rows in place in this process, if VERL_PATCHES is set; calling it again changes nothing.

    Without the variable nothing happens: vLLM calls this in every process of a machine that has the package installed.
    """
    if os.environ.get(VARIABLE):
        from verl_patches import prelude_patch  # noqa: F401
