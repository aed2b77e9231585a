"""Define the format of training checkpoints: safetensors files and a manifest.json.

A folder holds plain safetensors files, which any reader of that format opens, other files (config.json, a tokenizer),
and manifest.json. The manifest has the bytes of each file, the sha256 of a file without tensors, and for each tensor of
a file the part of the complete tensor that it is:

    key       name in the safetensors file, unique in that file
    region    rows (or columns) [start, stop) of the complete tensor `region.name` (a HF name), of shape `whole`
    role      "weight", or a state of the same parameter, such as "main", "exp_avg", "exp_avg_sq"
    flat      None, or the first element that is stored, of the region flattened in row-major order: a shard of a
              distributed optimizer holds such a range; `shape` is then (elements,)
    columns   with `flat`: the region is flattened column by column, as MindSpeed stores stacked experts
    sha256    first 16 digits of the sha256 of the tensor's bytes, compared where the whole tensor is read

The manifest has HF names and regions instead of Megatron's parameter names, which differ between Megatron's own
modules, Transformer Engine and MindSpeed, join gate and up, stack experts and count layers from the stage's first. A
region is the same for all of them, and the weight sync and the loader compute it for a rank anyway
(reshard/train_tensors.py), so a folder written for one layout is read by another through `reshard/region.py` alone.

Several processes write the files of a folder, each as NAME.partial, then fsync, rename; its entry goes to
manifest.d/NAME.json. One process writes manifest.json by rename once all entries are there, and removes manifest.d/
(writer.py): a folder with a manifest is complete. This file does not import torch; reader.py reads tensors.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import ModelShape
from verl_patches.layout.model_folder import INDEX, read_json_object
from verl_patches.reshard.region import Region
from verl_patches.shared_files import PARTIAL

DIGEST_DIGITS = 16  # hex digits of a tensor's digest in a manifest
FORMAT, VERSION, READABLE_VERSIONS = "verl_patches weights", 3, (2, 3)  # version 2 has additional fields
CHECKPOINT_NAME = re.compile(r"global_step_([1-9][0-9]*)")  # the name of a checkpoint's folder
MANIFEST, ENTRIES_FOLDER = "manifest.json", "manifest.d"
TRACKER, LAYOUT_FILE = "latest_checkpointed_iteration.txt", "layout.txt"  # of Megatron's own checkpoint (megatron.py)
CRITIC = "critic"  # folder of the critic's part of a checkpoint, and the fact that holds the identity of its manifest
WEIGHT_ROLE = "weight"
RANK_PREFIX, TRAINER_PREFIX = "rank_", "trainer."  # begin the names of a rank's files and of the trainer's
# safetensors' names of dtypes -> bytes of an element
ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
ITEM_BYTES |= {"F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1}
_CHUNK_BYTES = 4 << 20  # read at a time for a checksum
_SMALL_BYTES = 64 << 20
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", PARTIAL)


def rank_tensor_file(rank: int) -> str:
    """Return the name of the file with a rank's tensors."""
    return f"{RANK_PREFIX}{rank:05d}.safetensors"


def rank_state_file(rank: int) -> str:
    """Return the name of the file with the rest of a rank's state."""
    return f"{RANK_PREFIX}{rank:05d}.json"


def rank_file_names(world_size: int) -> list[str]:
    """Return the names of the files of all ranks."""
    return [name(rank) for rank in range(world_size) for name in (rank_tensor_file, rank_state_file)]


@dataclass(frozen=True)
class TensorEntry:
    """Describe one tensor of a file; this module's docstring explains the fields.

    A tensor has at least one dimension: a scalar is stored with shape (1,).
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    region: Region
    whole: tuple[int, ...]
    role: str = WEIGHT_ROLE
    flat: int | None = None
    sha256: str | None = None
    columns: bool = False

    @property
    def size_bytes(self) -> int:
        """Return the bytes of the tensor in the file."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def first_element(self) -> int:
        """Return the number of the first element of a flat range; all but weights are stored as such ranges."""
        assert self.flat is not None, self.key
        return self.flat


def whole_entry(key: str, dtype: str, shape: Sequence[int], role: str = WEIGHT_ROLE, name: str | None = None):
    """Return the entry of a complete tensor; `name`: the parameter it belongs to, if not `key`."""
    shape = tuple(shape)
    return TensorEntry(key, dtype, shape, Region(name or key, 0, 0, shape[0]), shape, role)


