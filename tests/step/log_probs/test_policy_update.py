"""Test the update without a pass for old log-probs: refusals, both sides of the call, the loss; no change while off."""

import math
import re
import types
from dataclasses import replace

import pytest
import torch
from verl import DataProto
from verl.trainer.ppo.core_algos import compute_policy_loss

from tests.runs import composed, tiny
from verl_patches.errors import RecipeError
from verl_patches.patching.row import make_subclass
from verl_patches.recipe import Objective, RolloutCorrection
from verl_patches.rules import RULES
from verl_patches.step.log_probs import policy_update, rollout_correction
from verl_patches.step.log_probs.ratio_settings import ratio_checks
from verl_patches.worker import recipe_worker
from verl_patches.worker.recipe_worker import RecipeWorker

TINY, SKIP, CORRECT = "deepseekv3_tiny_cpu", "recipe.train.skip_old_log_prob", "recipe.rollout_correction"
ACTOR = "actor_rollout_ref.actor"
PROMPT, LENGTH = 3, 4
ACTOR_LOG_PROBS = -torch.rand(4 * LENGTH, generator=torch.Generator().manual_seed(9)) - 0.5  # the actor's, at weights 0


def refusals(*overrides):
    return [c.detail for c in RULES.checks(composed(TINY, overrides)) if not c.ok and c.name != "replay"]


@pytest.mark.parametrize(("override", "words"), [
    (f"{ACTOR}.ppo_mini_batch_size=2", "mini_batch_size is 2 and data.train_batch_size 4: .* make them equal"),
    (f"{ACTOR}.ppo_epochs=2", f"{ACTOR}.ppo_epochs is 2: .* set 1"),
    ("algorithm.use_kl_in_reward=true", f"algorithm.use_kl_in_reward needs .* use {ACTOR}.use_kl_loss"),
    ("trainer.critic_warmup=2", "trainer.critic_warmup is 2: "),
    (f"+{ACTOR}.megatron.override_transformer_config.hidden_dropout=0.1", "hidden_dropout to 0.1, so"),
])  # fmt: skip
def test_a_setting_that_is_not_on_policy_is_refused_by_name(override, words):
    (refusal,) = refusals(f"{SKIP}=true", override)
    assert re.search(rf"{SKIP} is true, but .*{words}", refusal), refusal
    assert refusals(override) == refusals(f"{SKIP}=true") == []  # either setting alone is allowed


def test_dropout_of_the_model_is_refused():
    found = {}
    for share in (0.0, 0.1):
        run = replace(composed(TINY, [f"{SKIP}=true"]), hf_config={"attention_dropout": share})
        found[share] = [check.detail for check in ratio_checks(run) if not check.ok]
    assert found[0.0] == [] and "config.json sets attention_dropout to 0.1" in found[0.1][0]


@pytest.mark.parametrize(("settings", "words"), [
    ("rollout_rs=seq_sum_k1", "rollout_rs_threshold is None; expected LOWEST_HIGHEST"),
    ("rollout_rs=seq_sum_k1 rollout_rs_threshold=0.5_2", "'0.52'; .*decimal point.*YAML reads 0.5_2 as 0.52"),
])  # fmt: skip
def test_wrong_values_of_the_correction_are_refused_by_name(settings, words):
    (refusal,) = refusals(*(f"{CORRECT}.{setting}" for setting in settings.split()))
    assert re.search(f"{CORRECT}.*{words}", refusal), refusal


def test_a_correction_needs_comparable_log_probs():
    on = [f"{CORRECT}.rollout_is=token", f"{CORRECT}.rollout_rs=seq_sum_k1", f"{CORRECT}.rollout_rs_threshold=0.5_2.0"]
    override = "actor_rollout_ref.rollout.temperature=0.9"  # other reasons: test_logprob_check.py
    assert refusals(*on) == [] and refusals(override) == []
    (fault,) = refusals(*on, override)
    assert f"{CORRECT} is on, but" in fault and "temperature 0.9" in fault


