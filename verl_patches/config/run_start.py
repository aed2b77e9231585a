"""Where a start of a run goes on: decided here, done by launch/run_folder.py.

    trainer.resume_mode=disable      from step 1
    trainer.resume_mode=auto         from the newest complete checkpoint of the newest start's chain; from step 1 where
                                     no start of that name has any
    trainer.resume_mode=resume_path  from the checkpoint of trainer.resume_from_path

Starts, chains, and which checkpoints can be resumed from: weights/run_folders.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_patches.config.compose import switched_off
from verl_patches.errors import ConfigError
from verl_patches.values import size_text
from verl_patches.weights.manifest import Manifest
from verl_patches.weights.run_folders import (
    CHECKPOINTS,
    Chain,
    chain_of_start,
    checkpoints_home,
    data_facts,
    path_to_resume,
    refuse_old_folder,
    require_same_data,
    require_steps_left,
    require_whole,
    resume_from,
    starts_in,
)


@dataclass(frozen=True)
class NextStart:
    """How a start that may begin does.

    resumed, step: the checkpoint that it starts from, and the step that this one completes. parent: the start of this
    run that it goes on from, and the step; None where it begins a chain. held: checkpoints of the chain that are there.
    others: a sentence about the bytes of checkpoints outside the chain, "" without any.
    """

    resumed: Path | None = None
    step: int | None = None
    parent: tuple[str, int] | None = None
    held: int = 0
    others: str = ""


def run_home(config: DictConfig) -> Path:
    """Return the folder of all starts of the run: <recipe.output_root>/<recipe.run>."""
    return Path(config.recipe.output_root, config.recipe.run)


def homes_of(config: DictConfig) -> list[Path]:
    """Return the run's folder, and that of its checkpoints where it is another one."""
    home, saved = run_home(config), home_of_checkpoints(config)
    return [home] if home.resolve() == saved.resolve() else [home, saved]


def home_of_checkpoints(config: DictConfig) -> Path:
    """Return the folder of the run's name that holds its checkpoints."""
    return checkpoints_home(config.recipe.output_root, config.recipe.run, config.trainer.default_local_dir)


def checkpoints_of(config: DictConfig) -> Path:
    """Return the folder that a start saves to, or will: START stands for a start that is not made yet."""
    return home_of_checkpoints(config) / (config.recipe.start or "START") / CHECKPOINTS


def saves_as_recipe(config: DictConfig) -> bool:
    """Return whether checkpoints are ours, and not verl's own in trainer.default_local_dir."""
    return not any(switched_off(config, row) for row in ("checkpoint.save", "checkpoint.load"))


def next_start(config: DictConfig) -> NextStart:
    """Return where starting `config` now goes on; nothing is written.

    ConfigError where the checkpoint is damaged or absent, where the run has reached its total, where its data are
    others, and where `auto` would begin anew beside checkpoints of the same name.
    """
    for home in homes_of(config):
        refuse_old_folder(home)
    if not saves_as_recipe(config):
        return NextStart()
    trainer, starts = config.trainer, starts_in(home_of_checkpoints(config))
    chains = {start.name: chain_of_start(start) for start in starts}
    resumed, name = path_to_resume(trainer.resume_mode, trainer.resume_from_path), None
    if resumed is not None:
        place = resumed.resolve().parent
        name = next((start.name for start in starts if (start.folder / CHECKPOINTS).resolve() == place), None)
    elif trainer.resume_mode == "auto" and starts:
        name = starts[-1].name
        if (resumed := chains[name].newest()) is None:
            _refuse_to_begin(config, chains, starts[-1].source)
    if resumed is None:
        return NextStart(others=_said_of_others(config, Chain((), tuple(starts))))
    manifest = require_whole(resumed)
    step = manifest.facts["step"]
    require_steps_left(resumed, step, *_total_steps(config, manifest))
    require_same_data(resumed, manifest, data_facts(config.data.train_files), config.recipe.resume_other_data)
    chain = chains[name].up_to(step) if name else Chain((), tuple(starts))
    parent, held = (name, step) if name else None, len(chain.checkpoints())
    return NextStart(resumed, step, parent, held, _said_of_others(config, chain))


def planned_start(config: DictConfig) -> tuple[NextStart, str]:
    """Return (where the run would start, ""), or (a start at step 1, why there is none) where it is refused."""
    try:
        return next_start(config), ""
    except ConfigError as error:
        return NextStart(), str(error)


def resolved(config: DictConfig, start: NextStart, name: str) -> DictConfig:
    """Return a copy of `config` for the driver of the start `name`, which looks for no checkpoint itself."""
    config = config.copy()
    config.recipe.start = name
    if start.resumed is not None:
        config.trainer.update({"resume_mode": "resume_path", "resume_from_path": str(start.resumed)})
    elif saves_as_recipe(config):
        config.trainer.resume_mode = "disable"
    return config


def _refuse_to_begin(config: DictConfig, chains: dict[str, Chain], source: str | None) -> None:
    """ConfigError where `auto` finds no checkpoint in the newest start's chain, but there is one to go on from."""
    saved = [found[max(found)] for chain in chains.values() if (found := chain.checkpoints())]
    other = saved[-1] if saved else source
    if other is None:
        return
    whose = "another start of this name has" if saved else "that start went on from"
    raise ConfigError(
        f"trainer.resume_mode=auto: the newest start of {config.recipe.run}, {[*chains][-1]}, and those that it came "
        f"from have no complete checkpoint, but {whose} {other}; nothing was started. To go on from that: "
        f"{resume_from(other)}; to begin anew: trainer.resume_mode=disable"
    )


def _said_of_others(config: DictConfig, chain: Chain) -> str:
    sizes = chain.bytes_of_others()
    if not sizes:
        return ""
    return (
        f"{home_of_checkpoints(config)}: other starts ({', '.join(sizes)}) hold {size_text(sum(sizes.values()))} of "
        "checkpoints that this run does not count; nothing removes them"
    )


def _total_steps(config: DictConfig, manifest: Manifest) -> tuple[int | None, str]:
    """Return the run's total of steps, None where the data decide and are others, and the key that gives it."""
    total, key = config.trainer.total_training_steps, "trainer.total_training_steps"
    if total is None and (epoch := manifest.facts.get("steps_per_epoch")) and _same_settings_of_data(config, manifest):
        return epoch * config.trainer.total_epochs, f"{epoch} steps an epoch x trainer.total_epochs"
    return total, key


def _same_settings_of_data(config: DictConfig, manifest: Manifest) -> bool:
    """Return whether the settings of data, which decide the steps of an epoch, are those of the checkpoint."""
    settings = {key: value for key, value in manifest.facts.get("settings", {}).items() if key.startswith("data.")}
    now = OmegaConf.to_container(config.data, resolve=True)
    return all(now.get(key.removeprefix("data.")) == value for key, value in settings.items() if key.count(".") == 1)
