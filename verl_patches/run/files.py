"""Check the files that a run reads (model folder, data, the user's code, a recording) and the disk space that it needs.

The sizes of what it writes are modelled: checkpoints from the model's parameters, responses from a batch's shape.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple

from verl_patches.errors import Check, ConfigError, config_error_text, either
from verl_patches.layout.inventory import SCORE, first_layers, read_model_shape, size_differences
from verl_patches.layout.model_folder import QUANTIZATION, read_json_object, require_whole_folder, weight_files
from verl_patches.model.checks import value_model_differences
from verl_patches.patching.fingerprint import source_file
from verl_patches.rewards.parts import SHORT_FORM
from verl_patches.run.compose import has_own_dataset
from verl_patches.run.resolve import model_changes
from verl_patches.run.run_start import run_checkpoints_home
from verl_patches.shared_files import disk_folder, file_fault, free_bytes
from verl_patches.spec import RunSpec
from verl_patches.values import size_text
from verl_patches.weights.manifest import TRACKER, read_manifest
from verl_patches.weights.run_folders import CHECKPOINTS, value_model_folder
from verl_patches.weights.source import open_source

_DATA_KEYS = ("data.train_files", "data.val_files")
_MODEL_KEY = "actor_rollout_ref.model.path"
_REWARD_MODEL_FORM = "a checkpoint of algo=rm or a folder with score.weight"
PATH_KEYS = (*_DATA_KEYS, _MODEL_KEY, "recipe.rewards", f"{SHORT_FORM}.path")  # keys that name files that a run reads
_RECORD_BYTES = 64 << 20, 32 << 10  # bytes of a run's logs, and of a step in summary.json and metrics.jsonl


def with_required_files(run: RunSpec) -> RunSpec:
    """Return `run` as it is at a start, when the files of all keys of PATH_KEYS must be on this machine."""
    return replace(run, given_keys=run.given_keys | set(PATH_KEYS))


def folder_checks(run: RunSpec) -> Iterator[Check]:
    """Check that the model's folder holds the planned model in readable weights, where it is on this machine.

    As in all rules of this file, a missing file of a key that `run.given_keys` does not name is only a note: it may be
    on another machine.
    """
    path = run.model_folder / "config.json"
    if QUANTIZATION in model_changes(run.verl.actor_rollout_ref.model):
        text = (
            f"actor_rollout_ref.model.override_config.model_config: expected no {QUANTIZATION}, found one; remove this "
            "override, also where it is null, with which rank 0 fails when verl prints the configuration "
            "(transformers.configuration_utils.PretrainedConfig.to_diff_dict). The one in config.json is ignored anyway"
        )
        yield Check("model folder", False, text)
    if fault := config_error_text(require_whole_folder, path.parent, run.recipe.trust_remote_code):
        yield Check("model folder", False, f"{_MODEL_KEY}: {fault}")
        return
    if not path.exists():
        yield _absent_check(
            "model folder", [path], _MODEL_KEY, _MODEL_KEY in run.given_keys, "the folder of a HF model"
        )
        return
    held, model = first_layers(read_model_shape(path), run.recipe.num_hidden_layers), run.model
    held = replace(held, torch_dtype=model.torch_dtype)  # recipe.dtype decides the dtype of the computation
    fault = (
        f"{path}: expected the sizes of recipe.model_shape {run.recipe.model_shape}: {size_differences(held, model)}"
    )
    yield either("model shape", held == model, "same model", fault)
    if run.reads_weights:
        yield _weights_check(run, path.parent)


def _weights_check(run: RunSpec, folder: Path) -> Check:
    """Check that the folder's files are whole, hold every tensor once, and suit each framework that reads them."""
    name, load_format = "model weights", run.verl.actor_rollout_ref.rollout.load_format
    if not weight_files(folder) and not (folder / TRACKER).exists():
        return Check(name, True, f"{folder} has no weight files, so none were checked", note=True)
    try:
        source = open_source(folder)
    except ConfigError as error:
        return Check(name, False, str(error))
    source_text = {"hf": "a HF folder", "megatron": "a Megatron folder", "checkpoint": "a checkpoint"}[source.kind]
    source_text += f" in FP8 (blocks of {source.block[0]} x {source.block[1]})" if source.block else ""
    fault = (
        f"actor_rollout_ref.rollout.load_format is {load_format}, with which vLLM would read {folder}, {source_text}; "
        "expected dummy_megatron (the first weight sync fills vLLM), or a HF folder in bf16 (`weights convert`)"
    )
    fits = load_format.startswith("dummy") or source_text == "a HF folder"
    return either(name, fits, f"complete files: {source_text}", fault)


