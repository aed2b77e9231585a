"""Test each preset of configs/algo on each run: its keys win, it is short, and contradictions are refused."""

import pytest

from tests.runs import composed
from verl_patches.rules import RULES
from verl_patches.run.resolve import CONFIGS_DIR
from verl_patches.step.batches.checks import max_num_seqs_checks
from verl_patches.step.log_probs.ratio_settings import ratio_checks
from verl_patches.step.objectives.checks import estimator_checks

TINY, LEARN, LARGE = "deepseekv3_tiny_cpu", "deepseekv3_tiny_cpu_learn", "deepseekv3_256die_true_weight"
PRESETS = sorted((CONFIGS_DIR / "algo").glob("*.yaml"))
ALGORITHMS = [path.stem for path in PRESETS]
RUNS = sorted(path.stem for path in CONFIGS_DIR.glob("deepseekv3_*.yaml") if "algo: " in path.read_text())
KL_IN_REWARD = ["reinforce_plus_plus", "remax", "rloo"]
IN_GROUPS = ["grpo", "dr_grpo", "pass_k", "reinforce_plus_plus_baseline", "rloo"]
N, VAL = "actor_rollout_ref.rollout.n", "actor_rollout_ref.rollout.val_kwargs"
PPO = "actor_rollout_ref.actor.ppo"


def failed_checks(rule, name, *overrides):
    return {check.name: check.detail for check in rule(composed(name, overrides)) if not check.ok}


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_a_preset_goes_with_every_run(algo):
    for name in RUNS:
        run = composed(name, [f"algo={algo}"])
        found = {check.name: check.detail for check in RULES.checks(run) if not check.ok}
        if name == LEARN and not run.samples:  # 1 or 2 responses a prompt, not 16
            assert found and all("micro_batch_size_per_gpu" in detail for detail in found.values())
        else:
            assert found == {}, name


def test_the_presets_keys_win_over_those_of_a_base_and_overrides_over_the_presets():
    base, dapo = composed(LARGE), composed(LARGE, ["algo=dapo", "algorithm.lam=0.5"])
    for run, expected in ((base, (0.9, True, True)), (dapo, (1.0, False, False))):
        recipe, temperature = run.recipe, run.verl.actor_rollout_ref.rollout.temperature
        assert (temperature, recipe.tensor_cache.enabled, recipe.train.skip_old_log_prob) == expected
    assert dapo.verl.algorithm.lam == 0.5


@pytest.mark.parametrize("algo", KL_IN_REWARD)
def test_kl_in_the_reward_makes_the_pass_for_old_log_probs_which_a_run_cannot_leave_out(algo):
    run = composed(LARGE, [f"algo={algo}"])
    assert run.verl.algorithm.use_kl_in_reward and not run.verl.actor_rollout_ref.actor.use_kl_loss
    assert not run.recipe.train.skip_old_log_prob and composed(LARGE).recipe.train.skip_old_log_prob
    found = failed_checks(ratio_checks, LARGE, f"algo={algo}", "recipe.train.skip_old_log_prob=true")
    assert "use_kl_in_reward needs old log-probs before the update" in found["on policy"]


@pytest.mark.parametrize("algo", [*IN_GROUPS, "reinforce_plus_plus", "remax"])
def test_an_estimator_that_compares_responses_of_a_prompt_needs_several(algo):
    found = failed_checks(estimator_checks, TINY, f"algo={algo}", f"{N}=1")
    assert found.keys() == ({"advantages"} if algo in IN_GROUPS else set())


@pytest.mark.parametrize(("overrides", "message"), [
    ([f"{VAL}.n=4"], "val_kwargs.n is 4, but greedy responses are equal; set do_sample=true"),
    ([f"{VAL}.n=4", f"{VAL}.do_sample=true", f"{VAL}.temperature=0.7"], None),
])  # fmt: skip
def test_a_validation_of_several_responses_a_prompt_samples_them(overrides, message):
    for when in ("trainer.test_freq=5", "trainer.val_before_train=true"):
        found = failed_checks(estimator_checks, TINY, when, *overrides).get("validation")
        assert (found is None) if message is None else message in found
    assert failed_checks(estimator_checks, TINY, *overrides) == {}  # the same overrides without validation pass


def test_graphs_hold_a_validation_which_may_have_more_responses_than_a_step():
    key = "recipe.rollout.ascend.graph_batch_sizes=[32]"
    small = ["data.train_batch_size=256", f"{PPO}_mini_batch_size=256"]  # 32 responses a replica; 48 at once fit a die
    assert failed_checks(max_num_seqs_checks, LARGE, *small, key) == {}
    assert (
        "48 responses"
        in failed_checks(max_num_seqs_checks, LARGE, *small, key, "trainer.test_freq=1")["graph batch sizes"]
    )
