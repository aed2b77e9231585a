"""What gloo ranks do in test_redistribute.py. A sample's values are made from its number: all ranks know them."""

from __future__ import annotations

from contextlib import closing, contextmanager, nullcontext
from types import SimpleNamespace

import torch
import torch.distributed as dist

from verl_patches.tensor_cache import exchange as module
from verl_patches.tensor_cache.batch_plan import plan_batch
from verl_patches.tensor_cache.cache import TensorCache
from verl_patches.tensor_cache.exchange import Ragged, TensorSpec, wire_bytes

DTYPES = {
    "prompts": torch.int32,
    "responses": torch.int32,
    "log_probs": torch.float32,
    "flags": torch.bool,
    "halves": torch.bfloat16,
    "scores": torch.float64,
}


def told_of(lengths):
    """Responses take a third of a sample's tokens or none, prompts the rest; one score a sample."""
    responses = [length // 3 for length in lengths]
    counts = {"prompts": [a - b for a, b in zip(lengths, responses, strict=True)], "scores": [1] * len(lengths)}
    return {name: TensorSpec(dtype, counts.get(name, responses)) for name, dtype in DTYPES.items()}


def values_of(name, sample, count):
    """Any bits, NaN and infinities among them."""
    source = torch.Generator().manual_seed(1000 * sample + sorted(DTYPES).index(name))
    if DTYPES[name] == torch.bool:
        return torch.randint(2, (count,), generator=source).bool()
    raw = torch.randint(256, (count * DTYPES[name].itemsize,), dtype=torch.uint8, generator=source)
    return raw.view(DTYPES[name])


def ragged_of(name, samples, told):
    parts = [values_of(name, sample, told[name].lengths[sample]) for sample in samples]
    return Ragged(torch.cat([torch.empty(0, dtype=DTYPES[name]), *parts]), tuple(map(len, parts)))


def same(a, b):
    return a.lengths == b.lengths and torch.equal(a.values.view(torch.uint8), b.values.view(torch.uint8))


def redistribute(arguments):
    """(arrived as planned, collectives, bytes of the wire as told, names left after close)."""
    rank, plan, told = dist.get_rank(), plan_batch(**arguments), told_of(arguments["lengths"])
    cache, calls = TensorCache(), []
    cache.open(3)
    with counted(calls), closing(cache):
        for name in told:
            cache.put(3, name, plan.held[rank], ragged_of(name, plan.held[rank], told))
        cache.redistribute(3, plan, rank, told)
        mine = plan.placed[plan.replica_of[rank]]
        found = {name: cache.get(3, name, mine) for name in told}
    arrived = all(same(found[name], ragged_of(name, mine, told)) for name in told)
    return arrived, calls, list(wire_bytes(plan, rank, told)), cache.names


class counted:
    """Notes every collective of torch.distributed that the exchange makes, and the bytes of both sides."""

    NAMES = ("all_to_all_single", "all_reduce", "all_gather", "all_gather_object", "broadcast", "send", "recv")

    def __init__(self, calls):
        self.calls = calls

    def __enter__(self):
        self.real = {name: getattr(dist, name) for name in self.NAMES}
        for name in self.NAMES:
            setattr(dist, name, lambda *a, name=name, **k: self.note(name, a) or self.real[name](*a, **k))

    def note(self, name, arguments):
        self.calls.append([name, arguments[1].nbytes, arguments[0].nbytes] if name == "all_to_all_single" else [name])

    def __exit__(self, *_):
        for name, real in self.real.items():
            setattr(dist, name, real)


def spoilt(arguments, how, on_rank):
    """One rank is not as the others: its error, or another rank's."""
    rank, plan, told = dist.get_rank(), plan_batch(**arguments), told_of(arguments["lengths"])
    cache, odd = TensorCache(), dist.get_rank() == on_rank
    step = 4 if odd and how == "step" else 3
    cache.open(step)
    with closing(cache):
        for name in told:
            if odd and how == "missing" and name == "responses":
                continue
            samples = plan.held[rank]
            ragged = ragged_of(name, samples, told)
            if odd and how == "short" and name == "log_probs":
                ragged = Ragged(ragged.values[:-1], (*ragged.lengths[:-1], ragged.lengths[-1] - 1))
            if odd and how == "dtype" and name == "prompts":
                ragged = Ragged(ragged.values.long(), ragged.lengths)
            cache.put(step, name, samples, ragged)
        try:
            with out_of_memory() if odd and how == "memory" else nullcontext():
                cache.redistribute(step, plan, rank, told)
        except Exception as why:
            return f"{type(why).__name__}: {why}", cache.names
    return "no error", ()


@contextmanager
def out_of_memory():
    """Packing writes every segment and fails then; from there on no tensor can be made."""
    real = module._pack

    def fails(*_, **__):
        raise torch.OutOfMemoryError("no memory is left")

    def pack(*arguments):
        real(*arguments)
        module.torch = SimpleNamespace(**{**vars(torch), **dict.fromkeys(("empty", "zeros", "cat"), fails)})
        fails()

    module._pack = pack
    try:
        yield
    finally:
        module._pack, module.torch = real, torch


def disordered(arguments):
    """Whether values that a wrong exchange brings are noticed by `redistribute` above: it unpacks in another order."""
    real = module._unpack
    module._unpack = lambda segments, receives, computed, kinds: real(segments, receives, computed[::-1], kinds)
    try:
        return redistribute(arguments)[0]
    finally:
        module._unpack = real
