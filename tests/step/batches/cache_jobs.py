"""Define functions of gloo ranks for test_redistribute.py, with values that follow from a sample's number."""

from contextlib import closing, contextmanager
from unittest import mock

import torch
import torch.distributed as dist

from verl_patches.step.batches.batch_plan import plan_batch
from verl_patches.step.batches.cache import TensorCache
from verl_patches.step.batches.exchange import RaggedTensor, TensorSpec, wire_bytes

COLLECTIVES = ("all_to_all_single", "all_reduce", "all_gather", "all_gather_object", "broadcast", "send", "recv")
DTYPES = {"prompts": torch.int32, "responses": torch.int32, "log_probs": torch.float32}


def tensor_specs(lengths):
    """Split a sample's tokens into a response, a third of them or none, and a prompt."""
    responses = [length // 3 for length in lengths]
    prompts = [a - b for a, b in zip(lengths, responses, strict=True)]
    specs = {name: TensorSpec(dtype, responses) for name, dtype in DTYPES.items()}
    return specs | {"prompts": TensorSpec(DTYPES["prompts"], prompts)}


def make_ragged(name, samples, specs):
    """Return random bits as values, including NaN and infinities."""
    parts = [torch.empty(0, dtype=DTYPES[name])]
    for sample in samples:
        source = torch.Generator().manual_seed(1000 * sample + sorted(DTYPES).index(name))
        raw = torch.randint(256, (specs[name].lengths[sample] * 4,), dtype=torch.uint8, generator=source)
        parts.append(raw.view(DTYPES[name]))
    return RaggedTensor(torch.cat(parts), tuple(map(len, parts[1:])))


def redistribute(arguments):
    """Redistribute; return (arrived as planned, collectives, bytes by wire_bytes, names left after close)."""
    rank, plan, specs = dist.get_rank(), plan_batch(**arguments), tensor_specs(arguments["lengths"])
    cache = TensorCache()
    with collectives() as calls, closing(cache):
        for name in specs:
            cache.put(name, plan.rollout_samples[rank], make_ragged(name, plan.rollout_samples[rank], specs))
        cache.redistribute(plan, rank, specs)
        own = plan.replica_samples[plan.replica_by_rank[rank]]
        found = [(cache.get(name, own), make_ragged(name, own, specs)) for name in specs]
    bits = [(one.values.view(torch.uint8), other.values.view(torch.uint8)) for one, other in found]
    arrived = all(one.lengths == other.lengths for one, other in found) and all(torch.equal(*pair) for pair in bits)
    return arrived, calls, wire_bytes(plan, rank, specs), cache.names


@contextmanager
def collectives():
    """Record each collective of torch.distributed inside, with the bytes of both sides of an AlltoAllV."""
    calls = []

    def recorded_call(name, real):
        def call(*args, **options):
            calls.append((name, args[1].nbytes, args[0].nbytes) if name == "all_to_all_single" else (name, 0, 0))
            return real(*args, **options)

        return call

    with mock.patch.multiple(dist, **{name: recorded_call(name, getattr(dist, name)) for name in COLLECTIVES}):
        yield calls


def spoilt(arguments, fault, on_rank):
    """Return (error, names left) of a rank when one rank differs from the others."""
    rank, plan, specs = dist.get_rank(), plan_batch(**arguments), tensor_specs(arguments["lengths"])
    cache, fault = TensorCache(), fault if dist.get_rank() == on_rank else ""
    with closing(cache):
        for name in specs:
            ragged = make_ragged(name, plan.rollout_samples[rank], specs)
            if fault == "short" and name == "log_probs":
                ragged = RaggedTensor(ragged.values[:-1], (*ragged.lengths[:-1], ragged.lengths[-1] - 1))
            if fault == "dtype" and name == "prompts":
                ragged = RaggedTensor(ragged.values.long(), ragged.lengths)
            if fault != "missing" or name != "responses":
                cache.put(name, plan.rollout_samples[rank], ragged)
        try:
            cache.redistribute(plan, rank, specs)
        except Exception as why:
            return f"{type(why).__name__}: {why}", cache.names
    return "no error", ()


def disordered(arguments):
    """Return whether `redistribute` finds the values as planned although they are taken in another order."""
    take = RaggedTensor.take
    with mock.patch.object(RaggedTensor, "take", lambda self, places: take(self, places[::-1])):
        return redistribute(arguments)[0]