def batch(far=0.05):
    """Return the batch that verl's trainer passes to update_actor, after the pass for old log-probs."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(4, PROMPT + LENGTH, dtype=torch.int64)
    mask[0, -2:] = 0
    old = ACTOR_LOG_PROBS.view(4, LENGTH).clone()
    return DataProto.from_dict(
        {
            "responses": torch.arange(4 * LENGTH).view(4, LENGTH),
            "attention_mask": mask,
            "old_log_probs": old,
            "rollout_log_probs": old + far * torch.randn(4, LENGTH, generator=generator),
            "advantages": torch.randn(4, LENGTH, generator=generator),
        }
    )


class Worker:
    """Update as ActorRolloutRefWorker.update_actor: micro batches, and verl's own loss under our patch."""

    loss = staticmethod(policy_update.replace_old_log_probs(compute_policy_loss))

    def __init__(self, skip=False, ratio="token", objective="rl", **correction):
        recipe = tiny().recipe
        train = replace(recipe.train, skip_old_log_prob=skip, importance_ratio=ratio)
        changes = {"rollout_correction": RolloutCorrection(**correction), "objective": Objective(objective)}
        self.run_spec = replace(tiny(), recipe=replace(recipe, train=train, **changes))
        self.parameter = torch.zeros(LENGTH, requires_grad=True)

    def update_actor(self, data):
        self.met = data
        for part in data.batch.split(2):
            assert "old_log_probs" in part.keys()
            mask = part["attention_mask"][:, -LENGTH:].bool()
            tensors = {"old_log_prob": part["old_log_probs"], "advantages": part["advantages"], "response_mask": mask}
            log_prob = ACTOR_LOG_PROBS[part["responses"]] + self.parameter
            self.loss(log_prob=log_prob, **tensors, cliprange=0.2, loss_agg_mode="seq-mean-token-mean")[0].backward()
        return self.parameter.grad.clone()

    def run(self, data):
        if self.run_spec.recipe.train.skip_old_log_prob:
            data.batch.pop("old_log_probs")
        return updated(self, data)


def updated(upstream, data):
    """Run RecipeWorker.update_actor over that of `upstream`, which gets the moments of the update."""
    base = type("Upstream", (), {"update_actor": lambda self, data: upstream.update_actor(data)})
    worker = object.__new__(make_subclass(base, RecipeWorker))
    worker.run, worker.recipe = upstream.run_spec, upstream.run_spec.recipe
    worker.config = {"actor": {}}  # micro batches of a fixed size
    output = worker.update_actor(data)
    upstream.log_prob_sums = worker.log_prob_sums
    return output


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setattr(policy_update, "is_metrics_rank", lambda: True)
    monkeypatch.setattr(recipe_worker, "is_on", lambda row: True)


def test_off_is_untouched_bit_for_bit():
    data, plain = batch(), Worker()
    before = {name: tensor.clone() for name, tensor in data.batch.items()}
    found = plain.run(data)
    assert plain.met is data and plain.log_prob_sums is None
    assert all(torch.equal(data.batch[name], tensor) for name, tensor in before.items())
    bare = Worker()
    bare.loss = compute_policy_loss
    assert torch.equal(found, bare.update_actor(data))
    assert not torch.equal(found, Worker(rollout_is="token").run(batch()))  # negative control


def test_skipped_gradients_are_those_of_the_pass():
    skipped = Worker(skip=True)
    assert torch.equal(skipped.run(batch()), Worker().run(batch()))
    found = rollout_correction.add_worker_metrics(
        {"actor/entropy_loss": math.nan, "other": 1.0}, [skipped.log_prob_sums, None], skipped.run_spec.recipe
    )
    data = batch().batch
    mask = data["attention_mask"][:, -LENGTH:].bool()
    far = (data["rollout_log_probs"] - data["old_log_probs"]).abs()[mask]
    assert found["recipe/logprob_delta_mean"] == pytest.approx(far.mean().item())
    assert found["other"] == 1.0 and "actor/entropy_loss" not in found and "rollout_corr/rollout_is_mean" not in found


