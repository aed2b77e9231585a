"""A run started by verl's own entry point: the import alone, without our launcher and its `recipe:` section."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from verl_patches.cluster.recipe import VLLM_DTYPES, Recipe, check_recipe
from verl_patches.cluster.support import refusal, refused_keys
from verl_patches.cluster.trees import LINE
from verl_patches.errors import ConfigError
from verl_patches.layout.of_config import rollout_layout_of, train_layout_of
from verl_patches.patching import engine
from verl_patches.patching.switches import VARIABLE, Switches
from verl_patches.training import kept_config, truth_check
from verl_patches.training.worker_settings import send_engine_section

log = logging.getLogger(__name__)

NOT_HERE = (
    "verl_patches: started without its launcher (python -m verl_patches train): environment variables, model folder "
    "and memory plan are not checked, nothing watches memory and time, {record}"
)
_NO_RECORD = "and no record is kept (+recipe.run=NAME keeps one)"


def recipe_by_default(original: Callable) -> Callable:
    """Row provider for RayPPOTrainer.__init__: where the launcher composed no `recipe:`, the trainer makes one.

    All rows of controller and workers find `config.recipe` and `config.actor_rollout_ref.recipe` then, as in our own
    runs. Says in one line what only the launcher gives.
    """

    @functools.wraps(original)
    def __init__(self: Any, config: DictConfig, *args: Any, **kwargs: Any) -> None:
        if config.actor_rollout_ref.get("recipe") is None:
            fill_recipe(config, engine.current().switches)
            run = config.recipe.run
            log.warning(NOT_HERE.format(record=_NO_RECORD if run is None else f"the record is kept in {run}"))
            if config.recipe.line == LINE:
                send_engine_section(OmegaConf.to_container(config.actor_rollout_ref, resolve=True))
        original(self, config, *args, **kwargs)

    return __init__


def fill_recipe(config: DictConfig, switches: Switches) -> None:
    """Put the schema's defaults into `config`, under what a user gives with +recipe.KEY=VALUE; then check the whole.

    line, platform, patches and drift are those that the prelude runs with, dtype is that of rollout.dtype, and without
    a name (`run` is None) no record is kept. ConfigError where a key contradicts these, is unknown, or cannot work.
    """
    rollout = config.actor_rollout_ref.rollout
    dtypes = {theirs: ours for ours, theirs in VLLM_DTYPES.items()}
    if rollout.dtype not in dtypes:
        raise ConfigError(f"actor_rollout_ref.rollout.dtype is {rollout.dtype!r}; expected one of {', '.join(dtypes)}: "
                          "training has the same dtype")
    decided = {"line": switches.line, "platform": switches.platform, "patches": list(switches.patterns),
               "drift": switches.drift, "dtype": dtypes[rollout.dtype]}
    given = OmegaConf.to_container(config.get("recipe") or OmegaConf.create({}), resolve=True)
    faults = [f"recipe.{key} is {given[key]!r}; expected {value!r}, as {where}" for key, value in decided.items()
              for where in ("actor_rollout_ref.rollout.dtype says" if key == "dtype" else f"{VARIABLE} says",)
              if given.get(key, value) != value]
    if faults:
        raise ConfigError("\n  ".join(faults))
    try:
        merged = OmegaConf.to_container(OmegaConf.merge(OmegaConf.structured(Recipe), given, decided))
    except OmegaConfBaseException as error:
        raise ConfigError(f"recipe: {str(error).splitlines()[0]}; the keys are those of "
                          "verl_patches/cluster/recipe.py") from error
    check_recipe(merged)
    merged["run"] = given.get("run")
    with open_dict(config):
        config.recipe = merged
    with open_dict(config.actor_rollout_ref):
        config.actor_rollout_ref.recipe = merged
    _check(config)


def _check(config: DictConfig) -> None:
    """What the launcher would refuse and can be told from the configuration alone."""
    train_layout_of(config), rollout_layout_of(config)
    faults = [*kept_config.faults(config), *truth_check.faults(config),
              *(refusal(entry, value, config.recipe.line) for entry, value in refused_keys(config))]
    if faults:
        raise ConfigError("\n  ".join(faults))
