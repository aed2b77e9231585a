"""Provide transformers' results for the tiny model, the reference of the model tests, and jobs on line a3's model."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.layout.public_folder import as_published

PUBLIC = Path(__file__).resolve().parents[1] / "layout" / "deepseek_v3_public_config.json"
LENGTHS, WIDTH = (150, 97, 131), 160  # beyond the 64 tokens where yarn starts


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
def reference(tmp_path_factory, tiny_model):
    """Return transformers' results in fp32, each sequence by itself, and the folder that holds model and batch.pt.

    The model's config.json and extra tensors are then made those of a published folder (tests/layout).

    Keys: folder, mask, logits, gradients, weights (HF name -> tensor).
    batch.pt is (ids, mask, position_ids), each [3, WIDTH], padded left and right as verl pads prompts and responses.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from tests.model.parity import next_token_loss

    folder = tmp_path_factory.mktemp("parity")
    shutil.copytree(tiny_model, folder / "model")
    ids, mask, _ = batch = _make_batch()
    torch.save(batch, folder / "batch.pt")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", torch_dtype=torch.float32)
    as_published(folder / "model", json.loads(PUBLIC.read_text()))  # Megatron's side reads this from here on
    rows = [model(ids[i, m][None]).logits[0] for i, m in enumerate(mask)]
    logits = torch.zeros(*ids.shape, rows[0].shape[-1])
    logits[mask] = torch.cat(rows)
    next_token_loss(logits, ids, mask).backward()
    return {
        "folder": folder,
        "mask": mask,
        "logits": logits.detach(),
        "gradients": {name: p.grad for name, p in model.named_parameters()},
        "weights": {name: t.clone() for name, t in model.state_dict().items()},
    }


@pytest.fixture(scope="session")
def run_a3(a3_sources, reference, run_ranks):
    """Return run_a3("file:function", layout, *arguments, dtype, off, **sizes), which lists each rank's result.

    layout: (ranks, sizes) of mindspeed_start.LAYOUTS; `sizes` override it. The function gets the folder of `reference`
    and the engine's configuration before `arguments`, and runs once the engine has been started.
    """
    from tests.model.mindspeed_start import engine_config

    sources = a3_sources()
    path = os.pathsep.join(map(str, sources))

    def run(job: str, layout=(1, {}), *arguments, dtype="fp32", off="", **sizes) -> list:
        ranks = layout[0]
        env = {"VERL_PATCHES": f"line=a3,platform=cpu{off}", "PYTHONPATH": path}
        config = engine_config(reference["folder"] / "model", sources[0], ranks, {**layout[1], **sizes}, dtype)
        call = f"tests.model.{job}", config, reference["folder"], config, *arguments
        return run_ranks("tests.model.mindspeed_start:run", *call, size=ranks, env=env, backend=None)

    return run
