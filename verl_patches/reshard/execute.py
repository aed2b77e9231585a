"""One weight sync as planned: every rank packs, exchanges and unpacks bucket after bucket, without a name or a search.

All views are made once (compiled.py); a sync is a few calls a bucket. Bucket k + 1 is packed while bucket k is on its
way, and k is unpacked while k + 1 is:

    pack 0 | exchange 0      | exchange 1        | ...
           | local, pack 1   | unpack 0, pack 2  | ...

so there are two buffers to send from and two to receive into, never more than 4 * bucket_bytes in all; their memory
is taken from torch's allocator during a sync only. Collectives: one all_to_all_single of bytes for each bucket, and one
number before and after them, by which a problem of one rank stops all. A work handle's wait() puts the exchange before
what this stream does next, on any device, so nothing else is synchronised.

For an NPU, read and not run: HcclAlltoAllV takes uint8 on Atlas A3 (CANN 8.2.RC1's API reference), empty sends are
counted as nothing (ProcessGroupHCCL.cpp, alltoall_base), and storages of base format can be resized (ResizeNpu.h).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from verl_patches.reshard.agree import ReshardError, agree, check_peers, collect
from verl_patches.reshard.compiled import Compiler
from verl_patches.reshard.views import Bucket, Destination, Lent, Scratch, Source, Work

if TYPE_CHECKING:
    from verl_patches.reshard.plan import RankPlan, ReshardPlan

LoadWhole = Callable[[str, torch.Tensor], None]
FLAGS = 2  # collectives of one number in each sync


@dataclass(frozen=True)
class SyncReport:
    """What one sync did on this rank; bytes without alignment, seconds of the host's clock.

    `seconds`: pack, exchange (only the waiting), unpack, local, memory (getting and giving back buffers), load (what
    `load_whole` took) and total, after which the weights are there; on an accelerator only the total says how long
    something took, the others what the host spent. `peak_extra_bytes`: wire buffers, scratch tensors and computed
    sources at their highest.
    """

    sent_bytes: int
    received_bytes: int
    local_bytes: int
    collectives: int
    peak_extra_bytes: int
    seconds: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for a step table or JSON."""
        return dataclasses.asdict(self)


class Executor:
    """What one rank does at every sync. `build_executor` makes it, on all ranks at once."""

    def __init__(self, compiler: Compiler, *, group: Any, load_whole: LoadWhole | None, finish: Callable[[], Any]):
        self.group, self.device, self._load_whole, self._finish = group, compiler.device, load_whole, finish
        self._local, self._buckets, self._wire = compiler.local(), compiler.buckets(), list(compiler.wire.values())
        self._traffic = compiler.traffic()
        late = {scratch.region for bucket in self._buckets for scratch in bucket.opens}
        self._only_local = [each for each in compiler.scratch.values() if each.region not in late]
        self._scratch = list(compiler.scratch.values())
        live = {name: parts for name, parts in compiler.destinations.items() if name not in compiler.scratch}
        self._storages = _storages(compiler.sources, live)
        for lent in self._wire:
            lent.close()
        self._now = self._peak = 0
        self._problem: Exception | None = None
        self._seconds: dict[str, float] = {}

    @property
    def held_bytes(self) -> int:
        """Bytes of wire buffers and scratch tensors that are there now: none between two syncs."""
        lent = [*self._wire, *(scratch.memory for scratch in self._scratch)]
        return sum(each.tensor.untyped_storage().nbytes() for each in lent)

    @torch.no_grad()
    def run(self, before: Callable[[], Any] | None = None) -> SyncReport:
        """Move the weights; collective. Raises ReshardError on every rank for a problem of any.

        Training and rollout weights must be in device memory: neither offloaded nor asleep. `before` is called first,
        once all memory is there.
        """
        begin = time.perf_counter()
        self._seconds = dict.fromkeys(("pack", "exchange", "unpack", "local", "memory", "load"), 0.0)
        self._problem, self._peak = None, self._now
        self._step("memory", self._open_all)
        if before:
            self._step("load", before)
        try:
            agree(self._found(), self.group, self.device, "nothing was sent; stop, do not sample with what is there")
        except ReshardError:
            self._close_all()
            raise
        self._exchange_all()  # if a collective raises, buffers stay: it may still be writing
        self._step("load", self._finish)
        self._step("memory", self._close_all)
        agree(self._found(), self.group, self.device, "rollout weights are incomplete; stop, do not sample with them")
        self._seconds["total"] = time.perf_counter() - begin
        return SyncReport(*self._traffic, len(self._buckets) + FLAGS, self._peak, self._seconds)

    def _exchange_all(self) -> None:
        for scratch in self._only_local:
            self._step("local", self._open_scratch, scratch)
            self._step("load", self._finish_scratch, scratch)
        if not self._buckets:
            self._step("local", self._work, self._local)
            return
        self._step("pack", self._work, self._buckets[0].pack)
        under_way = self._exchange(self._buckets[0])
        self._step("local", self._work, self._local)
        for bucket, following in zip(self._buckets, [*self._buckets[1:], None], strict=True):
            if following:
                self._step("pack", self._work, following.pack)
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
        return dist.all_to_all_single(bucket.receive, bucket.send, bucket.receive_splits, bucket.send_splits,
                                      group=self.group, async_op=True)  # fmt: skip

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

    def _work(self, work: Work) -> None:
        self._peak = max(self._peak, self._now + work.run())

    def _open_scratch(self, scratch: Scratch) -> None:
        self._open(scratch.memory)
        self._work(scratch.local)

    def _finish_scratch(self, scratch: Scratch) -> None:
        self._load_whole(scratch.region.name, scratch.tensor)
        self._close(scratch.memory)

    def _open_all(self) -> None:
        gone = [name for storage, needed, name in self._storages if storage.nbytes() < needed]
        if gone:
            raise RuntimeError(f"memory of {gone[0]} and {len(gone) - 1} more is not there: is it offloaded?")
        for lent in self._wire:
            if not lent.is_open:
                self._open(lent)

    def _close_all(self) -> None:
        for scratch in self._scratch:
            self._close(scratch.memory)
        for lent in self._wire:
            self._close(lent)

    def _open(self, lent: Lent) -> None:
        lent.open()
        self._now += lent.size_bytes
        self._peak = max(self._peak, self._now)

    def _close(self, lent: Lent) -> None:
        if lent.is_open:
            lent.close()
            self._now -= lent.size_bytes

    def _found(self) -> list[str]:
        return [] if self._problem is None else [f"{type(self._problem).__name__}: {self._problem}"]


