"""Prepare a run that verl's own entry point starts, with only the prelude imported and no launcher."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from verl_patches.errors import ConfigError, our_command
from verl_patches.launch.ray_cluster import worker_settings
from verl_patches.patching import engine
from verl_patches.patching.switches import PATCHES_VAR, Switches
from verl_patches.recipe import VLLM_DTYPES, Recipe
from verl_patches.rules import RULES
from verl_patches.run.compose import output_root, write_reward_models
from verl_patches.run.record.loggers import require_loggers
from verl_patches.run.resolve import resolve
from verl_patches.run.run_folder import begin_without_launcher
from verl_patches.run.verl_values import check_recipe
from verl_patches.spec import RUN, RunSpec, run_from_config, write_run
from verl_patches.trainer.ray_start import run_unless_start_fails
from verl_patches.trainer.record import Progress
from verl_patches.trainer.worker_settings import send_settings
from verl_patches.upstream.modified import files_text, refuse_modified

log = logging.getLogger(__name__)

_LAUNCHER = our_command("train", "--config-name", "CONFIG")
NO_LAUNCHER_WARNING = (
    f"verl_patches: this run was started without its launcher ({_LAUNCHER}): environment variables, "
    "model folder and memory plan are not checked, memory and time are not monitored, {record}"
)
_LAUNCHER_KEYS = (
    "hccl.buffer_mib hccl.expansion_mode hccl.base_port timeouts ray_address worker_process_setup_hook "
    "model_shape num_hidden_layers trust_remote_code watch restart start"
).split()
_FIXED_ROUTE_VARIABLE = "VLLM_ENABLE_FIX_ROUTE"  # vllm-ascend reads it (run/environment.py)


def recipe_by_default(original: Callable) -> Callable:
    """Wrap RayPPOTrainer.__init__ to fill in `recipe:` and the facts of the run where no launcher has written them.

    Rows of controller and workers read them as in runs of the launcher. One log line lists the features that only the
    launcher provides.
    """

    @functools.wraps(original)
    def __init__(self: Any, config: DictConfig, *args: Any, **kwargs: Any) -> None:
        require_loggers(config.trainer.logger, os.environ)  # of the controller's node, also in a run of the launcher
        if config.get(RUN) is None:
            self.held_locks = ExitStack()  # holds the lock of the checkpoints' folder for the trainer's life
            run = begin_without_launcher(fill_recipe(config, engine.current_engine()), self.held_locks)
            write_run(config, run.text())
            record = "and no record is written (+recipe.run=NAME writes one)"
            if run.start.name is not None:
                record = f"the record is in {run.folder}"
            log.warning(NO_LAUNCHER_WARNING.format(record=record))
            self.modified_sources = refuse_modified(run)
            for name, files in self.modified_sources.items():
                log.warning("dirty: %s is not as pinned (drift=%s): %s", name, run.recipe.drift, files_text(files))
            send_settings(**worker_settings(run))
            self.init_workers = functools.partial(run_unless_start_fails, self.init_workers)
        original(self, config, *args, **kwargs)
        run = run_from_config(config)
        progress = Progress(run.folder if run.start.name else None)
        for line in _input_reports(self, run):
            progress.say(f"| {line}")

    return __init__


def _input_reports(trainer: Any, run: RunSpec) -> Iterator[str]:
    """Yield what was found before workers start: of the rows, and of the reward, which scores a made-up answer."""
    from verl_patches.rewards.manager import RewardManager  # imports verl

    for part, reward_name, scores in (("train", "reward_fn", run.samples), ("val", "val_reward_fn", run.validates)):
        rows: Any = getattr(trainer, f"{part}_dataset", None)
        reward = getattr(trainer, reward_name, None)
        if report := getattr(rows, "row_report", ""):  # set by step/rows.py
            yield report
        if scores and isinstance(reward, RewardManager):
            place = f"the first prompt of data.{part}_files"
            if result := reward.try_row(rows[0], place):  # "" where all parts are reward models
                yield f"reward of a made-up answer to {place}: {result}"


def fill_recipe(config: DictConfig, rows: engine.Engine) -> RunSpec:
    """Complete the section `recipe` of `config` with the schema's defaults, and return the run's facts.

    The user gives other values by +recipe.KEY=VALUE. Line, platform, patches and drift are those of `rows`, this
    process's engine; dtype is that of rollout.dtype. Without a name (`run` is None) no record is written. Raises
    ConfigError where a key contradicts these, is unknown, or cannot work.
    """
    from verl.utils.fs import copy_to_local

    merged = _merged_recipe(config, rows.switches)
    with open_dict(config):
        config.recipe = merged
        has_model = any(entry.name == "reward_model" for entry in config.recipe.rewards or ())
        if has_model and not config.reward_model.enable:  # verl's main has already read this key
            raise ConfigError(
                "reward_model.enable is false; expected true, as recipe.rewards has an entry of name reward_model: "
                "set reward_model.enable=true"
            )
        write_reward_models(config)
    folder = Path(copy_to_local(config.actor_rollout_ref.model.path))
    run = resolve(config.copy(), rows.specs.values(), shape_file=folder, applied=rows.wanted)
    checks = (check for rule in RULES.sizes if rule in RULES.launcherless for check in rule(run))
    faults = [*_npu_faults(run), *(check.detail for check in checks if not check.ok)]
    if faults:
        raise ConfigError("\n  ".join(faults))
    return run


def _merged_recipe(config: DictConfig, switches: Switches) -> dict[str, Any]:
    """Return the whole section `recipe`: the user's values, the prelude's switches, and defaults."""
    dtype, dtypes = config.actor_rollout_ref.rollout.dtype, {vllm: ours for ours, vllm in VLLM_DTYPES.items()}
    if dtype not in dtypes:
        expected = f"expected {' or '.join(dtypes)}, which training uses too"
        raise ConfigError(f"actor_rollout_ref.rollout.dtype is {dtype!r}; {expected}")
    decided = {name: getattr(switches, name) for name in ("line", "platform", "drift")}
    decided |= {"patches": list(switches.patterns), "dtype": dtypes[dtype]}
    user_values = OmegaConf.to_container(config.get("recipe") or OmegaConf.create({}), resolve=True)
    faults = []
    for key, value in decided.items():
        if user_values.get(key, value) != value:
            where = "actor_rollout_ref.rollout.dtype" if key == "dtype" else PATCHES_VAR
            faults.append(f"recipe.{key} is {user_values[key]!r}; expected {value!r}, the value in {where}")
    acts = (
        f"verl's own entry point ignores it, as only the launcher ({_LAUNCHER}) reads it; remove the key, or start "
        "with the launcher"
    )
    selected = {key: OmegaConf.select(OmegaConf.create(user_values), key) for key in _LAUNCHER_KEYS}
    faults += [f"recipe.{key} is set, but {acts}" for key, value in selected.items() if value is not None]
    if faults:
        raise ConfigError("\n  ".join(faults))
    try:
        merged = OmegaConf.to_container(OmegaConf.merge(OmegaConf.structured(Recipe), user_values, decided))
    except OmegaConfBaseException as error:
        text = str(error).splitlines()[0]
        raise ConfigError(f"recipe: {text}; docs/configuration.md lists the keys") from error
    check_recipe(merged)
    merged["watch"]["action"] = "off"  # the launcher's driver reads the heartbeats
    return merged | {"run": user_values.get("run"), "output_root": str(output_root(merged["output_root"]))}


def _npu_faults(run: RunSpec) -> list[str]:
    """Return faults in settings of NPUs that the launcher makes, and that users of verl's own entry point must make."""
    if run.platform != "npu":
        return []
    faults = []
    if run.verl.trainer.device != "npu":
        faults.append(
            f"trainer.device is {run.verl.trainer.device}; expected npu, the platform in {PATCHES_VAR}, as verl would "
            "wait for GPUs that Ray does not have: set trainer.device=npu"
        )
    balanced, route = run.recipe.rollout.balanced_routing, os.environ.get(_FIXED_ROUTE_VARIABLE)
    wanted = "1" if balanced else "0"
    if route != wanted:
        faults.append(
            f"{_FIXED_ROUTE_VARIABLE} is {route} in the environment of the trainer; expected {wanted}, as "
            f"recipe.rollout.balanced_routing is {balanced}: export {_FIXED_ROUTE_VARIABLE}={wanted} before "
            "`ray start` on every node, or change the key"
        )
    return faults
