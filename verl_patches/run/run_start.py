"""Decide where a start (one launch) of a run resumes; run/run_folder.py carries it out.

    trainer.resume_mode=disable      from step 1
    trainer.resume_mode=auto         from the newest complete checkpoint of the newest start's chain; from step 1 where
                                     no start of that name has any
    trainer.resume_mode=resume_path  from the checkpoint of trainer.resume_from_path

weights/run_folders.py defines starts, chains, and which checkpoints can be resumed from.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from omegaconf import OmegaConf

from verl_patches.errors import ConfigError
from verl_patches.spec import NextStart, RunSpec
from verl_patches.weights.manifest import Manifest
from verl_patches.weights.run_folders import (
    CHECKPOINTS,
    CheckpointChain,
    checkpoint_chain,
    checkpoints_home,
    data_facts,
    list_starts,
    path_to_resume,
    require_same_data,
    require_steps_left,
    require_whole_checkpoint,
    resume_overrides,
)


def run_checkpoints_home(run: RunSpec) -> Path:
    """Return the folder of the run's name that holds its checkpoints."""
    return checkpoints_home(run.home, run.verl.trainer.default_local_dir)


def recipe_saves_checkpoints(run: RunSpec) -> bool:
    """Return whether this recipe saves the checkpoints, rather than verl in trainer.default_local_dir."""
    return {"checkpoint.save", "checkpoint.load"} <= run.rows


def next_start(run: RunSpec) -> NextStart:
    """Return where the run would resume if it started now; nothing is written.

    Raise ConfigError where the checkpoint is damaged or absent, where the run has reached its total of steps, where its
    data differ, and where `auto` would begin at step 1 beside checkpoints of the same name.
    """
    if (run.home / "summary.json").exists():
        raise ConfigError(
            f"{run.home}: expected folders 0001, 0002, ..., found summary.json of an earlier version of this recipe, "
            "in which all starts of a run shared one folder: give the run another name (recipe.run)"
        )
    if not recipe_saves_checkpoints(run):
        return NextStart()
    trainer, starts = run.verl.trainer, list_starts(run_checkpoints_home(run))
    chains = {start.name: checkpoint_chain(start) for start in starts}
    resumed, name = path_to_resume(trainer.resume_mode, trainer.resume_from_path), None
    if resumed is not None:
        place = resumed.resolve().parent
        name = next((start.name for start in starts if (start.folder / CHECKPOINTS).resolve() == place), None)
    elif trainer.resume_mode == "auto" and starts:
        name = starts[-1].name
        if (resumed := chains[name].newest()) is None:
            _refuse_to_begin(run, chains, starts[-1].source)
    if resumed is None:
        return NextStart()
    manifest = require_whole_checkpoint(resumed)
    step = manifest.facts["step"]
    require_steps_left(resumed, step, *_total_steps(run, manifest))
    require_same_data(resumed, manifest, data_facts(run.verl.data.train_files), run.recipe.resume_other_data)
    chain = chains[name].up_to(step) if name else CheckpointChain((), tuple(starts))
    parent, held = (name, step) if name else None, len(chain.checkpoints())
    return NextStart(resumed, step, parent, held)


def with_start(run: RunSpec) -> RunSpec:
    """Return `run` with the result of `next_start`, or with the reason why it cannot start."""
    try:
        return replace(run, start=next_start(run))
    except ConfigError as error:
        return replace(run, no_start=str(error))


def driver_run(run: RunSpec, start: NextStart, name: str) -> RunSpec:
    """Return `run` as the driver of its start `name` gets it: resume keys that name the checkpoint, or say disable.

    Where verl itself saves the checkpoints, these keys stay as given.
    """
    keys = {}
    if start.resumed is not None:
        keys = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(start.resumed)}
    elif recipe_saves_checkpoints(run):
        keys = {"trainer.resume_mode": "disable"}
    return replace(run.with_verl(keys), start=replace(start, name=name, by_launcher=True))


def _refuse_to_begin(run: RunSpec, chains: dict[str, CheckpointChain], source: str | None) -> None:
    """Refuse `auto` where the newest start's chain has no checkpoint, but another start has one to resume from."""
    checkpoints = [found for found in (chain.checkpoints() for chain in chains.values()) if found]
    saved = [found[max(found)] for found in checkpoints]
    other = saved[-1] if saved else source
    if other is None:
        return
    owner = "another start of this name has" if saved else "that start was resumed from"
    raise ConfigError(
        f"trainer.resume_mode=auto: expected a complete checkpoint of {[*chains][-1]}, the newest start of "
        f"{run.recipe.run}, or of the starts that it resumed, found none, but {owner} {other}; nothing was started. To "
        f"resume from that: {resume_overrides(other)}; to start at step 1: trainer.resume_mode=disable"
    )


def _total_steps(run: RunSpec, manifest: Manifest) -> tuple[int | None, str]:
    """Return the run's total of steps and the key that gives it.

    The total is None where the data decide it and differ from those of the checkpoint.
    """
    total, key = run.verl.trainer.total_training_steps, "trainer.total_training_steps"
    epoch, settings = manifest.facts.get("steps_per_epoch"), manifest.facts.get("settings", {})
    data = {name: value for name, value in settings.items() if name.startswith("data.") and name.count(".") == 1}
    now = OmegaConf.to_container(run.verl.data, resolve=True)  # data settings decide the steps of an epoch
    if total is None and epoch and all(now.get(name.removeprefix("data.")) == value for name, value in data.items()):
        return epoch * run.verl.trainer.total_epochs, f"{epoch} steps an epoch x trainer.total_epochs"
    return total, key
