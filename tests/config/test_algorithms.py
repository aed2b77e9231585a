"""Every preset of configs/algo on every run: its keys win, it is short, and what does not go together is refused."""

import pytest

from verl_patches.config.checks import check_config
from verl_patches.config.compose import CONFIGS_DIR, compose
from verl_patches.layout.phases import samples

TINY, LEARN, LARGE = "deepseekv3_tiny_cpu", "deepseekv3_tiny_cpu_learn", "deepseekv3_256die_true_weight"
PRESETS = sorted((CONFIGS_DIR / "algo").glob("*.yaml"))
ALGORITHMS = [path.stem for path in PRESETS]
RUNS = sorted(path.stem for path in CONFIGS_DIR.glob("deepseekv3_*.yaml") if "algo: " in path.read_text())
KL_IN_REWARD = ["reinforce_plus_plus", "remax", "rloo"]
IN_GROUPS = ["grpo", "dr_grpo", "pass_k", "reinforce_plus_plus_baseline", "rloo"]
N, VAL = "actor_rollout_ref.rollout.n", "actor_rollout_ref.rollout.val_kwargs"
ACTOR, REWARD = "actor_rollout_ref.actor", "algorithm.use_kl_in_reward"


def failed(name, *overrides):
    return {c.name: c.detail for c in check_config(compose(name, overrides)) if not c.ok}


@pytest.mark.parametrize("path", PRESETS, ids=ALGORITHMS)
def test_a_preset_is_at_most_25_lines_and_names_its_paper(path):
    first, second, *rest = path.read_text().splitlines()
    assert first == "# @package _global_" and second.startswith("# ") and len(rest) <= 23


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_a_preset_goes_with_every_run(algo):
    for name in RUNS:
        found = failed(name, f"algo={algo}")
        if name == LEARN and not samples(compose(name, [f"algo={algo}"]).recipe):  # 1 or 2 responses a prompt, not 16
            assert found and all("micro_batch_size_per_gpu" in detail for detail in found.values())
        else:
            assert found == {}, name


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_the_presets_keys_win_over_the_runs_and_overrides_over_the_presets(algo):
    config = compose(TINY, [f"algo={algo}"])
    changed = compose(TINY, [f"algo={algo}", "algorithm.lam=0.5"])
    assert changed.algorithm.lam == 0.5 and changed.algorithm.adv_estimator == config.algorithm.adv_estimator


def test_the_presets_keys_win_over_those_of_a_base():
    base, dapo = compose(LARGE), compose(LARGE, ["algo=dapo"])
    for config, expected in ((base, (0.9, True, True)), (dapo, (1.0, False, False))):
        recipe = config.recipe
        found = (
            config.actor_rollout_ref.rollout.temperature,
            recipe.tensor_cache.enabled,
            recipe.train.skip_old_log_prob,
        )
        assert found == expected


def test_ratios_of_sequences_need_the_rows_that_make_them():
    found = failed(TINY, "algo=gspo", "recipe.patches=[-update.on_*]")
    assert "row update.on_policy is off" in found["on policy"]


@pytest.mark.parametrize("algo", KL_IN_REWARD)
def test_kl_in_the_reward_makes_the_pass_for_old_log_probs_which_a_run_cannot_leave_out(algo):
    config = compose(LARGE, [f"algo={algo}"])
    assert config.algorithm.use_kl_in_reward and not config.actor_rollout_ref.actor.use_kl_loss
    assert not config.recipe.train.skip_old_log_prob and compose(LARGE).recipe.train.skip_old_log_prob
    found = failed(LARGE, f"algo={algo}", "recipe.train.skip_old_log_prob=true")
    assert "use_kl_in_reward needs old log-probs before the update" in found["on policy"]


@pytest.mark.parametrize("algo", [*IN_GROUPS, "reinforce_plus_plus", "remax"])
def test_an_estimator_that_compares_responses_of_a_prompt_needs_several(algo):
    found = failed(TINY, f"algo={algo}", f"{N}=1")
    assert ("advantages" in found) == (algo in IN_GROUPS)
    assert "rollout.n is 1; expected 2 or more" in found.get("advantages", "rollout.n is 1; expected 2 or more")


@pytest.mark.parametrize(("overrides", "message"), [
    ([f"{VAL}.n=4"], "val_kwargs.n is 4, but greedy responses are equal; set do_sample=true"),
    ([f"{VAL}.n=4", f"{VAL}.do_sample=true"], "temperature 0, which verl refuses"),
    ([f"{VAL}.n=4", f"{VAL}.do_sample=true", f"{VAL}.temperature=0.7"], None),
    ([], None),
])  # fmt: skip
def test_a_validation_of_several_responses_a_prompt_samples_them(overrides, message):
    for when in ("trainer.test_freq=5", "trainer.val_before_train=true"):
        found = failed(TINY, when, *overrides).get("validation")
        assert (found is None) if message is None else message in found
    assert "validation" not in failed(TINY, *overrides)


def test_graphs_hold_a_validation_which_may_have_more_responses_than_a_step():
    key = "recipe.rollout.ascend.graph_batch_sizes=[32]"
    small = ["data.train_batch_size=256", f"{ACTOR}.ppo_mini_batch_size=256"]  # 32 responses a replica, 64 at once
    assert "graph batch sizes" not in failed(LARGE, *small, key)
    assert "64 responses" in failed(LARGE, *small, key, "trainer.test_freq=1")["graph batch sizes"]
