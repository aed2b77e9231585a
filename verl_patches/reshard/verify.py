"""Prove by checksums that a weight sync wrote every rollout element with the value that training holds.

This is for `recipe.reshard.verify`; it costs a pass over all weights. `Verifier` fills live memory with NaN before the
sync. After it, each elementary region of the plan (a part of an HF tensor that no layout cuts) has one checksum of its
raw values at every rank that trains it and at every rank that received it, in the rollout's dtype; one all-reduce (MIN)
compares them all. The checksum reads rollout memory by the same `destinations` by which the sync wrote it, so it cannot
show that these are wrong. For that `check_map` loads the contents of rollout memory once more with the engine's own
load_weights, which must not change anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from verl_patches.reshard.destination import RolloutTensor
from verl_patches.reshard.plan import ReshardPlan
from verl_patches.reshard.rank_errors import ReshardError, catch_errors, gather, raise_on_any_rank
from verl_patches.reshard.region import Region, contains, overlap, region_view
from verl_patches.reshard.train_tensors import TrainTensor

_NO_CHECKSUM = torch.iinfo(torch.int64).max  # the checksum of a rank that does not hold the region
_TRAINING_HOLDER = "training"
_SHOWN_REGIONS = 4  # number of wrong regions that a message explains


class _Copy(NamedTuple):
    """Describe one copy of a region on this rank: `holder` is _TRAINING_HOLDER or the live parameter's name."""

    number: int  # the region's, in the plan's order
    holder: str
    checksum: int
    nan: int


class Verifier:
    """Poison and check the memory of one rank; make and call verifiers on all ranks of the plan together.

    Raises ReshardError on every rank where live memory has several dtypes for a tensor, or a holder lacks its part.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        rank: int,
        sources: Mapping[str, TrainTensor],
        destinations: Mapping[str, Sequence[RolloutTensor]],
        device: torch.device | str,
    ):
        self.rank, self.sources, self.destinations, self.device = rank, sources, destinations, device
        self.parameters = plan.inventory.by_name
        self.regions = [
            (region, rank in block.holders, rank in block.receivers)
            for block in plan.blocks
            for region in block.regions
        ]
        self.dtypes = self._common_dtypes()

    def poison(self) -> None:
        """Fill all live memory that the sync must write with NaN."""
        with torch.no_grad():
            for parts in self.destinations.values():
                for part in parts:
                    part.tensor.fill_(float("nan"))

    @torch.no_grad()
    def check(self) -> int:
        """Compare rollout with training memory over all ranks and return the elements compared here; collective.

        A difference raises ReshardError on every rank with parameter, region, ranks, expected and found.
        """
        places: list[tuple[int, str]] = []
        sums: list[torch.Tensor] = []
        elements = 0

        def compute() -> None:
            nonlocal elements
            for number, holder, values in self._region_values():
                region = self.regions[number][0]
                places.append((number, holder))
                sums.extend((checksum(values, region, self.parameters[region.name].shape), values.isnan().sum()))
                elements += values.numel() if holder != _TRAINING_HOLDER else 0

        raise_on_any_rank(catch_errors(compute), None, self.device, "rollout weights could not be compared")
        numbers = torch.stack(sums).view(-1, 2).tolist() if sums else []  # a single copy from the device
        copies = [_Copy(*place, *pair) for place, pair in zip(places, numbers, strict=True)]
        self._raise_differences(self._unequal_regions(copies), copies)
        return elements

    def _region_values(self) -> Iterator[tuple[int, str, torch.Tensor]]:
        """Yield (number of the region, holder, values) of all copies on this rank."""
        for number, (region, trains, receives) in enumerate(self.regions):
            if trains:
                wire = getattr(torch, self.parameters[region.name].dtype)
                values = self.sources[region.name].read(region).detach().to(wire)
                yield number, _TRAINING_HOLDER, values.to(self.dtypes[self.parameters[region.name].kind])
            if receives:
                yield from ((number, name, values) for name, values in self._live_values(region))

    def _live_values(self, region: Region) -> Iterator[tuple[str, torch.Tensor]]:
        shape = self.parameters[region.name].shape
        parts = [part for part in self.destinations.get(region.name, ()) if overlap(part.region, region, shape)]
        if not parts or not all(contains(part.region, region, shape) for part in parts):
            found = ", ".join(str(part.region) for part in parts) or "no part"
            raise ReshardError(f"{region}: expected whole in rollout memory of rank {self.rank}, found {found}")
        for part in parts:
            yield part.parameter, region_view(part.tensor, part.region, region, shape)

    def _common_dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtype in live memory of each kind of tensors, to which ranks cast what they train."""
        here = {
            (self.parameters[name].kind, part.tensor.dtype)
            for name, parts in self.destinations.items()
            for part in parts
        }
        dtypes: dict[str, torch.dtype] = {}
        for kind, dtype in sorted(set().union(*gather(here)), key=str):
            if dtypes.setdefault(kind, dtype) != dtype:
                raise ReshardError(
                    f"reshard: {kind}: expected one dtype in rollout memory, found {dtypes[kind]} and {dtype}"
                )
        return dtypes

    def _unequal_regions(self, copies: list[_Copy]) -> list[int]:
        """Return the numbers of the regions whose copies on all ranks differ in checksum or count of NaN."""
        low, high = torch.full((2, len(self.regions), 2), _NO_CHECKSUM, dtype=torch.int64)
        if copies:
            rows = torch.tensor([[copy.number] * 2 for copy in copies])
            values = torch.tensor([copy[2:] for copy in copies])
            low.scatter_reduce_(0, rows, values, "amin")
            high.scatter_reduce_(0, rows, ~values, "amin")  # inverted, so that one MIN finds the largest too
        both = torch.stack([low, high]).to(self.device)
        dist.all_reduce(both, dist.ReduceOp.MIN)
        low, high = both.cpu()
        return (low != ~high).any(dim=1).nonzero().flatten().tolist()

    def _raise_differences(self, unequal: list[int], copies: list[_Copy]) -> None:
        """Raise ReshardError for the regions `unequal`; all ranks have the same ones, so that all enter `gather`."""
        if not unequal:
            return
        by_rank = gather([copy for copy in copies if copy.number in unequal[:_SHOWN_REGIONS]])
        lines = []
        for number in unequal[:_SHOWN_REGIONS]:
            same = [(rank, c) for rank, rank_copies in enumerate(by_rank) for c in rank_copies if c.number == number]
            lines.append(self._explain(number, same))
        raise ReshardError(
            f"reshard: {len(unequal)} of {len(self.regions)} regions of the rollout weights differ from training; stop "
            "the run, do not generate with them\n  " + "\n  ".join(lines)
        )

    def _explain(self, number: int, copies: list[tuple[int, _Copy]]) -> str:
        """Return a line with the copies that differ from the first training rank's: expected and found."""
        region = self.regions[number][0]
        trained = next(((rank, copy) for rank, copy in copies if copy.holder == _TRAINING_HOLDER), None)
        if trained is None:
            return f"{region}: expected a training rank that holds it, found none"
        texts = [f"rank {rank} ({c.holder}) {_checksum_text(c)}" for rank, c in copies if c[2:] != trained[1][2:]]
        expected = f"{_checksum_text(trained[1])} as on training rank {trained[0]}"
        return f"{region}: expected {expected}, found {', '.join(texts)}"