def build_executor(
    plan: ReshardPlan,
    rank: int,
    sources: Mapping[str, Source],
    destinations: Mapping[str, Sequence[Destination]],
    *,
    load_whole: LoadWhole | None = None,
    group: Any = None,
    device: torch.device | str = "cpu",
    finish: Callable[[], Any] = lambda: None,
    rank_plan: RankPlan | None = None,
) -> Executor:
    """Compile `rank`'s part of the plan; collective over `group`, whose ranks are the plan's.

    `sources`: HF name -> what this rank trains. `destinations`: HF name -> live rollout memory, but for the plan's
    `whole` tensors: each of those is put together in scratch memory and given to `load_whole(name, tensor)`, which must
    not keep it. `finish` is called at every sync once all weights are there. `rank_plan` replaces the rank's own part
    (tests). Raises ReshardError with the same message on every rank: where memory and plan disagree (a parameter
    unmapped, written twice or never, wrongly shaped), or two ranks.
    """
    made: list[tuple[RankPlan, Executor]] = []

    def make() -> list[str]:
        mine = rank_plan or plan.for_rank(rank)
        world_size = dist.get_world_size(group)
        compiler = Compiler(mine, sources, destinations, plan.inventory, plan.whole, world_size, device)
        problems = list(compiler.problems())
        if compiler.scratch and load_whole is None:
            problems.append(f"{next(iter(compiler.scratch))} is to be loaded whole: expected load_whole, found None")
        if not problems:
            executor = Executor(compiler, group=group, load_whole=load_whole, finish=finish)
            made.append((mine, executor))
        return problems

    agree(collect(make), group, device, "the plan does not fit the memory of these ranks; compare layouts and model")
    mine, executor = made[0]
    check_peers(mine, plan.digest(), group, device)
    return executor


def _storages(
    sources: Mapping[str, Source], destinations: Mapping[str, Sequence[Destination]]
) -> list[tuple[torch.UntypedStorage, int, str]]:
    """(storage, bytes that views need of it, a name that says what it holds) of live memory, each storage once."""
    needed: dict[int, tuple[torch.UntypedStorage, int, str]] = {}
    views = [(name, source.read(source.region)) for name, source in sources.items() if source.is_view]
    views += [(part.parameter, part.tensor) for parts in destinations.values() for part in parts]
    for name, view in views:
        if view.numel():
            storage = view.untyped_storage()
            steps = zip(view.shape, view.stride(), strict=True)
            last = view.storage_offset() + sum((n - 1) * step for n, step in steps)
            known = needed.get(storage._cdata, (storage, 0, name))
            needed[storage._cdata] = (storage, max(known[1], (last + 1) * view.element_size()), known[2])
    return list(needed.values())
