"""Execute the plan of a weight sync: every rank packs, exchanges and unpacks bucket after bucket.

The plan of a rank is compiled once into views (`Compiler`); a sync then takes a few calls for each bucket and looks up
no names. Bucket k + 1 is packed while bucket k is exchanged, and k is unpacked while k + 1 is exchanged:

    pack 0 | exchange 0      | exchange 1        | ...
           | local, pack 1   | unpack 0, pack 2  | ...

So there are two buffers to send from and two to receive into, never more than 4 * bucket_bytes in all; their memory
is taken from torch's allocator during a sync only. Collectives: one all_to_all_single of bytes for each bucket, and an
all-reduce of one number before the first and after the last bucket, by which an error of one rank stops all ranks.
wait() of a work handle orders the exchange before what this stream does next, on any device; there is no other
synchronisation.

A bucket has one segment for each peer, by rank. A segment has the planned regions in order, each in the training
inventory's dtype and from a multiple of 16 bytes on.

These facts were read in sources and not tried on an NPU: HcclAlltoAllV takes uint8 on Atlas A3 (CANN 8.2.RC1's API
reference), empty sends are allowed (ProcessGroupHCCL.cpp, alltoall_base), and storages of base format can be resized
(ResizeNpu.h).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from verl_patches.layout.inventory import Inventory
from verl_patches.memory.live_memory import storage_id
from verl_patches.reshard.destination import RolloutTensor
from verl_patches.reshard.plan import BucketPlan, RankPlan, ReshardPlan
from verl_patches.reshard.rank_errors import ReshardError, catch_errors, gather, raise_on_any_rank
from verl_patches.reshard.region import Region, cover, overlap, region_view, row_bytes, wire_bytes
from verl_patches.reshard.train_tensors import TrainTensor

_SIDES = (0, 1)  # send and receive, the indices of BucketPlan


@dataclass
class Copies:
    """Hold pairs of views of equal shape, copied by one call; dtypes and strides may differ."""

    targets: list[torch.Tensor] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)

    def run(self) -> None:
        """Copy each source view to its target view."""
        if self.targets:
            torch._foreach_copy_(self.targets, self.sources)


@dataclass
class Bucket:
    """Hold one exchange: `send` and `receive` are the used bytes of the wire buffers, splits are bytes by peer."""

    pack: Copies
    unpack: Copies
    send: torch.Tensor
    receive: torch.Tensor
    send_splits: list[int]
    receive_splits: list[int]


class Compiler:
    """Make the views of one rank's plan; raises ReshardError or ConfigError where plan and memory disagree."""

    def __init__(
        self,
        plan: RankPlan,
        sources: Mapping[str, TrainTensor],
        destinations: Mapping[str, Sequence[RolloutTensor]],
        inventory: Inventory,
        world_size: int,
        device: torch.device | str,
    ):
        self.plan, self.sources, self.parameters = plan, sources, inventory.by_name
        self.world_size, self.device = world_size, device
        self.destinations = destinations
        self.arriving_regions: dict[str, list[Region]] = {}
        for region in (*plan.local, *self._exchanged_regions(1)):
            self.arriving_regions.setdefault(region.name, []).append(region)
        # even and odd buckets have their own buffers
        self.wire: dict[tuple[int, int], torch.Tensor] = {}
        for side in _SIDES:
            most = max((sum(map(self._wire_bytes, _regions(bucket[side]))) for bucket in plan.buckets), default=0)
            for parity in (0, 1):
                self.wire[parity, side] = torch.empty(most, dtype=torch.uint8, device=device)

    def problems(self) -> Iterator[str]:
        """Yield a text for each part that is unmapped, written twice or never, or of a wrong shape."""
        for name in dict.fromkeys([*self.arriving_regions, *self.destinations]):
            if name not in self.parameters:
                yield f"{name} is not in the inventory of the model"
                continue
            shape, parts = self.parameters[name].shape, self.destinations.get(name, ())
            arriving_regions = self.arriving_regions.get(name, ())
            for region in arriving_regions:
                missing, _ = cover(region, [part.region for part in parts], shape)
                yield from (f"{gap} is sent to this rank, but no rollout parameter holds it" for gap in missing)
            for part in parts:
                if not part.region.rows:
                    continue
                missing, doubled = cover(part.region, arriving_regions, shape)
                where = f"in {part.parameter}: expected one write by the plan"
                yield from (f"{gap} {where}, found none" for gap in missing)
                yield from (f"{region} {where}, found two or more" for region in doubled)
                expected, found = part.region.shape_in(shape), tuple(part.tensor.shape)
                if found != expected:
                    yield f"{part.region} in {part.parameter}: expected shape {expected}, found {found}"

    def local_copies(self) -> Copies:
        """Return the copies from this rank's training memory to its rollout memory."""
        copies = Copies()
        for region in self.plan.local:
            for wanted, view in self._target_views(region):
                self._add_copy(copies, wanted, view)
        return copies

    def buckets(self) -> list[Bucket]:
        """Return every exchange in order."""
        return [self._bucket(number, bucket) for number, bucket in enumerate(self.plan.buckets)]

    def traffic(self) -> tuple[int, int, int]:
        """Return the bytes of elements sent, received and copied on the rank."""
        sent, received = (sum(map(self._raw_bytes, self._exchanged_regions(side))) for side in _SIDES)
        return sent, received, sum(map(self._raw_bytes, self.plan.local))

    def _exchanged_regions(self, side: int) -> Iterator[Region]:
        """Yield all regions that this rank sends or receives, in order."""
        return (region for bucket in self.plan.buckets for region in _regions(bucket[side]))

    def _bucket(self, number: int, plan: BucketPlan) -> Bucket:
        splits = [self._splits(segments) for segments in plan]
        send, receive = (self.wire[number % 2, side][: sum(splits[side])] for side in _SIDES)
        pack, unpack = Copies(), Copies()
        for region, view in self._wire_views(send, plan.send):
            self._add_copy(pack, region, view)
        for region, view in self._wire_views(receive, plan.receive):
            for wanted, target in self._target_views(region):
                unpack.targets.append(target)
                unpack.sources.append(region_view(view, region, wanted, self.parameters[region.name].shape))
        return Bucket(pack, unpack, send, receive, *splits)

    def _splits(self, segments: Mapping[int, Sequence[Region]]) -> list[int]:
        """Return the bytes of each peer's segment."""
        return [sum(map(self._wire_bytes, segments.get(peer, ()))) for peer in range(self.world_size)]

    def _wire_views(
        self, buffer: torch.Tensor, segments: Mapping[int, Sequence[Region]]
    ) -> Iterator[tuple[Region, Any]]:
        """Yield each region of the segments, and its view in the wire buffer."""
        start = 0
        for region in _regions(dict(sorted(segments.items()))):
            shape = region.shape_in(self.parameters[region.name].shape)
            yield region, buffer[start : start + self._raw_bytes(region)].view(self._dtype(region)).view(shape)
            start += self._wire_bytes(region)

    def _add_copy(self, copies: Copies, region: Region, target: torch.Tensor) -> None:
        source, wire = self.sources.get(region.name), self._dtype(region)
        if source is None:
            raise ReshardError(f"reshard: rank {self.plan.rank} must send or copy {region}, but trains none of it")
        view = source.read(region)
        if tuple(view.shape) != tuple(target.shape) or torch.promote_types(view.dtype, wire) != wire:
            raise ReshardError(
                f"reshard: {region} on training rank {self.plan.rank}: expected {wire} {tuple(target.shape)}, "
                f"found {view.dtype} {tuple(view.shape)}; the plan was made for another model or dtype"
            )
        copies.targets.append(target)
        copies.sources.append(view.detach())

    def _target_views(self, region: Region) -> Iterator[tuple[Region, torch.Tensor]]:
        """Yield each part of `region` that rollout memory takes, and its view there."""
        shape = self.parameters[region.name].shape
        for part in self.destinations.get(region.name, ()):
            wanted = overlap(part.region, region, shape)
            if wanted is not None:
                yield wanted, region_view(part.tensor.detach(), part.region, wanted, shape)

    def _dtype(self, region: Region) -> torch.dtype:
        return getattr(torch, self.parameters[region.name].dtype)

    def _raw_bytes(self, region: Region) -> int:
        return region.rows * row_bytes(self.parameters[region.name], region.axis)

    def _wire_bytes(self, region: Region) -> int:
        return wire_bytes(self.parameters[region.name], region)


