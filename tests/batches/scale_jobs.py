"""256 logical ranks in 16 gloo processes for test_scale.py: 16 threads a process, with the real cache and exchange."""

import functools
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

from verl_patches.batches import exchange as module
from verl_patches.batches.batch_plan import plan_batch, train_replicas
from verl_patches.batches.cache import TensorCache
from verl_patches.batches.exchange import Ragged, TensorSpec, wire_bytes
from verl_patches.layout.parallel import parse_layout

NAMES = ("prompts", "responses", "rollout_log_probs")
STEP = 3


class Hub:
    """all_to_all_single between logical ranks: those of a process meet, and one of them exchanges for all.

    Logical rank r is thread r % local of process r // local; `calls` counts the collectives of this process.
    """

    def __init__(self, local: int):
        self._local, self._barrier = local, threading.Barrier(local, timeout=100)
        self._thread, self._calls = threading.local(), [None] * local
        self.calls = 0

    def enter(self, index: int) -> None:
        self._thread.index = index

    def all_to_all_single(self, out: torch.Tensor, given: torch.Tensor, out_splits, in_splits) -> None:
        """As torch.distributed's, on the default group of all logical ranks."""
        index = self._thread.index
        self._calls[index] = out.split(out_splits), given.split(in_splits)
        self._barrier.wait()
        if index == 0:
            self._exchange()
        self._barrier.wait()

    def _exchange(self) -> None:
        """On the wire: by process, then by sending and by receiving thread."""
        outs, givens = zip(*self._calls, strict=True)
        peers = [range(n * self._local, (n + 1) * self._local) for n in range(dist.get_world_size())]
        parts = [[given[rank] for given in givens for rank in ranks] for ranks in peers]
        send = torch.cat([part for of_peer in parts for part in of_peer])
        places = [[out[rank] for rank in ranks for out in outs] for ranks in peers]
        sizes = [[sum(map(len, side)) for side in sides] for sides in (places, parts)]
        arrived = torch.empty(sum(sizes[0]), dtype=torch.uint8)
        dist.all_to_all_single(arrived, send, *sizes)
        flat = [place for of_peer in places for place in of_peer]
        for place, values in zip(flat, arrived.split([len(place) for place in flat]), strict=True):
            place.copy_(values)
        self.calls += 1


def ragged_of(name: str, samples: Sequence[int], spec: TensorSpec) -> Ragged:
    """Values that follow from tensor, sample and place."""
    counts = torch.tensor([spec.lengths[sample] for sample in samples])
    place = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    values = torch.tensor(samples).repeat_interleave(counts) * 4099 + place * 3 + NAMES.index(name)
    return Ragged((values % (1 << 23)).to(spec.dtype), tuple(counts.tolist()))


def step_of(layout: str, prompts: list[int], responses: list[int]):
    """(plan, specs) of a step as stage place makes them."""
    lengths = [a + b for a, b in zip(prompts, responses, strict=True)]
    replicas = train_replicas(parse_layout(layout))
    plan = plan_batch(replicas, lengths, balance=True, mini_batch_size=len(lengths), micro_batch_size=1)
    specs = {name: TensorSpec(torch.int32, prompts if name == "prompts" else responses) for name in NAMES}
    return plan, specs | {"rollout_log_probs": TensorSpec(torch.float32, responses)}


def redistribute(layout: str, prompts: list[int], responses: list[int], wrong: int) -> list[dict]:
    """What each logical rank of this process found; the holder of sample `wrong` puts other prompts of it."""
    plan, specs = step_of(layout, prompts, responses)
    local = len(plan.replica_of) // dist.get_world_size()
    hub, found, errors = Hub(local), [None] * local, []

    @functools.cache
    def expected_of(replica: int, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Values of a tensor on a replica, and the sample of each."""
        expected = ragged_of(name, plan.placed[replica], specs[name])
        return expected.values, torch.tensor(plan.placed[replica]).repeat_interleave(torch.tensor(expected.lengths))

    def work(index: int) -> None:
        hub.enter(index)
        try:
            found[index] = one_rank(dist.get_rank() * local + index, plan, specs, wrong, expected_of)
        except Exception as error:
            errors.append(error)
            hub._barrier.abort()

    with mock.patch.object(module, "dist", SimpleNamespace(all_to_all_single=hub.all_to_all_single)):
        threads = [threading.Thread(target=work, args=(index,)) for index in range(local)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    assert hub.calls == 1
    return found


def one_rank(rank: int, plan, specs, wrong: int, expected_of) -> dict:
    """{rank, samples, differ, held_bytes, sent_bytes, received_bytes, left}; `differ`: samples with other values."""
    cache = TensorCache()
    cache.open(STEP)
    for name in NAMES:
        ragged = ragged_of(name, plan.held[rank], specs[name])
        if wrong in plan.held[rank] and name == "prompts":
            ragged.parts()[plan.held[rank].index(wrong)].add_(1)
        cache.put(STEP, name, plan.held[rank], ragged)
    cache.redistribute(STEP, plan, rank, specs)
    own, differ = plan.placed[plan.replica_of[rank]], set()
    for name in NAMES:
        expected, of = expected_of(plan.replica_of[rank], name)
        differ |= set(of[cache.get(STEP, name, own).values != expected].tolist())
    sent, received = wire_bytes(plan, rank, specs)
    moved = {"held_bytes": cache.bytes_held, "sent_bytes": sent, "received_bytes": received}
    return {"rank": rank, "samples": own, "differ": differ, **moved, "left": cache.close() and cache.bytes_held}