def reward_folder_checks(run: RunSpec) -> Iterator[Check]:
    """Check that each folder of a reward model on this machine has a head and the actor's sizes and tokenizer."""
    for part in run.rewards:
        if part.entry.name != "reward_model":
            continue
        folder, key = value_model_folder(part.path), f"{part.where}.path"
        if not folder.exists():
            here = {"recipe.rewards", _MODEL_KEY} <= run.given_keys  # otherwise this is a plan for another machine
            yield _absent_check("reward model", [folder], key, here, _REWARD_MODEL_FORM)
            continue
        try:
            source = open_source(folder)
            require_whole_folder(folder, run.recipe.trust_remote_code)
        except ConfigError as error:
            yield Check("reward model", False, f"{key}: {error}")
            continue
        unlike = value_model_differences(run, source.inventory.model, folder)
        faults = [f"the model differs from the actor's: {unlike}"] if unlike else []
        if SCORE not in source.tensors:
            faults.append(f"no {SCORE} [1, H]; expected critic/ of a checkpoint of algo=rm, or a folder with that head")
        if source.kind == "checkpoint":
            settings = read_manifest(folder).facts.get("settings", {})
            if (trained := settings.get("recipe.objective.name", "an unknown objective")) != "rm":
                faults.append(f"expected a checkpoint of algo=rm, found one of {trained}, which trains no reward head")
        if fault := _tokenizer_fault(folder, run.model_folder):
            faults.append(fault)
        text = f"{key}: {folder}: {'; '.join(faults)}"
        yield either("reward model", not faults, f"{part.label}: {source.kind} in {folder}", text)


def _tokenizer_fault(folder: Path, actors: Path) -> str:
    """Return why the actor's token ids may differ from those of a reward model; empty where they are the same."""
    if not any(folder.glob("tokenizer*")):
        return "no tokenizer; copy the files from actor_rollout_ref.model.path, whose token ids this model scores"
    for name in ("tokenizer.json", "tiktoken.model"):
        files = [path / name for path in (folder, actors) if (path / name).is_file()]
        vocabularies = [f.read_bytes() if f.suffix == ".model" else read_json_object(f).get("model") for f in files]
        if len(files) == 2 and vocabularies[0] != vocabularies[1]:
            return f"the vocabulary in {name} differs from that of {_MODEL_KEY}, whose token ids this model scores"
    return ""


def _absent_check(name: str, files: Iterable[object], key: str, must_exist: bool, expected: str) -> Check:
    absent = ", ".join(map(str, files))
    if must_exist:
        return Check(name, False, f"{key}: {absent} does not exist; expected {expected}")
    return Check(name, True, f"{absent} is not on this machine, so it was not checked ({key})", note=True)


def data_checks(run: RunSpec) -> Iterator[Check]:
    """Check that data files are parquet files; step/rows.py checks their rows.

    The trainer's node reads them. A dataset class of the user may read any files.
    """
    for key in _DATA_KEYS:
        files = run.verl.data.get(key.removeprefix("data.")) or []
        files = [files] if isinstance(files, str) else files
        if absent := [file for file in files if not os.path.isfile(file)]:
            yield _absent_check("data", absent, key, key in run.given_keys, "parquet of `data build` (docs/data.md)")
        elif has_own_dataset(run.verl.data.custom_cls.path):
            text = f"{key}: read by data.custom_cls, so rows and columns were not checked"
            yield Check("data", True, text, note=True)
        elif faults := list(filter(None, (config_error_text(_row_count, file) for file in files))):
            yield Check("data", False, f"{key}: {'; '.join(faults)}")


def _row_count(file: str) -> int:
    """Return the number of rows of a parquet file, from its footer; raise ConfigError where it cannot be read."""
    from pyarrow import ArrowException, parquet  # imported here, as most commands read no data

    try:
        return parquet.read_metadata(file).num_rows
    except (ArrowException, OSError) as error:
        fault = file_fault(Path(file)) or f"is not a complete parquet file ({error}); write it again"
        raise ConfigError(f"{file} {fault}") from error


# the user's code, which the run's controller imports, and whose reward it calls, before workers start


def user_hooks(run: RunSpec) -> Iterator[tuple[str, str]]:
    """Yield each Python file or module of the user that a run names, and the key that names it."""
    yield from ((part.path, f"{part.where}.path") for part in run.rewards if part.entry.name == "python")
    if has_own_dataset(path := run.verl.data.custom_cls.path):
        yield path, "data.custom_cls.path"
    if hook := run.recipe.worker_process_setup_hook:
        yield hook.rpartition(".")[0], "recipe.worker_process_setup_hook"
    if library := run.verl.actor_rollout_ref.model.external_lib:
        yield library, "actor_rollout_ref.model.external_lib"


def user_places(run: RunSpec) -> list[str]:
    """Return the user's files, and the folder of the model, whose code the processes of a run execute."""
    files = [where if key.endswith(".path") else source_file(where) for where, key in user_hooks(run)]
    return [str(place) for place in (*files, run.model_folder) if place]


