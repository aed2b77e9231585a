"""vLLM's general-plugin entry as one more way in for the prelude."""

from __future__ import annotations

CODE = """
import sys
from verl_patches.rollout.vllm_plugin import register
register(); register()
prelude = sys.modules.get("verl_patches.prelude_patch")
import importlib.metadata
print(prelude is not None, hasattr(importlib.metadata.version, "__wrapped__") or importlib.metadata.version.__module__)
"""


def test_nothing_happens_without_the_switch(run_python):
    assert run_python(CODE).check().out.split() == ["False", "importlib.metadata"]


def test_rows_are_put_in_place_once(run_python):
    out = run_python(CODE, patches="line=pypi,platform=cpu").check().out.split()
    assert out == ["True", "verl_patches.platform.cpu"]
