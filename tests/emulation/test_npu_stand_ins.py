"""Line a3 on platform cpu: torch.npu in a process; test_cpu_rows.py tries each row, and imports each module."""

import pytest

from verl_patches.emulation.ascend import packages

START = """
import dataclasses
from verl_patches.patching.engine import Engine
from verl_patches.patching.switches import Switches
from verl_patches.emulation import rows as cpu_rows
rows = [dataclasses.replace(row, lines=frozenset({"a3", "pypi"})) for row in cpu_rows.TORCH] + list(cpu_rows.NPU)
engine = Engine(rows, Switches(LINE, "cpu"))
engine.apply()
import torch
"""
DEVICE = """
npu = torch.npu
assert npu.is_available() and npu.device_count() == 1 and npu.current_device() == torch.device("cpu")
side = npu.Stream()
with npu.stream(side):
    assert npu.current_stream() is side
    event = npu.current_stream().record_event()
assert npu.current_stream() is npu.default_stream()
npu.default_stream().wait_event(event); event.wait(); npu.synchronize()
first, last = npu.Event(enable_timing=True), npu.Event()
first.record(); last.record()
assert first.elapsed_time(last) >= 0
npu.manual_seed_all(7); before = torch.rand(1)
state = npu.default_generators[npu.current_device()].get_state()
npu.manual_seed(7); assert torch.equal(torch.rand(1), before)
with npu.device(0): pass
"""
NOT_THERE = """
for name in ("torch_npu", "acl", "apex", "torchair"):
    try: __import__(name)
    except ModuleNotFoundError: pass
    else: raise AssertionError(name)
assert not hasattr(torch, "npu") and not hasattr(torch.Tensor, "npu")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("line", "code"), [("a3", DEVICE), ("pypi", NOT_THERE)])
def test_stand_ins_in_a_process(run_python, line, code):
    run_python(f"LINE = {line!r}{START}{code}").check()


def test_what_lies_below_a_listed_name_is_listed():
    assert "profiling" in packages.listed("torch_npu.profiler.ProfilerLevel.Level1")[0]
    assert packages.listed("torch_npu.npu_rms_norm") is packages.listed("torch_npu.npu.memory_statistics") is None
