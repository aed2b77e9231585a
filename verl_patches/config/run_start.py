"""What a start of a run does with what is in its folders: decided here, done by launch/run_folder.py.

    goes on        trainer.resume_mode=auto with a checkpoint of the run whose id the folder has, or resume_path to one:
                   the id stays, and so do the checkpoints
    starts again   anything else, also resume_path to another run's checkpoint: a new id. Checkpoints inside the run's
                   folder move to earlier/N with the run that wrote them; in a folder elsewhere they are refused

Whose a checkpoint is: weights/checkpoint_folders.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from omegaconf import OmegaConf

from verl_patches.config.verl_values import RESUME_NEEDS
from verl_patches.errors import ConfigError
from verl_patches.spec import RunSpec, Start
from verl_patches.trainer.record import run_id
from verl_patches.weights.checkpoint_folders import EARLIER, Saved, newest, require_whole, resume_from, saved_in
from verl_patches.weights.manifest import CHECKPOINT, Manifest, read_manifest

_SHOWN = 3


def checkpoints_of(run: RunSpec) -> Path:
    """The folder of checkpoints."""
    return Path(run.verl.trainer.default_local_dir).absolute()


def uses_checkpoints(run: RunSpec) -> bool:
    """Whether the run writes to its folder of checkpoints, or looks for its own there."""
    return run.verl.trainer.save_freq > 0 or run.verl.trainer.resume_mode == "auto"


def is_inside(run: RunSpec, folder: Path) -> bool:
    """Whether checkpoints are in the run's folder, so that they move with it."""
    saved, folder = checkpoints_of(run).resolve(), folder.resolve()
    return saved != folder and saved.is_relative_to(folder)


def start_of(run: RunSpec, folder: Path) -> Start:
    """What starting `config` in the run's `folder` does; nothing is written.

    Raises ConfigError where the checkpoint is damaged or absent, where the run has reached its total, and where the
    start would mix checkpoints of two runs.
    """
    if run.switched_off("checkpoint.load"):
        return Start()  # verl's own checkpoints, which have no id
    saved, own = checkpoints_of(run), run_id(folder)
    resumed = _resumed(run, saved, own)
    manifest = None
    if resumed is not None:
        manifest = read_manifest(resumed)
        if manifest.kind != CHECKPOINT or not isinstance(manifest.facts.get("step"), int):
            raise ConfigError(f"{resumed} holds {manifest.kind!r}, expected a checkpoint of training and its step")
        _require_steps_left(run, resumed, manifest)
    found = saved_in(saved, own)
    step = None if manifest is None else manifest.facts["step"]
    if resumed is not None and resumed.resolve() in {path.resolve() for path in found.own.values()}:
        return Start(own, resumed, step, ignored=tuple(found.ignored()))
    moves = is_inside(run, folder) and any([*saved.glob("global_step_*"), *saved.glob(EARLIER)])
    if moves and resumed is not None and resumed.resolve().is_relative_to(saved.resolve()):
        if own is not None and manifest.facts.get("id") == own:
            raise ConfigError(
                f"trainer.resume_from_path is {resumed}, which this run has set aside; nothing was moved. Move it to "
                f"{saved}, and newer ones there away, then give that place"
            )
        raise ConfigError(
            f"trainer.resume_from_path is {resumed}, inside {folder}, but not of the run that this folder belongs to: "
            "the start would begin a new run and move it to earlier/; nothing was moved. Give this run another name "
            "(--run NAME, recipe.run)"
        )
    if not is_inside(run, folder) and uses_checkpoints(run):
        _refuse_others(run, saved, found, own)
    return Start(resumed=resumed, step=step, moves=moves)


def with_start(run: RunSpec) -> RunSpec:
    """Return `run` with where a start of it goes on now, as `start_of` says, or with why there is none."""
    try:
        return replace(run, start=start_of(run, run.folder))
    except ConfigError as error:
        return replace(run, no_start=str(error))


def started(run: RunSpec, start: Start) -> RunSpec:
    """Return `run` as its driver gets it: it resumes from the checkpoint of `start` and looks for no other."""
    if start.resumed is None:
        return run
    keys = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": str(start.resumed)}
    return replace(run.with_verl(keys), start=start)


def _resumed(run: RunSpec, saved: Path, own: str | None) -> Path | None:
    """The whole checkpoint that the run starts from."""
    trainer = run.verl.trainer
    if trainer.resume_mode == "auto":
        return None if own is None else newest(saved, own)
    if trainer.resume_mode == "resume_path":
        if not isinstance(trainer.resume_from_path, str):
            raise ConfigError(RESUME_NEEDS)  # without the launcher, config/verl_values.py has not said so
        resumed = Path(trainer.resume_from_path).absolute()
        require_whole(resumed)
        return resumed
    return None


def _require_steps_left(run: RunSpec, resumed: Path, manifest: Manifest) -> None:
    """ConfigError where the checkpoint is of the last step, or of a later one."""
    step, total, key = manifest.facts["step"], run.verl.trainer.total_training_steps, "trainer.total_training_steps"
    if total is None and (epoch := manifest.facts.get("steps_per_epoch")) and _same_data(run, manifest):
        total, key = epoch * run.verl.trainer.total_epochs, f"{epoch} steps an epoch x trainer.total_epochs"
    if total is not None and step >= total:
        raise ConfigError(
            f"{resumed}: step {step} is complete, and the run has reached its total of {total} ({key}); nothing was "
            "started. For more steps raise trainer.total_training_steps (smoke: --steps); for a new run give another "
            "name (--run NAME, recipe.run) or trainer.resume_mode=disable"
        )


def _same_data(run: RunSpec, manifest: Manifest) -> bool:
    """Whether the settings of data, which decide the steps of an epoch, are those of the checkpoint."""
    settings = {key: value for key, value in manifest.facts.get("settings", {}).items() if key.startswith("data.")}
    now = OmegaConf.to_container(run.verl.data, resolve=True)
    return all(now.get(key.removeprefix("data.")) == value for key, value in settings.items() if key.count(".") == 1)


def _refuse_others(run: RunSpec, saved: Path, found: Saved, own: str | None) -> None:
    """ConfigError where a folder elsewhere holds checkpoints, all of which are another run's for a new one."""
    held = [f"{path.name} of run {own}" for path in found.own.values()]
    held += [f"{path.name} of run {owner or '(no id)'}" for path, owner in found.others.items()]
    held += [f"{path.name}, damaged" for path in found.damaged]
    if held:
        more = f" and {len(held) - _SHOWN} more" if len(held) > _SHOWN else ""
        raise ConfigError(
            f"trainer.default_local_dir is {saved}, which holds {', '.join(held[:_SHOWN])}{more}; expected none, as "
            f"run {run.recipe.run} starts anew (its folder has {f'id {own}' if own else 'no id'}) and would mix its "
            "checkpoints with them; nothing was moved. Give another trainer.default_local_dir, or move these away; to "
            f"go on from one of them, another folder and {resume_from(saved / 'global_step_N')}"
        )
