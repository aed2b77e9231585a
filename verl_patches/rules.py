"""List the rules that a run's configuration must keep before anything starts, in the order of the step.

A rule is a function beside its feature that takes the run and yields a `Check` for each thing that it inspects, with
the expected and the found value. A plan shows all checks; a start is refused where one fails.
"""

from __future__ import annotations

from verl_patches.memory.checks import sleep_checks
from verl_patches.model.checks import engine_checks, expert_checks, model_checks, recomputation_checks, train_checks
from verl_patches.plan.memory_plan import whole_prompt_checks
from verl_patches.reshard.blocks import sync_checks
from verl_patches.rewards.checks import reward_checks, reward_model_checks
from verl_patches.rollout.checks import ascend_checks, rollout_checks
from verl_patches.run.files import data_checks, disk_checks, folder_checks, hook_checks, reward_folder_checks
from verl_patches.run.hccl import hccl_checks
from verl_patches.spec import Rule, Rules
from verl_patches.step.batches.checks import (
    batch_checks,
    filter_groups_checks,
    length_checks,
    max_num_seqs_checks,
    micro_batch_checks,
)
from verl_patches.step.log_probs.logprob_check import logprob_checks
from verl_patches.step.log_probs.ratio_settings import ratio_checks
from verl_patches.step.objectives.checks import critic_checks, estimator_checks, objective_checks
from verl_patches.step.replay.checks import recording_checks, routing_replay_checks
from verl_patches.trainer.checks import checkpoint_checks, profile_checks, restart_checks
from verl_patches.upstream.checkouts import verl_checks
from verl_patches.upstream.support import support_checks

# checks of files: a file that the command line names must be on this machine; where a run starts, every file must
FILE_RULES: tuple[Rule, ...] = (folder_checks, data_checks, reward_folder_checks, hook_checks, recording_checks)
SIZE_RULES: tuple[Rule, ...] = (
    model_checks,
    train_checks,
    expert_checks,
    recomputation_checks,
    engine_checks,
    # rollout
    rollout_checks,
    ascend_checks,
    whole_prompt_checks,
    sleep_checks,
    length_checks,
    max_num_seqs_checks,
    filter_groups_checks,
    # reward, log-probs, advantage
    reward_checks,
    reward_model_checks,
    ratio_checks,
    logprob_checks,
    estimator_checks,
    objective_checks,
    # update
    batch_checks,
    critic_checks,
    micro_batch_checks,
    routing_replay_checks,
    # weight sync
    sync_checks,
    # the run
    checkpoint_checks,
    restart_checks,
    profile_checks,
    support_checks,
    hccl_checks,
)
# the rules of SIZE_RULES that are checked for a run without the launcher too: upstream would compute wrong results
# where they fail. Impossible sizes, batches, lengths and memory end such a run by themselves.
LAUNCHERLESS_RULES: frozenset[Rule] = frozenset(
    {
        *(expert_checks, recomputation_checks, filter_groups_checks, reward_checks, reward_model_checks),
        *(ratio_checks, logprob_checks, objective_checks, critic_checks, micro_batch_checks, support_checks),
    }
)
RULES = Rules(FILE_RULES, SIZE_RULES, (disk_checks, verl_checks), LAUNCHERLESS_RULES)
