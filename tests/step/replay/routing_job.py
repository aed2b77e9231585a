"""Record, spoil the selection and replay on a rank in the tests of routing replay, with a model of either line."""

from __future__ import annotations

from pathlib import Path

import torch
from megatron.core import parallel_state as mpu
from verl.utils.megatron_utils import unwrap_model

from tests.model import parity_job
from tests.model.parity_job import local_gradients, run
from verl_patches.errors import RecipeError
from verl_patches.reshard.parameters import named_weights
from verl_patches.step.replay.routing_replay import RoutingReplay

RECORDED, REPLAYED = [[0], [1, 2]], [[2, 0], [1]]  # rows of micro batches, with another packing and order


def answers(built, folder: Path, line: str = "pypi") -> dict:
    """Return logits and gradients of replay with spoilt correction biases, which only selection reads, and controls."""
    chunks, batch = built[0], torch.load(folder / "batch.pt")
    replay = RoutingReplay(chunks)
    with torch.no_grad(), replay.recording():
        run(*built, batch, micro_batches=RECORDED)
    for chunk in unwrap_model(chunks):
        for name, tensor in named_weights(chunk):
            if name.endswith("expert_bias"):
                tensor.copy_(tensor.flip(0))
    found = {"layers": replay.layers, "shapes": [tuple(s.shape) for s in replay.samples.values()]}
    with torch.no_grad():
        found["without"] = run(*built, batch, micro_batches=REPLAYED)
    for chunk in chunks:
        chunk.zero_grad_buffer()
    with replay.replaying():
        found["replayed"] = run(*built, batch, micro_batches=REPLAYED, backward=True)
    found |= {"gradients": local_gradients(chunks, folder / "model", line), "counts": replay.end_step()}
    if mpu.get_pipeline_model_parallel_world_size() == 1:  # an error would leave the other stage waiting
        try:
            with replay.replaying():
                run(*built, batch, micro_batches=REPLAYED)
        except RecipeError as error:
            found["dropped"] = str(error)
    return found


def layouts_job(folder: Path, layouts: dict[str, dict]) -> dict:
    """Return `answers` at each layout of line pypi."""
    return parity_job.layouts_job(folder, layouts, answers)


def mindspeed_job(folder: Path, args) -> dict:
    """Return `answers` of line a3's model."""
    from tests.model.mindspeed_job import build

    return answers(build(folder / "model", args), folder, "a3")
