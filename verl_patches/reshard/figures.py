"""A plan in figures: bytes against their bounds, who is busiest, and the path of one parameter. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl_patches.errors import ConfigError
from verl_patches.layout.sharding import local_parameters
from verl_patches.reshard.plan import ReshardPlan
from verl_patches.reshard.region import region_of
from verl_patches.reshard.route import NEARNESS
from verl_patches.reshard.sizes import row_bytes


def figures(plan: ReshardPlan) -> dict[str, Any]:
    """What the plan costs, as plain data; bytes unless the name says otherwise.

    `imbalance` is max / mean of the bytes that ranks send. Its bound: a training stage must send what only it holds,
    so its ranks send at least their stage's mean, however well they share.
    """
    received = [got / must for got, must in zip(plan.received_bytes, plan.lower_bound_bytes, strict=True) if must]
    stages = [_stage(plan, stage) for stage in range(plan.train.pp)]
    mean = _mean(plan.sent_bytes)
    near = dict.fromkeys(NEARNESS[1:], 0)
    for piece, size in zip(plan.pieces, plan.piece_bytes, strict=True):
        near[plan.topology.nearness(piece.sender, piece.receiver)] += size
    busiest = max(*plan.sent_bytes, *plan.received_bytes)
    return {
        "ranks": plan.world_size, "train": str(plan.train), "train_library": plan.train_library,
        "rollout": str(plan.rollout), "rollout_library": plan.rollout_library,
        "kept_bytes": _spread(plan.local_bytes), "must_arrive_bytes": _spread(plan.lower_bound_bytes),
        "received_bytes": _spread(plan.received_bytes), "received_over_bound": max(received, default=1.0),
        "sent_bytes": _spread(plan.sent_bytes), "imbalance": max(plan.sent_bytes) / mean if mean else 1.0,
        "imbalance_bound": max(s["sent_bytes"]["mean"] for s in stages) / mean if mean else 1.0,
        "stages": stages, "nearness_bytes": near, "bucket_bytes": plan.bucket_bytes, "collectives": plan.bucket_count,
        "collectives_bound": -(-busiest // plan.bucket_bytes), "peak_extra_bytes": plan.peak_extra_bytes,
        "digest": plan.digest(),
    }


def _stage(plan: ReshardPlan, stage: int) -> dict[str, Any]:
    ranks = [rank for rank, found in enumerate(plan.stages) if found == stage]
    sent, received = ([figure[rank] for rank in ranks] for figure in (plan.sent_bytes, plan.received_bytes))
    layers = plan.train.stage_layers(stage, plan.inventory.model.num_hidden_layers)
    return {"stage": stage, "ranks": len(ranks), "layers": len(layers), "sent_bytes": _spread(sent),
            "imbalance": max(sent) / _mean(sent) if any(sent) else 1.0, "received_bytes": _spread(received)}


def _mean(numbers: Sequence[int]) -> float:
    return sum(numbers) / len(numbers)


def _spread(numbers: Sequence[int]) -> dict[str, float]:
    return {"min": min(numbers), "mean": _mean(numbers), "max": max(numbers)}


def traffic(plan: ReshardPlan) -> list[list[int]]:
    """Bytes that each rank (first index) sends to each (second index)."""
    sums = [[0] * plan.world_size for _ in range(plan.world_size)]
    for piece, size in zip(plan.pieces, plan.piece_bytes, strict=True):
        sums[piece.sender][piece.receiver] += size
    return sums


def path_of(plan: ReshardPlan, name: str, rank: int) -> dict[str, Any]:
    """How HF tensor `name` comes to `rank`, and what the rank sends of it: regions, peers, nearness, buckets, bytes.

    Raises ConfigError for an unknown tensor or rank.
    """
    parameter = plan.inventory.by_name.get(name)
    if parameter is None:
        raise ConfigError(f"reshard plan: the model has no tensor {name!r}; expected an HF name such as "
                          f"{plan.inventory.parameters[1].name!r}")
    held, needed = (local_parameters(plan.inventory, layout, rank, library).shards.get(name) for layout, library in (
        (plan.train, plan.train_library), (plan.rollout, plan.rollout_library)))
    mine = plan.for_rank(rank)
    steps = [(region, "kept", rank, None) for region in mine.local if region.name == name]
    for number, bucket in enumerate(mine.buckets):
        for verb, segments in (("received", bucket.receive), ("sent", bucket.send)):
            steps += [(region, verb, peer, number) for peer, regions in segments.items()
                      for region in regions if region.name == name]
    return {
        "parameter": name, "shape": list(parameter.shape), "dtype": parameter.dtype, "rank": rank,
        "holds_in_training": str(region_of(held)) if held else None,
        "needs_in_rollout": (f"{name} (whole)" if name in plan.whole else str(region_of(needed))) if needed else None,
        "holders": _holders(plan, name),
        "steps": [{"region": str(region), "what": verb, "peer": peer, "stage": plan.stages[peer],
                   "nearness": plan.topology.nearness(rank, peer), "bucket": number,
                   "bytes": (region.stop - region.start) * row_bytes(parameter, region.axis)}
                  for region, verb, peer, number in steps],
    }


def _holders(plan: ReshardPlan, name: str) -> list[dict[str, Any]]:
    """Each elementary interval of a tensor: the ranks that hold it in training and need it in rollout."""
    found = []
    for block in plan.blocks:
        for region in block.regions:
            if region.name == name:
                found.append({"region": str(region), "holders": list(block.holders), "needed_by": len(block.receivers)})
    return found
