"""Test traces of phases: each has only its own operations and moves, on a CPU and by the emulated torch_npu."""

import gzip
import inspect
import json
import pickle
import sys
from types import SimpleNamespace

import pytest
import torch

from verl_patches.emulation.npu import packages
from verl_patches.memory.schedule import SCHEDULE
from verl_patches.memory.scheduler import Scheduler
from verl_patches.worker.context import WorkerContext
from verl_patches.worker.profile import PhaseProfiler

STEP = "step_3_rank_1_"


class Moves:
    """Handle actor_params by computing: a load is a cosine, an offload a sine."""

    def load(self):
        torch.cos(torch.ones(3))

    def offload(self):
        torch.sin(torch.ones(3))


def one_step(folder, platform="cpu", phases=None, schedule=True):
    """Return {files, faults} of a step that exponentiates in the weight sync and multiplies matrices in the update."""
    settings = SimpleNamespace(phases=phases, stacks=False)
    here, recipe = WorkerContext(), SimpleNamespace(platform=platform, profile=settings)
    if schedule:
        here.scheduler = Scheduler(SCHEDULE, lambda: None)
        here.scheduler.add({"actor_params": Moves()})
    here.profiler = PhaseProfiler(recipe, 3, 1, folder)
    here.begin("reshard")
    torch.exp(torch.ones(3))
    here.begin("wake_kv")
    torch.tanh(torch.ones(3))
    with here.phase("update"):
        torch.ones(3, 3) @ torch.ones(3, 3)
    torch.log(torch.ones(3))  # after the phase
    return here.profiler.take_files()


def operations(file):
    text = gzip.open(file).read() if file.suffix == ".gz" else file.read_bytes()
    return {event["name"] for event in json.loads(text)["traceEvents"] if event.get("cat") == "cpu_op"}


@pytest.mark.parametrize("schedule", [True, False])
def test_a_trace_has_the_operations_and_moves_of_its_phase_alone(tmp_path, schedule):
    found = one_step(tmp_path, phases=["reshard", "update"], schedule=schedule)
    files = [f"{STEP}{phase}.json.gz" for phase in ("reshard", "update")]
    assert found == {"files": files, "faults": []} and sorted(files) == sorted(f.name for f in tmp_path.iterdir())
    sync, update = (operations(tmp_path / f"{STEP}{phase}.json.gz") for phase in ("reshard", "update"))
    moved = {"aten::cos", "aten::sin"} if schedule else set()  # a sync loads weights and offloads them
    assert {"aten::exp", *moved} < sync and {"aten::mm", *(moved & {"aten::cos"})} < update
    assert not {"aten::mm", "aten::tanh", "aten::log"} & sync and not {"aten::exp", "aten::tanh", "aten::log"} & update


def test_torch_npus_profiler_writes_what_mindstudio_reads(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", packages.torch_npu)
    found = one_step(tmp_path, platform="npu_emulated", phases=["update"])
    trace, memory = (tmp_path / file for file in found["files"])
    assert found["faults"] == [] and trace.name == "trace_view.json" and trace.parts[-3].endswith("_ascend_pt")
    assert "aten::mm" in operations(trace) and "aten::exp" not in operations(trace)
    assert pickle.loads(memory.read_bytes()).keys() == {"segments", "device_traces"}


def test_an_error_of_the_profiler_is_reported_and_not_raised(tmp_path, monkeypatch):
    (tmp_path / "taken").write_text("")
    found = one_step(tmp_path / "taken", phases=["update"])
    assert found["files"] == [] and "step_3_rank_1: FileExistsError" in found["faults"][0]
    nothing = inspect.signature(packages.torch_npu.profiler.tensorboard_trace_handler)
    monkeypatch.setattr(
        packages.torch_npu.profiler, "tensorboard_trace_handler", lambda *args: lambda profiled: nothing
    )
    monkeypatch.setitem(sys.modules, "torch_npu", packages.torch_npu)
    found = one_step(tmp_path / "npu", platform="npu_emulated", phases=["update"])
    assert "wrote no trace" in found["faults"][0]  # torch_npu prints its errors and returns


def test_without_the_snapshot_there_is_no_file_of_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", packages.torch_npu)
    monkeypatch.delattr(packages.torch_npu.npu.memory, "_snapshot")
    found = one_step(tmp_path, platform="npu_emulated", phases=["update"])
    assert [name.rpartition("/")[2] for name in found["files"]] == ["trace_view.json"]
    assert "AttributeError" in found["faults"][0] and not list(tmp_path.glob("*.pickle"))
