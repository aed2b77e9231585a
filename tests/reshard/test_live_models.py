"""Views of real training models after they loaded HF weights: each is the checkpoint's own slice, bit by bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from verl_patches.layout.inventory import build_inventory
from verl_patches.layout.parallel import parse_layout
from verl_patches.layout.sharding import local_parameters
from verl_patches.model.tiny import make_tiny_model
from verl_patches.model.weights import HFTensors
from verl_patches.reshard.region import region_of

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MEGATRON = {
    "pp2vpp2": {"layout": "pp2 vpp2 @2"},  # pipelines first, as in tests/model/test_weights.py
    "pp2uneven": {"layout": "pp2 @2 layers=1,3", "overrides": {"num_layers_in_first_pipeline_stage": 1},
                  "refused": ["pp2 @2", "@2"]},
    "tp1": {"layout": "@2"},
    "tp2": {"layout": "tp2 @2"},
    "ep2": {"layout": "ep2 @2", "refused": ["tp2 @2"]},
    "tp2ep2": {"layout": "tp2 ep2 etp1 @2", "refused": ["tp2 @2"]},
}  # fmt: skip
# name -> layout, overrides of the tiny configuration
MINDSPEED = {
    "tp2": ("tp2 @2", ["tensor_model_parallel_size=2", "expert_tensor_parallel_size=2"]),
    "tp2_extends_ep": ("tp2 ep2 etp1 @2", ["tensor_model_parallel_size=2", "expert_model_parallel_size=2"]),
    "ep2": ("ep2 @2", ["expert_model_parallel_size=2"]),
    "pp2_uneven": ("pp2 @2 layers=1,3", ["pipeline_model_parallel_size=2"]),
}
SOURCES = {"verl": "verl", "Megatron-LM": "megatron", "MindSpeed": "mindspeed", "MindSpeed-LLM": "mindspeed_llm"}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A tiny DeepSeek-V3 of seed 0, in bf16."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def run_ranks(warm, script: str, job: str, folder: Path, line: str, path: list[str]) -> list[dict]:
    """What live_job.py's function `job` returns on two ranks that `script` of tests/model starts."""
    environment = warm({
                   **os.environ, "VERL_PATCHES": f"line={line},platform=cpu", "WORLD_SIZE": "2",
                   "PYTHONPATH": os.pathsep.join([*path, str(ROOT), str(HERE)]), "TORCHDYNAMO_DISABLE": "1",
                   "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})  # fmt: skip
    command = [sys.executable, "-X", "warm", "-W", "ignore", str(ROOT / "tests/model" / script), f"live_job.py:{job}",
               str(folder)]  # fmt: skip
    processes, logs = [], [folder / f"rank{rank}.log" for rank in range(2)]
    for rank, path in enumerate(logs):
        with path.open("wb") as log:
            processes.append(subprocess.Popen(command, env={**environment, "RANK": str(rank)}, stdout=log, stderr=log))
    deadline = time.monotonic() + 400
    try:
        while any(p.poll() is None for p in processes) and not any(p.poll() for p in processes):
            assert time.monotonic() < deadline, f"ranks hang; rank 0 said:\n{logs[0].read_text()[-6000:]}"
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    failed = [rank for rank, p in enumerate(processes) if p.returncode > 0]
    assert not failed, "\n".join(f"rank {rank} failed:\n{logs[rank].read_text()[-6000:]}" for rank in failed)
    return [torch.load(folder / f"live_job.{job}.rank{rank}.pt", weights_only=False) for rank in range(2)]


def check(found: list[dict], model: Path, text: str, library: str) -> None:
    layout, inventory = parse_layout(text), build_inventory(model)
    with HFTensors(model) as files:
        for rank, here in enumerate(found):
            shards = local_parameters(inventory, layout, rank, library).shards
            assert here["regions"] == {name: region_of(shard) for name, shard in shards.items()}
            for name, region in here["regions"].items():
                expected = files.read(name).narrow(region.axis, region.start, region.stop - region.start)
                assert here["values"][name].dtype == expected.dtype
                assert torch.equal(here["values"][name], expected), (name, rank)
            assert here["seen"]
            assert all(here["valid"]) and here["rebuilt"] and not here["replaced"]


@pytest.fixture(scope="module")
def megatron(model, tmp_path_factory, warm) -> list[dict]:
    """Each rank's findings at every layout of megatron-core 0.12.2: one launch for all."""
    folder = tmp_path_factory.mktemp("megatron")
    (folder / "model").symlink_to(model)
    (folder / "layouts.json").write_text(json.dumps(MEGATRON))
    return run_ranks(warm, "rank_main.py", "megatron_job", folder, "pypi", [])


@pytest.mark.parametrize("name", MEGATRON)
def test_views_are_the_checkpoints_slices(megatron, model, name):
    check([rank[name] for rank in megatron], model, MEGATRON[name]["layout"], "megatron-local")


@pytest.mark.parametrize("name", MEGATRON)
def test_views_outlive_verls_offload(megatron, name):
    for rank in megatron:
        assert rank[name]["loaded"] and len(rank[name]["valid"]) == 3
        biases = [v for n, v in rank[name]["values"].items() if n.endswith("correction_bias")]
        assert rank[name]["offloaded_bytes"] == sum(b.nbytes for b in biases)  # buffers stay, parameters had gone


def test_layouts_that_are_not_the_models_are_refused(megatron):
    texts = [text for rank in megatron for case in rank.values() for text in case["refused"].items()]
    assert len(texts) == 8
    for asked, message in texts:
        assert isinstance(message, str) and "on rank" in message and "expected" in message, asked


@pytest.fixture(scope="module")
def sources(pytestconfig) -> list[str]:
    """Folders of line a3's Python sources, in the order of PYTHONPATH."""
    folder = pytestconfig.getoption("--upstream")
    missing = [name for name, package in SOURCES.items() if not (folder / name / package).is_dir()]
    if missing:
        pytest.skip(f"--upstream {folder} holds no checkout {missing[0]}: fetch-upstream makes them")
    return [str(folder / name) for name in SOURCES]


@pytest.mark.upstream
@pytest.mark.parametrize("name", MINDSPEED)
def test_views_of_line_a3_are_the_checkpoints_slices(sources, model, tmp_path, name, warm):
    from omegaconf import OmegaConf

    from verl_patches.cluster.compose import compose

    text, sizes = MINDSPEED[name]
    (tmp_path / "model").symlink_to(model)
    (tmp_path / "layout.txt").write_text(text)
    sizes = ["expert_model_parallel_size=1", "expert_tensor_parallel_size=1", *sizes]
    layers = parse_layout(text).layers_per_stage
    overrides = [f"actor_rollout_ref.actor.megatron.{size}" for size in sizes if size]
    overrides += [f"actor_rollout_ref.model.path={model}", "trainer.n_gpus_per_node=2", "recipe.line=a3",
                  "recipe.dtype=bf16", f"recipe.train.expert_split={'tp_extend_ep' if 'extends' in name else 'etp'}",
                  f"recipe.train.layers_per_stage={list(layers) if layers else 'null'}"]  # fmt: skip
    config = compose("grpo_deepseekv3_tiny_cpu", overrides, verl_path=Path(sources[0]))
    OmegaConf.save(config.actor_rollout_ref, tmp_path / "engine.yaml")
    found = run_ranks(warm, "mindspeed_rank.py", "mindspeed_job", tmp_path, "a3", sources)
    check(found, model, text, "mindspeed")
    assert all("not one of DeepSeek-V3's" in rank["refused"] for rank in found)  # asked for as another library's
