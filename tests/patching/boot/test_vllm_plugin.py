"""Test that vLLM's general-plugin entry starts the prelude once, and only if VERL_PATCHES is set."""

import pytest

CODE = """
import importlib.metadata, sys
from verl_patches.patching.boot.vllm_plugin import register
register(); register()
print("verl_patches.prelude_patch" in sys.modules, importlib.metadata.version.__module__)
"""


@pytest.mark.parametrize(
    ("patches", "module"),
    [(None, "importlib.metadata"), ("line=pypi,platform=cpu", "verl_patches.emulation.cpu.vllm_start")],
)
def test_rows_are_applied_once_and_only_with_the_variable(run_python, patches, module):
    assert run_python(CODE, patches=patches).check().out.split() == [str(patches is not None), module]
