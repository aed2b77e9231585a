"""Test vLLM's V1 engine with vllm-ascend's own Python on platform npu_emulated, one process an engine.

Each process (emulated_engine.py) builds one engine and runs several checks: greedy tokens and their log-probs against
transformers in fp32.
"""

import json
import sys

import pytest

from tests.conftest import ROOT, emulated_npu
from tests.emulation.emulated_engine import CYCLES, EAGER, PRODUCTION, USED_BYTES
from verl_patches import emulation
from verl_patches.catalog import all_rows
from verl_patches.errors import ConfigError
from verl_patches.model.tiny import make_tiny_model
from verl_patches.patching.engine import Engine
from verl_patches.patching.switches import Switches

LARGEST = 1e-5  # |dlogp| in fp32
CLASSES = ["NPUWorker", "NPUModelRunner", "CustomDeepseekV3ForCausalLM"]
ASCEND_SCHEDULER = {"ascend_scheduler_config": {"enabled": True}}
GRAPHS = {"enabled": True, "graph_batch_sizes": [8], "enable_multistream_moe": True, "enable_multistream_mla": True}
# name -> environment, rows that are off, arguments of LLM, functions that prepare a check, faults
ENGINES = {
    "eager, prompts in chunks, sleep mode": (
        {"TORCHDYNAMO_DISABLE": "1"}, ",-memory.sleep_mode",
        {"enforce_eager": True, "max_num_batched_tokens": 64, "enable_sleep_mode": True, "enable_prefix_caching": True},
        ["classes", "sleep"], EAGER),
    "graphs of several streams, traced": (
        {}, "",
        {"max_num_batched_tokens": 512, "enable_sleep_mode": True, "gpu_memory_utilization": 0.2,
         "additional_config": {"torchair_graph_config": GRAPHS, **ASCEND_SCHEDULER}},
        ["graphs", "cycles"], {}),
    "graphs of several streams, prompts in chunks, not traced": (
        {"TORCHDYNAMO_DISABLE": "1"}, "",
        {"max_num_batched_tokens": 64, "additional_config": {
            "torchair_graph_config": {**GRAPHS, "use_cached_graph": True}, "chunked_prefill_for_mla": True}},
        ["graphs"], PRODUCTION),
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    shape = json.loads((ROOT / "configs/model/deepseekv3_tiny_256experts.json").read_text())
    return make_tiny_model(tmp_path_factory.mktemp("emulated") / "model", overrides=shape | {"num_hidden_layers": 3})


@pytest.mark.slow
@pytest.mark.upstream
@pytest.mark.parametrize("name", ENGINES)
def test_log_probs_of_the_engine_are_those_of_transformers(name, model, run_emulated):
    env, off, options, prepared, faults = ENGINES[name]
    checks = {each: {"before": each} for each in prepared} | {fault: {"fault": fault} for fault in faults}
    case = {"model": "tiny", "options": options, "checks": {**checks, "without a fault": {"fault": None}}}
    job = "tests.emulation.emulated_engine:main"
    where = {"patches": emulated_npu() + off, "env": env, "backend": None}
    (found,) = run_emulated(job, {"tiny": str(model)}, [case], **where)
    spoilt = {fault: found.pop(fault)["worst"] for fault in faults}
    for check in found.values():
        assert check["worst"] < LARGEST and check["same"], found
    if name.startswith("eager"):
        used = USED_BYTES["weights"] + USED_BYTES["activations"] + USED_BYTES["beside"]  # as plan/expected.py has it
        assert found["classes"]["kv_cache_bytes"] == USED_BYTES["total"] // 2 - used
        assert found["classes"]["classes"] == CLASSES and found["sleep"]["poisoned"] == 1.0
        assert "after sleep" in found["sleep"]["kept"] and "memory.sleep_mode on" in found["sleep"]["kept"]
    assert {fault: worst for fault, worst in spoilt.items() if worst < 100 * LARGEST} == {}
    traced = found.get("graphs", {}).get("traced")
    assert traced is None or (len(traced) == 1 and traced[0] > 100) == ("not traced" not in name)
    if "cycles" in found:
        assert_nothing_grows(found["cycles"])
    if "not traced" in name:
        assert found["graphs"]["stream_switches"] > 0
        assert found["graphs"]["streams"] == [None] * 6  # layers of a prefill, of a decode


def assert_nothing_grows(found):
    """Assert constant memory after CYCLES of sleep to torch's pool with graphs that read addresses at each call."""
    assert len(found["tokens"]) == 1 and found["moved"] > CYCLES // 2
    assert max(found["live"]) <= found["live"][0] * 1.001
    assert max(found["asleep"]) < found["live"][0] - found["weights"]  # the KV cache has gone too
    assert "has moved since the graph's first call" in found["frozen"]  # the control: the pin's own setting
    assert "after sleep" in found["kept"] and "expandable_segments:True" in found["kept"]


def test_rows_of_npu_are_on_and_no_row_of_cpu_alone():
    emulated, npu = (Engine(all_rows(), Switches("a3", platform)).wanted for platform in ("npu_emulated", "npu"))
    own = {row.id for row in all_rows() if "npu_emulated" in row.platforms and "a3" in row.lines}
    assert npu < emulated and emulated - npu == own


def test_refused_where_a_device_may_be(tmp_path, monkeypatch):
    monkeypatch.setattr(emulation, "DEVICE_NODES", str(tmp_path / "davinci*"))
    emulation.require("npu_emulated")
    (tmp_path / "davinci_manager").touch()
    with pytest.raises(ConfigError, match=r"davinci_manager.*recipe.platform=npu"):
        emulation.require("npu_emulated")
    monkeypatch.setattr(emulation, "DEVICE_NODES", str(tmp_path / "none*"))
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    with pytest.raises(ConfigError, match="torch_npu at"):
        emulation.require("npu_emulated")
