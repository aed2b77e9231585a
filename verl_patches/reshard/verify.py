"""Proof, by the data itself, that a weight sync wrote every rollout element with what training holds.

For `recipe.reshard.verify`; it costs a pass over all weights. `Verifier` fills live memory with NaN before the sync.
After it, each elementary region of the plan (a part of an HF tensor that no layout cuts) has one checksum of its raw
values at every rank that trains it and at every rank that received it, in the rollout's dtype; one MIN over all ranks
compares them all. This cannot see a map that reads and writes wrongly in the same way: for that `check_map` loads what
rollout memory holds once more with the engine's own load_weights, after which nothing may have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from verl_patches.reshard.destination import RolloutTensor
from verl_patches.reshard.plan import ReshardPlan
from verl_patches.reshard.rank_errors import ReshardError, catch_errors, gather, raise_on_any_rank
from verl_patches.reshard.region import Region, overlap, part_of
from verl_patches.reshard.train_tensors import TrainTensor

_NONE = torch.iinfo(torch.int64).max  # of a rank that does not hold the region
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.uint8)
_TRAINING = "training"
_SHOWN = 4  # wrong regions that a message explains


@dataclass(frozen=True)
class VerifyReport:
    """What was compared over all ranks: `regions`, and of these, on this rank, `elements` of live rollout memory.

    `nan_elements`: how many of them are not a number, as in training. `unverified`: tensors that load_weights was given
    whole.
    """

    regions: int
    elements: int
    nan_elements: int
    unverified: tuple[str, ...]


class _Held(NamedTuple):
    """One elementary region that this rank holds: its number in the plan's order, in training or which parameter."""

    number: int
    holder: str
    elements: int


