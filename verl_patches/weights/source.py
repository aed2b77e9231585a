"""Find and check every tensor of a folder of weights, with the places of its parts, before the weights are read.

A folder is a HF model folder (bf16, fp16, fp32, or FP8 with block scales), Megatron's own checkpoint (megatron.py), or
a checkpoint of training (manifest.py), which has states of the optimizer too. Only headers, indices and a few KB of
each file are read here; a manifest's digests of tensors are compared where the bytes are read (reader.py). Tensors of
layers that config.json does not count (multi-token prediction) are left out. A folder with `score.weight` [1, H] is of
a value model, which has it in place of lm_head.weight. torch is imported for Megatron's checkpoints only.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
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
    ITEM_BYTES,
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
BLOCK = (128, 128)
QUANTIZATION_CONFIG = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [*BLOCK],
}
_SAMPLE_BYTES = 4096  # read at the start and the end of each file's tensors, for its identity
SAFETENSORS_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_SHOWN_NAMES = 3


class SourceTensor(NamedTuple):
    """Describe one complete tensor: its parts cover it once, in order of their start; `scale`: its FP8 scales."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[StoredPart, ...]
    scale: StoredPart | None = None

    @property
    def size_bytes(self) -> int:
        """Return the bytes of the values, without scales."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, eq=False)
class Source:
    """Hold all tensors of a folder, by HF name, in the inventory's order.

    `kind`: "hf", "megatron" or "checkpoint". `config`: read_stored_config's. `block`: the FP8 block, None without FP8.
    `left_out`: names of tensors beyond the counted layers, and of rotary frequencies. `identity`: digest that tells
    folders apart, from the files' sizes, headers and a sample of their bytes, from CRCs of zips, or from the identity
    of a manifest. `files`: the manifest's. `layout`: text of the layout of a Megatron folder. `states`: those of the
    optimizer, by role and HF name.
    """

    folder: Path
    kind: str
    config: dict[str, Any]
    inventory: Inventory
    tensors: dict[str, SourceTensor]
    block: tuple[int, int] | None
    left_out: tuple[str, ...]
    identity: str
    files: tuple[FileEntry, ...] = ()
    layout: str | None = None
    states: dict[tuple[str, str], list[StoredState]] = field(default_factory=dict)


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """Return the shape of the block scales of a weight of `shape`."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def scale_name(name: str) -> str:
    """Return the name of the block scales of the weight `name`."""
    return name.removesuffix("weight") + SCALE_SUFFIX


def open_source(folder: str | Path, only_plan: bool = False, expert_split: str | None = None) -> Source:
    """Return the checked tensors of `folder`; with `only_plan` a HF folder may be config.json and the index alone.

    `expert_split`: recipe.train.expert_split, for a Megatron folder that does not record how it splits experts.

    Raises ConfigError that names the file or tensor: a missing or unknown tensor, one in two files, an index that does
    not match the files, a file that is cut off, another shape or dtype, a missing scale, an unsupported config, a
    checkpoint whose weights are all in its critic/.
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
    block = _fp8_block(folder, config)
    index = None if manifest or is_megatron else _read_index(folder)
    layout: str | None = None
    left_out: tuple[str, ...] = ()
    states: dict[tuple[str, str], list[StoredState]] = {}
    stored: Iterable[TensorPart]
    if is_megatron:
        found = read_folder(folder, inventory, expert_split)
        stored, identity, layout, left_out = found.parts, found.identity, str(found.layout), found.left_out
    elif manifest:
        if unlike := size_differences(model, manifest.model):
            raise ConfigError(f"{folder}: config.json and {MANIFEST} differ: {unlike}; copy both again")
        stored, states = _manifest_parts(folder, manifest)
        identity = [manifest.identity]
    elif only_plan and index and not weight_files(folder):
        stored, identity = _index_parts(index, inventory, block), [repr(asdict(model))]
    else:
        headers = [_Header(folder / name) for name in _source_files(folder, index)]
        _check_index(folder, index, headers)
        stored, identity = _header_parts(headers), [header.identity() for header in headers]
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
    tensors = _source_tensors(folder, inventory, block, by_name)
    if not any(tensor.dtype == FP8 for tensor in tensors.values()):
        block = None
    kind = "megatron" if is_megatron else "hf"
    if manifest:
        kind = "checkpoint"
    files, left_out = manifest.files if manifest else (), (*left_out, *beyond)
    return Source(folder, kind, config, inventory, tensors, block, left_out, _digest(identity), files, layout, states)


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
            name = scale_name(parameter.name)
            _check_scale(folder, parameter.name, block, name in scales)
            assert block is not None  # _check_scale refuses None
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


def _header_parts(headers: Iterable[_Header]) -> Iterator[TensorPart]:
    for header in headers:
        for name, tensor in header.tensors.items():
            shape = tuple(tensor["shape"])
            region = Region(name, 0, 0, math.prod(shape[:1]))
            yield TensorPart(StoredPart(header.path.name, header.offset(name), region), tensor["dtype"], shape)


def _index_parts(index: Mapping[str, str], inventory: Inventory, block: tuple[int, int] | None) -> Iterator[TensorPart]:
    """Yield parts to plan with before the files are there: dtypes and shapes by config.json, offsets unknown."""
    for name, file in index.items():
        parameter = inventory.by_name.get(name.replace(SCALE_SUFFIX, "weight"))
        dtype, shape = ("F32", (1,)) if parameter is None else (SAFETENSORS_NAMES[parameter.dtype], parameter.shape)
        if block and parameter is not None and scale_name(parameter.name) in index and parameter.kind in FP8_KINDS:
            is_scale = name.endswith(SCALE_SUFFIX)
            dtype, shape = ("F32", scale_shape(shape, block)) if is_scale else (FP8, shape)
        yield TensorPart(StoredPart(file, 0, Region(name, 0, 0, shape[0])), dtype, shape)


class _Header:
    """Hold the header of one safetensors file."""

    def __init__(self, path: Path):
        self.path, self.tensors = path, safetensors_header(path)
        self.data_bytes = max((tensor["data_offsets"][1] for tensor in self.tensors.values()), default=0)
        self.start = path.stat().st_size - self.data_bytes

    def offset(self, name: str) -> int:
        """Return the offset of the tensor's first byte in the file."""
        return self.start + self.tensors[name]["data_offsets"][0]

    def identity(self) -> Any:
        """Return header and first and last bytes of the tensors, which differ for other weights of the same model."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            first = file.read(_SAMPLE_BYTES)
            file.seek(max(self.start, self.start + self.data_bytes - _SAMPLE_BYTES))
            return self.path.name, self.data_bytes, repr(self.tensors), first + file.read(_SAMPLE_BYTES)


def _fp8_block(folder: Path, config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the FP8 block of config.json, None if it has none; another form of FP8 than DeepSeek's raises ConfigError.

    `read_config` refuses other methods.
    """
    found = config.get(QUANTIZATION)
    if found is None:
        return None
    sizes: Any = found.get("weight_block_size") if isinstance(found, Mapping) else None
    is_pair = isinstance(sizes, list) and len(sizes) == 2 and all(type(n) is int and n > 0 for n in sizes)
    if not is_pair or found.get("fmt", "e4m3") != "e4m3":
        raise ConfigError(
            f"{folder / 'config.json'}: {QUANTIZATION}: expected fmt e4m3 and weight_block_size of two numbers, "
            f"as {json.dumps(QUANTIZATION_CONFIG)}, found {found!r}; only DeepSeek's FP8 is supported"
        )
    return tuple(sizes)