def _regions(segments: Mapping[int, Sequence[Region]]) -> Iterator[Region]:
    return itertools.chain.from_iterable(segments.values())


@dataclass(frozen=True)
class SyncReport:
    """Report the bytes (without alignment) and the seconds (of the host's clock) of one sync on this rank.

    `seconds`: pack, exchange (only the waiting), unpack, local, memory (opening and closing buffers), load (`before`
    and `finish`) and total, after which the weights are complete. On an accelerator only the total includes the
    device's work; the others are time of the host. `collectives`: of buckets, without the all-reduces of a number by
    which ranks agree. `peak_extra_bytes`: bytes of the wire buffers.
    """

    sent_bytes: int
    received_bytes: int
    local_bytes: int
    collectives: int
    peak_extra_bytes: int
    seconds: dict[str, float]


class Executor:
    """Execute one rank's part of every sync; `build_executor` makes executors on all ranks at once."""

    def __init__(self, compiler: Compiler, finish: Callable[[], Any]):
        self.device, self._finish, self._traffic = compiler.device, finish, compiler.traffic()
        self._local, self._buckets = compiler.local_copies(), compiler.buckets()
        self._wire = list(compiler.wire.values())
        views = [(name, source.tensor) for name, source in compiler.sources.items()]
        views += [(part.parameter, part.tensor) for parts in compiler.destinations.values() for part in parts]
        self._storages = {storage_id(view): (name, view.untyped_storage()) for name, view in views if view.numel()}
        self._close_buffers()
        self._problem: Exception | None = None
        self._seconds: dict[str, float] = {}

    @property
    def buffer_bytes(self) -> int:
        """Return the bytes that wire buffers have now, 0 between two syncs."""
        return sum(buffer.untyped_storage().nbytes() for buffer in self._wire)

    @torch.no_grad()
    def run(self, before: Callable[[], Any] | None = None) -> SyncReport:
        """Move the weights; collective. An error of any rank raises ReshardError on every rank.

        Training and rollout weights must be in device memory: neither offloaded nor asleep. `before` is called before
        the exchange, once all buffers are allocated.
        """
        begin = time.perf_counter()
        self._seconds = dict.fromkeys(("pack", "exchange", "unpack", "local", "memory", "load"), 0.0)
        self._problem = None
        self._run_step("memory", self._open_buffers)
        if before:
            self._run_step("load", before)
        try:
            self._raise_on_any_rank("no weights were sent; stop the run, do not generate with the present weights")
        except ReshardError:
            self._close_buffers()
            raise
        self._exchange_all()  # if it raises, buffers stay: a collective may still write to them
        self._run_step("load", self._finish)
        self._run_step("memory", self._close_buffers)
        self._raise_on_any_rank("rollout weights are incomplete; stop the run, do not generate with them")
        self._seconds["total"] = time.perf_counter() - begin
        peak = sum(buffer.nbytes for buffer in self._wire)
        return SyncReport(*self._traffic, len(self._buckets), peak, self._seconds)

    def _exchange_all(self) -> None:
        if not self._buckets:
            self._run_step("local", self._local.run)
            return
        self._run_step("pack", self._buckets[0].pack.run)
        under_way = self._exchange(self._buckets[0])
        self._run_step("local", self._local.run)
        for bucket, following in zip(self._buckets, [*self._buckets[1:], None], strict=True):
            if following:
                self._run_step("pack", following.pack.run)
            begin = time.perf_counter()
            under_way.wait()
            self._seconds["exchange"] += time.perf_counter() - begin
            if following:
                under_way = self._exchange(following)
            self._run_step("unpack", bucket.unpack.run)

    def _exchange(self, bucket: Bucket) -> dist.Work:
        return dist.all_to_all_single(
            bucket.receive, bucket.send, bucket.receive_splits, bucket.send_splits, async_op=True
        )

    def _run_step(self, phase: str, do: Callable[[], Any]) -> None:
        """Run one local step; after an error steps are skipped, but exchanges go on so that no rank waits forever."""
        if self._problem is not None and phase != "memory":
            return
        begin = time.perf_counter()
        try:
            do()
        except Exception as why:
            self._problem = self._problem or why
        self._seconds[phase] += time.perf_counter() - begin

    def _raise_on_any_rank(self, failure: str) -> None:
        problems = [] if self._problem is None else [f"{type(self._problem).__name__}: {self._problem}"]
        raise_on_any_rank(problems, None, self.device, failure)

    def _open_buffers(self) -> None:
        freed = [name for name, storage in self._storages.values() if not storage.nbytes()]
        if freed:
            raise RuntimeError(
                f"{freed[0]} and {len(freed) - 1} more have no device memory: expected training and rollout weights on "
                "the device, found them offloaded or freed by sleep mode; bring them back before the sync (by "
                "load_megatron_model_to_gpu, wake_up)"
            )
        for buffer in self._wire:
            buffer.untyped_storage().resize_(buffer.nbytes)

    def _close_buffers(self) -> None:
        for buffer in self._wire:
            buffer.untyped_storage().resize_(0)


