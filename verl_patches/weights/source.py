"""Find and check every tensor of a folder of weights, with the places of its parts, before the weights are read.

A folder is a HF model folder (bf16, fp16, fp32, or FP8 with block scales), Megatron's own checkpoint (megatron.py), or
a checkpoint of training (manifest.py), which has states of the optimizer too. Only headers, indices and a few KB of
each file are read here; a manifest's digests of tensors are compared where the bytes are read (reader.py). Tensors of
layers that config.json does not count (multi-token prediction) are left out. A folder with `score.weight` [1, H] is of
a value model, which has it in place of lm_head.weight. torch is imported for Megatron's checkpoints only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import (
    SCORE,
    SCORE_BIAS,
    Inventory,
    build_inventory,
    read_model_shape,
    size_differences,
)
from verl_patches.layout.model_folder import (
    INDEX,
    QUANTIZATION,
    SCALE_SUFFIX,
    SINGLE_FILE,
    read_config,
    read_json_object,
    read_stored_config,
    require_whole_folder,
    safetensors_header,
    weight_files,
)
from verl_patches.reshard.region import Region, cover
from verl_patches.weights.manifest import (
    CRITIC,
    ENTRIES_FOLDER,
    MANIFEST,
    RANK_PREFIX,
    TRACKER,
    WEIGHT_ROLE,
    FileEntry,
    Manifest,
    StoredPart,
    StoredState,
    TensorPart,
    build_header,
    has_manifest,
    holds_critic_alone,
    read_manifest,
    require_file,
)
from verl_patches.weights.megatron import read_folder

FP8 = "F8_E4M3"
FLOAT_DTYPES = ("F32", "BF16", "F16")
FP8_KINDS = frozenset(  # stored in FP8 by DeepSeek: linear layers except the router and the head
    {"q_proj", "q_a_proj", "q_b_proj", "kv_a_proj", "kv_b_proj", "o_proj"}
    | {
        f"{part}_{piece}"
        for part in ("dense_mlp", "shared_expert", "routed_expert")
        for piece in ("gate", "up", "down")
    }
)
SAFETENSORS_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_SHOWN_NAMES = 3


class SourceTensor(NamedTuple):
    """Describe one complete tensor: its parts cover it once, in order of their start; `scale`: its FP8 scales."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[StoredPart, ...]
    scale: StoredPart | None = None


