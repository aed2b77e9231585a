"""A run started by verl's own entry point, with the import alone: without the launcher and its `recipe:` section."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from verl_patches.batches import limits
from verl_patches.boot.worker_settings import send_settings
from verl_patches.config.algorithm import (
    critic_checks,
    keep_groups_checks,
    objective_checks,
    reward_checks,
    reward_model_checks,
)
from verl_patches.config.checks import fault_of_experts, faults_of_recomputation
from verl_patches.config.compose import give_recipe, model_changes, output_root
from verl_patches.config.recipe import VLLM_DTYPES, Recipe, check_recipe
from verl_patches.errors import ConfigError
from verl_patches.launch.ray_cluster import worker_settings
from verl_patches.launch.run_folder import begin_without_launcher
from verl_patches.layout.model_folder import read_config
from verl_patches.layout.parallel import rollout_layout_of, train_layout_of
from verl_patches.layout.phases import reward_models
from verl_patches.log_probs import on_policy, truth_check
from verl_patches.patching import engine
from verl_patches.patching.switches import VARIABLE, Switches
from verl_patches.trainer.ray_start import unless_start_fails
from verl_patches.upstream.checkouts import Trees
from verl_patches.upstream.modified import files_text, refuse_modified
from verl_patches.upstream.support import refusal, refused_keys

log = logging.getLogger(__name__)

NOT_HERE = (
    "verl_patches: started without its launcher (python -m verl_patches train): environment variables, model folder "
    "and memory plan are not checked, nothing watches memory and time, {record}"
)
_BY_LAUNCHER = (
    "hccl.buffer_mib hccl.expansion_mode hccl.base_port timeouts ray_address ray_port worker_process_setup_hook "
    "model_shape num_hidden_layers watch restart start"
).split()
_FIXED_ROUTE = "VLLM_ENABLE_FIX_ROUTE"  # vllm-ascend reads it (config/environment.py)


def recipe_by_default(original: Callable) -> Callable:
    """Row provider for RayPPOTrainer.__init__: fills in `recipe:` where the launcher composed none.

    Then all rows of controller and workers find `config.recipe` and `config.actor_rollout_ref.recipe`, as in runs of
    the launcher. Logs one line about what only the launcher provides.
    """

    @functools.wraps(original)
    def __init__(self: Any, config: DictConfig, *args: Any, **kwargs: Any) -> None:
        if config.actor_rollout_ref.get("recipe") is None:
            fill_recipe(config, engine.current().switches)
            self.recipe_held = ExitStack()  # the lock of the checkpoints' folder, as long as the trainer lives
            self.start_folder = begin_without_launcher(config, self.recipe_held)
            log.warning(NOT_HERE.format(record=_record(self.start_folder)))
            self.modified_sources = refuse_modified(config, Trees())
            for name, files in self.modified_sources.items():
                log.warning("dirty: %s is not as pinned (drift=%s): %s", name, config.recipe.drift, files_text(files))
            send_settings(**worker_settings(config))
            self.init_workers = functools.partial(unless_start_fails, self.init_workers)
        original(self, config, *args, **kwargs)

    return __init__


def _record(folder: Path | None) -> str:
    if folder is None:
        return "and no record is written (+recipe.run=NAME writes one)"
    return f"the record is in {folder}"


def fill_recipe(config: DictConfig, switches: Switches) -> None:
    """Put the schema's defaults into `config`, under what a user gives with +recipe.KEY=VALUE; then check the result.

    line, platform, patches and drift are those that the prelude runs with, dtype is that of rollout.dtype, and without
    a name (`run` is None) no record is written. ConfigError where a key contradicts these, is unknown, or cannot work.
    """
    dtype, dtypes = config.actor_rollout_ref.rollout.dtype, {vllm: ours for ours, vllm in VLLM_DTYPES.items()}
    if dtype not in dtypes:
        expected = f"expected one of {', '.join(dtypes)}: training has the same dtype"
        raise ConfigError(f"actor_rollout_ref.rollout.dtype is {dtype!r}; {expected}")
    decided = {name: getattr(switches, name) for name in ("line", "platform", "drift")}
    decided |= {"patches": list(switches.patterns), "dtype": dtypes[dtype]}
    given = OmegaConf.to_container(config.get("recipe") or OmegaConf.create({}), resolve=True)
    faults = []
    for key, value in decided.items():
        if given.get(key, value) != value:
            where = "actor_rollout_ref.rollout.dtype" if key == "dtype" else VARIABLE
            faults.append(f"recipe.{key} is {given[key]!r}; expected {value!r}, as in {where}")
    acts = "only the launcher (python -m verl_patches train) acts on it; remove it, or use the launcher"
    selected = {key: OmegaConf.select(OmegaConf.create(given), key) for key in _BY_LAUNCHER}
    faults += [f"recipe.{key} is given, but {acts}" for key, value in selected.items() if value is not None]
    if faults:
        raise ConfigError("\n  ".join(faults))
    try:
        merged = OmegaConf.to_container(OmegaConf.merge(OmegaConf.structured(Recipe), given, decided))
    except OmegaConfBaseException as error:
        text = str(error).splitlines()[0]
        raise ConfigError(f"recipe: {text}; the keys are those of verl_patches/config/recipe.py") from error
    check_recipe(merged)
    merged["watch"]["action"] = "off"  # the launcher's driver reads the heartbeats
    merged |= {"run": given.get("run"), "output_root": str(output_root(merged["output_root"]))}
    with (
        open_dict(config),
        open_dict(config.actor_rollout_ref),
        open_dict(config.critic),
        open_dict(config.reward_model),
    ):
        config.recipe = merged
        if reward_models(config.recipe) and not config.reward_model.enable:  # verl's main has read it by now
            raise ConfigError("recipe.rewards has a reward model, and reward_model.enable is false; set it true")
        give_recipe(config)
    _check(config)


def _check(config: DictConfig) -> None:
    """ConfigError for what the launcher would refuse, as far as layouts, the line and the switches decide it.

    The checks of sizes, batches, lengths and memory (config/checks.py) are not made.
    """
    from verl.utils.fs import copy_to_local

    train = train_layout_of(config)
    rollout_layout_of(config)
    faults = [*_npu_faults(config), *filter(None, [fault_of_experts(train)]), *faults_of_recomputation(config)]
    hf_config = {**read_config(copy_to_local(config.actor_rollout_ref.model.path)), **model_changes(config)}
    faults += [*on_policy.faults(config, hf_config), *limits.faults(config), *truth_check.faults(config)]
    faults += [refusal(entry, value, config.recipe.line) for entry, value in refused_keys(config)]
    checks = [*objective_checks(config), *critic_checks(config), *keep_groups_checks(config)]
    checks += [*reward_checks(config), *reward_model_checks(config, train)]
    faults += [check.detail for check in checks if not check.ok]
    if faults:
        raise ConfigError("\n  ".join(faults))


def _npu_faults(config: DictConfig) -> list[str]:
    """Settings for NPUs that the launcher makes and that a user of verl's own entry point must make."""
    if config.recipe.platform != "npu":
        return []
    faults = []
    if config.trainer.device != "npu":
        faults.append(
            f"trainer.device is {config.trainer.device}; expected npu, as {VARIABLE} says platform=npu: verl "
            "would wait for GPUs that Ray does not have; set trainer.device=npu"
        )
    balanced, route = config.recipe.rollout.balanced_routing, os.environ.get(_FIXED_ROUTE)
    wanted = "1" if balanced else "0"
    if route != wanted:
        faults.append(
            f"{_FIXED_ROUTE} is {route} in the environment of the trainer; expected {wanted}, as "
            f"recipe.rollout.balanced_routing is {balanced}: export {_FIXED_ROUTE}={wanted} before "
            "`ray start` on every node, or change the key"
        )
    return faults
