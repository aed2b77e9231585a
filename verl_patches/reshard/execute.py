"""One weight sync as planned: every rank packs, exchanges and unpacks bucket after bucket.

The plan of a rank is compiled once into views (`Compiler`); a sync then is a few calls for each bucket, without a name
or a search. Bucket k + 1 is packed while bucket k is exchanged, and k is unpacked while k + 1 is exchanged:

    pack 0 | exchange 0      | exchange 1        | ...
           | local, pack 1   | unpack 0, pack 2  | ...

so there are two buffers to send from and two to receive into, never more than 4 * bucket_bytes in all; their memory
is taken from torch's allocator during a sync only. Collectives: one all_to_all_single of bytes for each bucket, and one
number before and after them, by which an error of one rank stops all. A work handle's wait() orders the exchange before
what this stream does next, on any device, so nothing else is synchronised.

Layout of the exchanged bytes: in a bucket one segment for each peer, by rank; in a segment the planned regions in
order, each in the training inventory's dtype from a multiple of 16 bytes on.

Read in sources and not run on an NPU: HcclAlltoAllV takes uint8 on Atlas A3 (CANN 8.2.RC1's API reference), empty sends
are allowed (ProcessGroupHCCL.cpp, alltoall_base), and storages of base format can be resized (ResizeNpu.h).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from verl_patches.layout.inventory import Inventory
from verl_patches.reshard.destination import RolloutTensor
from verl_patches.reshard.live_memory import storage_id
from verl_patches.reshard.plan import BucketPlan, RankPlan, ReshardPlan
from verl_patches.reshard.rank_errors import ReshardError, catch_errors, check_peers, raise_on_any_rank
from verl_patches.reshard.region import Region, cover, overlap, part_of, row_bytes, wire_bytes
from verl_patches.reshard.train_tensors import TrainTensor

LoadWhole = Callable[[str, torch.Tensor], None]
FLAGS = 2  # collectives of one number in each sync
_SIDES = (0, 1)  # send and receive, as BucketPlan has them


class ResizableBuffer:
    """A tensor that has memory between `open` and `close`; made open. Views must be made while it is open."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str):
        self.tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
        self.size_bytes = self.tensor.untyped_storage().nbytes()

    @property
    def is_open(self) -> bool:
        """Whether it has memory."""
        return self.tensor.untyped_storage().nbytes() == self.size_bytes

    def open(self) -> None:
        """Allocate the memory, uninitialised."""
        self.tensor.untyped_storage().resize_(self.size_bytes)

    def close(self) -> None:
        """Free the memory."""
        self.tensor.untyped_storage().resize_(0)


@dataclass
class Copies:
    """Pairs of views of equal shape, copied by one call; dtypes and strides may differ."""

    to: list[torch.Tensor] = field(default_factory=list)
    source: list[torch.Tensor] = field(default_factory=list)

    def run(self) -> None:
        """Copy all."""
        if self.to:
            torch._foreach_copy_(self.to, self.source)


class Scratch(NamedTuple):
    """Memory in which the complete HF tensor `name` is put together for vLLM's own load_weights.

    `local` copies the part that this rank trains.
    """

    name: str
    memory: ResizableBuffer
    local: Copies


@dataclass
class Bucket:
    """One exchange: `send` and `receive` are the bytes used of the wire buffers, splits are bytes by peer.

    `opens` and `closes`: scratch tensors whose first, or last, part comes with this bucket.
    """

    pack: Copies
    unpack: Copies
    send: torch.Tensor
    receive: torch.Tensor
    send_splits: list[int]
    receive_splits: list[int]
    opens: list[Scratch] = field(default_factory=list)
    closes: list[Scratch] = field(default_factory=list)


