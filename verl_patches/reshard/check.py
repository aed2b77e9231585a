"""Prove that a plan of a weight sync is right, and describe it in figures, without torch.

`check_plan` uses the layouts alone, independently of how the plan was made. It proves that each rank's rollout shards
are covered exactly once by what it copies and receives; that what it copies and sends lies in its training shards; that
buckets stay within their bytes; and that sender and receiver of every segment (what one rank sends another in a bucket)
name the same regions in the same order. So the plan writes every rollout element once, from the right training element.

`figures` and `tensor_path` describe a plan: bytes against their bounds, the busiest ranks, the path of one parameter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verl_patches.errors import ConfigError, RecipeError
from verl_patches.layout.sharding import local_parameters
from verl_patches.reshard.plan import NEARNESS, RankPlan, ReshardPlan, nearness
from verl_patches.reshard.region import Region, contains, cover, row_bytes, shard_region, wire_bytes


def check_plan(plan: ReshardPlan, rank_plans: Mapping[int, RankPlan] | None = None) -> None:
    """Prove `plan`, or `rank_plans` as the plans of all its ranks; a fault raises RecipeError."""
    if rank_plans is None:
        rank_plans = {rank: plan.for_rank(rank) for rank in range(plan.world_size)}
    for rank_plan in rank_plans.values():
        _check_buckets(plan, rank_plan)
        _check_sources(plan, rank_plan)
        _check_destinations(plan, rank_plan)
    _check_segments(rank_plans)


def _fault(text: str) -> RecipeError:
    return RecipeError(f"reshard plan: {text}; this is a fault of this repository: report it")


def _check_buckets(plan: ReshardPlan, rank_plan: RankPlan) -> None:
    if len(rank_plan.buckets) != plan.bucket_count:
        raise _fault(
            f"rank {rank_plan.rank} has {len(rank_plan.buckets)} buckets, expected {plan.bucket_count}, so that the "
            "weight sync would hang"
        )
    by_name = plan.inventory.by_name
    for number, bucket in enumerate(rank_plan.buckets):
        for verb, segments in zip(("sends", "receives"), bucket, strict=True):
            size = sum(wire_bytes(by_name[r.name], r) for regions in segments.values() for r in regions)
            if size > plan.bucket_bytes:
                raise _fault(
                    f"rank {rank_plan.rank} {verb} {size} bytes in bucket {number}, expected at most bucket_bytes = "
                    f"{plan.bucket_bytes}"
                )


def _check_sources(plan: ReshardPlan, rank_plan: RankPlan) -> None:
    shards = local_parameters(plan.inventory, plan.train, rank_plan.rank, plan.train_library).shards
    sent = [region for bucket in rank_plan.buckets for regions in bucket.send.values() for region in regions]
    for verb, regions in (("keeps", rank_plan.local), ("sends", sent)):
        for region in regions:
            shard = shards.get(region.name)
            if shard is None or not contains(shard_region(shard), region, shard.parameter.shape):
                raise _fault(
                    f"rank {rank_plan.rank} {verb} {region}; expected a part of its training shard ({plan.train}), "
                    f"found {shard_region(shard) if shard else 'no shard of that tensor'}"
                )


def _check_destinations(plan: ReshardPlan, rank_plan: RankPlan) -> None:
    needed = local_parameters(plan.inventory, plan.rollout, rank_plan.rank, plan.rollout_library).shards
    written: dict[str, list[Region]] = defaultdict(list)
    received = (region for bucket in rank_plan.buckets for regions in bucket.receive.values() for region in regions)
    for region in (*rank_plan.local, *received):
        written[region.name].append(region)
    for name in written.keys() - needed.keys():
        raise _fault(
            f"rank {rank_plan.rank} receives or keeps {written[name][0]}, but its rollout layout ({plan.rollout}) "
            "holds no part of that tensor"
        )
    for name, shard in needed.items():
        shape, regions, expected = shard.parameter.shape, written.get(name, ()), shard_region(shard)
        outside = [region for region in regions if not contains(expected, region, shape)]
        never, twice = cover(expected, regions, shape) if not outside else ((), ())
        for fault, faulty in (("writes outside of it", outside), ("two writes", twice), ("no write", never)):
            if faulty:
                raise _fault(
                    f"rank {rank_plan.rank} needs {expected} written exactly once, found {fault} of "
                    f"{_region_list(faulty)}"
                )


def _check_segments(rank_plans: Mapping[int, RankPlan]) -> None:
    sends: dict[tuple[int, int, int], tuple[Region, ...]] = {}
    receives: dict[tuple[int, int, int], tuple[Region, ...]] = {}
    for rank, rank_plan in rank_plans.items():
        for number, bucket in enumerate(rank_plan.buckets):
            sends |= {(number, rank, peer): regions for peer, regions in bucket.send.items()}
            receives |= {(number, peer, rank): regions for peer, regions in bucket.receive.items()}
    for number, sender, receiver in sorted(sends.keys() | receives.keys()):
        sent = sends.get((number, sender, receiver), ())
        expected = receives.get((number, sender, receiver), ())
        if sent != expected or not sent or sender == receiver:
            raise _fault(
                f"bucket {number}: rank {sender} sends {_region_list(sent) or 'no region'} to rank {receiver}, which "
                f"expects {_region_list(expected) or 'no region'}; expected the same regions in the same order, at "
                "least one, and two different ranks"
            )


def _region_list(regions: Iterable[Region]) -> str:
    texts = [str(region) for region in regions]
    return ", ".join(texts[:4]) + (f" and {len(texts) - 4} more" if len(texts) > 4 else "")


def figures(plan: ReshardPlan) -> dict[str, Any]:
    """Return the costs of a plan as plain data, in bytes unless the name says otherwise.

    `imbalance` is max / mean of the bytes that ranks send. `imbalance_bound` is the least that any plan can reach: only
    the ranks of a training stage can send its layers, so the busiest of them sends at least their mean.
    """
    over_bound = [r / b for r, b in zip(plan.received_bytes, plan.lower_bound_bytes, strict=True) if b]
    stages = [_stage_figures(plan, stage) for stage in range(plan.train.pp)]
    sent = _min_mean_max(plan.sent_bytes)
    near = dict.fromkeys(NEARNESS[1:], 0)
    for piece in plan.pieces:
        near[nearness(piece.sender, piece.receiver)] += piece.size_bytes
    busiest = max(*plan.sent_bytes, *plan.received_bytes)
    return {
        "ranks": plan.world_size,
        "train": str(plan.train),
        "train_library": plan.train_library,
        "rollout": str(plan.rollout),
        "rollout_library": plan.rollout_library,
        "kept_bytes": _min_mean_max(plan.local_bytes),
        "must_arrive_bytes": _min_mean_max(plan.lower_bound_bytes),
        "received_bytes": _min_mean_max(plan.received_bytes),
        "received_over_bound": max(over_bound, default=1.0),
        "sent_bytes": sent,
        "imbalance": _ratio_to_mean(sent["max"], sent),
        "imbalance_bound": _ratio_to_mean(max(stage["sent_bytes"]["mean"] for stage in stages), sent),
        "stages": stages,
        "nearness_bytes": near,
        "bucket_bytes": plan.bucket_bytes,
        "collectives": plan.bucket_count,
        "collectives_bound": -(-busiest // plan.bucket_bytes),
        "peak_extra_bytes": plan.peak_extra_bytes,
        "digest": plan.digest(),
    }


def _stage_figures(plan: ReshardPlan, stage: int) -> dict[str, Any]:
    ranks = [rank for rank, stage_of_rank in enumerate(plan.stages) if stage_of_rank == stage]
    sent, received = (
        _min_mean_max([sizes[rank] for rank in ranks]) for sizes in (plan.sent_bytes, plan.received_bytes)
    )
    return {
        "stage": stage,
        "ranks": len(ranks),
        "layers": len(plan.train.stage_layers(stage, plan.inventory.model.num_hidden_layers)),
        "sent_bytes": sent,
        "imbalance": _ratio_to_mean(sent["max"], sent),
        "received_bytes": received,
    }


def _min_mean_max(numbers: Sequence[int]) -> dict[str, float]:
    return {"min": min(numbers), "mean": sum(numbers) / len(numbers), "max": max(numbers)}


def _ratio_to_mean(number: float, spread: Mapping[str, float]) -> float:
    return number / spread["mean"] if spread["mean"] else 1.0


def tensor_path(plan: ReshardPlan, name: str, rank: int) -> dict[str, Any]:
    """Return how HF tensor `name` gets to `rank`, and what the rank sends of it, as plain data.

    The steps have regions, peers, nearness, buckets and bytes.

    Raises ConfigError for an unknown tensor or rank.
    """
    parameter = plan.inventory.by_name.get(name)
    if parameter is None:
        raise ConfigError(
            f"reshard plan: the model has no tensor {name!r}; expected an HF name such as "
            f"{plan.inventory.parameters[1].name!r}"
        )
    held = local_parameters(plan.inventory, plan.train, rank, plan.train_library).shards.get(name)
    needed = local_parameters(plan.inventory, plan.rollout, rank, plan.rollout_library).shards.get(name)
    steps = []

    def add(verb: str, peer: int, number: int | None, regions: Iterable[Region]) -> None:
        place = {"stage": plan.stages[peer], "nearness": nearness(rank, peer), "bucket": number}
        for region in regions:
            if region.name == name:
                size = region.rows * row_bytes(parameter, region.axis)
                steps.append({"region": str(region), "what": verb, "peer": peer, **place, "bytes": size})

    rank_plan = plan.for_rank(rank)
    add("kept", rank, None, rank_plan.local)
    for number, bucket in enumerate(rank_plan.buckets):
        for verb, segments in (("received", bucket.receive), ("sent", bucket.send)):
            for peer, regions in segments.items():
                add(verb, peer, number, regions)
    return {
        "parameter": name,
        "shape": list(parameter.shape),
        "dtype": parameter.dtype,
        "rank": rank,
        "holds_in_training": str(shard_region(held)) if held else None,
        "needs_in_rollout": str(shard_region(needed)) if needed else None,
        "steps": steps,
    }
