"""Test the loop with tensors that stay on the workers: with the same order, steps are bit-equal."""

import json
import re

import pytest
from loop_runs import ARRIVAL_ORDER, PPO, hook, read_metrics
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.near_ties import norm_tolerance
from verl_patches.step.batches.limits import trainer_bytes

pytestmark = pytest.mark.slow
CACHE_ON = "recipe.tensor_cache.enabled=true"
# a seed whose samples have no two experts so nearly tied that rounding decides (docs/the-step.md#near-ties)
SEED = "actor_rollout_ref.rollout.seed=1"
ACTOR, VAL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout.val_kwargs"
DYNAMIC = f"{ACTOR}.use_dynamic_bsz=true"


REPLAY = "recipe.train.routing_replay="


def budget(tokens):
    """Return the override of the actor's token budget, from which verl derives those of log-probs and reference."""
    return f"{ACTOR}.ppo_max_token_len_per_gpu={tokens}"


def assert_same_steps(cached, plain):
    assert read_metrics(cached, "grad_norm", "reward") == read_metrics(plain, "grad_norm", "reward")
    for step, other in zip(cached.steps, plain.steps, strict=True):
        assert step["logprob_delta"]["mean"] == pytest.approx(other["logprob_delta"]["mean"], rel=1e-6)
        assert step["tensor_cache"]["received_bytes"] > 0 and "tensor_cache" not in other


