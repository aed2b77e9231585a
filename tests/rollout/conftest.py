"""Start ranks of an in-process rollout for tests, and compute the results of one rank without parallelism."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.layout.public_folder import as_published

PUBLIC = Path(__file__).resolve().parents[1] / "layout" / "deepseek_v3_public_config.json"
CPU = "line=pypi,platform=cpu"
ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_V1": "0"}


@pytest.fixture(scope="session")
def run_rollout(run_ranks):
    """Return run_rollout("module:function", *arguments, size=1, ...), which runs a function of this folder on ranks.

    It is `run_ranks` with the patches of platform cpu and the variables of an in-process vLLM.
    """
    return lambda job, *arguments, **options: run_ranks(
        f"tests.rollout.{job}", *arguments, **{"patches": CPU, "env": ENV, **options}
    )


@pytest.fixture(scope="session")
def public_folder(tiny_model, tmp_path_factory) -> Path:
    """Export the model from Megatron's files of a layout to a folder as DeepSeek publishes it, with bf16 weights."""
    from verl_patches.layout.parallel import parse_layout
    from verl_patches.weights.convert import convert  # imports torch
    from verl_patches.weights.plan import plan_conversion
    from verl_patches.weights.source import open_source

    made = tmp_path_factory.mktemp("public")
    folder, layout = made / "tiny", parse_layout("tp2 pp2 ep4 etp1 @8 layers=1,3")
    convert(plan_conversion(open_source(tiny_model), layout), made / "megatron")
    convert(plan_conversion(open_source(made / "megatron"), file_bytes=1_000_000), folder)
    return as_published(folder, json.loads(PUBLIC.read_text()))


@pytest.fixture(scope="session")
def requests() -> list[list]:
    """Return pairs of a prompt and the number of tokens to generate: one short sequence, then five longer ones."""
    import random

    draw = random.Random(1)
    return [
        [[draw.randrange(3, 512) for _ in range(n)], length]
        for n, length in ((7, 4), (20, 10), (21, 14), (22, 18), (23, 22), (24, 26))
    ]


@pytest.fixture(scope="session")
def one_rank(run_rollout, tiny_model, public_folder, requests) -> dict:
    """Return all results of one process without parallelism, computed together because starting it is slow."""
    tokens = [(7 * i * i + 3 * i) % 509 + 3 for i in range(150)]  # far beyond original_max_position_embeddings = 64
    spec = {"model": str(tiny_model), "tokens": tokens, "prompt_tokens": 110, "requests": requests}
    spec |= {"rollout": {"tensor_model_parallel_size": 1}, "public_folder": str(public_folder)}
    spec["wrong_configs"] = _wrong_configs(tiny_model)
    return {**spec, **run_rollout("parity_rank:one_rank", spec)[0]}


def _wrong_configs(model: Path) -> dict[str, dict]:
    """Return HF config overrides, each of which removes a part of DeepSeek-V3."""
    yarn = json.loads((model / "config.json").read_text())["rope_scaling"]
    flat = {**yarn, "rope_type": "yarn", "mscale": 0.0, "mscale_all_dim": 0.0}  # 0.1 * 0 * ln(40) + 1 = 1
    return {"no_mscale": {"rope_scaling": flat}, "no_groups": {"n_group": 1, "topk_group": 1}}
