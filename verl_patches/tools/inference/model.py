"""Find the weights that a user names and the configuration of their run, and answer prompts with them.

Weights are read in place, in any format of weights/source.py. Those of a run and its checkpoints have the settings of
the run's config.yaml, others those of a file of configs/.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from verl_patches.errors import ConfigError, require_checks
from verl_patches.launch.smoke import CONFIG_NAME
from verl_patches.layout.inventory import SCORE
from verl_patches.plan.serving import instance_checks, instance_config
from verl_patches.platform import NO_DEVICE, require_platform
from verl_patches.run.compose import RowProvider, check_dtype, compose_config, override_keys
from verl_patches.run.engine_options import check_engine_options, rewrite_engine_options
from verl_patches.run.environment import CONFIG_FILE, environment_variables, process_environment
from verl_patches.run.resolve import resolve
from verl_patches.run.verl_values import check_recipe, check_verl_values
from verl_patches.spec import RunSpec, Trees
from verl_patches.tools.data.sources import prompt_tokens, read_rows
from verl_patches.upstream.checkouts import VERL_CONFIG, add_platform_trees, require_trees, verl_config_dir
from verl_patches.upstream.modified import refuse_modified
from verl_patches.values import loading_errors, read_yaml
from verl_patches.weights.manifest import CHECKPOINT_NAME
from verl_patches.weights.run_folders import checkpoint_chain, find_start, require_start
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
    if (given / "config.json").exists():
        saved, of_run = CHECKPOINT_NAME.fullmatch(given.name), given.absolute().parent.parent
        folders = {int(saved[1]) if saved else 0: given}
        run = of_run if saved and (of_run / CONFIG_FILE).is_file() else None
    else:
        run = find_start(given, root, ", or a folder of weights, with config.json")
        folders = checkpoint_chain(require_start(run)).checkpoints()
        if not folders:
            raise ConfigError(
                f"{given}: expected complete checkpoints of {run} or of the starts that it resumes, found none; "
                "run it with trainer.save_freq=N"
            )
    if run and config_name:
        raise ConfigError(f"{given}: its settings are those of {run / CONFIG_FILE}; remove --config-name")
    name = config_name or CONFIG_NAME
    config = _recorded_config(run, overrides, trees) if run else compose_config(name, overrides, verl_path=trees.verl)
    platform = config.recipe.platform
    keys, trees = override_keys(overrides), add_platform_trees(platform, trees)
    spec = resolve(instance_config(config), platform_rows(platform), keys, trees)
    require_trees(spec)
    require_platform(spec.platform, "on a CPU take a run or --config-name with recipe.platform=cpu")
    refuse_modified(spec)
    sources = {step: open_source(folders[step]) for step in ([max(folders)] if newest else folders)}
    for source in sources.values():
        if SCORE in source.tensors:
            raise ConfigError(
                f"{source.folder}: expected a language model, found a value model (it has the tensor {SCORE}); to use "
                "it as a reward model, name it in recipe.rewards (docs/recipes.md)"
            )
        if spec.platform == "npu":
            require_checks(instance_checks(replace(spec, model=source.inventory.model)))
    length = source.config["max_position_embeddings"]
    return Model(spec, str(run / CONFIG_FILE) if run else f"configs/{name}.yaml", sources, length)


def _recorded_config(run: Path, overrides: Sequence[str], trees: Trees) -> DictConfig:
    """Return the configuration of a recorded run, with `overrides` of keys that it has, checked as compose() does."""
    with loading_errors(f"{run / CONFIG_FILE} with {' '.join(overrides)}: expected the settings of a run"):
        config = OmegaConf.create(read_yaml(run / CONFIG_FILE))
        OmegaConf.set_struct(config, True)
        config.merge_with_dotlist(list(overrides))
        check_recipe(OmegaConf.to_container(config.recipe))
        check_verl_values(
            OmegaConf.to_container(config), read_yaml(verl_config_dir(trees.verl) / f"{VERL_CONFIG}.yaml")
        )
        check_dtype(config)
        check_engine_options(config, override_keys(overrides), OmegaConf.from_dotlist(list(overrides)))
        rewrite_engine_options(config)
        return config


def restart_in_environment(run: RunSpec) -> None:
    """Start this command again with the variables of a run, unless the process already has them.

    Python and torch read some of them only when they start.
    """
    wanted = [v for v in environment_variables(run) if v.where == "workers" or v.name == "PYTHONPATH"]
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


# ---- prompts and answers


class Prompt(NamedTuple):
    """Hold a row, its number in all files from 0, and its prompt as tokens."""

    number: int
    row: dict[str, Any]
    tokens: list[int]


def read_prompts(
    files: Sequence[Path], key: str, tokenizer: Any, most: int, skip: bool = False
) -> tuple[list[Prompt], int]:
    """Return (the prompts of JSON and parquet files in order, how many were left out).

    key: the column of prompts: messages for the tokenizer's chat template, or literal text. most: tokens of a
    prompt; longer ones are refused, or left out with `skip`, as verl does with data.filter_overlong_prompts. Raise
    ConfigError, with file and row, for a row that cannot be used.
    """
    prompts, left_out = list[Prompt](), 0
    for file in files:
        for line, row in read_rows(file):
            try:
                if not isinstance(row, dict):
                    raise ValueError(f"expected a JSON object, found {str(row):.200}")
                tokens = prompt_tokens(tokenizer, row.get(key))
                if len(tokens) > most and not skip:
                    raise ValueError(f"expected a prompt of at most {most} tokens, found {len(tokens)}")
            except ValueError as error:
                raise ConfigError(f"{file}:{line}: column {key}: {error}") from None
            if len(tokens) > most:
                left_out += 1
            else:
                prompts.append(Prompt(len(prompts) + left_out, row, tokens))
    if not prompts:
        raise ConfigError(f"{', '.join(map(str, files)) or 'no file'}: expected rows with a prompt, found none")
    return prompts, left_out


def answers(
    model: Model, source: Source, prompts: Sequence[Prompt], sampling: Mapping[str, Any]
) -> Iterator[tuple[Prompt, list[Any]]]:
    """Yield each prompt with the engine's responses to it, of the weights of `source`; frees the engine before."""
    from verl_patches.tools.inference import engine as engines  # imports vllm

    params = engines.prompt_params(sampling, len(prompts))
    tokens = [prompt.tokens for prompt in prompts]
    length = min(model.length, max(map(len, tokens)) + sampling["max_tokens"])
    with engines.start_engine(source.folder, model.run, length) as generate:
        responses = generate(tokens, params)
    del generate  # which holds the engine
    yield from zip(prompts, responses, strict=True)


def response_fields(response: Any, tokenizer: Any) -> dict[str, Any]:
    """Return a response for JSON; finish: stop or length."""
    text = tokenizer.decode(response.tokens, skip_special_tokens=True)
    return {"text": text, "tokens": len(response.tokens), "finish": response.finish}