def _read_index(folder: Path) -> dict[str, str] | None:
    path = folder / INDEX
    if not path.exists():
        return None
    found = read_json_object(path).get("weight_map")
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: expected key weight_map, {{tensor: file}}, found none; copy the file again")
    return {tensor: str(file) for tensor, file in found.items()}


def _source_files(folder: Path, index: dict[str, str] | None) -> list[str]:
    found = weight_files(folder)
    if index is None:
        if found != {SINGLE_FILE}:
            what = ", ".join(sorted(found)[:_SHOWN_NAMES]) or "no safetensors files"
            raise ConfigError(
                f"{folder}: expected {INDEX}, or {SINGLE_FILE} alone, found {what}; download the folder again"
            )
        return [SINGLE_FILE]
    named = set(index.values())
    if missing := sorted(named - found):
        raise ConfigError(
            f"{folder}: {len(missing)} of {len(named)} files named in {INDEX} are missing, such as {missing[0]}; "
            "download them"
        )
    if unknown := sorted(found - named):
        raise ConfigError(
            f"{folder}: {unknown[0]} is not named in {INDEX}; delete the file if it is left over, or download the index"
        )
    return sorted(named)


def _check_index(folder: Path, index: Mapping[str, str] | None, headers: Iterable[_Header]) -> None:
    """Raise ConfigError for a tensor that is in two files, or in a file that the index does not give."""
    where: dict[str, str] = {}
    for header in headers:
        for name in header.tensors:
            if name in where:
                raise ConfigError(
                    f"{folder}: {name} is in {where[name]} and in {header.path.name}; delete the wrong one"
                )
            where[name] = header.path.name
    if index is None:
        return
    for name in sorted(index.keys() | where.keys()):
        if index.get(name) != where.get(name):
            raise ConfigError(
                f"{folder}: {name}: expected in {index.get(name, 'no file')} ({INDEX}), found in "
                f"{where.get(name, 'no file')}; the index belongs to other files: download it again"
            )


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


def _check_scale(folder: Path, name: str, block: tuple[int, int] | None, is_there: bool) -> None:
    """Raise ConfigError unless the block of the FP8 weight `name` is known, and its scales are there."""
    if block is None:
        raise ConfigError(
            f"{folder / 'config.json'}: no {QUANTIZATION}, but {name} is stored in FP8; expected "
            f"{json.dumps(QUANTIZATION_CONFIG)}: copy the config.json of these weights"
        )
    if not is_there:
        raise ConfigError(
            f"{folder}: expected {scale_name(name)}, the scales of {name}, which is stored in FP8, found none; "
            "download the folder again"
        )


def _digest(items: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for item in items:
        digest.update(repr(item).encode())
    return digest.hexdigest()
