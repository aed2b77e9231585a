"""Provide transformers' results for the tiny model, the reference of the model tests, and jobs on line a3's model."""

from __future__ import annotations

import functools
import json
import os
import shutil
from pathlib import Path

import pytest

from tests.layout.public_folder import as_published

PUBLIC = Path(__file__).resolve().parents[1] / "layout" / "deepseek_v3_public_config.json"


@pytest.fixture(scope="session")
def reference(tmp_path_factory, tiny_model):
    """Return transformers' results in fp32, each sequence by itself, and the folder that holds model and batch.pt.

    The model's config.json and extra tensors are then made those of a published folder (tests/layout).

    Keys: folder, mask, logits, gradients, weights (HF name -> tensor).
    batch.pt is (ids, mask, position_ids), each [3, WIDTH], padded left and right as verl pads prompts and responses.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from tests.model.parity import make_batch, next_token_loss

    folder = tmp_path_factory.mktemp("parity")
    shutil.copytree(tiny_model, folder / "model")
    ids, mask, _ = batch = make_batch()
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
def family(tmp_path_factory):
    """Return family(name), the keys of `reference` for tiny Moonlight or Kimi-K2, and its `shapes`, {HF name: shape}.

    logits are sketches, gradients norms and sketches (family_figures.py), weights those of the folder.
    """
    import torch

    from tests.model.family_figures import make_model, stored_figures
    from tests.model.parity import make_batch
    from tests.weights.cases import read_folder

    @functools.cache
    def make(name: str) -> dict:
        folder, figures = tmp_path_factory.mktemp(name), stored_figures(name)
        ids, mask, _ = batch = make_batch()
        weights = read_folder(make_model(name, folder / "model"))
        torch.save(batch, folder / "batch.pt")
        logits = torch.zeros(*ids.shape, figures["logits"].shape[-1])
        logits[mask] = figures["logits"]
        return {**figures, "folder": folder, "mask": mask, "logits": logits, "weights": weights}

    return make


@pytest.fixture(scope="session")
def run_a3(a3_sources, reference, run_ranks):
    """Return run_a3("file:function", layout, *arguments, dtype, off, folder, **sizes), which lists each rank's result.

    layout: (ranks, sizes) of mindspeed_start.LAYOUTS; `sizes` override it. The function gets the folder, by default
    that of `reference`, and the engine's configuration before `arguments`, and runs once the engine has been started.
    """
    from tests.model.mindspeed_start import engine_config

    sources = a3_sources()
    path = os.pathsep.join(map(str, sources))

    def run(job: str, layout=(1, {}), *arguments, dtype="fp32", off="", folder=reference["folder"], **sizes) -> list:
        ranks = layout[0]
        env = {"VERL_PATCHES": f"line=a3,platform=cpu{off}", "PYTHONPATH": path}
        config = engine_config(folder / "model", sources[0], ranks, {**layout[1], **sizes}, dtype)
        call = f"tests.model.{job}", config, folder, config, *arguments
        return run_ranks("tests.model.mindspeed_start:run", *call, size=ranks, env=env, backend=None)

    return run
