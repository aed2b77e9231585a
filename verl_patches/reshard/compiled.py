"""The plan of one rank made into views: compiled once, copied through at every sync. See execute.py for the order.

Wire layout: buckets one after another; in a bucket one segment for each peer, by rank; in a segment the planned regions
in order, each in its wire dtype (the training inventory's) from a multiple of 16 bytes on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from verl_patches.layout.inventory import Inventory
from verl_patches.reshard.agree import ReshardError
from verl_patches.reshard.overlap import cover, overlap, part_of
from verl_patches.reshard.region import Region
from verl_patches.reshard.sizes import row_bytes, wire_bytes
from verl_patches.reshard.views import Bucket, Computed, Copies, Destination, Lent, Scratch, Source, Work

if TYPE_CHECKING:
    from verl_patches.reshard.plan import BucketPlan, RankPlan

_SIDES = (0, 1)  # send and receive, as BucketPlan has them


class Compiler:
    """Makes the views of one rank's plan; raises ReshardError or ConfigError where plan and memory disagree."""

    def __init__(
        self,
        plan: RankPlan,
        sources: Mapping[str, Source],
        destinations: Mapping[str, Sequence[Destination]],
        inventory: Inventory,
        whole: Collection[str],
        world_size: int,
        device: torch.device | str,
    ):
        self.plan, self.sources, self.parameters = plan, sources, inventory.by_name
        self.world_size, self.device = world_size, device
        arriving = {region.name for region in self._arriving()}
        self.scratch = {name: self._scratch(name) for name in whole if name in arriving}
        self.destinations = {**destinations, **{name: (each,) for name, each in self.scratch.items()}}
        # bytes that travel by (bucket, side); even and odd buckets have their own buffers
        self._sizes = {(number, side): sum(self._wire_bytes(r) for segment in bucket[side].values() for r in segment)
                       for number, bucket in enumerate(plan.buckets) for side in _SIDES}  # fmt: skip
        self.wire = {(parity, side): self._wire_buffer(parity, side) for parity in (0, 1) for side in _SIDES}

    def problems(self) -> Iterator[str]:
        """What is unmapped, written twice or never, or wrongly shaped, with expected and found: should be nothing."""
        arriving: dict[str, list[Region]] = {}
        for region in self._arriving():
            arriving.setdefault(region.name, []).append(region)
        for name in dict.fromkeys([*arriving, *self.destinations]):
            if name not in self.parameters:
                yield f"{name} is not in the inventory of the model"
                continue
            shape, parts = self.parameters[name].shape, self.destinations.get(name, ())
            for region in arriving.get(name, ()):
                missing, _ = cover(region, [part.region for part in parts], shape)
                yield from (f"{each} arrives, but is unmapped: no live parameter takes it" for each in missing)
            for part in parts:
                if part.region.start == part.region.stop:
                    continue
                missing, doubled = cover(part.region, arriving.get(name, ()), shape)
                where = f"in {part.parameter}: expected once by the plan"
                yield from (f"{each} {where}, found never written" for each in missing)
                yield from (f"{each} {where}, found written twice or more" for each in doubled)
                expected, found = part.region.shape_in(shape), tuple(part.tensor.shape)
                if found != expected:
                    yield f"{part.region} in {part.parameter}: expected shape {expected}, found {found}"

    def local(self) -> Work:
        """What goes from this rank's training memory straight to its rollout memory (scratch: into its own `local`)."""
        work = Work()
        for region in self.plan.local:
            into = self.scratch[region.name].local if region.name in self.scratch else work
            for wanted, view in self._targets(region):
                self._read(into, wanted, view)
        return work

    def buckets(self) -> list[Bucket]:
        """Every exchange in order."""
        found = [self._bucket(number, bucket) for number, bucket in enumerate(self.plan.buckets)]
        for name, scratch in self.scratch.items():
            at = [i for i, bucket in enumerate(self.plan.buckets)
                  if any(region.name == name for segment in bucket.receive.values() for region in segment)]  # fmt: skip
            if at:
                found[at[0]].opens.append(scratch)
                found[at[-1]].closes.append(scratch)
        return found

    def traffic(self) -> tuple[int, int, int]:
        """Bytes of elements sent, received and copied on the rank."""
        sides = [[r for bucket in self.plan.buckets for segment in bucket[side].values() for r in segment]
                 for side in _SIDES]  # fmt: skip
        return tuple(sum(map(self._bytes, regions)) for regions in (*sides, self.plan.local))

    def _bucket(self, number: int, plan: BucketPlan) -> Bucket:
        send, receive = (self.wire[number % 2, side].tensor[: self._sizes[number, side]] for side in _SIDES)
        pack, unpack = Work(), Copies()
        for region, view in self._on_wire(send, plan.send):
            self._read(pack, region, view)
        for region, view in self._on_wire(receive, plan.receive):
            for wanted, to in self._targets(region):
                unpack.add(to, part_of(view, region, wanted, self.parameters[region.name].shape))
        splits = [[sum(map(self._wire_bytes, side.get(peer, ()))) for peer in range(self.world_size)] for side in plan]
        return Bucket(pack, unpack, send, receive, *splits)

    def _on_wire(self, buffer: torch.Tensor, segments: Mapping[int, Sequence[Region]]) -> Iterator[tuple[Region, Any]]:
        at = 0
        for peer in sorted(segments):
            for region in segments[peer]:
                dtype, shape = self._dtype(region), region.shape_in(self.parameters[region.name].shape)
                yield region, buffer[at : at + self._bytes(region)].view(dtype).view(shape)
                at += self._wire_bytes(region)

    def _read(self, work: Work, region: Region, to: torch.Tensor) -> None:
        source, shape = self.sources.get(region.name), self.parameters[region.name].shape
        if source is None or cover(region, [source.region], shape)[0]:
            raise ReshardError(
                f"reshard: rank {self.plan.rank} should give {region}, expected to train it, found that it trains "
                f"{source.region if source else 'nothing of that tensor'}"
            )
        if not source.is_view:
            work.computed.setdefault(region.name, Computed(source, shape)).parts.append((region, to))
            return
        view = source.read(region)
        wire = self._dtype(region)
        if tuple(view.shape) != tuple(to.shape) or torch.promote_types(view.dtype, wire) != wire:
            raise ReshardError(
                f"reshard: {region} on training rank {self.plan.rank}: expected {wire} {tuple(to.shape)}, "
                f"found {view.dtype} {tuple(view.shape)}; the inventory is not of this model"
            )
        work.copies.add(to, view.detach())

    def _targets(self, region: Region) -> Iterator[tuple[Region, torch.Tensor]]:
        shape = self.parameters[region.name].shape
        for part in self.destinations.get(region.name, ()):
            wanted = overlap(part.region, region, shape)
            if wanted is not None:
                scratch = self.scratch.get(region.name)
                if scratch:
                    scratch.memory.open()
                yield wanted, part_of(part.tensor.detach(), part.region, wanted, shape)
                if scratch:
                    scratch.memory.close()

    def _arriving(self) -> Iterator[Region]:
        yield from self.plan.local
        for bucket in self.plan.buckets:
            for segment in bucket.receive.values():
                yield from segment

    def _wire_buffer(self, parity: int, side: int) -> Lent:
        sizes = [size for (number, of), size in self._sizes.items() if number % 2 == parity and of == side]
        return Lent((max(sizes, default=0),), torch.uint8, self.device)

    def _scratch(self, name: str) -> Scratch:
        parameter = self.parameters[name]
        whole = Region(name, 0, 0, parameter.shape[0])
        memory = Lent(parameter.shape, self._dtype(whole), self.device)
        memory.close()
        return Scratch(whole, memory)

    def _dtype(self, region: Region) -> torch.dtype:
        return getattr(torch, self.parameters[region.name].dtype)

    def _bytes(self, region: Region) -> int:
        return (region.stop - region.start) * row_bytes(self.parameters[region.name], region.axis)

    def _wire_bytes(self, region: Region) -> int:
        return wire_bytes(self.parameters[region.name], region)
