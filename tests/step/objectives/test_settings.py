"""Test that the presets of fixed data hold over every base, and that contradictions of the identity are refused."""

import re

import pytest

from tests.runs import composed
from verl_patches.errors import ConfigError
from verl_patches.memory.schedule import ROLLOUT_PHASES, schedule_for_run
from verl_patches.plan.calibration import CONSTANTS
from verl_patches.plan.expected import group_bytes
from verl_patches.plan.memory_plan import run_memory
from verl_patches.plan.step_plan import step_input, step_time
from verl_patches.rules import RULES
from verl_patches.run import hccl
from verl_patches.step.objectives.checks import objective_checks
from verl_patches.step.objectives.settings import COLUMNS, file_columns, objective_faults

TINY, LARGE = "deepseekv3_tiny_cpu", "deepseekv3_256die_true_weight"
ALGORITHMS = ("sft", "dpo", "ipo", "kto", "rm", "prm")
ACTOR = "actor_rollout_ref.actor"


def refusals(run):
    return [check.detail for check in RULES.checks(run) if not check.ok]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("base", [TINY, LARGE])
def test_a_preset_holds_over_a_base(base, algorithm):
    run = composed(base, [f"algo={algorithm}"])
    assert list(objective_faults(run)) == [] and refusals(run) == []
    (shown,) = objective_checks(run)
    assert "no rollout: fixed data" in shown.detail
    assert run.verl.data.custom_cls.name == "FixedDataset" and algorithm in COLUMNS


@pytest.mark.parametrize(("algorithm", "override", "words"), [
    ("dpo", f"{ACTOR}.loss_agg_mode=token-mean", "loss_agg_mode is token-mean: only then each response weighs equally"),
    ("dpo", f"{ACTOR}.kl_loss_type=low_var_kl", "kl_loss_type is low_var_kl: .* overflow, .*; set kl"),
    ("dpo", f"{ACTOR}.ppo_mini_batch_size=2", "ppo_mini_batch_size is 2: the step must be one optimizer step"),
    ("dpo", "recipe.train.skip_old_log_prob=true", "skip_old_log_prob is True: the loss needs the policy's log-probs"),
    ("dpo", "actor_rollout_ref.rollout.n=1", "rollout.n is 1: a prompt has that many responses in a batch; set 2"),
    ("sft", "recipe.objective.label_smoothing=0.1", "label_smoothing is 0.1: only dpo has it; set 0"),
    ("sft", "data.custom_cls.path=null", "custom_cls.path is null: verl's own dataset gives no responses"),
    ("sft", "trainer.test_freq=1", "validation would sample; set trainer.test_freq=-1"),
    ("sft", "algorithm.adv_estimator=gae", "adv_estimator is gae: other estimators would need a critic; set grpo"),
    ("rm", "critic.ppo_epochs=2", "critic.ppo_epochs is 2: the step must be one optimizer step .*; set 1"),
    ("sft", "recipe.rewards=[{name: maths}]", "recipe.rewards is .*: fixed responses have no reward"),
    ("kto", "data.train_batch_size=1", "train_batch_size is 1: KTO's KL estimate pairs a prompt with another"),
])  # fmt: skip
def test_what_contradicts_the_gradient_is_refused_with_the_reason(algorithm, override, words):
    found = list(objective_faults(composed(TINY, [f"algo={algorithm}", override])))
    assert len(found) == 1 and re.search(f"recipe.objective.name is {algorithm}, but .*{words}", found[0]), found


def test_a_row_that_makes_the_gradient_must_be_on():
    (found,) = refusals(composed(TINY, ["algo=dpo", "recipe.patches=[-advantage.objective]"]))
    assert found.startswith("recipe.objective.name is dpo, but row advantage.objective is off; remove")


def test_a_key_of_data_that_nothing_reads_is_refused_as_with_verls_own_dataset():
    with pytest.raises(ConfigError, match="nothing reads this key: .*data.max_respons_length"):
        composed(TINY, ["algo=sft", "+data.max_respons_length=4"])


def test_grpo_has_no_such_rules():
    assert list(objective_faults(composed(TINY))) == list(objective_checks(composed(TINY))) == []


def test_raw_text_stands_for_a_prompt_and_a_response():
    assert file_columns("sft", ["messages", "tools"]).keys() == {"messages", "tools"}
    assert file_columns("sft", ["text", "id"]).keys() == {"text"}
    assert file_columns("sft", ["text", "prompt", "response"]).keys() == {"prompt", "response"}
    assert file_columns("kto", ["text"]).keys() == {"prompt", "response", "label"}  # the columns that a message shows


def test_no_phase_of_a_rollout_is_scheduled_or_modelled():
    run, grpo_run, rm_run = composed(LARGE, ["algo=dpo"]), composed(LARGE), composed(LARGE, ["algo=rm"])
    schedule, stays = schedule_for_run(run, run.verl.actor_rollout_ref)
    assert not {phase.name for phase in schedule.phases} & {*ROLLOUT_PHASES} and "rollout_weights" not in stays
    sizes = group_bytes(run_memory(run).setting, 0)
    assert sizes["rollout_weights"] == sizes["kv_cache"] == sizes["reshard_buffers"] == 0 < sizes["ref_params"]
    sft_sizes = group_bytes(run_memory(composed(LARGE, ["algo=sft"])).setting, 0)
    assert sft_sizes["ref_params"] == 0 < sft_sizes["actor_params"]
    assert {group.side for group in hccl.hccl_groups(run)} == {"train"} and hccl.buffer_need_mib(run) == 0
    seconds = step_time(step_input(run), CONSTANTS)
    assert seconds["rollout"] == seconds["reshard"] == seconds["reward"] == 0.0
    assert all(seconds[phase] > 0 for phase in ("old_log_prob", "ref", "update"))
    sizes = group_bytes(run_memory(rm_run).setting, 0)
    assert sizes["actor_params"] == sizes["optimizer"] == sizes["swap_window"] == 0 < sizes["critic_params"]
    seconds = step_time(step_input(rm_run), CONSTANTS)
    assert seconds["update"] == 0.0 < seconds["update_critic"]
    assert step_time(step_input(grpo_run), CONSTANTS)["rollout"] > 0  # the control
    assert group_bytes(run_memory(grpo_run).setting, 0)["rollout_weights"] > 0
    assert {group.side for group in hccl.hccl_groups(grpo_run)} == {"train", "rollout"}
    whole, _ = schedule_for_run(grpo_run, grpo_run.verl.actor_rollout_ref)
    assert {*ROLLOUT_PHASES} <= {phase.name for phase in whole.phases}
