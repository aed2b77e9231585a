"""Check a run's settings on the trainer's side: checkpoints, restarts, traces."""

from __future__ import annotations

from collections.abc import Iterator

from verl_patches.errors import Check, either
from verl_patches.layout.phases import STEP_PHASES
from verl_patches.memory.schedule import ROLLOUT_PHASES
from verl_patches.recipe import PROFILED_PHASES
from verl_patches.spec import RunSpec


def checkpoint_checks(run: RunSpec) -> Iterator[Check]:
    """Check that the run can save and resume.

    Runs that do neither are skipped, as are runs with verl's own checkpoints and without expert parallelism: they lose
    no experts.
    """
    trainer, ours = run.verl.trainer, ("checkpoint.parts", "checkpoint.save", "checkpoint.load")
    off = [row for row in ours if row not in run.rows]
    for name, section in run.trained_sections.items():
        if not section.megatron.get("use_distributed_optimizer", True):
            fault = f"{name}.megatron.use_distributed_optimizer is false, expected true"
            yield Check("optimizer", False, f"{fault}: each rank offloads and saves its part of the optimizer states")
    if (trainer.save_freq <= 0 and trainer.resume_mode == "disable") or (len(off) == len(ours) and run.train.ep == 1):
        return
    faults = []
    if off:
        faults.append(
            f"patches {', '.join(off)} are off, expected all of {', '.join(ours)} on: verl saves the model on "
            "data-parallel rank 0 only, so the experts of other ranks would be lost "
            "(verl.utils.checkpoint.megatron_checkpoint_manager.MegatronCheckpointManager.save_checkpoint)"
        )
    if trainer.get("default_hdfs_dir"):
        faults.append("trainer.default_hdfs_dir is set, expected null: files go to trainer.default_local_dir only")
    detail = f"in {trainer.default_local_dir}, which all nodes must share"
    if run.start.resumed:
        detail += f"; continues from {run.start.resumed}"
    if run.no_start:
        faults.append(run.no_start)
    yield Check("checkpoints", not faults, "; ".join(faults) or detail, note=not faults)


def restart_checks(run: RunSpec) -> Iterator[Check]:
    """Check that a restart (recipe.restart) finds a checkpoint, and nodes to leave out; skip without restarts."""
    restart, trainer = run.recipe.restart, run.verl.trainer
    if restart.exclude_nodes and run.recipe.ray_address is None:
        text = "recipe.restart.exclude_nodes needs recipe.ray_address, found null: set it, or remove exclude_nodes"
        yield Check("restart", False, text)
    if not restart.max_restarts:
        return
    faults = []
    if trainer.save_freq < 1:
        faults.append(f"trainer.save_freq is {trainer.save_freq}, so there is no checkpoint; set it to 1 or more")
    if trainer.resume_mode != "auto":
        faults.append(f"trainer.resume_mode is {trainer.resume_mode}; expected auto, which takes the newest checkpoint")
    detail = f"at most {restart.max_restarts} times, from the newest checkpoint"
    yield either(
        "restart", not faults, detail, f"recipe.restart.max_restarts is {restart.max_restarts}, but {'; '.join(faults)}"
    )


def profile_checks(run: RunSpec) -> Iterator[Check]:
    """Check that recipe.profile names steps and ranks that the run has; skip where it is off."""
    section = run.recipe.profile
    if section.steps is None:
        return
    faults = list(_profile_faults(run))
    yield from (Check("profile", False, fault) for fault in faults)
    if not faults:
        phases = ", ".join(section.phases or [phase for phase in PROFILED_PHASES if phase not in _absent_phases(run)])
        yield Check("profile", True, f"steps {list(section.steps)}, ranks {list(section.ranks)}: {phases}")


def _absent_phases(run: RunSpec) -> set[str]:
    """Return the phases that the run does not have: of a critic, of reward models, of a rollout."""
    absent = {phase.schedule_name for phase in STEP_PHASES if phase.critic and not run.has_critic}
    if not run.reward_models:
        absent.add("rm_scores")
    if not run.samples:
        absent.update(ROLLOUT_PHASES)
    return absent


def _profile_faults(run: RunSpec) -> Iterator[str]:
    key, section = "recipe.profile", run.recipe.profile
    for rank in section.ranks:
        if rank >= run.world_size:
            yield f"{key}.ranks: {rank} is not a rank of the run; expected 0 to {run.world_size - 1}"
    if absent := _absent_phases(run).intersection(section.phases or ()):
        yield f"{key}.phases: a run with this algorithm and these rewards has no {', '.join(sorted(absent))}"
    if run.recipe.train.skip_old_log_prob and "old_log_prob" in (section.phases or ()):
        yield f"{key}.phases: a run with recipe.train.skip_old_log_prob=true has no old_log_prob"