class Compiler:
    """Makes the views of one rank's plan; raises ReshardError or ConfigError where plan and memory disagree."""

    def __init__(
        self,
        plan: RankPlan,
        sources: Mapping[str, TrainTensor],
        destinations: Mapping[str, Sequence[RolloutTensor]],
        inventory: Inventory,
        whole: Collection[str],
        world_size: int,
        device: torch.device | str,
    ):
        self.plan, self.sources, self.parameters = plan, sources, inventory.by_name
        self.world_size, self.device = world_size, device
        self.destinations, self.scratch = dict(destinations), {}
        self.arriving: dict[str, list[Region]] = {}
        for region in (*plan.local, *self._exchanged(1)):
            self.arriving.setdefault(region.name, []).append(region)
        for name in self.arriving.keys() & set(whole):
            region = Region(name, 0, 0, self.parameters[name].shape[0])
            memory = ResizableBuffer(self.parameters[name].shape, self._dtype(region), device)
            memory.close()
            self.scratch[name] = Scratch(name, memory, Copies())
            self.destinations[name] = (RolloutTensor(region, memory.tensor, "(scratch memory for load_weights)"),)
        # bytes exchanged by (bucket, side); even and odd buckets have their own buffers
        self._sizes = {
            (number, side): sum(map(self._wire_bytes, _regions(bucket[side])))
            for number, bucket in enumerate(plan.buckets)
            for side in _SIDES
        }
        self.wire: dict[tuple[int, int], ResizableBuffer] = {}
        for parity, side in itertools.product((0, 1), _SIDES):
            sizes = [size for (number, of), size in self._sizes.items() if (number % 2, of) == (parity, side)]
            self.wire[parity, side] = ResizableBuffer((max(sizes, default=0),), torch.uint8, device)

    def problems(self) -> Iterator[str]:
        """One text for each part that is unmapped, written twice or never, or of a wrong shape: expected and found."""
        for name in dict.fromkeys([*self.arriving, *self.destinations]):
            if name not in self.parameters:
                yield f"{name} is not in the inventory of the model"
                continue
            shape, parts = self.parameters[name].shape, self.destinations.get(name, ())
            arriving = self.arriving.get(name, ())
            for region in arriving:
                missing, _ = cover(region, [part.region for part in parts], shape)
                yield from (f"{gap} arrives, but is unmapped: no live parameter takes it" for gap in missing)
            for part in parts:
                if not part.region.rows:
                    continue
                missing, doubled = cover(part.region, arriving, shape)
                where = f"in {part.parameter}: expected once by the plan"
                yield from (f"{gap} {where}, found never written" for gap in missing)
                yield from (f"{region} {where}, found written twice or more" for region in doubled)
                expected, found = part.region.shape_in(shape), tuple(part.tensor.shape)
                if found != expected:
                    yield f"{part.region} in {part.parameter}: expected shape {expected}, found {found}"

    def local(self) -> Copies:
        """Copies from this rank's training memory to its rollout memory (those to scratch are its own `local`)."""
        copies = Copies()
        for region in self.plan.local:
            into = self.scratch[region.name].local if region.name in self.scratch else copies
            for wanted, view in self._targets(region):
                self._read(into, wanted, view)
        return copies

    def buckets(self) -> list[Bucket]:
        """Every exchange in order."""
        buckets = [self._bucket(number, bucket) for number, bucket in enumerate(self.plan.buckets)]
        for name, scratch in self.scratch.items():
            numbers = [n for n, b in enumerate(self.plan.buckets) if name in {r.name for r in _regions(b.receive)}]
            if numbers:
                buckets[numbers[0]].opens.append(scratch)
                buckets[numbers[-1]].closes.append(scratch)
        return buckets

    def traffic(self) -> tuple[int, int, int]:
        """Bytes of elements sent, received and copied on the rank."""
        return tuple(sum(map(self._bytes, regions)) for regions in (*map(self._exchanged, _SIDES), self.plan.local))

    def _exchanged(self, side: int) -> Iterator[Region]:
        """All regions that this rank sends or receives, in order."""
        return (region for bucket in self.plan.buckets for region in _regions(bucket[side]))

    def _bucket(self, number: int, plan: BucketPlan) -> Bucket:
        send, receive = (self.wire[number % 2, side].tensor[: self._sizes[number, side]] for side in _SIDES)
        pack, unpack = Copies(), Copies()
        for region, view in self._on_wire(send, plan.send):
            self._read(pack, region, view)
        for region, view in self._on_wire(receive, plan.receive):
            for wanted, to in self._targets(region):
                unpack.to.append(to)
                unpack.source.append(part_of(view, region, wanted, self.parameters[region.name].shape))
        splits = [[sum(map(self._wire_bytes, side.get(peer, ()))) for peer in range(self.world_size)] for side in plan]
        return Bucket(pack, unpack, send, receive, *splits)

    def _on_wire(self, buffer: torch.Tensor, segments: Mapping[int, Sequence[Region]]) -> Iterator[tuple[Region, Any]]:
        """Each region of the segments, and its view in the wire buffer."""
        start = 0
        for region in _regions(dict(sorted(segments.items()))):
            shape = region.shape_in(self.parameters[region.name].shape)
            yield region, buffer[start : start + self._bytes(region)].view(self._dtype(region)).view(shape)
            start += self._wire_bytes(region)

    def _read(self, copies: Copies, region: Region, to: torch.Tensor) -> None:
        source, shape = self.sources.get(region.name), self.parameters[region.name].shape
        if source is None or cover(region, [source.region], shape)[0]:
            raise ReshardError(
                f"reshard: rank {self.plan.rank} should send {region}, expected to train it, found that it trains "
                f"{source.region if source else 'nothing of that tensor'}"
            )
        view, wire = source.read(region), self._dtype(region)
        if tuple(view.shape) != tuple(to.shape) or torch.promote_types(view.dtype, wire) != wire:
            raise ReshardError(
                f"reshard: {region} on training rank {self.plan.rank}: expected {wire} {tuple(to.shape)}, "
                f"found {view.dtype} {tuple(view.shape)}; the inventory is not of this model"
            )
        copies.to.append(to)
        copies.source.append(view.detach())

    def _targets(self, region: Region) -> Iterator[tuple[Region, torch.Tensor]]:
        """Each part of `region` that rollout or scratch memory takes, and its view there."""
        shape, scratch = self.parameters[region.name].shape, self.scratch.get(region.name)
        for part in self.destinations.get(region.name, ()):
            wanted = overlap(part.region, region, shape)
            if wanted is not None:
                if scratch:
                    scratch.memory.open()
                yield wanted, part_of(part.tensor.detach(), part.region, wanted, shape)
                if scratch:
                    scratch.memory.close()

    def _dtype(self, region: Region) -> torch.dtype:
        return getattr(torch, self.parameters[region.name].dtype)

    def _bytes(self, region: Region) -> int:
        return region.rows * row_bytes(self.parameters[region.name], region.axis)

    def _wire_bytes(self, region: Region) -> int:
        return wire_bytes(self.parameters[region.name], region)


