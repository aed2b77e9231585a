"""Compose runs for tests from the configs of this repository, as the commands do."""

import functools
from collections.abc import Sequence

from omegaconf import DictConfig, OmegaConf

from verl_patches.catalog import platform_rows
from verl_patches.plan.memory_plan import with_planned_keys
from verl_patches.run.compose import compose
from verl_patches.spec import RunSpec, Trees, write_run


def composed(name: str, overrides: Sequence[str] = (), trees: Trees = Trees()) -> RunSpec:  # noqa: B008 frozen
    """Return the facts of a run of configs/`name`.yaml with Hydra `overrides`, with `auto` recomputation decided."""
    return with_planned_keys(compose(name, overrides, platform_rows, trees))


@functools.cache
def tiny() -> RunSpec:
    """Return the facts of the tiny model's run."""
    return composed("deepseekv3_tiny_cpu")


def trainer_config(run: RunSpec) -> DictConfig:
    """Return verl's configuration of a run as its trainer gets it: with the facts, and not read-only."""
    config = OmegaConf.create(OmegaConf.to_container(run.verl))
    write_run(config, run.text())
    return config


def worker_section(run: RunSpec) -> DictConfig:
    """Return verl's section actor_rollout_ref of a run as its workers get it."""
    return OmegaConf.create(OmegaConf.to_container(trainer_config(run).actor_rollout_ref))
