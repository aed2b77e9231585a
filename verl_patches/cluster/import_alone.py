"""A run started by verl's own entry point: the import alone, without our launcher and its `recipe:` section."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from verl_patches.cluster.checkouts import LINE, Trees
from verl_patches.cluster.checks import fault_of_experts
from verl_patches.cluster.model_files import model_changes
from verl_patches.cluster.modified import refuse_modified, said
from verl_patches.cluster.recipe import VLLM_DTYPES, Recipe, check_recipe
from verl_patches.cluster.support import refusal, refused_keys
from verl_patches.errors import ConfigError
from verl_patches.layout.model_folder import read_config
from verl_patches.layout.of_config import rollout_layout_of, train_layout_of
from verl_patches.patching import engine
from verl_patches.patching.switches import VARIABLE, Switches
from verl_patches.tensor_cache import limits
from verl_patches.trainer import on_policy, truth_check
from verl_patches.trainer.ray_start import unless_start_fails
from verl_patches.trainer.worker_settings import send_settings

log = logging.getLogger(__name__)

NOT_HERE = (
    "verl_patches: started without its launcher (python -m verl_patches train): environment variables, model folder "
    "and memory plan are not checked, nothing watches memory and time, {record}"
)
_BY_LAUNCHER = ("hccl.buffer_mib", "hccl.expansion_mode", "hccl.base_port", "timeouts", "ray_address", "ray_port",
                "worker_process_setup_hook", "model_shape")
_FIXED_ROUTE = "VLLM_ENABLE_FIX_ROUTE"  # vllm-ascend reads it (cluster/environment.py)


def recipe_by_default(original: Callable) -> Callable:
    """Row provider for RayPPOTrainer.__init__: where the launcher composed no `recipe:`, the trainer makes one.

    All rows of controller and workers find `config.recipe` and `config.actor_rollout_ref.recipe` then, as in our own
    runs. Says in one line what only the launcher gives.
    """

    @functools.wraps(original)
    def __init__(self: Any, config: DictConfig, *args: Any, **kwargs: Any) -> None:
        if config.actor_rollout_ref.get("recipe") is None:
            fill_recipe(config, engine.current().switches)
            log.warning(NOT_HERE.format(record=_record(config.recipe)))
            self.modified_sources = refuse_modified(config, Trees())
            for name, files in self.modified_sources.items():
                log.warning("dirty: %s is not as pinned (drift=%s): %s", name, config.recipe.drift, said(files))
            send_settings(*_worker_settings(config))
            self.init_workers = functools.partial(unless_start_fails, self.init_workers)
        original(self, config, *args, **kwargs)

    return __init__


def _worker_settings(config: DictConfig) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """(what line a3's engine is prepared from, how a worker on npu finds its interface), as the launcher sends them."""
    recipe, engine_section, network = config.recipe, None, None
    if recipe.line == LINE:
        engine_section = OmegaConf.to_container(config.actor_rollout_ref, resolve=True)
    if recipe.platform == "npu":
        network = {"nodes": config.trainer.nnodes, "interface": recipe.hccl.interface}
    return engine_section, network


def _record(recipe: DictConfig) -> str:
    if recipe.run is None:
        return "and no record is kept (+recipe.run=NAME keeps one)"
    return f"the record is kept in {Path(recipe.output_root, recipe.run).absolute()}"


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
    faults += [f"recipe.{key} is given, but only the launcher (python -m verl_patches train) acts on it; take it out, "
               "or use the launcher" for key in _BY_LAUNCHER
               if OmegaConf.select(OmegaConf.create(given), key) is not None]
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
    """ConfigError with what the launcher too would refuse, as far as layouts, the line and the switches decide it.

    Left out are the checks of sizes, batches, lengths and memory (cluster/checks.py).
    """
    train = train_layout_of(config)
    rollout_layout_of(config)
    experts = fault_of_experts(train)
    faults = [*_npu_faults(config), *([experts] if experts else []), *on_policy.faults(config, _hf_config(config)),
              *limits.faults(config), *truth_check.faults(config),
              *(refusal(entry, value, config.recipe.line) for entry, value in refused_keys(config))]
    if faults:
        raise ConfigError("\n  ".join(faults))


def _hf_config(config: DictConfig) -> dict[str, Any]:
    from verl.utils.fs import copy_to_local

    return {**read_config(copy_to_local(config.actor_rollout_ref.model.path)), **model_changes(config)}


def _npu_faults(config: DictConfig) -> Iterator[str]:
    """What the launcher sets by itself on NPUs and verl's own entry point takes from the user."""
    if config.recipe.platform != "npu":
        return
    if config.trainer.device != "npu":
        yield (f"trainer.device is {config.trainer.device}; expected npu, as {VARIABLE} says platform=npu: verl would "
               "wait for GPUs that Ray does not have; set trainer.device=npu")
    wanted, found = str(int(config.recipe.rollout.balanced_routing)), os.environ.get(_FIXED_ROUTE)
    if found != wanted:
        yield (f"{_FIXED_ROUTE} is {found} in the environment of the trainer; expected {wanted}, as "
               f"recipe.rollout.balanced_routing is {config.recipe.rollout.balanced_routing}: export "
               f"{_FIXED_ROUTE}={wanted} before `ray start` on every node, or change the key")