def _regions(segments: Mapping[int, Sequence[Region]]) -> Iterator[Region]:
    return itertools.chain.from_iterable(segments.values())


@dataclass(frozen=True)
class SyncReport:
    """What one sync did on this rank; bytes without alignment, seconds of the host's clock.

    `seconds`: pack, exchange (only the waiting), unpack, local, memory (opening and closing buffers), load (what
    `load_whole` took) and total, after which the weights are complete; on an accelerator only the total includes the
    device's work, the others are time of the host. `peak_extra_bytes`: wire buffers and scratch tensors at their
    highest.
    """

    sent_bytes: int
    received_bytes: int
    local_bytes: int
    collectives: int
    peak_extra_bytes: int
    seconds: dict[str, float]


class Executor:
    """What one rank does at every sync. `build_executor` makes it, on all ranks at once."""

    def __init__(self, compiler: Compiler, load_whole: LoadWhole, finish: Callable[[], Any]):
        self.device, self._load_whole, self._finish = compiler.device, load_whole, finish
        self._local, self._buckets, self._wire = compiler.local(), compiler.buckets(), list(compiler.wire.values())
        self._traffic, self._scratch = compiler.traffic(), list(compiler.scratch.values())
        received = {scratch.name for bucket in self._buckets for scratch in bucket.opens}
        self._only_local = [scratch for scratch in self._scratch if scratch.name not in received]
        views = [(name, source.tensor) for name, source in compiler.sources.items()]
        for name, parts in compiler.destinations.items():
            views += [(part.parameter, part.tensor) for part in parts if name not in compiler.scratch]
        self._storages = {storage_id(view): (name, view.untyped_storage()) for name, view in views if view.numel()}
        for buffer in self._wire:
            buffer.close()
        self._now = self._peak = 0
        self._problem: Exception | None = None
        self._seconds: dict[str, float] = {}

    @property
    def held_bytes(self) -> int:
        """Bytes that wire buffers and scratch tensors have now: 0 between two syncs."""
        buffers = [*self._wire, *(scratch.memory for scratch in self._scratch)]
        return sum(buffer.tensor.untyped_storage().nbytes() for buffer in buffers)

    @torch.no_grad()
    def run(self, before: Callable[[], Any] | None = None) -> SyncReport:
        """Move the weights; collective. Raises ReshardError on every rank for an error of any.

        Training and rollout weights must be in device memory: neither offloaded nor asleep. `before` is called first,
        once all buffers are allocated.
        """
        begin = time.perf_counter()
        self._seconds = dict.fromkeys(("pack", "exchange", "unpack", "local", "memory", "load"), 0.0)
        self._problem, self._peak = None, self._now
        self._step("memory", self._open_all)
        if before:
            self._step("load", before)
        try:
            self._raise_on_any_rank("nothing was sent; stop, do not sample with the present weights")
        except ReshardError:
            self._close_all()
            raise
        self._exchange_all()  # if a collective raises, buffers stay: it may still be writing
        self._step("load", self._finish)
        self._step("memory", self._close_all)
        self._raise_on_any_rank("rollout weights are incomplete; stop, do not sample with them")
        self._seconds["total"] = time.perf_counter() - begin
        return SyncReport(*self._traffic, len(self._buckets) + FLAGS, self._peak, self._seconds)

    def _exchange_all(self) -> None:
        for scratch in self._only_local:
            self._step("local", self._open_scratch, scratch)
            self._step("load", self._finish_scratch, scratch)
        if not self._buckets:
            self._step("local", self._local.run)
            return
        self._step("pack", self._buckets[0].pack.run)
        under_way = self._exchange(self._buckets[0])
        self._step("local", self._local.run)
        for bucket, following in zip(self._buckets, [*self._buckets[1:], None], strict=True):
            if following:
                self._step("pack", following.pack.run)
            begin = time.perf_counter()
            under_way.wait()
            self._seconds["exchange"] += time.perf_counter() - begin
            if following:
                under_way = self._exchange(following)
            for scratch in bucket.opens:
                self._step("local", self._open_scratch, scratch)
            self._step("unpack", bucket.unpack.run)
            for scratch in bucket.closes:
                self._step("load", self._finish_scratch, scratch)

    def _exchange(self, bucket: Bucket) -> dist.Work:
        return dist.all_to_all_single(
            bucket.receive, bucket.send, bucket.receive_splits, bucket.send_splits, async_op=True
        )

    def _step(self, phase: str, do: Callable[..., None], *args: Any) -> None:
        """One local step. After a first error no more are taken, but exchanges go on: no rank waits for ever."""
        if self._problem is not None and phase != "memory":
            return
        begin = time.perf_counter()
        try:
            do(*args)
        except Exception as why:
            self._problem = self._problem or why
        self._seconds[phase] += time.perf_counter() - begin

    def _raise_on_any_rank(self, todo: str) -> None:
        problems = [] if self._problem is None else [f"{type(self._problem).__name__}: {self._problem}"]
        raise_on_any_rank(problems, None, self.device, todo)

    def _open_scratch(self, scratch: Scratch) -> None:
        self._open(scratch.memory)
        scratch.local.run()

    def _finish_scratch(self, scratch: Scratch) -> None:
        self._load_whole(scratch.name, scratch.memory.tensor)
        self._close(scratch.memory)

    def _open_all(self) -> None:
        freed = [name for name, storage in self._storages.values() if not storage.nbytes()]
        if freed:
            raise RuntimeError(
                f"{freed[0]} and {len(freed) - 1} more have no device memory: expected training and rollout weights on "
                "the device, found them offloaded or asleep; load them before the sync"
            )
        for buffer in self._wire:
            if not buffer.is_open:
                self._open(buffer)

    def _close_all(self) -> None:
        for scratch in self._scratch:
            self._close(scratch.memory)
        for buffer in self._wire:
            self._close(buffer)

    def _open(self, buffer: ResizableBuffer) -> None:
        buffer.open()
        self._now += buffer.size_bytes
        self._peak = max(self._peak, self._now)

    def _close(self, buffer: ResizableBuffer) -> None:
        if buffer.is_open:
            buffer.close()
            self._now -= buffer.size_bytes


