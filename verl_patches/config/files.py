"""The rules about the files that a run reads: model folder, data, reward function, a recording to replay."""

from __future__ import annotations

import ast
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_patches.config.compose import config_file, model_changes, model_shape_of, reads_weights
from verl_patches.config.environment import run_dir
from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import differences, read_model_shape
from verl_patches.layout.model_folder import QUANTIZATION, weight_files
from verl_patches.trainer.recording import find_recording
from verl_patches.weights.source import open_source

_DATA = ("data.train_files", "data.val_files")
_MODEL, REWARD = "actor_rollout_ref.model.path", "custom_reward_function.path"
PATHS = (*_DATA, _MODEL, REWARD)  # keys that name files which a run reads
_Found = tuple[str, bool, str] | tuple[str, bool, str, bool]  # fields of config/checks.py's Check


def checks(config: DictConfig, must_exist: Collection[str]) -> Iterator[_Found]:
    """(name, whether it holds, detail, whether it is a note) of each rule; `must_exist` as in checks.check_config."""
    yield from _folder_checks(config, must_exist)
    yield from _data_checks(config, must_exist)
    yield from _reward_checks(config, must_exist)
    yield from _replay_checks(config)


def _folder_checks(config: DictConfig, must_exist: Collection[str]) -> Iterator[_Found]:
    """Where the model's folder is on this machine: it holds the planned model, in weights that can be read."""
    path = config_file(config)
    if QUANTIZATION in model_changes(config):
        text = (
            f"actor_rollout_ref.model.override_config.model_config holds {QUANTIZATION}; expected none: that of "
            "config.json is not read, and null ends rank 0, where verl prints it (configuration_utils.py:845)"
        )
        yield "model folder", False, text
    if not path.is_file():
        yield _absent("model folder", [path], _MODEL, _MODEL in must_exist, "the folder of a HF model")
        return
    found, model = read_model_shape(path), model_shape_of(config)
    fault = f"{path} is not of recipe.model_shape {config.recipe.model_shape}: {differences(found, model)}"
    yield "model shape", found == model, "same model" if found == model else fault
    if reads_weights(config):
        yield _weights_check(config, path.parent)


def _weights_check(config: DictConfig, folder: Path) -> _Found:
    """The folder's files are whole and hold every tensor once, and each framework that reads them can."""
    name, load_format = "model weights", config.actor_rollout_ref.rollout.load_format
    if not weight_files(folder):
        return (name, True, f"{folder} has no safetensors file: its weights were not checked", True)
    try:
        source = open_source(folder)
    except ConfigError as error:
        return name, False, str(error)
    how = {"hf": "a HF folder", "shards": "sharded weights", "checkpoint": "a checkpoint"}[source.kind]
    how += f" in FP8 (blocks of {source.block[0]} x {source.block[1]})" if source.block else ""
    fault = (
        f"actor_rollout_ref.rollout.load_format is {load_format}, with which vLLM would read {folder}, {how}; expected "
    )
    fault += "dummy_megatron (the first weight sync fills vLLM), or a HF folder in bf16 (`weights convert`)"
    fits = load_format.startswith("dummy") or how == "a HF folder"
    return name, fits, f"whole files: {how}" if fits else fault


def _absent(name: str, files: Iterable[object], key: str, must_exist: bool, expected: str) -> _Found:
    absent = ", ".join(map(str, files))
    if must_exist:
        return name, False, f"{key}: {absent} does not exist; expected {expected}"
    return name, True, f"{absent} is not on this machine, so it was not checked ({key})", True


def _data_checks(config: DictConfig, must_exist: Collection[str]) -> Iterator[_Found]:
    """Data files are parquet in verl's schema; those for training hold a batch. The trainer's node reads them."""
    for key, least in zip(_DATA, (config.data.train_batch_size, 1), strict=True):
        files = config.data.get(key.removeprefix("data.")) or []
        files = [files] if isinstance(files, str) else files
        absent = [file for file in files if not os.path.isfile(file)]
        if absent:
            yield _absent("data", absent, key, key in must_exist, "parquet of data/prepare_deepscaler.py")
            continue
        try:
            rows = sum(_read_rows(file, config.data.prompt_key) for file in files)
        except ConfigError as error:
            yield "data", False, f"{key}: {error}"
            continue
        if rows < least:
            yield "data", False, f"{key}: {rows} prompts; expected at least {least}"


def _read_rows(file: str, prompt_key: str) -> int:
    """Number of rows of a parquet file, from its footer; ConfigError where it cannot be read or lacks a column."""
    from pyarrow import ArrowException, parquet, types  # here, as most commands read no data

    def is_list(found: Any) -> bool:
        return types.is_list(found) or types.is_large_list(found)

    def is_struct(found: Any, *names: str) -> bool:
        return types.is_struct(found) and set(names) <= {found.field(n).name for n in range(found.num_fields)}

    columns = {
        prompt_key: lambda found: is_list(found) and is_struct(found.value_type, "role", "content"),
        "data_source": lambda found: types.is_string(found) or types.is_large_string(found),
        "reward_model": lambda found: is_struct(found, "ground_truth"),
    }
    try:
        with parquet.ParquetFile(file) as opened:
            schema, rows = opened.schema_arrow, opened.metadata.num_rows
            if rows:
                opened.read_row_group(0)
    except (ArrowException, OSError) as error:
        raise ConfigError(f"{file} is not a whole parquet file ({error}); make it again") from error
    faults = [name for name, fits in columns.items() if name not in schema.names or not fits(schema.field(name).type)]
    if faults:
        raise ConfigError(
            f"{file}: column {' or '.join(faults)} is missing or of another type; expected those of "
            "docs/own-data-and-reward.md (data.prompt_key names that of the prompts)"
        )
    return rows


def _reward_checks(config: DictConfig, must_exist: Collection[str]) -> Iterator[_Found]:
    """The reward function's file defines it; without a file verl's own rewards are used."""
    section = config.custom_reward_function
    if not section.path:
        return
    file, key = Path(section.path), "custom_reward_function"
    if not os.path.isfile(file):
        yield _absent("reward function", [file], REWARD, REWARD in must_exist, "a Python file")
        return
    try:
        names = set(_names_bound(ast.parse(file.read_bytes())))
    except (OSError, SyntaxError, ValueError, MemoryError, RecursionError) as error:
        yield "reward function", False, f"{key}.path: {file} is not Python: {error}"
        return
    held, fault = f"{section.name} of {file}", f"{key}.name is {section.name!r}; {file} does not define it"
    defined = not names.isdisjoint((section.name, "*"))
    yield "reward function", defined, held if defined else fault


def _names_bound(node: ast.AST) -> Iterator[str]:
    """Names that a module binds, also in if and try; "*" for an import of all names."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child.name
        elif isinstance(child, ast.alias):
            yield child.asname or child.name
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id
        else:
            yield from _names_bound(child)


def _replay_checks(config: DictConfig) -> Iterator[_Found]:
    """The recording has the run's steps, in whole files, and the run would not move them aside before it reads them."""
    replay, folder = config.recipe.rollout.replay, run_dir(config).resolve()
    if replay is None:
        return
    fault = ""
    try:
        find_recording(replay, config.trainer.total_training_steps)
    except ConfigError as error:
        fault = str(error)
    if not fault and Path(replay).resolve().is_relative_to(folder):
        fault = (
            f"recipe.rollout.replay is {replay}, inside {folder}, whose outputs this run moves aside; "
            "give this run another name (--run NAME, recipe.run)"
        )
    yield "replay", not fault, fault or f"the responses of {replay}"
