"""Ranks of an in-process rollout for tests: gloo processes on this host, as verl's launcher would start them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.layout.public_folder import as_published

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CPU = "line=pypi,platform=cpu"
ENV = {
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V1": "0",
}


class RanksFailed(AssertionError):
    """Some rank did not exit 0 in time; the message holds the end of each rank's output."""


@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory, warm):
    """run_ranks(specs, patches=..., timeout_s=...) -> what each rank's code returned, in rank order; one spec a rank.

    Raises RanksFailed with every rank's output if one fails or the time is up; only processes started here are ended.
    """
    import torch

    def run(specs: list[dict], patches: str = CPU, timeout_s: float = 120) -> list[dict]:
        folder = tmp_path_factory.mktemp("ranks")
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        common = {**os.environ, **ENV, "VERL_PATCHES": patches, "PYTHONPATH": path, "WORLD_SIZE": str(len(specs)),
                  "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks = []
        for rank, spec in enumerate(specs):
            command = [sys.executable, "-X", "warm", str(HERE / "engine_rank.py"), json.dumps(spec),
                       str(folder / f"{rank}.pt")]  # fmt: skip
            env = {**warm(common), "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with (folder / f"{rank}.log").open("w") as log:
                ranks.append(subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True))
        _wait(ranks, folder, timeout_s)
        return [torch.load(folder / f"{rank}.pt") for rank in range(len(specs))]

    return run


def _wait(ranks: list[subprocess.Popen], folder: Path, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    try:
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < end:
            if any(rank.poll() not in (None, 0) for rank in ranks):
                end = min(end, time.monotonic() + 5)  # let the others say why they stop, too
            time.sleep(0.05)
    finally:
        late = [number for number, rank in enumerate(ranks) if rank.poll() is None]
        for number in late:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(ranks[number].pid, signal.SIGKILL)  # a session of its own: only this rank
        codes = [rank.wait() for rank in ranks]
    if late or any(codes):
        ends = [(folder / f"{number}.log").read_text()[-6000:] for number in range(len(ranks))]
        told = enumerate(zip(codes, ends, strict=True))
        logs = "\n".join(f"--- rank {rank}, exit {code}\n{end}" for rank, (code, end) in told)
        raise RanksFailed(f"ranks still running when the time was up: {late}\n{logs}")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    """The tiny DeepSeek-V3 of this repository, seed 0."""
    from verl_patches.model.tiny import make_tiny_model

    return str(make_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="session")
def public_folder(tiny_model, tmp_path_factory) -> Path:
    """The same model in a folder as DeepSeek publishes it, with weights in bf16."""
    folder = tmp_path_factory.mktemp("public") / "tiny"
    shutil.copytree(tiny_model, folder)
    return as_published(folder, json.loads((ROOT / "tests/layout/deepseek_v3_public_config.json").read_text()))


@pytest.fixture(scope="session")
def requests() -> list[list]:
    """[prompt, number of tokens to generate]: one short sequence, then five longer ones."""
    import random

    draw = random.Random(1)
    return [[[draw.randrange(3, 512) for _ in range(n)], length]
            for n, length in ((7, 4), (20, 10), (21, 14), (22, 18), (23, 22), (24, 26))]


@pytest.fixture(scope="session")
def one_rank(run_ranks, tiny_model, public_folder, requests) -> dict:
    """What one process without parallelism computes: everything in one go, because starting it is what costs."""
    tokens = [(7 * i * i + 3 * i) % 509 + 3 for i in range(150)]  # far beyond original_max_position_embeddings = 64
    spec = {"code": "parity_rank:one_rank", "model": tiny_model, "tokens": tokens, "prompt_tokens": 110,
            "rollout": {"tensor_model_parallel_size": 1}, "requests": requests,
            "wrong_configs": _wrong_configs(tiny_model), "public_folder": str(public_folder)}
    return {**spec, **run_ranks([spec])[0]}


def _wrong_configs(model: str) -> dict[str, dict]:
    """HF config overrides under which a part of DeepSeek-V3 is missing."""
    yarn = json.loads((Path(model) / "config.json").read_text())["rope_scaling"]
    flat = {**yarn, "rope_type": "yarn", "mscale": 0.0, "mscale_all_dim": 0.0}  # 0.1 * 0 * ln(40) + 1 = 1
    return {
        "no_mscale": {"rope_scaling": flat},
        "no_groups": {"n_group": 1, "topk_group": 1},
    }