def test_an_update_with_verls_own_loss_is_an_error():
    """Check this because it would take vLLM's log-probs for old ones, which is another gradient."""
    bare = Worker(skip=True)
    bare.loss = compute_policy_loss
    with pytest.raises(RecipeError, match="skip_old_log_prob is set, .*row update.loss_on_policy"):
        bare.run(batch())
    assert not torch.equal(bare.parameter.grad, Worker().run(batch()))


@pytest.mark.parametrize("correction", [
    {"rollout_is": "token", "rollout_is_threshold": 1.02},
    {"rollout_is": "sequence"},
    {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.97_1.1"},
    {"rollout_is": "token", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.98_1.02"},
    {"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.97_1.02"},
])  # fmt: skip
def test_both_ways_weigh_alike(correction):
    passed, skipped = Worker(**correction), Worker(skip=True, **correction)
    found, other = passed.run(batch()), skipped.run(batch())
    assert torch.equal(found, other) and not torch.allclose(found, Worker().run(batch()))
    assert passed.log_prob_sums == skipped.log_prob_sums
    metrics = rollout_correction.add_worker_metrics({}, [passed.log_prob_sums] * 2, passed.run_spec.recipe)
    assert metrics["recipe/logprob_delta_mean"] > 0
    assert ("rollout_corr/rollout_is_mean" in metrics) is ("rollout_is" in correction)
    assert ("rollout_corr/rollout_rs_masked_fraction" in metrics) is ("rollout_rs" in correction)


@pytest.mark.parametrize("skip", [False, True])
def test_the_token_mask_gives_the_gradient_of_icepop(skip):
    """Check against -mean(M(k) r A), k = pi_actor / pi_rollout: M(k) = k if low <= k <= high, else 0."""
    low, high = 0.97, 1.05
    settings = {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_rs": "token_k1"}
    found = Worker(skip, **settings, rollout_rs_threshold=f"{1 / high}_{1 / low}").run(batch())
    data, parameter = batch().batch, torch.zeros(LENGTH, requires_grad=True)
    mask = data["attention_mask"][:, -LENGTH:]
    k = (data["old_log_probs"] - data["rollout_log_probs"]).exp()
    inside = ((k >= low) & (k <= high)).float()
    terms = inside * k * data["advantages"] * parameter.exp()  # r: all log-probs of the actor move by `parameter`
    means = (terms * mask).sum(-1) / mask.sum(-1)  # a masked token counts in the mean of its sequence
    (expected,) = torch.autograd.grad(-means.view(2, 2).mean(-1).sum(), parameter)  # two micro batches
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    assert 0 < (inside * mask).sum() < mask.sum()
    swapped = Worker(skip, **settings, rollout_rs_threshold=f"{low}_{high}").run(batch())  # control
    assert not torch.allclose(swapped, expected, rtol=1e-2)


def test_a_batch_without_rollout_log_probs_has_no_report_and_no_correction():
    data, worker = batch(), Worker(skip=True)  # as with replayed responses
    data.batch.pop("rollout_log_probs")
    assert torch.equal(worker.run(data), Worker().run(batch()))
    found = rollout_correction.add_worker_metrics({}, [worker.log_prob_sums] * 2, worker.run_spec.recipe)
    mask = data.batch["attention_mask"][:, -LENGTH:].bool()
    mean = ACTOR_LOG_PROBS.view(4, LENGTH)[mask].mean().item()  # two replicas report the same batch
    assert found == {rollout_correction.MEAN_LOG_PROB: pytest.approx(mean)}
    data = batch()
    data.batch.pop("rollout_log_probs")
    with pytest.raises(RecipeError, match="rollout_correction is on, but the batch has no rollout_log_probs"):
        Worker(rollout_is="token").run(data)


def test_on_fixed_data_the_ratio_is_one_whatever_the_pass_before_the_update_found():
    data = batch()
    data.batch.pop("rollout_log_probs")
    wrong = data.batch["old_log_probs"] = data.batch["old_log_probs"] + 0.05  # as rounding in bf16 may change them
    expected = Worker(skip=True).run(DataProto.from_dict({**data.batch}))
    assert torch.equal(Worker(objective="dpo").run(data), expected)
    data.batch["old_log_probs"] = wrong
    assert not torch.equal(Worker().run(data), expected)  # control: with the batch's old log-probs


def gspo_loss(new, old, advantages, mask, low, high):
    """Return the loss of GSPO (arXiv:2507.18071), eq. 5 to 7: advantages [B], all others [B, S]."""
    ratios = (((new - old) * mask).sum(-1) / mask.sum(-1)).exp()
    return torch.maximum(-advantages * ratios, -advantages * ratios.clamp(1 - low, 1 + high)).mean()


def load_core_algos(line, upstream_text):
    """Return verl's module of losses at the pin of `line`."""
    if line == "pypi":
        from verl.trainer.ppo import core_algos

        return core_algos
    commit, module = "54c9b7364c2d188b2ba4107404cfa3c2b446df19", types.ModuleType("core_algos_a3")
    exec(upstream_text("volcengine/verl", commit, "verl/trainer/ppo/core_algos.py"), module.__dict__)
    return module


@pytest.mark.parametrize("line", ["pypi", pytest.param("a3", marks=pytest.mark.upstream)])
def test_ratios_of_sequences_give_gspo(line, upstream_text):
    core_algos, torch_like = load_core_algos(line, upstream_text), {"dtype": torch.float64}
    generator = torch.Generator().manual_seed(1)
    new = torch.randn(6, 7, generator=generator, **torch_like).requires_grad_()
    old = (new + 0.1 * torch.randn(6, 7, generator=generator, **torch_like)).detach()
    mask = torch.arange(7) < torch.tensor([7, 1, 3, 5, 2, 6])[:, None]
    advantages = torch.randn(6, 1, generator=generator, **torch_like)
    limits = {
        "cliprange_low": 3e-2,
        "cliprange_high": 4e-2,
        "clip_ratio_c": 1e9,
        "loss_agg_mode": "seq-mean-token-mean",
    }

    def verl_loss(by_sequence):
        update = policy_update.PolicyUpdate(False, None, by_sequence)
        with policy_update.current_update.set(update if by_sequence else None):
            loss, clipped, *_ = policy_update.replace_old_log_probs(core_algos.compute_policy_loss)(
                old_log_prob=old, log_prob=new, advantages=advantages.expand(6, 7), response_mask=mask, **limits
            )
        return loss, clipped, *torch.autograd.grad(loss, new)

    direct = gspo_loss(new, old, advantages[:, 0], mask, 3e-2, 4e-2)
    (expected,) = torch.autograd.grad(direct, new)
    loss, clipped, gradient = verl_loss(by_sequence=True)
    assert abs(loss - direct) < 1e-12 and (gradient - expected).abs().max() < 1e-12 and 0 < clipped < 1
    assert (gradient == 0).all(-1).any() and not (gradient == 0).all(-1).all()  # whole sequences are clipped
    other, _, token_gradient = verl_loss(by_sequence=False)  # negative control
    assert abs(other - direct) > 1e-3 and (token_gradient - expected).abs().max() > 1e-3


def test_an_update_by_sequences_takes_the_old_log_probs_of_its_batch():
    """Check at the weights of the pass, where all ratios are 1: the gradient is bit-equal to that of token ratios."""
    token, sequence = Worker(), Worker(ratio="sequence")
    assert sequence.run(batch())[0].allclose(token.run(batch())[0], rtol=1e-6)
    assert policy_update.current_update.value is None


def test_ratios_of_sequences_need_mini_batches_and_means_over_sequences():
    sequence, mode = "recipe.train.importance_ratio=sequence", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"
    halves = f"{ACTOR}.ppo_mini_batch_size=2"
    assert refusals(sequence, mode, halves) == refusals("algo=gspo") == []
    (fault,) = refusals(sequence, halves)
    assert "loss_agg_mode is token-mean" in fault
    (fault,) = refusals(sequence, mode)
    assert "all ratios are 1" in fault
