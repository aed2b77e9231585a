"""Test the tensor cache at the 256-die runs' size: 256 logical ranks as threads, 512 prompts of 16 samples."""

import functools
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from tests.runs import composed
from tests.step.batches.lengths import PROMPT, RESPONSE, lognormal_lengths
from verl_patches.plan.memory_plan import cached_bytes
from verl_patches.step.batches import exchange
from verl_patches.step.batches.batch_plan import plan_batch, train_replicas
from verl_patches.step.batches.cache import TensorCache
from verl_patches.step.batches.exchange import RaggedTensor, TensorSpec, wire_bytes

SAMPLES, GROUP, SHORTER, WORLD = 512 * 16, 16, 8, 256  # lengths are an eighth, so that one process holds all ranks
NAMES = ("prompts", "responses", "rollout_log_probs")


@pytest.fixture(scope="module")
def run():
    return composed("deepseekv3_256die_true_weight")


def plan_step(run, prompts, responses):
    """Return (plan, specs) of a step as stage place makes them."""
    lengths = [a + b for a, b in zip(prompts, responses, strict=True)]
    replicas = train_replicas(run.train)
    plan = plan_batch(replicas, lengths, mini_batch_size=len(lengths), micro_batch_size=1)
    specs = {"prompts": TensorSpec(torch.int32, prompts), "responses": TensorSpec(torch.int32, responses)}
    return plan, specs | {"rollout_log_probs": TensorSpec(torch.float32, responses)}


def make_ragged(name, samples, spec):
    """Return values that follow from tensor, sample and place."""
    counts = torch.tensor([spec.lengths[sample] for sample in samples])
    place = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    values = torch.tensor(samples).repeat_interleave(counts) * 4099 + place * 3 + NAMES.index(name)
    return RaggedTensor((values % (1 << 23)).to(spec.dtype), tuple(counts.tolist()))


class Hub:
    """Run all_to_all_single between threads, the n-th of which is logical rank n; `calls` counts the collectives."""

    def __init__(self):
        self.thread, self.barrier = threading.local(), threading.Barrier(WORLD, self._exchange)
        self.sides, self.calls = [None] * WORLD, 0

    def all_to_all_single(self, out, given, out_splits, in_splits):
        self.sides[self.thread.rank] = out.split(out_splits), given.split(in_splits)
        self.barrier.wait()

    def _exchange(self):
        self.calls += 1
        for rank, (outs, _) in enumerate(self.sides):
            for out, (_, given) in zip(outs, self.sides, strict=True):
                out.copy_(given[rank])


@pytest.mark.slow
def test_every_tensor_arrives_once_at_each_rank_that_computes_it(run, monkeypatch):
    """Check a control in the same run too: a sample whose holder has another value differs on 32 ranks only."""
    tokens = lognormal_lengths(SAMPLES, 0.7, seed=1, group=GROUP)
    prompts = [-(-(1 + 97 * (sample // GROUP) % 199) // SHORTER) for sample in range(SAMPLES)]
    responses = [-(-max(1, n - 200) // SHORTER) for n in tokens]
    (plan, specs), wrong, hub = plan_step(run, prompts, responses), 4711, Hub()
    monkeypatch.setattr(exchange, "dist", hub)
    monkeypatch.setattr(exchange, "raise_on_any_rank", lambda problems, *_: problems and pytest.fail(str(problems)))

    @functools.cache
    def expected_values(replica, name):
        """Return the values of a tensor on a replica, and the sample of each."""
        expected = make_ragged(name, plan.replica_samples[replica], specs[name])
        return expected.values, torch.tensor(plan.replica_samples[replica]).repeat_interleave(
            torch.tensor(expected.lengths)
        )

    def run_rank(rank):
        hub.thread.rank, cache = rank, TensorCache()
        try:
            for name in NAMES:
                ragged = make_ragged(name, plan.rollout_samples[rank], specs[name])
                if wrong in plan.rollout_samples[rank] and name == "prompts":
                    ragged.parts()[plan.rollout_samples[rank].index(wrong)].add_(1)
                cache.put(name, plan.rollout_samples[rank], ragged)
            cache.redistribute(plan, rank, specs)
        except BaseException:
            hub.barrier.abort()  # otherwise the other ranks would wait
            raise
        own, differ = plan.replica_samples[plan.replica_by_rank[rank]], set()
        for name in NAMES:
            expected, value_samples = expected_values(plan.replica_by_rank[rank], name)
            differ |= set(value_samples[cache.get(name, own).values != expected].tolist())
        sent, received = wire_bytes(plan, rank, specs)
        return SimpleNamespace(samples=own, differ=differ, sent=sent, received=received, cached_bytes=cache.bytes_held)

    with ThreadPoolExecutor(WORLD) as pool:
        ranks = list(pool.map(run_rank, range(WORLD)))
    assert hub.calls == len(NAMES) and all(rank.differ == ({wrong} & set(rank.samples)) for rank in ranks)
    copies = Counter(sample for rank in ranks for sample in rank.samples)
    assert copies == dict.fromkeys(range(SAMPLES), 4 * 8)  # TP4 x PP8 ranks of one replica
    assert all(len(set(rank.samples)) == len(rank.samples) == SAMPLES // 8 for rank in ranks)
    assert sum(rank.sent for rank in ranks) == sum(rank.received for rank in ranks)
    expected_bytes = 32 * 4 * (sum(prompts) + 2 * sum(responses))  # ids, and log-probs of responses
    assert sum(rank.cached_bytes for rank in ranks) == expected_bytes
    for rank in ranks:
        assert rank.cached_bytes == rank.received <= cached_bytes(run) // 8


def test_memory_of_a_die_at_full_length(run):
    """Check that a die's held, sent and received bytes are below the memory plan's, and a thousandth of a die."""
    plan, specs = plan_step(run, [PROMPT] * SAMPLES, [RESPONSE] * SAMPLES)
    counted = cached_bytes(run) // 8
    for rank in (0, 100, 255):
        sent, received = wire_bytes(plan, rank, specs)
        assert sent == 32 * 32 * 4 * (PROMPT + 2 * RESPONSE)  # 32 samples to the 32 ranks of a replica
        assert received <= counted
        assert sent + 2 * received + counted < 65.79e9 / 500