def build_executor(
    plan: ReshardPlan,
    rank: int,
    sources: Mapping[str, TrainTensor],
    destinations: Mapping[str, Sequence[RolloutTensor]],
    *,
    load_whole: LoadWhole,
    finish: Callable[[], Any],
    device: torch.device | str,
) -> Executor:
    """Compile `rank`'s part of the plan; collective over all ranks.

    `sources`: HF name -> what this rank trains. `destinations`: HF name -> live rollout memory, but for the plan's
    `whole` tensors: each of those is put together in scratch memory and given to `load_whole(name, tensor)`, which must
    not keep it. `finish` is called at every sync once all weights are written. Raises ReshardError with the same
    message on every rank: where memory and plan disagree (a parameter unmapped, written twice or never, of a wrong
    shape), or two ranks.
    """
    rank_plan = executor = None

    def make() -> list[str]:
        nonlocal rank_plan, executor
        rank_plan, world_size = plan.for_rank(rank), dist.get_world_size()
        compiler = Compiler(rank_plan, sources, destinations, plan.inventory, plan.whole, world_size, device)
        problems = list(compiler.problems())
        if not problems:
            executor = Executor(compiler, load_whole, finish)
        return problems

    todo = "the plan does not fit the memory of these ranks; compare layouts and model"
    raise_on_any_rank(catch_errors(make), None, device, todo)
    check_peers(rank_plan, plan.digest(), device)
    return executor
