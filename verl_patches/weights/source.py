"""What a conversion reads: every tensor of a folder of weights, with the bytes of its parts, checked before it starts.

A folder is a HF model folder (bf16, fp16, fp32, or FP8 with block scales), or one of this project's (manifest.py: a
layout's shards, or a checkpoint, of which the weights are read). Only headers, indices and a few KB of each file are
read here; digests of tensors, which a folder of this project's has, are compared by who reads their bytes (convert.py).
Tensors of layers that config.json does not count (multi-token prediction) are left out. No torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import Inventory, Parameter, build_inventory, differences, read_model_shape
from verl_patches.layout.model_folder import (
    INDEX,
    QUANTIZATION,
    SCALE,
    SINGLE,
    read_config,
    read_json_object,
    require_files,
    require_name,
    safetensors_header,
    weight_files,
)
from verl_patches.reshard.region import Region, cover
from verl_patches.weights.manifest import (
    ITEM_BYTES,
    MANIFEST,
    WEIGHT,
    FileEntry,
    Manifest,
    check_headers,
    has_manifest,
    read_manifest,
)

FP8 = "F8_E4M3"
FLOATS = ("F32", "BF16", "F16")
FP8_KINDS = frozenset(  # stored in FP8 by DeepSeek: linear layers but the router and the head
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
_SAMPLE_BYTES = 4096  # of the start and the end of each file's tensors, for its identity
_SAFETENSORS_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_SHOWN = 3


class StoredPart(NamedTuple):
    """Where a region of a tensor is: `offset` is that of its first byte in `file`, and its rows follow each other.

    `sha256`: first digits of that of its bytes, None where none was recorded.
    """

    file: str
    offset: int
    region: Region
    sha256: str | None = None


class SourceTensor(NamedTuple):
    """One complete tensor: its parts cover it once, in order of their start; `scale`: the FP8 scales', if it has."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[StoredPart, ...]
    scale: StoredPart | None = None

    @property
    def stored(self) -> tuple[StoredPart, ...]:
        """Its parts, and its scales."""
        return (*self.parts, self.scale) if self.scale else self.parts

    @property
    def size_bytes(self) -> int:
        """Bytes of the values, without scales."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, eq=False)
class Source:
    """All tensors of a folder, by HF name, in the inventory's order.

    `kind`: "hf", "shards" or "checkpoint". `config`: config.json as it is. `block`: the FP8 block, None without FP8.
    `left_out`: names of tensors beyond the counted layers. `identity`: digest of what the files are, from their sizes,
    headers and a sample of their bytes, or from their sha256 where a manifest has them. `files`: that manifest's.
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

    def scale_shape(self, tensor: SourceTensor) -> tuple[int, int]:
        """Shape of the scales of a tensor in FP8."""
        return scale_shape(tensor.shape, self.block)


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """Shape of the block scales of a weight of `shape`."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def scale_name(name: str) -> str:
    """Name of the block scales of the weight `name`."""
    return name.removesuffix("weight") + SCALE


def open_source(folder: str | Path, only_plan: bool = False) -> Source:
    """Read and check what `folder` holds. With `only_plan` a HF folder may be config.json and the index alone.

    Raises ConfigError that names the file or tensor: a missing or unknown tensor, one in two files, an index that does
    not match the files, a file that is cut off, another shape or dtype, a missing scale, an unsupported config, a link
    out of the folder, a pipe or device in it.
    """
    folder = Path(folder)
    if folder.is_dir():
        require_files(folder)
    return _of_manifest(folder) if has_manifest(folder) else _of_hf(folder, only_plan)


# ---- a folder with a manifest


def _of_manifest(folder: Path) -> Source:
    manifest = read_manifest(folder)
    if manifest.kind == "hf":
        return _of_hf(folder, only_plan=False, manifest=manifest)
    check_headers(folder, manifest)
    raw, inventory = _config_of(folder)
    if unlike := differences(inventory.model, manifest.model):
        raise ConfigError(f"{folder}: config.json is not of the model in {MANIFEST}: {unlike}; copy both again")
    parts: dict[str, list[StoredPart]] = {}
    stored: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in manifest.files:
        weights = [tensor for tensor in file.tensors if tensor.role == WEIGHT]
        if not weights:
            continue
        header = _Header(folder / file.name)
        for tensor in weights:
            name, facts = tensor.region.name, (tensor.dtype, tensor.whole)
            if tensor.flat is not None or stored.setdefault(name, facts) != facts:
                raise ConfigError(
                    f"{folder / file.name}: {tensor.key}: expected weights as regions of one dtype, shape"
                )
            part = StoredPart(file.name, header.offset(tensor.key), tensor.region, tensor.sha256)
            parts.setdefault(name, []).append(part)
    _check_names(folder, inventory, parts)
    tensors = {}
    for parameter in inventory.parameters:
        name, whole = parameter.name, Region(parameter.name, 0, 0, parameter.shape[0])
        dtype, shape = stored[name]
        if shape != parameter.shape:
            raise ConfigError(f"{folder}: {name}: expected shape {parameter.shape} (config.json), found {shape}")
        held = sorted(parts[name], key=lambda part: part.region[1:3])
        missing, doubled = cover(whole, (part.region for part in held), parameter.shape)
        if missing or doubled:
            what = f"{missing[0]} is in no file" if missing else f"{doubled[0]} is in two files"
            raise ConfigError(f"{folder}: {what}; write or copy the folder again")
        tensors[name] = SourceTensor(name, dtype, parameter.shape, tuple(held))
    return Source(folder, manifest.kind, raw, inventory, tensors, None, (), _identity(manifest), manifest.files)


def _identity(manifest: Manifest) -> str:
    return _digest((file.name, file.sha256) for file in manifest.files)


# ---- a HF folder


class _Header:
    """The header of one safetensors file, its tensors' sizes checked; with the digests that its `entry` has of them."""

    def __init__(self, path: Path, entry: FileEntry | None = None):
        self.path, self.tensors = path, safetensors_header(path)
        self._sha256 = {tensor.key: tensor.sha256 for tensor in entry.tensors} if entry else {}
        sizes = [tensor["data_offsets"][1] for tensor in self.tensors.values()]
        self.data_bytes = max(sizes, default=0)
        self.start = path.stat().st_size - self.data_bytes
        reached = 0
        for name, tensor in sorted(self.tensors.items(), key=lambda item: item[1]["data_offsets"]):
            first, last = tensor["data_offsets"]
            size = math.prod(tensor["shape"]) * ITEM_BYTES.get(tensor["dtype"], 0)
            if first != reached or (size and last - first != size):
                raise ConfigError(
                    f"{path}: {name}: expected {size} bytes from {reached} on ({tensor['dtype']} {tensor['shape']}), "
                    f"found {last - first} from {first} on; download the file again"
                )
            reached = last

    def offset(self, name: str) -> int:
        """Of the tensor's first byte in the file."""
        return self.start + self.tensors[name]["data_offsets"][0]

    def part(self, name: str) -> StoredPart:
        """Where the whole tensor `name` is."""
        rows = self.tensors[name]["shape"][0]
        return StoredPart(self.path.name, self.offset(name), Region(name, 0, 0, rows), self._sha256.get(name))

    def sample(self) -> bytes:
        """Bytes of the start and the end of the tensors: other weights of the same model have others."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            first = file.read(_SAMPLE_BYTES)
            file.seek(max(self.start, self.start + self.data_bytes - _SAMPLE_BYTES))
            return first + file.read(_SAMPLE_BYTES)


def _config_of(folder: Path) -> tuple[dict[str, Any], Inventory]:
    config = read_config(folder)
    return read_json_object(folder / "config.json"), build_inventory(read_model_shape(config))


def _of_hf(folder: Path, only_plan: bool, manifest: Manifest | None = None) -> Source:
    raw, inventory = _config_of(folder)
    block = _block_of(folder, raw)
    index = _read_index(folder)
    if only_plan and index and not weight_files(folder):
        return _from_index(folder, raw, inventory, block, index)
    entries = {file.name: file for file in manifest.files} if manifest else {}
    headers = {name: _Header(folder / name, entries.get(name)) for name in _files_of(folder, index)}
    where: dict[str, str] = {}
    for file, header in headers.items():
        for name in header.tensors:
            if name in where:
                raise ConfigError(f"{folder}: {name} is in {where[name]} and in {file}; delete the wrong one")
            where[name] = file
    if index is not None:
        _check_index(folder, index, where)
    counted = {name for name in where if not _is_beyond(name, inventory.model.num_hidden_layers)}
    scales = {name for name in counted if name.endswith(SCALE)}
    _check_names(folder, inventory, counted - scales)
    tensors = {}
    for parameter in inventory.parameters:
        held = headers[where[parameter.name]]
        tensor = _whole(held, parameter)
        if tensor.dtype == FP8:
            name = scale_name(parameter.name)
            tensor = tensor._replace(scale=_scale(folder, tensor, name, headers, where, block))
            scales.discard(name)
        tensors[parameter.name] = tensor
    if scales:
        name = min(scales)
        raise ConfigError(
            f"{folder / where[name]}: {name} is the scale of no FP8 tensor; expected one of a weight in FP8"
        )
    samples = ((file, header.data_bytes, repr(header.tensors), header.sample()) for file, header in headers.items())
    identity = _identity(manifest) if manifest else _digest(samples)
    fp8 = block if any(tensor.dtype == FP8 for tensor in tensors.values()) else None
    left_out = tuple(sorted(where.keys() - counted))
    return Source(folder, "hf", raw, inventory, tensors, fp8, left_out, identity, tuple(entries.values()))


def _block_of(folder: Path, config: Mapping[str, Any]) -> tuple[int, int] | None:
    """The FP8 block of config.json; None if it names none. ConfigError for another quantization."""
    found = config.get(QUANTIZATION)
    if found is None:
        return None
    sizes = found.get("weight_block_size") if isinstance(found, Mapping) else None
    is_pair = isinstance(sizes, list) and len(sizes) == 2 and all(type(n) is int and n > 0 for n in sizes)
    if not is_pair or found.get("quant_method") != "fp8" or found.get("fmt", "e4m3") != "e4m3":
        raise ConfigError(
            f"{folder / 'config.json'}: {QUANTIZATION}: expected quant_method fp8, fmt e4m3 and weight_block_size of "
            f"two numbers, as {json.dumps(QUANTIZATION_CONFIG)}, found {found!r}; only DeepSeek's FP8 is supported"
        )
    return tuple(sizes)


def _read_index(folder: Path) -> dict[str, str] | None:
    path = folder / INDEX
    if not path.exists():
        return None
    found = read_json_object(path).get("weight_map")
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: expected weight_map, {{tensor: file}}; copy it again")
    return {tensor: require_name(file, str(path)) for tensor, file in found.items()}


def _files_of(folder: Path, index: dict[str, str] | None) -> list[str]:
    found = weight_files(folder)
    if index is None:
        if found != {SINGLE}:
            what = ", ".join(sorted(found)[:_SHOWN]) or "no safetensors files"
            raise ConfigError(f"{folder}: expected {INDEX}, or {SINGLE} alone, found {what}; download the folder again")
        return [SINGLE]
    named = set(index.values())
    if missing := sorted(named - found):
        raise ConfigError(
            f"{folder}: {len(missing)} of {len(named)} files named in {INDEX} are missing, as {missing[0]}; "
            "download them"
        )
    if unknown := sorted(found - named):
        raise ConfigError(
            f"{folder}: {unknown[0]} is not named in {INDEX}; the index is old, or the file is left over: remove one"
        )
    return sorted(named)


def _check_index(folder: Path, index: Mapping[str, str], where: Mapping[str, str]) -> None:
    for name in sorted(index.keys() | where.keys()):
        if index.get(name) != where.get(name):
            raise ConfigError(
                f"{folder}: {name}: {INDEX} says {index.get(name, 'nothing')}, it is in {where.get(name, 'no file')}; "
                "the index is not of these files: download it again"
            )


def _is_beyond(name: str, num_layers: int) -> bool:
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return match is not None and int(match[1]) >= num_layers


def _check_names(folder: Path, inventory: Inventory, found: Iterable[str]) -> None:
    expected, found = inventory.by_name.keys(), set(found)
    for what, names in (("missing", expected - found), ("not known to config.json", found - expected)):
        if names:
            shown = ", ".join(sorted(names)[:_SHOWN])
            raise ConfigError(
                f"{folder}: {len(names)} tensors are {what}, as {shown}; expected the {len(expected)} that config.json "
                "describes: config.json is of another model, or a download is incomplete"
            )


def _whole(header: _Header, parameter: Parameter) -> SourceTensor:
    found, name = header.tensors[parameter.name], parameter.name
    shape = tuple(found["shape"])
    if shape != parameter.shape:
        raise ConfigError(f"{header.path}: {name}: expected shape {parameter.shape} (config.json), found {shape}")
    allowed = (FP8, *FLOATS) if parameter.kind in FP8_KINDS else FLOATS
    if found["dtype"] not in allowed:
        raise ConfigError(f"{header.path}: {name}: expected one of {', '.join(allowed)}, found {found['dtype']}")
    return SourceTensor(name, found["dtype"], shape, (header.part(name),))


def _scale(folder: Path, tensor: SourceTensor, name: str, headers, where, block) -> StoredPart:
    if block is None:
        raise ConfigError(
            f"{folder / 'config.json'}: no {QUANTIZATION}, but {tensor.name} is stored in FP8; expected "
            f"{json.dumps(QUANTIZATION_CONFIG)}: copy the config.json of these weights"
        )
    if name not in where:
        raise ConfigError(
            f"{folder}: {name} is missing, the scales of {tensor.name}, which is stored in FP8; "
            "download the folder again"
        )
    header, expected = headers[where[name]], scale_shape(tensor.shape, block)
    found = header.tensors[name]
    if (found["dtype"], tuple(found["shape"])) != ("F32", expected):
        raise ConfigError(
            f"{header.path}: {name}: expected F32 {expected} (blocks of {block[0]} x {block[1]}), "
            f"found {found['dtype']} {tuple(found['shape'])}"
        )
    return header.part(name)


def _from_index(folder: Path, raw, inventory: Inventory, block, index: Mapping[str, str]) -> Source:
    """A source to plan with before its files are there: dtypes as config.json gives them; offsets are not known."""
    beyond = {name for name in index if _is_beyond(name, inventory.model.num_hidden_layers)}
    _check_names(folder, inventory, {name for name in index if name not in beyond and not name.endswith(SCALE)})
    tensors = {}
    for parameter in inventory.parameters:
        name, scale = parameter.name, None
        dtype = _SAFETENSORS_NAMES[parameter.dtype]
        if scale_name(name) in index and block and parameter.kind in FP8_KINDS:
            rows = scale_shape(parameter.shape, block)[0]
            dtype, scale = FP8, StoredPart(index[scale_name(name)], 0, Region(scale_name(name), 0, 0, rows))
        part = StoredPart(index[name], 0, Region(name, 0, 0, parameter.shape[0]))
        tensors[name] = SourceTensor(name, dtype, parameter.shape, (part,), scale)
    return Source(
        folder, "hf", raw, inventory, tensors, block, tuple(sorted(beyond)), _digest([repr(asdict(inventory.model))])
    )


def _digest(items: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for item in items:
        digest.update(repr(item).encode())
    return digest.hexdigest()