def assert_bytes_are_modelled(run):
    """Assert that the trainer's bytes in each step are those of `trainer_bytes` for the step's lengths."""
    found = re.findall(r"bytes of stage (\w+) (\d+)", run.log)
    per_step = [(stage, int(size)) for stage, size in found if int(size)]
    modelled = []
    for step in run.steps:
        recorded, scores = (
            load_file(run.folder / "rollouts" / f"{name}_{step['step']}.safetensors") for name in ("step", "scores")
        )
        samples, width = recorded["responses"].shape
        prompts, responses = (mask.sum(1) for mask in recorded["attention_mask"].long().tensor_split([-width], 1))
        n = samples // len({bytes(uid.tolist()) for uid in scores["uid"]})
        tokens = int(prompts[::n].sum()), int(responses.sum())
        stages = trainer_bytes(samples // n, samples, *tokens, send_back=False, per_token=False)
        stages["generate"]["seeds"] = 8 * samples // n
        modelled += [(stage, sum(columns.values())) for stage, columns in stages.items() if columns]
    assert per_step == modelled and len(run.steps) > 1


def assert_validated(run):
    """Assert validations before step 1 and in both steps: record, metrics and table."""
    validations = [run.summary["val_before"], *run.steps]
    assert [each["step"] for each in validations] == [0, 1, 2]
    metrics = [json.loads(text) for text in (run.folder / "metrics.jsonl").read_text().splitlines()]
    for each, line in zip(validations, metrics, strict=True):
        means = [value for name, value in line.items() if re.fullmatch(r"val-core/.*/mean@\d+", name)]
        assert len(means) == 2 and each["val"]["score"] == pytest.approx(sum(means) / 2)  # of maths and learnable rows
        assert line.items() >= each["val"]["metrics"].items() and each["step"] == line["step"]
    assert all(0 < step["seconds"]["validate"] < step["seconds"]["step"] for step in run.steps)
    assert all(step["seconds"]["rollout"] > 0 and step["memory"]["violations"]["count"] == 0 for step in run.steps)
    events = EventAccumulator(str(run.folder / "tensorboard" / "val")).Reload()
    tables = [event for tag in events.Tags()["tensors"] if "val/generations" in tag for event in events.Tensors(tag)]
    assert [table.step for table in tables] == [0, 1, 2]
    assert all(table.tensor_proto.string_val[0].count(b"**Score:**") == 8 for table in tables)
    last = f"{validations[-1]['val']['score']:.4f}"
    assert re.search(rf"^- +2 .* {last}$", run.progress, re.MULTILINE)


def test_in_arrival_order_the_steps_are_those_of_verl(smoke):
    """Test row update.tensor_cache with mini batches, epochs, validation and warm-up.

    The run has one rollout instance of TP 2 for two train replicas, responses of unequal lengths, and GSPO's ratios
    with REINFORCE++'s baseline and KL. A sample has 144 tokens at most, so verl packs some micro batches of two samples
    and some of one.
    """
    more = [f"{ACTOR}.ppo_mini_batch_size=2", f"{ACTOR}.ppo_epochs=2", "trainer.test_freq=1", "trainer.critic_warmup=2"]
    more += [DYNAMIC, budget(144), "data.max_prompt_length=128", "rollout=tp2", hook("end_early"), f"{REPLAY}R2"]
    more += [
        "algo=gspo",
        "algorithm.adv_estimator=reinforce_plus_plus_baseline",
        f"{ACTOR}.use_kl_loss=true",
        f"{ACTOR}.kl_loss_type=mse",
        "trainer.val_before_train=true",
        f"{VAL}.n=2",
        f"{VAL}.do_sample=true",
    ]
    more += [f"{VAL}.temperature=1.0"]
    plain, cached = (smoke("--steps", "2", ARRIVAL_ORDER, SEED, *more, *on) for on in ([], [CACHE_ON]))
    assert_same_steps(cached, plain)
    assert cached.steps[0]["grad_norm"] is None and cached.steps[1]["grad_norm"] > 0
    for run in (cached, plain):  # later mini batches have other weights than the pass whose experts they select
        assert run.steps[0]["routing_replay"] is None and 0.5 < run.steps[1]["routing_replay"]["agreement"] < 1
    recorded = load_file(cached.folder / "rollouts" / "step_2.safetensors")
    assert len(set(recorded["attention_mask"][:, -recorded["responses"].shape[1] :].sum(1).tolist())) > 1
    for run in (cached, plain):
        assert_validated(run)
    names = " ".join(cached.steps[0]["val"]["metrics"])
    assert "/mean@2" in names and "/best@2/mean" in names and "/pass@2" in names  # maths rows are 0 or 1


def test_balanced_and_packed_steps_are_the_same_but_for_rounding(smoke):
    """Test row update.micro_batches_as_planned, with which a token weighs the same as without.

    Responses are equally long, and each micro batch has two of a replica's four samples, as without.
    """
    cached, plain = smoke(CACHE_ON, DYNAMIC, budget(272), hook("print_bytes")), smoke()
    assert_bytes_are_modelled(cached)
    for step, other in zip(cached.steps, plain.steps, strict=True):
        assert step["grad_norm"] == pytest.approx(other["grad_norm"], rel=norm_tolerance(step["step"], 1e-4))
        assert step["logprob_delta"]["mean"] < 1e-5
        assert 1 <= step["tensor_cache"]["balance"] < 1.1
    assert "global_seqlen/" not in cached.log and "global_seqlen/" in plain.log


def test_ppo_has_the_same_steps_but_for_rounding(smoke):
    """Compare balanced batches, in which ranks have other samples, the critic's too."""
    cached, plain = smoke(*PPO, CACHE_ON), smoke(*PPO)
    assert cached.steps[0]["reward"] == plain.steps[0]["reward"]  # of step 2 the weights differ by rounding
    for step, other in zip(cached.steps, plain.steps, strict=True):
        assert step["tensor_cache"]["received_bytes"] > 0
        for key in ("grad_norm", "critic"):
            assert step[key] == pytest.approx(other[key], rel=norm_tolerance(step["step"], 1e-4))


@pytest.mark.upstream
def test_line_a3(a3):
    """Run ReMax, with greedy responses and a second weight sync in each step; the validation's is the third."""
    more = ["algo=remax", "trainer.test_freq=1", "trainer.val_before_train=true", f"{REPLAY}R2"]
    plain, cached = (a3("--steps", "2", ARRIVAL_ORDER, SEED, *more, *on) for on in ([], [CACHE_ON]))
    assert_same_steps(cached, plain)
    for run in (cached, plain):
        assert_validated(run)
        assert [step["sync"]["syncs"] for step in run.steps] == [3, 3]
