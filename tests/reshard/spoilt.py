"""What a rank does in tests of refusals: a sync with something wrong, and the message that it gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from tests.reshard.cases import Case, Live, bytes_of, differences, gathered, rollout_memory, train_memory
from verl_patches.reshard.execute import Executor, build_executor
from verl_patches.reshard.plan import RankPlan
from verl_patches.reshard.rank_errors import ReshardError
from verl_patches.reshard.verify import Verifier, check_map


def message(do: Callable, *arguments) -> str:
    """What `do` raises, as text; "fine" if nothing."""
    try:
        do(*arguments)
    except ReshardError as why:
        return str(why)
    return "fine"


def with_plan(case: Case, spoil: str) -> str:
    """Build with rank plans that the function named `spoil` (below) changed; the message, or "fine"."""
    rank = dist.get_rank()
    plan = case.plan()
    plans = [plan.for_rank(each) for each in range(dist.get_world_size())]
    SPOILERS[spoil](plans)
    destinations, _ = rollout_memory(case, rank)
    object.__setattr__(plan, "for_rank", plans.__getitem__)
    return message(lambda: build_executor(plan, rank, train_memory(case, rank), destinations))


def planned_differently(case: Case) -> str:
    """Build, after rank 1 has planned with a bucket of 16 bytes more, which happens to change no region."""
    rank = dist.get_rank()
    mine = replace(case, bucket_bytes=case.bucket_bytes + 16 * (rank == 1))
    destinations, _ = rollout_memory(case, rank)
    return message(lambda: build_executor(mine.plan(), rank, train_memory(case, rank), destinations))


def _edit(plans: list[RankPlan], rank: int, side: str, change: Callable[[list], list]) -> tuple[int, int]:
    """Change the regions of the first segment on one side of one rank; returns (bucket, peer)."""
    for number, bucket in enumerate(plans[rank].buckets):
        for peer, regions in sorted(getattr(bucket, side).items()):
            segments = {**getattr(bucket, side), peer: tuple(change(list(regions)))}
            buckets = list(plans[rank].buckets)
            buckets[number] = bucket._replace(**{side: segments})
            plans[rank] = replace(plans[rank], buckets=tuple(buckets))
            return number, peer
    raise AssertionError("nothing to change")


def _both_ends(plans: list[RankPlan], change: Callable[[list], list]) -> None:
    number, peer = _edit(plans, 0, "receive", change)
    buckets = list(plans[peer].buckets)
    changed = tuple(change(list(buckets[number].send[0])))
    buckets[number] = buckets[number]._replace(send={**buckets[number].send, 0: changed})
    plans[peer] = replace(plans[peer], buckets=tuple(buckets))


def _swap_ranks(plans: list[RankPlan]) -> None:
    plans[0], plans[1] = replace(plans[1], rank=0), replace(plans[0], rank=1)


def _swap_receivers(plans: list[RankPlan]) -> None:
    """One sender mixes up two of its receivers; sizes may be equal, so that the exchange alone would not notice."""
    for rank, plan in enumerate(plans):
        for number, bucket in enumerate(plan.buckets):
            if len(bucket.send) > 1:
                a, b = sorted(bucket.send)[:2]
                send = {**bucket.send, a: bucket.send[b], b: bucket.send[a]}
                buckets = [*plan.buckets[:number], bucket._replace(send=send), *plan.buckets[number + 1 :]]
                plans[rank] = replace(plan, buckets=tuple(buckets))
                return
    raise AssertionError("nothing to swap")


def _a_sender(plans: list[RankPlan]) -> int:
    """A rank that sends something."""
    return next(plan.rank for plan in plans if any(bucket.send for bucket in plan.buckets))


SPOILERS: dict[str, Callable[[list[RankPlan]], object]] = {
    "nothing": lambda plans: None,
    "removed": lambda plans: _both_ends(plans, lambda regions: regions[1:]),
    "duplicated": lambda plans: _both_ends(plans, lambda regions: [regions[0], *regions]),
    "removed by the sender": lambda plans: _edit(plans, _a_sender(plans), "send", lambda regions: regions[1:]),
    "ranks swapped": _swap_ranks,
    "receivers swapped": _swap_receivers,
    "a bucket less": lambda plans: plans.__setitem__(2, replace(plans[2], buckets=plans[2].buckets[:-1])),
}


def with_memory(case: Case, spoil: str) -> str:
    """Build with live memory of rank 1 that is unmapped, mapped twice, of a wrong shape, or not there."""
    rank = dist.get_rank()
    plan, sources = case.plan(), train_memory(case, rank)
    destinations, _ = rollout_memory(case, rank)
    name = next(name for name, parts in destinations.items() if parts[0].region.stop - parts[0].region.start > 1)
    live = destinations[name][0]
    if rank == 1 and spoil == "unmapped":
        del destinations[name]
    if rank == 1 and spoil == "half mapped":
        half = live.region._replace(stop=live.region.start + 1)
        destinations[name] = (live._replace(region=half, tensor=live.tensor.narrow(half.axis, 0, 1)),)
    if rank == 1 and spoil == "too much":
        destinations["model.layers.0.mlp.never.weight"] = (live,)
    if rank == 1 and spoil == "shape":
        destinations[name] = (live._replace(tensor=torch.zeros(3, 5)),)
    if rank == 1 and spoil == "not trained":
        sources.clear()
    return message(lambda: build_executor(plan, rank, sources, destinations))


def while_running(case: Case, spoil: str) -> list[str]:
    """Two syncs, rank 1 failing in the first: what each rank gets from it, and from the second, which must be well."""
    rank = dist.get_rank()
    plan, sources = case.plan(), train_memory(case, rank)
    destinations, _ = rollout_memory(case, rank)
    broken = [rank == 1]

    def load_whole(name: str, tensor: torch.Tensor) -> None:
        if broken[0] and spoil == "load":
            raise KeyError(name)

    executor = build_executor(plan, rank, sources, destinations, load_whole=load_whole)
    packing, pack = executor._buckets[0].pack, executor._buckets[0].pack.run

    def run() -> None:
        if broken[0] and spoil == "pack":
            raise ValueError("cannot be packed")
        pack()

    packing.run = run
    storage = next(iter(destinations.values()))[0].tensor.untyped_storage()
    size = storage.nbytes()
    if broken[0] and spoil == "offloaded":
        storage.resize_(0)
    first = message(executor.run)
    broken[0] = False
    storage.resize_(size)
    return [first, message(executor.run), str(executor._now + executor.held_bytes)]


def with_wrong_bytes(case: Case, spoil: str) -> str:
    """A sync that runs through but writes something wrong on one rank; what `Verifier.check` says."""
    rank = dist.get_rank()
    plan, sources = case.plan(), train_memory(case, rank)
    destinations, _ = rollout_memory(case, rank)
    executor = build_executor(plan, rank, sources, destinations)
    verifier = Verifier(plan, rank, sources, destinations)
    verifier.poison()
    if rank == 2:
        _spoil_copies(executor, spoil)
    if spoil == "replicas differ" and rank == 0:
        sources["model.layers.0.input_layernorm.weight"].tensor[0] += 1
    executor.run()
    if rank == 2 and spoil == "last value":
        part = next(iter(destinations.values()))[0]
        part.tensor[-1, -1] += 1
    return message(verifier.check)


def _spoil_copies(executor: Executor, spoil: str) -> None:
    executor._open_all()  # views of the wire are made while it is open
    copies = next(bucket.unpack for bucket in executor._buckets if bucket.unpack.to)
    square = next((i for i, to in enumerate(copies.to) if to.dim() == 2 and to.shape[0] == to.shape[1]), None)
    if spoil == "left out":
        copies.to.pop(), copies.source.pop()
    if spoil == "transposed":
        copies.source[square] = copies.source[square].t()
    if spoil == "swapped":
        other = next(i for i, to in enumerate(copies.to) if i != square and to.shape == copies.to[square].shape)
        copies.source[square], copies.source[other] = copies.source[other], copies.source[square]


def with_nan(case: Case) -> tuple[str, int]:
    """A sync of weights of which one is NaN in training: that is no fault of the sync. (message, NaN found here)."""
    rank = dist.get_rank()
    plan, sources = case.plan(), train_memory(case, rank)
    destinations, _ = rollout_memory(case, rank)
    for name, source in sources.items():
        if name == "model.norm.weight":
            source.tensor[3] = float("nan")
    executor, verifier = build_executor(plan, rank, sources, destinations), Verifier(plan, rank, sources, destinations)
    verifier.poison()
    executor.run()
    return "fine", verifier.check().nan_elements


def with_wrong_map(case: Case, spoil: str) -> list[str]:
    """`check_map` on memory whose map has an expert transposed, or two experts exchanged; load_weights knows better."""
    rank = dist.get_rank()
    plan, sources = case.plan(), train_memory(case, rank)
    truth, live = rollout_memory(case, rank)
    destinations = dict(truth)
    name, other = [name for name in truth if ".experts." in name and name.endswith("down_proj.weight")][:2]
    part = truth[name][0]
    if spoil == "transposed":
        destinations[name] = (Live(part.region, part.tensor.t(), part.parameter),)
    if spoil == "exchanged":
        destinations[name] = (truth[other][0]._replace(region=part.region),)
        destinations[other] = (part._replace(region=truth[other][0].region),)

    def load_weights(weights) -> None:
        for hf, whole in weights:
            for place in truth[hf]:
                region = place.region
                place.tensor.copy_(whole.narrow(region.axis, region.start, region.stop - region.start))

    build_executor(plan, rank, sources, destinations).run()
    before = {name: bytes_of(tensor) for name, tensor in live.items()}
    shapes = {name: parameter.shape for name, parameter in case.inventory.by_name.items()}
    found = check_map(load_weights, live, destinations, shapes, rank)
    assert found or all(torch.equal(before[name], bytes_of(live[name])) for name in live)
    return found


def with_a_bit_flipped(case: Case) -> list[str]:
    """What the comparison with gathered and sliced tensors says when rank 3 has one bit of one element wrong."""
    rank = dist.get_rank()
    sources, (destinations, live) = train_memory(case, rank), rollout_memory(case, rank)
    build_executor(case.plan(), rank, sources, destinations).run()
    if rank == 3:
        live["model.norm.weight"].view(torch.int16)[5] ^= 1
    return differences(case, rank, gathered(case, sources), live)


def peak_while_running(case: Case) -> tuple[int, int, int, int]:
    """(peak bytes that torch's allocator saw during a sync, the report's, held afterwards, held with wires open)."""
    from torch.profiler import ProfilerActivity, profile

    rank = dist.get_rank()
    destinations, _ = rollout_memory(case, rank)
    executor = build_executor(case.plan(), rank, train_memory(case, rank), destinations)
    executor.run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        report = executor.run()
    now = peak = 0
    for event in sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    left = executor.held_bytes
    executor._open_all()
    return peak, report.peak_extra_bytes, left, executor.held_bytes