@dataclass(frozen=True)
class FileEntry:
    """Describe one file: name, bytes, and its tensors in the order of their bytes, or the sha256 (hex) without them."""

    name: str
    size_bytes: int
    sha256: str | None = None
    tensors: tuple[TensorEntry, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """Describe the contents of a folder.

    `model`: the sizes that decide names and shapes. `layout`: text of `parse_layout`. `dtype`: that of stored weights.
    `identity`: unique for each checkpoint. `file_names`: those of all files. `facts`: further values of the writer,
    with the `step`.
    """

    model: ModelShape
    layout: str
    dtype: str
    identity: str
    file_names: tuple[str, ...]
    files: tuple[FileEntry, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Return the bytes of the files that have an entry."""
        return sum(file.size_bytes for file in self.files)


class StoredPart(NamedTuple):
    """Locate a region of a tensor: `offset` is that of its first byte in `file`, and its rows follow each other.

    `sha256`: first digits of that of its bytes, None where none was recorded. `column_stride`: None, or in a stack of
    experts, whose regions are stored column by column, the number of elements from one stored column to the next;
    `offset` is then that of the first stored column, and the region's rows begin at element `column_start` of each.
    """

    file: str
    offset: int
    region: Region
    sha256: str | None = None
    column_stride: int | None = None
    column_start: int = 0


class StoredState(NamedTuple):
    """Locate a flat range of a region of an optimizer's state."""

    file: str
    offset: int
    entry: TensorEntry


class TensorPart(NamedTuple):
    """Describe a stored part of a tensor of dtype `dtype` and shape `whole`; `part.region` names the tensor."""

    part: StoredPart
    dtype: str
    whole: tuple[int, ...]


# ---- manifest.json


def content_digest(content: dict[str, Any]) -> str:
    """Return the hex digest of manifest.json without its digest; spaces and the order of keys do not count."""
    text = json.dumps({k: v for k, v in content.items() if k != "digest"}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def to_json(manifest: Manifest) -> str:
    """Return the text of manifest.json, with its digest."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        "model": {"config": asdict(manifest.model)},
        **{name: getattr(manifest, name) for name in ("layout", "dtype", "identity", "facts")},
        "files": [file_fields(file) for file in manifest.files],
    }
    content = json.loads(json.dumps(content))  # as it will be read back, with keys as text, for the digest
    return json.dumps({**content, "digest": content_digest(content)}) + "\n"


def file_fields(file: FileEntry) -> dict[str, Any]:
    """Return one entry as a dict for JSON."""
    tensors = [_tensor_fields(tensor) for tensor in file.tensors]
    return {"name": file.name, "bytes": file.size_bytes, "sha256": file.sha256, "tensors": tensors}


def _tensor_fields(tensor: TensorEntry) -> dict[str, Any]:
    """Return a tensor's entry for JSON without the values that a complete weight of that name has."""
    region = tensor.region
    content: dict[str, Any] = {"key": tensor.key, "dtype": tensor.dtype, "shape": tensor.shape}
    if region.name != tensor.key:
        content["of"] = region.name
    if tensor.flat is not None or tensor.shape != tensor.whole:
        content |= {"whole": tensor.whole, "axis": region.axis, "start": region.start, "stop": region.stop}
    defaults = {"role": WEIGHT_ROLE, "flat": None, "sha256": None, "columns": False}
    return content | {k: getattr(tensor, k) for k, usual in defaults.items() if getattr(tensor, k) != usual}


def _parse_tensor(found: dict[str, Any]) -> TensorEntry:
    key, shape = found["key"], tuple(found["shape"])
    whole = tuple(found.get("whole", shape))
    region = Region(found.get("of", key), found.get("axis", 0), found.get("start", 0), found.get("stop", whole[0]))
    more = {name: found[name] for name in ("role", "flat", "sha256", "columns") if name in found}
    return TensorEntry(key, found["dtype"], shape, region, whole, **more)


def _parse_file(found: dict[str, Any]) -> FileEntry:
    tensors = tuple(_parse_tensor(tensor) for tensor in found["tensors"])
    return FileEntry(found["name"], found["bytes"], found["sha256"], tensors)


def has_manifest(folder: str | Path) -> bool:
    """Return whether the folder is a complete checkpoint."""
    return (Path(folder) / MANIFEST).is_file()


def small_files(folder: Path) -> list[Path]:
    """Return files to copy beside new weights: tokenizer, generation_config.json, the model's own Python files."""
    made = {"config.json", INDEX, MANIFEST, TRACKER, LAYOUT_FILE}
    files = (path for path in sorted(folder.iterdir()) if path.is_file() and path.stat().st_size < _SMALL_BYTES)
    own = (".", RANK_PREFIX, TRAINER_PREFIX)
    return [p for p in files if p.name not in made and p.suffix not in _WEIGHT_SUFFIXES and not p.name.startswith(own)]


def read_manifest(folder: str | Path) -> Manifest:
    """Return the manifest of a folder; raises ConfigError where it is absent, damaged, or of another format."""
    path = Path(folder) / MANIFEST
    if not path.exists():
        raise ConfigError(f"{folder}: expected a training checkpoint with {MANIFEST}, found none; give a complete one")
    found = read_json_object(path)
    if found.get("format") != FORMAT or found.get("version") not in READABLE_VERSIONS:
        raise ConfigError(
            f"{path}: expected format {FORMAT!r}, version {VERSION}, found {found.get('format')!r}, version "
            f"{found.get('version')!r}; read it with the version of this repository that wrote it, or save it again"
        )
    if found.get("digest") != content_digest(found):
        raise ConfigError(
            f"{path}: expected digest {content_digest(found)[:12]} for its content, found "
            f"{str(found.get('digest'))[:12]}: it was edited or is damaged; copy the folder again"
        )
    try:
        model = ModelShape(**{f.name: found["model"]["config"][f.name] for f in fields(ModelShape)})
        files = tuple(_parse_file(file) for file in found["files"])
        plain = {name: found[name] for name in ("layout", "dtype", "identity", "facts")}
    except KeyError as error:
        raise ConfigError(
            f"{path}: expected the key {error} of a training checkpoint, found none; if the folder is a HF model, "
            f"delete {MANIFEST}, which an earlier version of this repository wrote"
        ) from error
    return Manifest(**plain, model=model, files=files, file_names=tuple(file.name for file in files))


def holds_critic_alone(manifest: Manifest) -> bool:
    """Return whether a checkpoint is of a run that trained a value model alone, with all weights in critic/."""
    roles = {tensor.role for file in manifest.files for tensor in file.tensors}
    return CRITIC in manifest.facts and WEIGHT_ROLE not in roles


def read_record(folder: Path, name: str) -> FileEntry:
    """Return the entry of file `name` in a folder that is being written."""
    return _parse_file(read_json_object(folder / ENTRIES_FOLDER / f"{name}.json"))


# ---- bytes of a file


def in_data_order(tensors: Sequence[TensorEntry]) -> list[TensorEntry]:
    """Return `tensors` with the largest elements first; in this order every tensor of a file is aligned."""
    return sorted(tensors, key=lambda tensor: -ITEM_BYTES[tensor.dtype])


def build_header(tensors: Sequence[TensorEntry], where: str) -> bytes:
    """Return the header of a safetensors file: length, JSON, spaces up to 8 bytes; empty without tensors."""
    if not tensors:
        return b""
    found, offset = {}, 0
    for tensor in tensors:
        assert offset % ITEM_BYTES[tensor.dtype] == 0, f"{where}: {tensor.key} is not aligned"
        stop = offset + tensor.size_bytes
        found[tensor.key] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, stop]}
        offset = stop
    assert len(found) == len(tensors), f"{where}: two tensors have the same key"
    text = json.dumps({"__metadata__": {"format": "pt"}, **found}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


# ---- verifying


def require_file(folder: str | Path, entry: FileEntry) -> None:
    """Raise ConfigError unless the file exists, has its size, and begins with the header of its tensors."""
    path, head = Path(folder) / entry.name, build_header(entry.tensors, entry.name)
    found = f"{path.stat().st_size} bytes" if path.is_file() else "no file"
    if found != f"{entry.size_bytes} bytes":
        raise ConfigError(f"{path}: expected {entry.size_bytes} bytes ({MANIFEST}), found {found}")
    with path.open("rb") as file:
        if file.read(len(head)) != head:
            raise ConfigError(f"{path}: expected the header of the tensors in {MANIFEST}, found a different one")


def file_problems(folder: str | Path, entry: FileEntry, progress: Callable[[int], None] = lambda _: None) -> list[str]:
    """Return the faults of one file against its entry, by reading all of it; `progress` gets the bytes read."""
    try:
        require_file(folder, entry)
    except ConfigError as error:
        return [str(error)]
    path, found = Path(folder) / entry.name, []
    with path.open("rb") as file:
        size = file.seek(len(build_header(entry.tensors, entry.name)))
        progress(size)
        parts = [(f"{path}, {tensor.key}", tensor.size_bytes, tensor.sha256) for tensor in entry.tensors]
        for what, left, expected in parts or [(str(path), entry.size_bytes, entry.sha256)]:
            digest = hashlib.sha256()
            while left and (block := file.read(min(left, _CHUNK_BYTES))):
                digest.update(block)
                progress(len(block))
                left -= len(block)
            seen = digest.hexdigest()[: len(expected or "")]
            if seen != expected:
                found.append(f"{what}: expected sha256 {expected} ({MANIFEST}), found {seen}")
    return found


def folder_problems(folder: str | Path, manifest: Manifest, progress: Callable[[int], None] = lambda _: None):
    """Return all faults of a complete folder as texts: damaged or missing files, and files without an entry."""
    found = [problem for entry in manifest.files for problem in file_problems(folder, entry, progress)]
    known = {entry.name for entry in manifest.files} | {MANIFEST}
    for path in sorted(Path(folder).iterdir()):
        if path.name not in known and (path.suffix == ".safetensors" or path.name.endswith(PARTIAL)):
            found.append(f"{path}: not listed in {MANIFEST}; delete it if it is left over from another checkpoint")
    return found
