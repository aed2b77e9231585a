"""What one rank does in test_mindspeed_batches.py: passes and updates of verl's worker, samples of unequal lengths."""

from __future__ import annotations

from pathlib import Path

import torch
from megatron.core import parallel_state as mpu

from tests.model.mindspeed_job import start_worker

WIDTH = 16  # of responses


def batches_job(folder: Path, config, boundaries: bool, args) -> dict:
    """Two updates: log-probs and entropy before each, grad_norm, weights afterwards, and the passes' input shapes.

    Without `boundaries` attention takes the packed sequences of a micro batch for one.
    """
    from verl import DataProto

    worker, tensors = start_worker(folder, config)
    tensors = _unequal(tensors)
    if not boundaries:
        _drop_boundaries()
    chunk, shapes = worker.actor_module[0], []
    chunk.register_forward_pre_hook(lambda _, args, given: shapes.append(given["input_ids"].shape), with_kwargs=True)
    found = {"log_probs": [], "entropy": [], "grad_norm": [], "shapes": [], "weights": []}
    for _ in range(2):
        data = DataProto.from_dict(dict(tensors))
        before = worker.compute_log_prob(DataProto.from_dict(dict(tensors))).batch
        data.batch["old_log_probs"] = before["old_log_probs"]
        data.batch["ref_log_prob"] = before["old_log_probs"] + 0.1 * torch.linspace(-1, 1, WIDTH)
        found["log_probs"].append(before["old_log_probs"])
        found["entropy"].append(before["entropys"])
        found["shapes"].append([*map(tuple, shapes)])
        shapes.clear()
        data.meta_info["global_token_num"] = tensors["attention_mask"].sum(1).tolist()
        found["grad_norm"] += worker.update_actor(data).meta_info["metrics"]["actor/grad_norm"]
        found["shapes"].append([*map(tuple, shapes)])
        shapes.clear()
        found["weights"].append([param.detach().clone() for param in chunk.parameters()])
    samples = _first(len(tensors["input_ids"])) + torch.arange(len(tensors["input_ids"]))
    found["first_stage"] = mpu.is_pipeline_first_stage(ignore_virtual=True)  # verl packs what the embedding reads
    return {**found, "mask": tensors["attention_mask"][:, -WIDTH:].bool(), "samples": samples}


def _first(count: int) -> int:
    """The number of this rank's first sample; each replica has `count`."""
    return mpu.get_data_parallel_rank() * count


def _unequal(tensors: dict) -> dict:
    """The samples of `start_worker` with padding on both sides, which differs for each of all ranks' samples."""
    mask = tensors["attention_mask"].clone()
    for row in range(len(mask)):
        number = _first(len(mask)) + row
        mask[row, : 23 * number % 97] = 0
        mask[row, mask.shape[1] - 5 * number % 13 :] = 0
    return {**tensors, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def _drop_boundaries() -> None:
    from verl_patches.model.mindspeed import model

    original = model.lengths_of
    model.lengths_of = lambda lengths: original(lengths)._replace(ends=original(lengths).ends[-1:])
