"""Transformers' answer for the tiny model, which the model tests compare with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.layout.public_folder import as_published

PUBLIC = Path(__file__).resolve().parents[1] / "layout" / "deepseek_v3_public_config.json"
LENGTHS, WIDTH = (150, 97, 131), 160  # beyond the 64 tokens that yarn starts from


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
    """transformers' answer in fp32, each sequence by itself, and the folder that holds model and batch.pt.

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
    as_published(folder / "model", json.loads(PUBLIC.read_text()))  # what Megatron's side reads from here on
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
