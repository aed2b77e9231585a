"""Fixtures of the model tests: several gloo ranks under the rows, and transformers' answer for the tiny model."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.layout.public_folder import as_published

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PUBLIC = ROOT / "tests" / "layout" / "deepseek_v3_public_config.json"
LENGTHS, WIDTH = (150, 97, 131), 160  # beyond the 64 tokens that yarn starts from


def _load(name: str):
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def run_ranks(warm):
    """run_ranks(job, folder, world_size=2, switches="", timeout_s=240): what "file.py:function" returns on every rank.

    The function is called with `folder`. `switches`: more of VERL_PATCHES, as ",-model.config". A rank that fails or
    hangs takes the others with it, and its output is in the AssertionError.
    """
    return functools.partial(_run_ranks, warm)


def _run_ranks(warm, job: str, folder: Path, world_size: int = 2, switches: str = "", timeout_s: float = 240) -> list:
    import torch

    stem = job.replace(".py:", ".")
    for old in folder.glob(f"{stem}.*"):
        old.unlink()
    environment = warm({
        **os.environ,
        "VERL_PATCHES": "line=pypi,platform=cpu" + switches,
        "PYTHONPATH": str(ROOT),
        "WORLD_SIZE": str(world_size),
        "TORCHDYNAMO_DISABLE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    })
    processes, logs = [], [folder / f"{stem}.rank{rank}.log" for rank in range(world_size)]
    for rank, path in enumerate(logs):
        with path.open("wb") as log:
            command = [sys.executable, "-X", "warm", "-W", "ignore", str(HERE / "rank_main.py"), job, str(folder)]
            processes.append(
                subprocess.Popen(command, env={**environment, "RANK": str(rank)}, stdout=log, stderr=log, cwd=ROOT)
            )
    _wait(processes, logs, time.monotonic() + timeout_s)
    return [torch.load(folder / f"{stem}.rank{rank}.pt", weights_only=False) for rank in range(world_size)]


def _wait(processes: list[subprocess.Popen], logs: list[Path], deadline: float) -> None:
    try:
        while any(p.poll() is None for p in processes) and not any(p.poll() for p in processes):
            assert time.monotonic() < deadline, f"ranks hang; rank 0 said:\n{logs[0].read_text()[-6000:]}"
            time.sleep(0.05)
    finally:
        time.sleep(0.2 if any(p.poll() for p in processes) else 0)  # the first failure often brings others down
        for process in processes:
            process.kill()
            process.wait()
    failed = [rank for rank, p in enumerate(processes) if p.returncode > 0]
    assert not failed, "\n".join(f"rank {rank} failed:\n{logs[rank].read_text()[-6000:]}" for rank in failed)


def _make_batch():
    import torch

    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(6, 512, (len(LENGTHS), WIDTH), generator=generator)
    mask = torch.zeros(len(LENGTHS), WIDTH, dtype=torch.bool)
    for row, length in enumerate(LENGTHS):
        start = (WIDTH - length) // 2 * (row % 2)
        mask[row, start : start + length] = True
    ids[~mask] = 2
    return ids, mask, (mask.long().cumsum(-1) - 1).clamp(min=0)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    """A tiny DeepSeek-V3 of seed 0."""
    from verl_patches.model.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def parity():
    """The module parity.py: the loss and the comparisons."""
    return _load("parity")


@pytest.fixture(scope="session")
def reference(tmp_path_factory, tiny_folder, parity):
    """transformers' answer in fp32, each sequence by itself, and the folder that holds model and batch.pt.

    The model's config.json and extra tensors are then made those of a published folder (tests/layout).

    Keys: folder, mask, logits, gradients, weights (HF name -> tensor).
    batch.pt is (ids, mask, position_ids), each [3, WIDTH], padded left and right as verl pads prompts and responses.
    """
    import torch
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("parity")
    shutil.copytree(tiny_folder, folder / "model")
    ids, mask, _ = batch = _make_batch()
    torch.save(batch, folder / "batch.pt")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", torch_dtype=torch.float32)
    as_published(folder / "model", json.loads(PUBLIC.read_text()))  # what Megatron's side reads from here on
    rows = [model(ids[i, m][None]).logits[0] for i, m in enumerate(mask)]
    logits = torch.zeros(*ids.shape, rows[0].shape[-1])
    logits[mask] = torch.cat(rows)
    parity.next_token_loss(logits, ids, mask).backward()
    return {
        "folder": folder,
        "mask": mask,
        "logits": logits.detach(),
        "gradients": {name: p.grad for name, p in model.named_parameters()},
        "weights": {name: t.clone() for name, t in model.state_dict().items()},
    }
