"""Find what `generate`, `chat` and `eval` run: the weights that a user names, and the configuration of their run.

Weights are read in place, in any format of weights/source.py. Those of a run and its checkpoints have the settings of
the run's config.yaml, others those of a file of configs/.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from verl_patches.errors import ConfigError, require_checks
from verl_patches.launch.smoke import CONFIG_NAME
from verl_patches.layout.inventory import SCORE
from verl_patches.plan.serving import instance_checks, instance_config
from verl_patches.platform import NO_DEVICE, require_platform
from verl_patches.recipe import VLLM_DTYPES
from verl_patches.run.compose import RowProvider, check_dtype, compose_config, override_keys
from verl_patches.run.engine_options import ROLLOUT_KEY, check_engine_options, rewrite_engine_options
from verl_patches.run.environment import CONFIG_FILE, environment_variables, process_environment
from verl_patches.run.record.loggers import LOGGERS
from verl_patches.run.resolve import resolve
from verl_patches.run.verl_values import check_recipe, check_verl_values
from verl_patches.spec import VALUE_OBJECTIVES, RunSpec, Trees
from verl_patches.upstream.checkouts import (
    VERL_CONFIG,
    add_platform_trees,
    require_trees,
    require_verl_version,
    verl_config_dir,
)
from verl_patches.values import loading_errors, read_yaml
from verl_patches.weights.manifest import CHECKPOINT_NAME, has_manifest
from verl_patches.weights.run_folders import checkpoint_chain, complete_checkpoints, find_start, require_start
from verl_patches.weights.source import Source, open_source


class Model(NamedTuple):
    """Hold weights by step, oldest first, 0 if they are no checkpoint; length: most tokens of prompt and response."""

    run: RunSpec
    settings: str  # the config file of `run`
    sources: dict[int, Source]
    length: int


def find_model(
    given: Path,
    root: Path,
    config_name: str | None,
    overrides: Sequence[str],
    trees: Trees,
    platform_rows: RowProvider,
    newest: bool = False,
) -> Model:
    """Return the weights of a folder, or the checkpoints (with `newest` only that) of a run or a start.

    run_folders.find_start finds a run. config_name: a file of configs/ for weights without a run; None is smoke.sh's.
    Headers of the weights are checked.
    Raise ConfigError for anything else, for a value model, and for what cannot run here.
    """
    if CHECKPOINT_NAME.fullmatch(given.name) and not has_manifest(given):
        there = ", ".join(path.name for _, path in sorted(complete_checkpoints(given.parent)))
        found = f"{given.parent} has {there or 'none'}"
        raise ConfigError(f"{given}: expected a complete checkpoint, found none or a part of one; {found}")
    if (given / "config.json").exists() or (given / "snapshots").is_dir():  # open_source refuses the second
        saved = CHECKPOINT_NAME.fullmatch(given.name)
        folders = {int(saved[1]) if saved else 0: given}
        of_run = saved and (given.absolute().parents[1] / CONFIG_FILE).is_file()
        run = given.absolute().parents[1] if of_run else None
    else:
        run, folders = find_start(given, root, ", or a folder of weights, with config.json"), {}
    if run and config_name:
        raise ConfigError(f"{given}: its settings are those of {run / CONFIG_FILE}; remove --config-name")
    name = config_name or CONFIG_NAME
    config = _recorded_config(run, overrides, trees) if run else compose_config(name, overrides, verl_path=trees.verl)
    objective, platform = config.recipe.objective.name, config.recipe.platform
    if run and objective in VALUE_OBJECTIVES:
        raise ConfigError(
            f"{given}: expected a language model, found a value model (algo={objective}), which generates no tokens; "
            "to use it as a reward model, name it in recipe.rewards (docs/recipes.md)"
        )
    spec = resolve(
        instance_config(config), platform_rows(platform), override_keys(overrides), add_platform_trees(platform, trees)
    )
    if run and not folders:
        folders = checkpoint_chain(require_start(run)).checkpoints()
        if not folders:
            raise ConfigError(
                f"{given}: expected complete checkpoints of {run} or of the starts that it resumes, found none; "
                "run it with trainer.save_freq=N"
            )
    require_trees(spec)
    require_verl_version(spec.line, spec.trees)
    require_platform(spec.platform, "on a CPU take a run or --config-name with recipe.platform=cpu")
    wanted = [max(folders)] if newest else folders
    sources = {step: open_source(folders[step]) for step in wanted}
    for source in sources.values():
        if SCORE in source.tensors:
            raise ConfigError(
                f"{source.folder}: expected a language model, found a value model (it has the tensor {SCORE})"
            )
        if spec.platform == "npu":
            require_checks(instance_checks(replace(spec, model=source.inventory.model)))
        length: Any = source.config.get("max_position_embeddings")
        if type(length) is not int or length < 2:
            where = source.folder / "config.json"
            raise ConfigError(f"{where}: max_position_embeddings is {length!r:.80}; expected a whole number >= 2")
    return Model(spec, str(run / CONFIG_FILE) if run else f"configs/{name}.yaml", sources, length)


def _recorded_config(run: Path, overrides: Sequence[str], trees: Trees) -> DictConfig:
    """Return the configuration of a recorded run, with `overrides` of keys that it has, checked as compose() does."""
    with loading_errors(
        f"{run / CONFIG_FILE} with {' '.join(overrides) or 'no overrides'}: expected the settings of a run"
    ):
        config = OmegaConf.create(read_yaml(run / CONFIG_FILE))
        OmegaConf.set_struct(config, True)
        config.merge_with_dotlist(list(overrides))
        try:
            check_recipe(OmegaConf.to_container(config.recipe))
        except ConfigError as error:
            text = "an unknown key was recorded by another version: remove it from the file"
            raise ConfigError(f"{run / CONFIG_FILE}: {error}\n        ({text})") from error
        verl_file = verl_config_dir(trees.verl) / f"{VERL_CONFIG}.yaml"
        check_verl_values(OmegaConf.to_container(config), read_yaml(verl_file))
        keys = override_keys(overrides)
        if "recipe.dtype" in keys and f"{ROLLOUT_KEY}.dtype" not in keys:  # the file has values in place of references
            config.actor_rollout_ref.rollout.dtype = VLLM_DTYPES[config.recipe.dtype]
        check_dtype(config)
        check_engine_options(config, keys, OmegaConf.from_dotlist(list(overrides)))
        rewrite_engine_options(config)
        return config


def restart_in_environment(run: RunSpec) -> None:
    """Start this command again with the variables of a run, unless the process already has them.

    Python and torch read some of them only when they start.
    """
    records = {logger.folder[0] for logger in LOGGERS.values() if logger.folder}
    variables = [v for v in environment_variables(run) if v.name not in records]
    wanted = [v for v in variables if v.where == "workers" or v.name == "PYTHONPATH"]
    if run.platform in NO_DEVICE:  # vLLM warns of what a CPU lacks; a smoke run has that in its log alone
        wanted = [replace(v, value="ERROR") if v.name == "VLLM_LOGGING_LEVEL" else v for v in wanted]
    if any(os.environ.get(variable.name) != variable.value for variable in wanted):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], process_environment(wanted, os.environ))


def validation_sampling(run: RunSpec) -> dict[str, Any]:
    """Return how the trainer of a run samples in a validation, by names of vLLM's SamplingParams."""
    rollout = run.verl.actor_rollout_ref.rollout
    given = rollout.val_kwargs
    sampling = {"n": given.n, "seed": rollout.get("seed") or 0, "max_tokens": run.verl.data.max_response_length}
    sampling["ignore_eos"] = rollout.ignore_eos
    if given.do_sample:
        return {**sampling, "temperature": given.temperature, "top_p": given.top_p, "top_k": given.top_k}
    return {**sampling, "temperature": 0.0}