def hook_checks(run: RunSpec) -> Iterator[Check]:
    """Check that the files and the packages that the user names exist; nothing is imported."""
    folders = [*map(str, run.trees.folders), *sys.path]
    for where, key in user_hooks(run):
        if key.endswith(".path"):
            must_exist = bool({key, key.partition("[")[0]} & run.given_keys)
            if not Path(where).is_file():
                yield _absent_check("hooks", [where], key, must_exist, "a Python file")
        elif PathFinder.find_spec(package := where.partition(".")[0], folders) is None:
            yield _absent_check("hooks", [f"package {package}"], key, run.platform != "npu", "one on PYTHONPATH")


# disk space for what the run writes


class DiskNeed(NamedTuple):
    """Describe what a run writes to one folder: bytes, a text, the keys that change it. name: run or checkpoints."""

    name: str
    folder: Path
    size_bytes: int
    text: str
    keys: str


def disk_checks(run: RunSpec, starts: bool = False) -> Iterator[Check]:
    """Check that what the run writes fits on this machine's disks; only a warning unless it `starts` here."""
    needs = disk_needs(run)
    fault = disk_fault(needs)
    yield Check("disk", not (fault and starts), fault or disk_detail(needs), note=fault is not None and not starts)


def disk_needs(run: RunSpec) -> list[DiskNeed]:
    """Return what a run will write from its start on (modelled): records, responses and checkpoints.

    Only checkpoints that come on top of the existing ones count: at most as many as are kept, and one that is being
    written before an old one is removed.
    """
    steps, trainer = total_steps(run), run.verl.trainer
    done = run.start.step or 0
    left = None if steps is None else max(steps - done, 0)
    records, step_bytes = _RECORD_BYTES
    least, text = records + step_bytes * (left or 1), "logs and records"
    if run.recipe.rollout.record and run.samples:
        size = recorded_bytes(run)
        least += size * (left or 1)
        text += f", responses of {_count_text(left, 'step')}, {size_text(size)} each (modelled)"
    needs = [DiskNeed("run", run.home, least, text, "recipe.output_root, recipe.rollout.record")]
    if trainer.save_freq > 0:
        size, kept = sum(run.checkpoint_bytes), trainer.get("max_actor_ckpt_to_keep")
        saves = None if steps is None else math.ceil(steps / trainer.save_freq) - done // trainer.save_freq
        most = max(kept + 1 - run.start.held, 1) if kept else None
        count = min((number for number in (saves, most) if number is not None), default=None)
        text = "at least 2 checkpoints" if count is None else _count_text(count, "checkpoint")
        text += f", {size_text(size)} each (modelled), including the one that is being written"
        keys = "trainer.default_local_dir, trainer.save_freq, trainer.max_actor_ckpt_to_keep"
        keys += f" (now {'null: all' if kept is None else kept})"
        folder = run_checkpoints_home(run) / (run.start.name or "START") / CHECKPOINTS  # START: not made yet
        needs.append(DiskNeed("checkpoints", folder, size * (count or 2), text, keys))
    return needs


def recorded_bytes(run: RunSpec) -> int:
    """Return the bytes of a step's responses on disk (modelled).

    Ids, masks and positions have 8 bytes each, log-probs are fp32.
    """
    data = run.verl.data
    tokens = 4 * 8 * run.longest_tokens + 4 * data.max_response_length
    return data.train_batch_size * run.verl.actor_rollout_ref.rollout.n * tokens


def _count_text(count: int | None, what: str) -> str:
    if count is None:
        return f"at least one {what}"
    return f"{count} {what}{'' if count == 1 else 's'}"


def total_steps(run: RunSpec) -> int | None:
    """Return the steps of a run: trainer.total_training_steps, or those of its epochs; None where no data files say so.

    A dataset class of the user may make more or fewer samples of the rows.
    """
    if run.verl.trainer.total_training_steps is not None or has_own_dataset(run.verl.data.custom_cls.path):
        return run.verl.trainer.total_training_steps
    files = run.verl.data.train_files or []
    try:
        rows = sum(map(_row_count, [files] if isinstance(files, str) else files))
    except ConfigError:  # the file is absent, or has a fault that the rule about data names
        return None
    return rows // run.verl.data.train_batch_size * run.verl.trainer.total_epochs or None


def disk_detail(needs: Iterable[DiskNeed]) -> str:
    """Return as text what a run writes to which folder."""
    return "; ".join(f"{size_text(need.size_bytes)} in {need.folder}: {need.text}" for need in needs)


def disk_fault(needs: Iterable[DiskNeed]) -> str | None:
    """Return what a run would write beyond the free space of its file systems; None where all fits.

    Several folders may share a file system.
    """
    by_disk: dict[int, list[DiskNeed]] = {}
    for need in needs:
        by_disk.setdefault(disk_folder(need.folder).stat().st_dev, []).append(need)
    faults = []
    for found in by_disk.values():
        free, wanted = free_bytes(found[0].folder), sum(need.size_bytes for need in found)
        if wanted > free:
            parts = "; ".join(f"{need.folder} gets {need.text}" for need in found)
            keys = ", ".join(need.keys for need in found)
            faults.append(
                f"expected {size_text(wanted)} free, found {size_text(free)}: {parts}. Free some, or change {keys}"
            )
    return "; ".join(faults) or None