@dataclass(frozen=True, eq=False)
class Source:
    """Hold all tensors of a folder, by HF name, in the inventory's order.

    `kind`: "hf", "megatron" or "checkpoint". `config`: read_stored_config's. `block`: the FP8 block, None without FP8.
    `left_out`: names of tensors beyond the counted layers, and of rotary frequencies. `files`: the manifest's.
    `states`: those of the optimizer, by role and HF name.
    """

    folder: Path
    kind: str
    config: dict[str, Any]
    inventory: Inventory
    tensors: dict[str, SourceTensor]
    block: tuple[int, int] | None
    left_out: tuple[str, ...]
    files: tuple[FileEntry, ...] = ()
    states: dict[tuple[str, str], list[StoredState]] = field(default_factory=dict)

    def identity(self) -> list[Any]:
        """Return what tells this folder from another and from its former content: its files' sizes and times."""
        names = sorted({part.file for tensor in self.tensors.values() for part in tensor.parts})
        found = [(self.folder / name).stat() for name in names]
        return [str(self.folder.resolve()), [(each.st_size, each.st_mtime_ns) for each in found]]


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """Return the shape of the block scales of a weight of `shape`."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def open_source(folder: str | Path) -> Source:
    """Return the checked tensors of `folder`.

    Raises ConfigError that names the file or tensor: a missing or unknown tensor, one in two files, a file that is cut
    off, another shape or dtype, a missing scale, an unsupported config, a checkpoint whose weights are all in its
    critic/.
    """
    folder = Path(folder)
    manifest = read_manifest(folder) if has_manifest(folder) else None
    is_megatron = (folder / TRACKER).is_file()
    if is_megatron and not (folder / "config.json").exists():
        raise ConfigError(
            f"{folder}: no config.json beside {TRACKER}; copy the HF model's config.json and tokenizer to it"
        )
    if manifest is None and ((folder / ENTRIES_FOLDER).is_dir() or any(folder.glob(f"{RANK_PREFIX}*"))):
        raise ConfigError(f"{folder}: no {MANIFEST}, so this checkpoint is not complete; give another one")
    if manifest and holds_critic_alone(manifest):
        raise ConfigError(
            f"{folder}: has no actor, because its run trained a value model alone; give {folder / CRITIC} instead"
        )
    if manifest is None:
        require_whole_folder(folder)
    model = read_model_shape(read_config(folder))
    config, inventory = read_stored_config(folder), build_inventory(model)
    kind, left_out = "hf", tuple[str, ...]()
    states: dict[tuple[str, str], list[StoredState]] = {}
    if is_megatron:
        kind, (stored, left_out) = "megatron", read_folder(folder, inventory)
    elif manifest:
        if unlike := size_differences(model, manifest.model):
            raise ConfigError(f"{folder}: config.json and {MANIFEST} differ: {unlike}; copy both again")
        kind, (stored, states) = "checkpoint", _manifest_parts(folder, manifest)
    else:
        stored = [part for name in _source_files(folder) for part in _header_parts(folder / name)]
    by_name: dict[str, list[TensorPart]] = {}
    for each in stored:
        by_name.setdefault(each.part.region.name, []).append(each)
    beyond = sorted(name for name in by_name if _is_left_out(name, model.num_hidden_layers))
    for name in beyond:
        del by_name[name]
    if SCORE in by_name:
        inventory = build_inventory(model, value=True)
        if SCORE_BIAS not in by_name:  # HF's ...ForSequenceClassification has no bias
            inventory = replace(inventory, outer=tuple(each for each in inventory.outer if each.name != SCORE_BIAS))
    block = _fp8_block(folder, config)
    tensors = _source_tensors(folder, inventory, block, by_name)
    if not any(tensor.dtype == FP8 for tensor in tensors.values()):
        block = None
    files, left_out = manifest.files if manifest else (), (*left_out, *beyond)
    return Source(folder, kind, config, inventory, tensors, block, left_out, files, states)


def _source_tensors(
    folder: Path, inventory: Inventory, block: tuple[int, int] | None, stored: dict[str, list[TensorPart]]
) -> dict[str, SourceTensor]:
    """Return the inventory's tensors, each from its `stored` parts; a conflict with config.json raises ConfigError."""
    scales = {name for name in stored if name.endswith(SCALE_SUFFIX)}
    _check_names(folder, inventory, stored.keys() - scales)
    tensors = {}
    for parameter in inventory.parameters:
        dtypes = (FP8, *FLOAT_DTYPES) if parameter.kind in FP8_KINDS else FLOAT_DTYPES
        tensor = _source_tensor(folder, parameter.name, parameter.shape, dtypes, stored[parameter.name])
        if tensor.dtype == FP8:
            name = parameter.name.removesuffix("weight") + SCALE_SUFFIX
            if block is None or name not in scales:
                found = "no scales" if block else "no such key"
                raise ConfigError(
                    f"{folder}: {parameter.name} is stored in FP8; expected {name}, its scales, and {QUANTIZATION} in "
                    f"config.json, found {found}; download the folder again"
                )
            scale = _source_tensor(folder, name, scale_shape(parameter.shape, block), ("F32",), stored[name])
            tensor = tensor._replace(scale=scale.parts[0])
            scales.discard(name)
        tensors[parameter.name] = tensor
    if scales:
        file = stored[min(scales)][0].part.file
        raise ConfigError(
            f"{folder / file}: {min(scales)}: expected the scales of an FP8 weight, found no such weight; "
            "download the folder again"
        )
    return tensors


