"""Run the prelude in each process of vLLM, which calls this entry point of the group `vllm.general_plugins`."""

from __future__ import annotations

import importlib
import os

from verl_patches.patching.boot.before_import import PRELUDE
from verl_patches.patching.switches import PATCHES_VAR


def register() -> None:
    """Apply the catalogue's rows in this process if VERL_PATCHES is set. Idempotent.

    Without the variable it does nothing, as vLLM calls it wherever the package is installed.
    """
    if os.environ.get(PATCHES_VAR):
        importlib.import_module(PRELUDE)
