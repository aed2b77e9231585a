"""What a run on platform npu_emulated reached."""

import sys
from types import ModuleType

import torch

from verl_patches.emulation import coverage
from verl_patches.emulation.ascend.ops import npu_swiglu


def test_called_functions_and_imported_modules_are_listed_with_those_never_reached(tmp_path, monkeypatch):
    package = ModuleType("vllm_ascend")
    package.__path__ = [str(tmp_path)]
    for name in ("__init__", "a", "b"):
        (tmp_path / f"{name}.py").touch()
    monkeypatch.setitem(sys.modules, "vllm_ascend", package)
    monkeypatch.setitem(sys.modules, "vllm_ascend.a", ModuleType("vllm_ascend.a"))
    before = coverage.reached()["functions"]["npu_swiglu"]
    npu_swiglu(torch.ones(2, 4))
    worker = coverage.reached()
    assert worker["functions"]["npu_swiglu"] == before + 1
    other = {"functions": {"npu_swiglu": 0, "npu_rms_norm": 0}, "modules": {"vllm_ascend.b": False}, "graphs": 3}
    first = {"functions": {"npu_swiglu": 2}, "modules": worker["modules"], "graphs": 0, "groups": [{"ranks": 2}]}
    found = coverage.coverage_of([first, other | {"groups": []}])
    assert found["groups"] == [{"ranks": 2}]
    assert found["functions"]["npu_swiglu"]["calls"] == 2
    assert found["functions"]["npu_swiglu"]["schemas"][0].startswith("npu_swiglu(input, dim=-1")
    assert (found["functions_never"], found["modules"]) == (["npu_rms_norm"], ["vllm_ascend", "vllm_ascend.a"])
    assert found["modules_never"] == ["vllm_ascend.b"]
    first, function, *_ = coverage.lines_of(found)
    assert "1 of 2 functions" in first and "2 of 3 modules" in first and "3 graphs" in first
    assert function.startswith("  npu_swiglu(input, dim=-1") and function.endswith(": 2 calls")
