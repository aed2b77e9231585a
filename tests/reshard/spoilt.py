"""Run syncs with one error in them on ranks, and return the message that each rank gets, for tests of refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from tests.layout.native_parameters import part
from tests.reshard.cases import FIRST, Case, Rank, add_parameters
from verl_patches.layout.parallel import rollout_layout
from verl_patches.reshard.execute import Executor
from verl_patches.reshard.plan import RankPlan
from verl_patches.reshard.rank_errors import ReshardError
from verl_patches.reshard.verify import check_map


def error_message(do: Callable, *arguments) -> str:
    """Return the text of the error that `do` raises, "fine" without one."""
    try:
        do(*arguments)
    except ReshardError as why:
        return str(why)
    return "fine"


def build_with_plan(case: Case, spoil: str) -> str:
    """Build with rank plans that SPOILERS[spoil] changed."""
    rank = Rank(case)
    plans = [rank.plan.for_rank(number) for number in range(dist.get_world_size())]
    SPOILERS[spoil](plans)
    object.__setattr__(rank.plan, "for_rank", plans.__getitem__)
    return error_message(rank.build)


def build_with_unequal_plans(case: Case, spoil: str) -> str:
    """Build, after rank 1 has planned for another bucket or rollout."""
    changes = {
        "bucket": {"bucket_bytes": case.bucket_bytes + 16},  # the regions stay
        "rollout": {"rollout": rollout_layout(2, dp=1, tp=2)},
    }
    return error_message(Rank(replace(case, **changes[spoil]) if dist.get_rank() == 1 else case).build)


def _set_local(plans: list[RankPlan], change: Callable[[tuple], tuple]) -> None:
    plans[0] = replace(plans[0], local=change(plans[0].local))


def _swap_ranks(plans: list[RankPlan]) -> None:
    plans[0], plans[1] = replace(plans[1], rank=0), replace(plans[0], rank=1)


SPOILERS: dict[str, Callable[[list[RankPlan]], object]] = {
    "nothing": lambda plans: None,
    "removed": lambda plans: _set_local(plans, lambda regions: regions[1:]),
    "duplicated": lambda plans: _set_local(plans, lambda regions: (regions[0], *regions)),
    "ranks swapped": _swap_ranks,
}


def build_with_memory(case: Case, spoil: str) -> str:
    """Build with memory of rank 1 that is unmapped, mapped in part, of a wrong shape, too much, or not trained."""
    rank = Rank(case)
    place = rank.destinations[FIRST][0]
    half = place.region._replace(stop=place.region.start + 1)
    if rank.rank == 1 and spoil == "not trained":
        rank.sources.clear()
    elif rank.rank == 1 and spoil != "nothing":
        rank.destinations |= {
            "unmapped": {FIRST: ()},
            "half mapped": {FIRST: (replace(place, region=half, tensor=place.tensor[:1]),)},
            "too much": {"model.layers.0.mlp.never.weight": (place,)},
            "shape": {FIRST: (replace(place, tensor=torch.zeros(3, 5)),)},
        }[spoil]
    return error_message(rank.build)


def fail_first_sync(case: Case, spoil: str) -> tuple[str, str, int]:
    """Run two syncs, in the first of which rank 1 fails; return both messages and the bytes allocated afterwards."""
    rank = Rank(case)
    broken, executor = rank.rank == 1, rank.build()
    packing, pack = executor._buckets[0].pack, executor._buckets[0].pack.run

    def run() -> None:
        if broken and spoil == "pack":
            raise ValueError("cannot be packed")
        pack()

    packing.run = run
    storage = rank.destinations[FIRST][0].tensor.untyped_storage()
    size = storage.nbytes()
    if broken and spoil == "offloaded":
        storage.resize_(0)
    first, broken = error_message(executor.run), False
    storage.resize_(size)
    return first, error_message(executor.run), executor.buffer_bytes


def check_wrong_bytes(case: Case, spoil: str) -> str:
    """Run a sync that ends but writes wrong bytes on one rank; return the message of `Verifier.check`."""
    rank = Rank(case)
    executor, verifier = rank.build(), rank.verifier()
    if rank.rank == 2:
        _spoil_copies(executor, spoil)
    if spoil == "replicas differ" and rank.rank == 0:
        rank.sources["model.layers.0.input_layernorm.weight"].tensor[0] += 1
    if spoil == "NaN in training" and "model.norm.weight" in rank.sources:
        rank.sources["model.norm.weight"].tensor[3] = float("nan")
    executor.run()
    if rank.rank == 2 and spoil == "last value":
        rank.destinations[FIRST][0].tensor[-1, -1] += 1
    return error_message(verifier.check)


def _spoil_copies(executor: Executor, spoil: str) -> None:
    executor._open_buffers()  # views of the wire are made while it is open
    copies = next(bucket.unpack for bucket in executor._buckets if bucket.unpack.targets)
    sources, shapes = copies.sources, [target.shape for target in copies.targets]
    square = next((i for i, shape in enumerate(shapes) if len(shape) == 2 and shape[0] == shape[1]), None)
    if spoil == "left out":
        copies.targets.pop()
        sources.pop()
    if spoil == "transposed":
        sources[square] = sources[square].t()
    if spoil == "swapped":
        other = next(i for i, shape in enumerate(shapes) if i != square and shape == shapes[square])
        sources[square], sources[other] = sources[other], sources[square]


def check_wrong_map(case: Case, spoil: str) -> list[str]:
    """Return `check_map`'s message for a map with an expert transposed, or two swapped; load_weights is right."""
    rank = Rank(case)
    places, model = rank.destinations, torch.nn.Module()
    add_parameters(model, rank.live)
    name, other = [name for name in places if ".experts." in name and name.endswith("down_proj.weight")][:2]
    one, two = places[name][0], places[other][0]
    if spoil == "transposed":
        rank.destinations = places | {name: (replace(one, tensor=one.tensor.t()),)}
    if spoil == "exchanged":
        exchanged = {name: (replace(two, region=one.region),), other: (replace(one, region=two.region),)}
        rank.destinations = places | exchanged

    def load_weights(weights) -> None:
        for hf_name, whole in weights:
            for place in places[hf_name]:
                place.tensor.copy_(part(whole, place.region))

    model.load_weights = load_weights
    rank.build().run()
    shapes = {hf_name: parameter.shape for hf_name, parameter in case.inventory.by_name.items()}
    return check_map(model, rank.destinations, shapes, rank.rank)


def flip_one_bit(case: Case) -> list[str]:
    """Return `Rank.differences` when one bit of one element is wrong on rank 3."""
    rank = Rank(case)
    rank.build().run()
    if rank.rank == 3:
        rank.live["model.norm.weight"].view(torch.int16)[5] ^= 1
    return rank.differences()