def _checksum_text(copy: _Copy) -> str:
    return f"checksum {copy.checksum & (1 << 64) - 1:016x}" + (f" with {copy.nan} NaN" if copy.nan else "")


_CHUNK_ELEMENTS = 1 << 22  # elements summed at a time, so that int64 copies stay below 100 MB
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MIX_FACTORS = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9)  # odd constants; products wrap around at 64 bits


def checksum(tensor: torch.Tensor, region: Region, shape: Sequence[int]) -> torch.Tensor:
    """Return the sum modulo 2**64 of the raw values, each times an odd number from its place: int64 scalar.

    `tensor`: values of `region` of the HF tensor of `shape`, with any strides. Because places in the HF tensor count, a
    swap or a transposition changes the sum; sums of parts of one region add up to that of the region.
    """
    values = tensor.detach()
    first = [region.start if dim == region.axis else 0 for dim in range(len(shape))]
    if values.dim() == 1:
        values, first, shape = values[:, None], [*first, 0], [*shape, 1]
    rows, columns = values.shape
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    column = torch.arange(first[1], first[1] + columns, device=values.device)
    step = max(1, _CHUNK_ELEMENTS // max(1, columns))
    for start in range(0, rows, step):
        part = values[start : start + step].contiguous()
        raw = part.view(_INTEGERS[part.element_size()]).to(torch.int64)
        row = torch.arange(first[0] + start, first[0] + start + len(part), device=values.device)
        place = row[:, None] * shape[1] + column
        mixed = place * _MIX_FACTORS[0]
        mixed = (mixed ^ (mixed >> 29)) * _MIX_FACTORS[1]
        total += (raw * ((mixed ^ (mixed >> 32)) | 1)).sum()
    return total


def check_map(
    model: torch.nn.Module,
    destinations: Mapping[str, Sequence[RolloutTensor]],
    shapes: Mapping[str, Sequence[int]],
    rank: int,
) -> list[str]:
    """Load a model's contents, read by `destinations`, with its own load_weights, and return what changed.

    Returns a sentence for each parameter that changed, as its place in `destinations` is wrong; that shows only where
    the values at the wrong and the right place differ. load_weights must still work on the model, whose memory it
    changes where a place is wrong. Parts that this rank does not hold are zeros, which load_weights ignores.
    """

    def values() -> Iterator[tuple[str, torch.Tensor]]:
        for name, parts in destinations.items():
            whole = torch.zeros(tuple(shapes[name]), dtype=parts[0].tensor.dtype, device=parts[0].tensor.device)
            for part in parts:
                region_view(whole, Region(name, 0, 0, shapes[name][0]), part.region, shapes[name]).copy_(part.tensor)
            yield name, whole

    with torch.no_grad():
        before = {name: _parameter_checksum(tensor) for name, tensor in model.named_parameters()}
        model.load_weights(values())
        changed = [name for name, tensor in model.named_parameters() if _parameter_checksum(tensor) != before[name]]
    return [
        f"{name} on rank {rank}: expected no change when loaded again, found one: the weight sync writes it wrongly"
        for name in changed
    ]


def _parameter_checksum(tensor: torch.Tensor) -> int:
    flat = tensor.detach().reshape(-1)
    return int(checksum(flat, Region("", 0, 0, len(flat)), (len(flat),)))