def _source_tensor(folder: Path, name: str, shape: tuple[int, ...], dtypes: Sequence[str], stored: list[TensorPart]):
    """Return the tensor of these parts; raises ConfigError unless they have a right dtype and cover `shape` once."""
    dtype = stored[0].dtype
    for each in stored:
        if (each.dtype, each.whole) != (dtype, shape) or dtype not in dtypes:
            raise ConfigError(
                f"{folder / each.part.file}: {name}: expected {', '.join(dtypes)} {shape} (config.json), "
                f"found {each.dtype} {each.whole}; use the config.json of these weights"
            )
    parts = sorted((each.part for each in stored), key=lambda part: part.region[1:3])
    missing, doubled = cover(Region(name, 0, 0, shape[0]), (part.region for part in parts), shape)
    if missing or doubled:
        what = f"{missing[0]} is in no file" if missing else f"{doubled[0]} is in two files"
        raise ConfigError(f"{folder}: {what}; write or copy the folder again")
    return SourceTensor(name, dtype, shape, tuple(parts))


# ---- stored parts, as a folder describes them


def _manifest_parts(
    folder: Path, manifest: Manifest
) -> tuple[list[TensorPart], dict[tuple[str, str], list[StoredState]]]:
    """Return the parts of weights, and the flat ranges of optimizer states."""
    weights: list[TensorPart] = []
    states: dict[tuple[str, str], list[StoredState]] = {}
    for file in (file for file in manifest.files if file.tensors):
        require_file(folder, file)
        offset = len(build_header(file.tensors, file.name))
        for tensor in file.tensors:
            if tensor.role == WEIGHT_ROLE:
                part = StoredPart(file.name, offset, tensor.region, tensor.sha256)
                weights.append(TensorPart(part, tensor.dtype, tensor.whole))
            else:
                state = StoredState(file.name, offset, tensor)
                states.setdefault((tensor.role, tensor.region.name), []).append(state)
            offset += tensor.size_bytes
    return weights, states


def _header_parts(path: Path) -> Iterator[TensorPart]:
    """Yield the tensors of a safetensors file."""
    tensors = safetensors_header(path)
    start = path.stat().st_size - max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
    for name, tensor in tensors.items():
        shape = tuple(tensor["shape"])
        part = StoredPart(path.name, start + tensor["data_offsets"][0], Region(name, 0, 0, math.prod(shape[:1])))
        yield TensorPart(part, tensor["dtype"], shape)


def _fp8_block(folder: Path, config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the FP8 block of config.json, None if it has none; another form of FP8 than DeepSeek's raises ConfigError.

    `read_config` refuses other methods.
    """
    found = config.get(QUANTIZATION)
    if found is None:
        return None
    sizes = found.get("weight_block_size") or []
    if len(sizes) != 2 or found.get("fmt", "e4m3") != "e4m3":
        raise ConfigError(
            f"{folder / 'config.json'}: {QUANTIZATION}: expected fmt e4m3 and weight_block_size of two numbers, "
            f"found {found!r}; only DeepSeek's FP8 is supported"
        )
    return sizes[0], sizes[1]


def _source_files(folder: Path) -> list[str]:
    """Return the names of the safetensors files, which are those of the index, or SINGLE_FILE alone."""
    found, named = weight_files(folder), {SINGLE_FILE}
    if (folder / INDEX).exists():
        named = {str(file) for file in (read_json_object(folder / INDEX).get("weight_map") or {}).values()}
    if found != named:
        file = min(found ^ named)
        what = "is missing" if file in named else "is not one of them: delete it if it is left over"
        raise ConfigError(
            f"{folder}: expected the files of {INDEX}, or without it {SINGLE_FILE} alone; {file} {what}, or download "
            "the folder again"
        )
    return sorted(named)


def _is_left_out(name: str, num_layers: int) -> bool:
    """Return whether a tensor is of a layer beyond the counted ones, or a table that follows from config.json.

    Moonlight's files hold the rotary frequencies of each layer.
    """
    if name.endswith(".rotary_emb.inv_freq"):
        return True
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return match is not None and int(match[1]) >= num_layers


def _check_names(folder: Path, inventory: Inventory, found: Iterable[str]) -> None:
    expected, found = inventory.by_name.keys(), set(found)
    for what, names in (("missing", expected - found), ("not in config.json's model", found - expected)):
        if names:
            shown = ", ".join(sorted(names)[:_SHOWN_NAMES])
            raise ConfigError(
                f"{folder}: {len(names)} tensors are {what}, such as {shown}; expected the {len(expected)} that "
                "config.json describes: config.json is of another model, or a download is incomplete"
            )