class Verifier:
    """Poisons and checks the memory of one rank; make it and call it on all ranks of the plan together.

    Raises ReshardError on every rank where live memory has not one dtype for a tensor, or a holder lacks its part.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        rank: int,
        sources: Mapping[str, TrainTensor],
        destinations: Mapping[str, Sequence[RolloutTensor]],
        *,
        group: Any = None,
        device: torch.device | str = "cpu",
    ):
        self.rank, self.sources, self.group, self.device = rank, sources, group, device
        self.destinations = {name: parts for name, parts in destinations.items() if name not in plan.whole}
        self.parameters, self.whole = plan.inventory.by_name, plan.whole
        self.items = [
            (region, rank in block.holders, rank in block.receivers)
            for block in plan.blocks
            for region in block.regions
            if region.name not in plan.whole
        ]
        self.dtypes = self._agree_on_dtypes()

    def poison(self) -> None:
        """Fill all live memory that the sync is to write: NaN, or all bits for integers."""
        with torch.no_grad():
            for part in (part for parts in self.destinations.values() for part in parts):
                floating = part.tensor.is_floating_point()
                part.tensor.fill_(float("nan") if floating else (255 if part.tensor.dtype == torch.uint8 else -1))

    @torch.no_grad()
    def check(self) -> VerifyReport:
        """Compare live rollout memory with training memory over all ranks; collective.

        Raises ReshardError on every rank naming parameter, region, ranks, expected and found.
        """
        held: list[_Held] = []
        sums: list[torch.Tensor] = []

        def compute() -> None:
            for number, holder, values in self._held():
                region = self.items[number][0]
                held.append(_Held(number, holder, values.numel()))
                sums.append(checksum(values, region, self.parameters[region.name].shape))
                sums.append(count_nan(values))

        raise_on_any_rank(catch_errors(compute), self.group, self.device, "weights could not be compared")
        numbers = torch.stack(sums).view(-1, 2).cpu() if sums else torch.zeros(0, 2, dtype=torch.int64)
        self._raise_for(self._unequal(held, numbers), held, numbers)
        live = [
            (each.elements, int(nan)) for each, (_, nan) in zip(held, numbers, strict=True) if each.holder != _TRAINING
        ]
        elements, nan_elements = (sum(column) for column in zip(*live, strict=True)) if live else (0, 0)
        return VerifyReport(len(self.items), elements, nan_elements, tuple(sorted(self.whole)))

    def _held(self) -> Iterator[tuple[int, str, torch.Tensor]]:
        for number, (region, trains, receives) in enumerate(self.items):
            shape = self.parameters[region.name].shape
            if trains:
                yield number, _TRAINING, self._trained(region)
            if receives:
                yield from ((number, name, values) for name, values in self._live(region, shape))

    def _trained(self, region: Region) -> torch.Tensor:
        wire = getattr(torch, self.parameters[region.name].dtype)
        return self.sources[region.name].read(region).detach().to(wire).to(self.dtypes[region.name])

    def _live(self, region: Region, shape: Sequence[int]) -> Iterator[tuple[str, torch.Tensor]]:
        parts = [part for part in self.destinations.get(region.name, ()) if overlap(part.region, region, shape)]
        if not parts:
            raise ReshardError(f"{region}: expected in live memory of rank {self.rank}, found nowhere")
        for part in parts:
            values = part_of(part.tensor, part.region, region, shape)
            if values is None:
                raise ReshardError(f"{region}: expected in {part.parameter}, found {part.region} there")
            yield part.parameter, values

    def _agree_on_dtypes(self) -> dict[str, torch.dtype]:
        """Dtype of each tensor in live memory, equal on all ranks: those that only train a tensor cast to it."""
        names = list(dict.fromkeys(region.name for region, *_ in self.items))
        codes = torch.full((2, len(names)), _NONE, dtype=torch.int64)
        problems = []
        for at, name in enumerate(names):
            found = {part.tensor.dtype for part in self.destinations.get(name, ())}
            if found - set(_DTYPES):
                problems.append(f"{name}: expected one of {_DTYPES}, found {found}")
            elif found:
                every = [_DTYPES.index(dtype) for dtype in found]
                codes[0, at], codes[1, at] = min(every), -max(every)
        codes = self._minimum(codes)
        problems += [
            f"{name}: expected one dtype in live memory of all ranks, found none or several"
            for name, low, high in zip(names, *codes.tolist(), strict=True)
            if low != -high
        ]
        raise_on_any_rank(problems, self.group, self.device, "live rollout memory cannot be compared")
        return {name: _DTYPES[code] for name, code in zip(names, codes[0].tolist(), strict=True)}

    def _unequal(self, held: list[_Held], numbers: torch.Tensor) -> list[int]:
        """Numbers of the regions whose holders, over all ranks, do not have the same checksum and count of NaN."""
        low = [[_NONE, _NONE] for _ in self.items]
        high = [[_NONE, _NONE] for _ in self.items]  # of ~value, so that one MIN finds the largest too
        for each, pair in zip(held, numbers.tolist(), strict=True):
            for ends, values in ((low, pair), (high, [~value for value in pair])):
                ends[each.number] = [min(both) for both in zip(ends[each.number], values, strict=True)]
        low, high = self._minimum(torch.tensor([low, high]))
        return (low != ~high).any(dim=1).nonzero().flatten().tolist()

    def _minimum(self, numbers: torch.Tensor) -> torch.Tensor:
        numbers = numbers.to(self.device)
        dist.all_reduce(numbers, dist.ReduceOp.MIN, group=self.group)
        return numbers.cpu()

    def _raise_for(self, wrong: list[int], held: list[_Held], numbers: torch.Tensor) -> None:
        """`wrong` is equal on all ranks, so either all of them gather or none."""
        if not wrong:
            return
        shown = wrong[:_SHOWN]
        mine = [
            (each.number, each.holder, *pair)
            for each, pair in zip(held, numbers.tolist(), strict=True)
            if each.number in shown
        ]
        every = [
            (number, holder, rank, *pair)
            for rank, theirs in enumerate(gather(mine, self.group))
            for number, holder, *pair in theirs
        ]
        lines = [self._explain(number, [each[1:] for each in every if each[0] == number]) for number in shown]
        raise ReshardError(
            f"reshard: {len(wrong)} of {len(self.items)} regions are not everywhere what training holds; stop, do not "
            "sample with these weights\n  " + "\n  ".join(lines)
        )

    def _explain(self, number: int, every: list[tuple[str, int, int, int]]) -> str:
        """One line: which holder differs from the first training rank, expected and found."""
        region = self.items[number][0]
        truth = next((each for each in every if each[0] == _TRAINING), None)
        if truth is None:
            return f"{region}: expected a training rank that holds it, found none"
        _, rank, expected, nan = truth
        others = [each for each in every if each[2:] != truth[2:]]
        texts = [f"rank {at} ({holder}) {_text(value, bad)}" for holder, at, value, bad in others]
        return f"{region}: expected {_text(expected, nan)} as on training rank {rank}, found {', '.join(texts)}"


def _text(value: int, nan: int) -> str:
    return f"checksum {value & (1 << 64) - 1:016x}" + (f" with {nan} NaN" if nan else "")


_CHUNK = 1 << 22  # elements at a time: int64 copies stay below 100 MB
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MIX = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9)  # odd constants; products wrap around at 64 bits


def checksum(tensor: torch.Tensor, region: Region, shape: Sequence[int]) -> torch.Tensor:
    """Sum modulo 2**64 of the raw values, each times an odd number of its place in the HF tensor: int64 scalar.

    `tensor`: values of `region` of the HF tensor of `shape`, with any strides. Because places count, a swap or a
    transposition changes the sum; sums of parts of one region add up to that of the region.
    """
    values = tensor.detach()
    first = [region.start if dim == region.axis else 0 for dim in range(len(shape))]
    if values.dim() == 1:
        values, first, shape = values[:, None], [*first, 0], [*shape, 1]
    rows, columns = values.shape
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    column = torch.arange(first[1], first[1] + columns, device=values.device)
    step = max(1, _CHUNK // max(1, columns))
    for start in range(0, rows, step):
        part = values[start : start + step].contiguous()
        raw = part.view(_INTEGERS[part.element_size()]).to(torch.int64)
        row = torch.arange(first[0] + start, first[0] + start + len(part), device=values.device)
        place = row[:, None] * shape[1] + column
        total += (raw * _odd(place)).sum()
    return total


def count_nan(tensor: torch.Tensor) -> torch.Tensor:
    """How many elements are not a number: int64 scalar; 0 for integers."""
    if not tensor.is_floating_point():
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    return (tensor.detach() != tensor.detach()).sum()


def _odd(place: torch.Tensor) -> torch.Tensor:
    mixed = place * _MIX[0]
    mixed = (mixed ^ (mixed >> 29)) * _MIX[1]
    return (mixed ^ (mixed >> 32)) | 1


def check_map(
    load_weights: Callable[[Iterator[tuple[str, torch.Tensor]]], Any],
    live: Mapping[str, torch.Tensor],
    destinations: Mapping[str, Sequence[RolloutTensor]],
    shapes: Mapping[str, Sequence[int]],
    rank: int,
) -> list[str]:
    """Load with the engine's own load_weights what its memory holds by `destinations`: nothing may change.

    `live`: the engine's parameters by name. Returns a sentence for each that changed: its place in the map is wrong (or
    its values were equal to another's). For engines whose load_weights still works on them; memory is then as it was
    only where the map is right. Parts that this rank does not hold are loaded as zeros, which it ignores.
    """

    def values() -> Iterator[tuple[str, torch.Tensor]]:
        for name, parts in destinations.items():
            whole = torch.zeros(tuple(shapes[name]), dtype=parts[0].tensor.dtype, device=parts[0].tensor.device)
            for part in parts:
                part_of(whole, Region(name, 0, 0, shapes[name][0]), part.region, shapes[name]).copy_(part.tensor)
            yield name, whole

    with torch.no_grad():
        before = {name: _of_parameter(tensor) for name, tensor in live.items()}
        load_weights(values())
        changed = [name for name, tensor in live.items() if _of_parameter(tensor) != before[name]]
    return [
        f"{name} on rank {rank}: expected to stay as it is when loaded again, found it changed: its map is wrong"
        for name in changed
    ]


def _of_parameter(tensor: torch.Tensor) -> int:
    flat = tensor.detach().reshape(-1)
    return int(checksum(flat, Region("", 0, 0, len(flat)), (len(flat),)))
