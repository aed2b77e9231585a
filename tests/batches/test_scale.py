"""The tensor cache at the 256-die runs' size: 256 logical ranks in 16 processes, 512 prompts of 16 samples."""

from collections import Counter

import pytest

from tests.batches import scale_jobs
from tests.batches.lengths import PROMPT, RESPONSE, lognormal_lengths
from verl_patches.config.compose import compose
from verl_patches.layout.parallel import train_layout_of
from verl_patches.planning.memory_plan import cached_bytes

BIG = "grpo_deepseekv3_256die_true_weight"
SAMPLES, GROUP, SHORTER = 512 * 16, 16, 8  # lengths are an eighth, so that a test machine holds all 256 ranks


def lengths(shorter):
    """(prompts, responses) of every sample; samples of a prompt share it."""
    tokens = lognormal_lengths(SAMPLES, 0.7, seed=1, group=GROUP)
    shared = [1 + 97 * (sample // GROUP) % 199 for sample in range(SAMPLES)]
    return [-(-n // shorter) for n in shared], [-(-max(1, n - 200) // shorter) for n in tokens]


@pytest.fixture(scope="module")
def config():
    return compose(BIG)


@pytest.mark.slow
def test_every_tensor_arrives_once_at_each_rank_that_computes_it(run_ranks, config):
    """Negative control in the same run: a sample whose holder has another value differs on 32 ranks, and nowhere."""
    wrong = 4711
    arguments = str(train_layout_of(config)), *lengths(SHORTER), wrong
    processes = run_ranks("tests.batches.scale_jobs:redistribute", *arguments, size=16, timeout_s=150)
    found = [found for process in processes for found in process]
    assert [each["rank"] for each in found] == list(range(256))
    assert all(each["differ"] == ({wrong} & set(each["samples"])) for each in found)
    copies = Counter(sample for each in found for sample in each["samples"])
    assert copies == dict.fromkeys(range(SAMPLES), 4 * 8)  # TP4 x PP8 ranks of one replica
    assert all(len(set(each["samples"])) == len(each["samples"]) == SAMPLES // 8 for each in found)
    total = {key: sum(each[key] for each in found) for key in ("held_bytes", "sent_bytes", "received_bytes")}
    assert total["sent_bytes"] == total["received_bytes"]
    prompts, responses = lengths(SHORTER)
    assert total["held_bytes"] == 32 * 4 * (sum(prompts) + 2 * sum(responses))  # ids, and log-probs of responses
    beside = 256 * 16 * (1 + 3)  # headers of 256 peers, alignment of three tensors of each
    for each in found:
        assert each["held_bytes"] <= each["received_bytes"] <= each["held_bytes"] + beside and each["left"] == 0
        assert each["held_bytes"] <= cached_bytes(config) // 8


def test_memory_of_a_die_at_full_length(config):
    """Held, sent and received of a die by the plan: below what the memory plan counts, and a thousandth of a die."""
    plan, specs = scale_jobs.step_of(str(train_layout_of(config)), [PROMPT] * SAMPLES, [RESPONSE] * SAMPLES)
    counted = cached_bytes(config) // 8
    for rank in (0, 100, 255):
        sent, received = scale_jobs.wire_bytes(plan, rank, specs)
        assert sent == 256 * 16 + 32 * 32 * 4 * (PROMPT + 2 * RESPONSE)  # 32 samples to the 32 ranks of a replica
        assert received <= counted + 256 * 16 * 4
        assert sent + 2 * received + counted < 65.79e9 / 500