def build_executor(
    plan: ReshardPlan,
    rank: int,
    sources: Mapping[str, TrainTensor],
    destinations: Mapping[str, Sequence[RolloutTensor]],
    *,
    finish: Callable[[], Any],
    device: torch.device | str,
) -> Executor:
    """Return the executor of `rank`'s part of the plan; collective over all ranks.

    `sources`: HF name -> part that this rank trains. `destinations`: HF name -> live rollout memory. `finish` is called
    at every sync once all weights are written. Raises ReshardError with the same message on every rank where ranks have
    unequal plans, or memory and plan disagree (a parameter unmapped, written twice or never, of a wrong shape).
    """
    digests = gather(plan.digest())
    unlike = [f"rank {rank} has the digest {digest}" for rank, digest in enumerate(digests) if digest != digests[0]]
    if unlike:
        raise ReshardError(
            f"reshard: ranks have different plans: rank 0 has the digest {digests[0]}, {', '.join(unlike[:3])}; "
            "expected one digest. Compare the layouts and the code versions of these ranks"
        )
    made: list[Executor] = []

    def make() -> list[str]:
        compiler = Compiler(plan.for_rank(rank), sources, destinations, plan.inventory, plan.world_size, device)
        problems = list(compiler.problems())
        if not problems:
            made.append(Executor(compiler, finish))
        return problems

    failure = "the plan does not match the tensors on these ranks; compare the layouts with the model"
    raise_on_any_rank(catch_errors(make), None, device, failure)
    return made[0]
