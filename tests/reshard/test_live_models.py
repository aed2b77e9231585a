"""Views of real training models after they loaded HF weights: each is the checkpoint's own slice, bit by bit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.model.mindspeed_start import LAYOUTS, PARTS, engine_config
from tests.weights.cases import read_folder
from verl_patches.layout.inventory import build_inventory
from verl_patches.layout.parallel import parse_layout
from verl_patches.layout.sharding import local_parameters
from verl_patches.reshard.region import region_of

MEGATRON = {
    "pp2vpp2": {"layout": "pp2 vpp2 @2"},  # pipelines first
    "pp2uneven": {"layout": "pp2 @2 layers=1,3", "overrides": {"num_layers_in_first_pipeline_stage": 1},
                  "refused": ["pp2 @2", "@2"]},
    "tp1": {"layout": "@2"},
    "tp2": {"layout": "tp2 @2"},
    "ep2": {"layout": "ep2 @2", "refused": ["tp2 @2"]},
    "tp2ep2": {"layout": "tp2 ep2 etp1 @2", "refused": ["tp2 @2"]},
}  # fmt: skip
MINDSPEED = {"tp2": "tp2 @2", "tp2_extends_ep": "tp2 ep2 etp1 @2", "ep2": "ep2 @2", "pp2_uneven": "pp2 @2 layers=1,3"}
MINDSPEED["cp2_ep2"] = "cp2 ep2 @2"
pytestmark = pytest.mark.slow


def check(found: list[dict], model: Path, text: str, library: str) -> None:
    layout, inventory = parse_layout(text), build_inventory(model)
    tensors = read_folder(model)
    for rank, here in enumerate(found):
        shards = local_parameters(inventory, layout, rank, library).shards
        assert here["regions"] == {name: region_of(shard) for name, shard in shards.items()}
        for name, region in here["regions"].items():
            expected = tensors[name].narrow(region.axis, region.start, region.stop - region.start)
            assert here["values"][name].dtype == expected.dtype
            assert torch.equal(here["values"][name], expected), (name, rank)
        assert here["seen"]
        assert all(here["valid"]) and here["rebuilt"] and not here["replaced"]


@pytest.fixture(scope="module")
def megatron(tiny_model, run_ranks) -> list[dict]:
    """Each rank's findings at every layout of megatron-core 0.12.2: one launch for all."""
    job, patches = "tests.reshard.live_job:megatron_job", "line=pypi,platform=cpu"
    return run_ranks(job, tiny_model, MEGATRON, size=2, backend="nccl", patches=patches)


@pytest.mark.parametrize("name", MEGATRON)
def test_views_are_the_checkpoints_slices_and_outlive_verls_offload(megatron, tiny_model, name):
    check([rank[name] for rank in megatron], tiny_model, MEGATRON[name]["layout"], "megatron-local")
    for rank in megatron:
        assert rank[name]["loaded"] and len(rank[name]["valid"]) == 3
        biases = [v for n, v in rank[name]["values"].items() if n.endswith("correction_bias")]
        assert rank[name]["offloaded_bytes"] == sum(b.nbytes for b in biases)  # buffers stay, parameters had gone


def test_layouts_that_are_not_the_models_are_refused(megatron):
    texts = [text for rank in megatron for case in rank.values() for text in case["refused"].items()]
    assert len(texts) == 8
    for layout, message in texts:
        assert isinstance(message, str) and "on rank" in message and "expected" in message, layout


@pytest.mark.upstream
@pytest.mark.parametrize("name", MINDSPEED)
def test_views_of_line_a3_are_the_checkpoints_slices(a3_sources, tiny_model, name, run_ranks):
    sources, text = a3_sources(), MINDSPEED[name]
    config = engine_config(tiny_model, sources[0], *{**LAYOUTS, **PARTS}[name], dtype="bf16")
    env = {"VERL_PATCHES": "line=a3,platform=cpu", "PYTHONPATH": os.pathsep.join(map(str, sources))}
    jobs = "tests.model.mindspeed_start:run", "tests.reshard.live_job:mindspeed_job"
    found = run_ranks(*jobs, config, tiny_model, text, size=2, env=env, backend=None, timeout_s=400)
    check(found, tiny_model, text, "mindspeed")
    assert all("not one of DeepSeek-V3's" in rank["refused"] for rank in found)  # called with another library's
