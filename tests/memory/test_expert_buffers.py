"""Routed experts leave the device with the rest: verl 54c9b736's offload over the real DDP of Megatron core_r0.8.0."""

import functools
import json
import os
from pathlib import Path

import pytest

from verl_patches.catalog import ROWS
from verl_patches.errors import ConfigError
from verl_patches.patching.engine import Engine
from verl_patches.patching.switches import Switches

JOB = Path(__file__).resolve().parent / "offload_job.py"
OURS = ("memory.offload_experts", "memory.load_experts")
WITHOUT = tuple(f"-{row}" for row in OURS)
DENSE, EXPERT = 2 * 128, 128  # elements of the job's buffers, which Megatron pads to 128
ALL = {"dense param": DENSE, "dense grad": DENSE, "expert param": EXPERT, "expert grad": EXPERT}


@pytest.fixture(scope="module")
def seen(run_python, pytestconfig):
    """seen(*patterns): what offload_job.py found under the rows of line a3 with these switches."""
    folder = pytestconfig.getoption("--upstream")
    sources = [folder / name for name in ("verl", "Megatron-LM")]
    if not all((source / source.name.partition("-")[0].lower()).is_dir() for source in sources):
        pytest.skip(f"--upstream {folder} holds no checkouts of verl and Megatron-LM: fetch-upstream makes them")

    @functools.cache
    def run(*patterns):
        done = run_python(JOB.read_text(), patches=",".join(("line=a3,platform=cpu", *patterns)),
                          env={"PYTHONPATH": os.pathsep.join(map(str, sources)), "TORCHDYNAMO_DISABLE": "1"})
        return json.loads(done.check().out.splitlines()[-1])

    return run


@pytest.mark.slow
@pytest.mark.upstream
def test_offload_leaves_nothing_and_load_brings_it_back(seen):
    found = seen()
    assert found["rows"] == {row.id: "active" for row in ROWS if row.id.startswith("memory.")}
    assert found["at first"] == found["loaded"] == ALL
    assert found["offloaded"] == found["offloaded twice"] == dict.fromkeys(ALL, 0)
    assert found["loaded without gradients"] == {**ALL, "dense grad": 0, "expert grad": 0}
    assert found["weights are back"] and found["weights are back again"] and found["gradients"] == [0, 0, 0]
    assert found["reference is the same"]


@pytest.mark.slow
@pytest.mark.upstream
def test_megatron_finds_its_own_lists_afterwards_even_after_an_error(seen):
    found = seen()
    assert "grad_data_size" in found["load first"] and found["buffers are Megatron's"]
    assert found["phases"] == ["offload"]


@pytest.mark.slow
@pytest.mark.upstream
def test_verl_alone_leaves_the_experts(seen):
    found = seen(*WITHOUT)
    assert found["offloaded"] == {**ALL, "dense param": 0, "dense grad": 0}
    assert found["gradients"] == [0, 20, 0]  # and never zeroes theirs


def test_neither_row_is_for_the_line_whose_verl_does_it():
    assert set(OURS) <= Engine(ROWS, Switches("a3", "npu")).wanted
    assert set(OURS).isdisjoint(Engine(ROWS, Switches("pypi", "cpu")).wanted)


def test_experts_that_nothing_would_bring_back_are_not_offloaded():
    with pytest.raises(ConfigError, match=r"memory\.offload_experts needs memory\.load_experts, which is off"):
        Engine(ROWS, Switches("a3", "npu", ("-memory.load_experts",)))
    assert set(OURS).isdisjoint(Engine(ROWS, Switches("a3", "npu", WITHOUT)).wanted)
