"""Proof of a plan, and its figures. No torch.

`check_plan` uses the layouts alone, nothing of how the plan was made: each rank's rollout shards are covered exactly
once by what it keeps and what it receives; what it keeps and sends lies in its training shards; buckets stay within
their bytes; and both ends of every segment name the same regions in the same order. Together: executed as planned,
every rollout element is written once, from the right training element.

`figures` and `path_of` describe a plan: bytes against their bounds, the busiest ranks, the path of one parameter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verl_patches.errors import ConfigError, RecipeError
from verl_patches.layout.sharding import local_parameters
from verl_patches.reshard.plan import RankPlan, ReshardPlan
from verl_patches.reshard.region import Region, region_of, row_bytes, wire_bytes
from verl_patches.reshard.route import NEARNESS


def check_plan(plan: ReshardPlan, rank_plans: Mapping[int, RankPlan] | None = None) -> None:
    """Prove `plan`, or what is given as the plans of all its ranks; raises RecipeError naming rank and parameter."""
    if rank_plans is None:
        rank_plans = {rank: plan.for_rank(rank) for rank in range(plan.world_size)}
    if sorted(rank_plans) != list(range(plan.world_size)):
        raise RecipeError(f"reshard plan: expected a plan for each of {plan.world_size} ranks, found {len(rank_plans)}")
    for rank, mine in sorted(rank_plans.items()):
        if mine.rank != rank:
            raise RecipeError(f"reshard plan: rank {rank} was given the plan of rank {mine.rank}; plan again")
        _check_buckets(plan, mine)
        _check_held(plan, mine)
        _check_written(plan, mine)
    _check_ends(rank_plans)


def _check_buckets(plan: ReshardPlan, mine: RankPlan) -> None:
    if len(mine.buckets) != plan.bucket_count:
        raise RecipeError(
            f"reshard plan: rank {mine.rank} has {len(mine.buckets)} buckets, expected "
            f"{plan.bucket_count}: the ranks would wait for each other for ever"
        )
    by_name = plan.inventory.by_name
    for number, bucket in enumerate(mine.buckets):
        for verb, segments in zip(("sends", "receives"), bucket, strict=True):
            size = sum(wire_bytes(by_name[r.name], r) for regions in segments.values() for r in regions)
            if size > plan.bucket_bytes:
                raise RecipeError(
                    f"reshard plan: rank {mine.rank} {verb} {size} bytes in bucket {number}, "
                    f"expected at most bucket_bytes = {plan.bucket_bytes}"
                )


def _check_held(plan: ReshardPlan, mine: RankPlan) -> None:
    held = local_parameters(plan.inventory, plan.train, mine.rank, plan.train_library).shards
    by_name = plan.inventory.by_name
    sent = [region for bucket in mine.buckets for regions in bucket.send.values() for region in regions]
    for verb, regions in (("keeps", mine.local), ("sends", sent)):
        for region in regions:
            has = held.get(region.name) and region_of(held[region.name])
            start, stop = _along(has, region.axis, by_name[region.name].shape) if has else (0, 0)
            if not start <= region.start < region.stop <= stop:
                raise RecipeError(
                    f"reshard plan: rank {mine.rank} {verb} {region}, expected a part of what it holds "
                    f"in training ({plan.train}), found {has or 'nothing of that tensor'}"
                )


def _check_written(plan: ReshardPlan, mine: RankPlan) -> None:
    needed = local_parameters(plan.inventory, plan.rollout, mine.rank, plan.rollout_library).shards
    written: dict[str, list[Region]] = defaultdict(list)
    received = (region for bucket in mine.buckets for regions in bucket.receive.values() for region in regions)
    for region in (*mine.local, *received):
        written[region.name].append(region)
    for name in written.keys() - needed.keys():
        raise RecipeError(
            f"reshard plan: rank {mine.rank} gets {written[name][0]}, expected nothing of {name}: its "
            f"rollout layout ({plan.rollout}) does not hold it"
        )
    for name, shard in needed.items():
        expected = region_of(shard)
        if name in plan.whole:
            expected = Region(name, 0, 0, shard.parameter.shape[0])
        fault = _fault(expected, sorted(written.get(name, ())), shard.parameter.shape)
        if fault:
            raise RecipeError(f"reshard plan: rank {mine.rank} needs {expected} exactly once, {fault}")


def _fault(expected: Region, found: list[Region], shape: tuple[int, ...]) -> str | None:
    """What is wrong with `found` (sorted) as a cover of `expected`, or None."""
    axes = {region.axis for region in found}
    if len(axes) > 1:
        return f"found it cut along more than one axis: {_list(found)}"
    at, end = _along(expected, axes.pop() if axes else expected.axis, shape)
    for region in found:
        if region.start != at or region.stop <= region.start:
            word = "twice or out of place" if region.start < at or region.stop <= region.start else "a hole"
            return f"found {word} at {at}: {_list(found)}"
        at = region.stop
    return None if at == end else f"found it to end at {at} instead of {end}: {_list(found) or 'nothing arrives'}"


def _along(region: Region, axis: int, shape: tuple[int, ...]) -> tuple[int, int]:
    """[start, stop) of `region` along `axis`; empty where it is cut along another."""
    if region.axis == axis:
        return region.start, region.stop
    return (0, shape[axis]) if region.is_whole(shape) else (0, 0)


def _check_ends(rank_plans: Mapping[int, RankPlan]) -> None:
    buckets = [(rank, n, bucket) for rank, mine in rank_plans.items() for n, bucket in enumerate(mine.buckets)]
    sends = {(n, rank, peer): regions for rank, n, bucket in buckets for peer, regions in bucket.send.items()}
    receives = {(n, peer, rank): regions for rank, n, bucket in buckets for peer, regions in bucket.receive.items()}
    for number, sender, receiver in sorted(sends.keys() | receives.keys()):
        sent = sends.get((number, sender, receiver), ())
        expected = receives.get((number, sender, receiver), ())
        if sent != expected or not sent or sender == receiver:
            raise RecipeError(
                f"reshard plan: in bucket {number} rank {sender} sends rank {receiver} "
                f"{_list(sent) or 'nothing'}, which expects {_list(expected) or 'nothing'}; expected "
                "the same regions in the same order on two ranks, and a segment only where there are any"
            )


def _list(regions: Iterable[Region]) -> str:
    texts = [str(region) for region in regions]
    return ", ".join(texts[:4]) + (f" and {len(texts) - 4} more" if len(texts) > 4 else "")


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
        "ranks": plan.world_size,
        "train": str(plan.train),
        "train_library": plan.train_library,
        "rollout": str(plan.rollout),
        "rollout_library": plan.rollout_library,
        "kept_bytes": _spread(plan.local_bytes),
        "must_arrive_bytes": _spread(plan.lower_bound_bytes),
        "received_bytes": _spread(plan.received_bytes),
        "received_over_bound": max(received, default=1.0),
        "sent_bytes": _spread(plan.sent_bytes),
        "imbalance": max(plan.sent_bytes) / mean if mean else 1.0,
        "imbalance_bound": max(s["sent_bytes"]["mean"] for s in stages) / mean if mean else 1.0,
        "stages": stages,
        "nearness_bytes": near,
        "bucket_bytes": plan.bucket_bytes,
        "collectives": plan.bucket_count,
        "collectives_bound": -(-busiest // plan.bucket_bytes),
        "peak_extra_bytes": plan.peak_extra_bytes,
        "digest": plan.digest(),
    }


def _stage(plan: ReshardPlan, stage: int) -> dict[str, Any]:
    ranks = [rank for rank, found in enumerate(plan.stages) if found == stage]
    sent, received = ([figure[rank] for rank in ranks] for figure in (plan.sent_bytes, plan.received_bytes))
    layers = plan.train.stage_layers(stage, plan.inventory.model.num_hidden_layers)
    return {
        "stage": stage,
        "ranks": len(ranks),
        "layers": len(layers),
        "sent_bytes": _spread(sent),
        "imbalance": max(sent) / _mean(sent) if any(sent) else 1.0,
        "received_bytes": _spread(received),
    }


def _mean(numbers: Sequence[int]) -> float:
    return sum(numbers) / len(numbers)


def _spread(numbers: Sequence[int]) -> dict[str, float]:
    return {"min": min(numbers), "mean": _mean(numbers), "max": max(numbers)}


def path_of(plan: ReshardPlan, name: str, rank: int) -> dict[str, Any]:
    """How HF tensor `name` comes to `rank`, and what the rank sends of it: regions, peers, nearness, buckets, bytes.

    Raises ConfigError for an unknown tensor or rank.
    """
    parameter = plan.inventory.by_name.get(name)
    if parameter is None:
        raise ConfigError(
            f"reshard plan: the model has no tensor {name!r}; expected an HF name such as "
            f"{plan.inventory.parameters[1].name!r}"
        )
    held, needed = (
        local_parameters(plan.inventory, layout, rank, library).shards.get(name)
        for layout, library in ((plan.train, plan.train_library), (plan.rollout, plan.rollout_library))
    )
    mine = plan.for_rank(rank)
    steps = [(region, "kept", rank, None) for region in mine.local if region.name == name]
    for number, bucket in enumerate(mine.buckets):
        for verb, segments in (("received", bucket.receive), ("sent", bucket.send)):
            steps += [
                (region, verb, peer, number)
                for peer, regions in segments.items()
                for region in regions
                if region.name == name
            ]
    return {
        "parameter": name,
        "shape": list(parameter.shape),
        "dtype": parameter.dtype,
        "rank": rank,
        "holds_in_training": str(region_of(held)) if held else None,
        "needs_in_rollout": (f"{name} (whole)" if name in plan.whole else str(region_of(needed))) if needed else None,
        "holders": [
            {"region": str(region), "holders": list(block.holders), "needed_by": len(block.receivers)}
            for block in plan.blocks
            for region in block.regions
            if region.name == name
        ],
        "steps": [
            {
                "region": str(region),
                "what": verb,
                "peer": peer,
                "stage": plan.stages[peer],
                "nearness": plan.topology.nearness(rank, peer),
                "bucket": number,
                "bytes": region.rows * row_bytes(parameter, region.axis),
            }
            for region, verb, peer, number in steps
        ],
    }
