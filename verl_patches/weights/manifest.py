"""The format of checkpoints of training, and of HF folders that are converted: safetensors files and a manifest.json.

A folder holds plain safetensors files, which any reader of that format opens, other files (config.json, a tokenizer),
and manifest.json. The manifest says of each file its bytes and sha256, and of each tensor of it which part of which
complete tensor it is:

    key       name in the safetensors file, unique in that file
    region    rows (or columns) [start, stop) of the complete tensor `region.name` (a HF name), of shape `whole`
    role      "weight", or what else of the same parameter, such as "main", "exp_avg", "exp_avg_sq"
    flat      None, or the first element that is stored, of the region flattened in row-major order: a shard of a
              distributed optimizer holds such a range; `shape` is then (elements,)
    columns   with `flat`: the region is flattened column by column, as MindSpeed stores stacked experts
    sha256    first 16 digits of the sha256 of the tensor's bytes, compared where the whole tensor is read. The file's
              own is that of its header and of these digests (`FileDigest`)

HF names and regions, not Megatron's parameter names: Megatron's differ between its own modules, Transformer Engine's
and MindSpeed's, join gate and up, stack experts and count layers from the stage's first. A region is the same for all
of them, and it is what the weight sync and the loader already compute for a rank (reshard/train_tensors.py), so a
folder written for one layout is read by another through `reshard/region.py` alone.

A folder is written in this order (writer.py), so that no state of it looks complete but the complete one:

    begin         manifest.json with state "writing" and the names of the files to come
    FileWriter    each file as NAME.partial, then fsync, rename; its entry in manifest.d/NAME.json the same way
    complete      manifest.json with state "complete" and all entries, by rename; manifest.d/ is removed

Several processes may write different files of one folder; one of them begins and completes it. No torch here: tensors
are bytes (reader.py reads them as tensors).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import ModelShape
from verl_patches.layout.model_folder import INDEX, read_json_object, require_name, safetensors_header
from verl_patches.reshard.region import Region
from verl_patches.shared_files import PARTIAL

DIGITS = 16  # of a tensor's digest in a manifest


class FileDigest:
    """The digests of a file, from its bytes in order, in pieces of any size.

    `head`: the header; `sizes`: bytes of its tensors, in order. Without tensors it is the plain sha256 of the bytes.
    `tensors`: digests of the tensors whose last byte was given, DIGITS hex digits each.
    """

    def __init__(self, head: bytes, sizes: Sequence[int] = ()):
        self.tensors: list[str] = []
        self._file, self._sizes, self._plain = hashlib.sha256(head), list(sizes), not sizes
        self._tensor, self._done = hashlib.sha256(), 0  # of the tensor that comes next
        self.update(memoryview(b""))  # a first tensor may be empty

    @property
    def missing(self) -> int:
        """Bytes of the tensors that were not given yet."""
        return sum(self._sizes[len(self.tensors) :]) - self._done

    def update(self, view: memoryview) -> int:
        """Add the next bytes; how many of them are more than the tensors have."""
        if self._plain:
            self._file.update(view)
            return 0
        while len(self.tensors) < len(self._sizes):
            left = self._sizes[len(self.tensors)] - self._done
            self._tensor.update(view[:left])
            if len(view) < left:
                self._done += len(view)
                return 0
            view = view[left:]
            self._file.update(self._tensor.digest())
            self.tensors.append(self._tensor.hexdigest()[:DIGITS])
            self._tensor, self._done = hashlib.sha256(), 0
        return len(view)

    def hexdigest(self) -> str:
        """The digest of the file so far."""
        return self._file.hexdigest()


class Beside:
    """Calls in a thread beside the caller's, one at a time; the error of one is raised by the next `wait` or `add`."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._last: Future | None = None

    def add(self, function: Callable[..., Any], *args: Any) -> None:
        """Wait for the call before, and begin this one; what it is given must not change until it has ended."""
        self.wait()
        self._last = self._pool.submit(function, *args)

    def wait(self) -> None:
        """Until the last call has ended."""
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown()


FORMAT, VERSION = "verl_patches weights", 2
SAVED = re.compile(r"global_step_([1-9][0-9]*)")  # the name of a checkpoint's folder
MANIFEST, ENTRIES = "manifest.json", "manifest.d"
TRACKER = "latest_checkpointed_iteration.txt"  # of Megatron's own checkpoint (megatron.py)
CHECKPOINT = "checkpoint"
CRITIC = "critic"  # folder of the critic's part of a checkpoint; the fact of that name is its manifest's identity
KINDS = ("hf", CHECKPOINT)
WEIGHT = "weight"
OF_RANK, OF_TRAINER = "rank_", "trainer."  # names of files of one rank of a checkpoint, and of its trainer, begin so
# safetensors' names of dtypes -> bytes of an element
ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
ITEM_BYTES |= {"F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1}
LARGEST_BYTES = 1 << 30  # of a manifest; that of all 256 dies has 6.7 MB
_CHUNK_BYTES = 4 << 20  # that is read at a time for a checksum
_SMALL_BYTES = 64 << 20
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", PARTIAL)


def tensors_of_rank(rank: int) -> str:
    """Name of the file with a rank's tensors."""
    return f"{OF_RANK}{rank:05d}.safetensors"


def state_of_rank(rank: int) -> str:
    """Name of the file with the rest of a rank's state."""
    return f"{OF_RANK}{rank:05d}.json"


def rank_files(world_size: int) -> list[str]:
    """Names of the files of all ranks."""
    return [name(rank) for rank in range(world_size) for name in (tensors_of_rank, state_of_rank)]


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file; the fields are explained above. At least one dimension (store a scalar as shape (1,))."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    region: Region
    whole: tuple[int, ...]
    role: str = WEIGHT
    flat: int | None = None
    sha256: str | None = None
    columns: bool = False

    def __post_init__(self):
        expected = self.region.shape_in(self.whole)
        if self.dtype not in ITEM_BYTES:
            raise ConfigError(f"{self.key}: unknown dtype {self.dtype!r}; expected one of {', '.join(ITEM_BYTES)}")
        if not 0 <= self.region.start <= self.region.stop <= self.whole[self.region.axis]:
            raise ConfigError(f"{self.key}: {self.region} is not a part of a tensor of shape {self.whole}")
        if self.flat is None:
            if self.shape != expected:
                raise ConfigError(f"{self.key}: {self.region} has shape {expected}, found {self.shape}")
        elif len(self.shape) != 1 or not 0 <= self.flat <= self.flat + self.shape[0] <= math.prod(expected):
            raise ConfigError(f"{self.key}: elements from {self.flat}, shape {self.shape}, exceed {self.region}")

    @property
    def size_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def whole_tensor(key: str, dtype: str, shape: Sequence[int], role: str = WEIGHT, name: str | None = None):
    """The entry of a complete tensor; `name`: the parameter it belongs to, if not `key`."""
    shape = tuple(shape)
    return TensorEntry(key, dtype, shape, Region(name or key, 0, 0, shape[0]), shape, role)


@dataclass(frozen=True)
class FileEntry:
    """One file of a folder: its name, bytes, sha256 (hex; explained above), and tensors in the order of their bytes."""

    name: str
    size_bytes: int
    sha256: str
    tensors: tuple[TensorEntry, ...] = ()

    def __post_init__(self):
        require_name(self.name, MANIFEST)


@dataclass(frozen=True)
class Manifest:
    """What a folder holds.

    `kind`: one of KINDS. `model`: the sizes that decide names and shapes. `layout`: text of `parse_layout`, None for a
    HF folder. `dtype`: what weights are stored in, "bf16", "fp8" or "keep". `identity`: digest of all that the folder
    is made from; only the same work resumes it. `expected`: names of all files. `facts`: further values of the writer.
    """

    kind: str
    model: ModelShape
    layout: str | None
    dtype: str
    identity: str
    expected: tuple[str, ...]
    files: tuple[FileEntry, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    complete: bool = False

    @property
    def size_bytes(self) -> int:
        """Bytes of the files that are known."""
        return sum(file.size_bytes for file in self.files)


class StoredPart(NamedTuple):
    """Where a region of a tensor is: `offset` is that of its first byte in `file`, and its rows follow each other.

    `sha256`: first digits of that of its bytes, None where none was recorded. `header`: of the record of a zip that
    `offset` counts from, None for the file. `line`: None, or the elements of each of the lines that begin at `offset`,
    one for each column of the region: its rows are the elements from `first` on of each line (a stack of experts).
    """

    file: str
    offset: int
    region: Region
    sha256: str | None = None
    header: int | None = None
    line: int | None = None
    first: int = 0


class StoredState(NamedTuple):
    """Where a flat range of a region is that the optimizer has of a parameter."""

    file: str
    offset: int
    entry: TensorEntry


class Stored(NamedTuple):
    """One part of a tensor of dtype `dtype` and shape `whole`, as a folder says; `part.region` names the tensor."""

    part: StoredPart
    dtype: str
    whole: tuple[int, ...]


def model_digest(model: ModelShape) -> str:
    """Hex digest of the sizes of a model."""
    return hashlib.sha256(json.dumps(asdict(model), sort_keys=True).encode()).hexdigest()


# ---- manifest.json


def content_digest(content: dict[str, Any]) -> str:
    """Hex digest of what manifest.json says, but for the digest itself; spaces and order of keys do not count."""
    text = json.dumps({k: v for k, v in content.items() if k != "digest"}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def to_json(manifest: Manifest) -> str:
    """The text of manifest.json, with its digest."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        "state": "complete" if manifest.complete else "writing",
        "kind": manifest.kind,
        "model": {"digest": model_digest(manifest.model), "config": asdict(manifest.model)},
        **{name: getattr(manifest, name) for name in ("layout", "dtype", "identity", "facts")},
        "expected": [] if manifest.complete else list(manifest.expected),
        "files": [file_fields(file) for file in manifest.files],
    }
    content = json.loads(json.dumps(content))  # keys as they are read back: text, in the digest's order
    return json.dumps({**content, "digest": content_digest(content)}) + "\n"


def file_fields(file: FileEntry) -> dict[str, Any]:
    """One entry as JSON has it."""
    tensors = [_tensor_fields(tensor) for tensor in file.tensors]
    return {"name": file.name, "bytes": file.size_bytes, "sha256": file.sha256, "tensors": tensors}


def _tensor_fields(tensor: TensorEntry) -> dict[str, Any]:
    """What is as for a complete weight of its own name is left out."""
    region = tensor.region
    content = {"key": tensor.key, "dtype": tensor.dtype, "shape": tensor.shape}
    if region.name != tensor.key:
        content["of"] = region.name
    if tensor.flat is not None or tensor.shape != tensor.whole:
        content |= {"whole": tensor.whole, "axis": region.axis, "start": region.start, "stop": region.stop}
    defaults = {"role": WEIGHT, "flat": None, "sha256": None, "columns": False}
    return content | {k: getattr(tensor, k) for k, usual in defaults.items() if getattr(tensor, k) != usual}


def _tensor_of(found: dict[str, Any]) -> TensorEntry:
    key, shape = found["key"], tuple(found["shape"])
    whole = tuple(found.get("whole", shape))
    region = Region(found.get("of", key), found.get("axis", 0), found.get("start", 0), found.get("stop", whole[0]))
    more = {name: found[name] for name in ("role", "flat", "sha256", "columns") if name in found}
    return TensorEntry(key, found["dtype"], shape, region, whole, **more)


def _file_of(found: dict[str, Any]) -> FileEntry:
    tensors = tuple(_tensor_of(tensor) for tensor in found["tensors"])
    return FileEntry(found["name"], found["bytes"], found["sha256"], tensors)


def has_manifest(folder: str | Path) -> bool:
    """Whether the folder is one of this format, complete or not."""
    return (Path(folder) / MANIFEST).is_file()


def small_files(folder: Path) -> list[Path]:
    """Files that are copied beside new weights: the tokenizer, generation_config.json, the model's own Python files."""
    made = {"config.json", INDEX, MANIFEST, TRACKER}
    files = (path for path in sorted(folder.iterdir()) if path.is_file() and path.stat().st_size < _SMALL_BYTES)
    own = (".", OF_RANK, OF_TRAINER)
    return [p for p in files if p.name not in made and p.suffix not in _WEIGHTS and not p.name.startswith(own)]


def read_manifest(folder: str | Path, complete: bool = True) -> Manifest:
    """The manifest of a folder; ConfigError where there is none, it is not of this format, or not complete.

    With `complete=False` a folder that is being written is read too, without its files' entries.
    """
    path = Path(folder) / MANIFEST
    try:
        there = path.is_file()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    if not there:
        raise ConfigError(f"{folder}: no {MANIFEST}; expected a checkpoint, or a folder of weights convert")
    found = read_json_object(path, LARGEST_BYTES)
    if found.get("format") != FORMAT or found.get("version") != VERSION:
        raise ConfigError(
            f"{path}: expected format {FORMAT!r}, version {VERSION}, found {found.get('format')!r}, "
            f"{found.get('version')!r}; read it with the version of the code that wrote it, or write it again"
        )
    if found.get("digest") != content_digest(found):
        raise ConfigError(
            f"{path}: its digest is {str(found.get('digest'))[:12]}, expected {content_digest(found)[:12]} of its own "
            "content: it was edited or is damaged; copy the folder again"
        )
    try:
        model = ModelShape(**{f.name: found["model"]["config"][f.name] for f in fields(ModelShape)})
        files = tuple(_file_of(file) for file in found["files"])
        expected = tuple(require_name(name, str(path)) for name in found["expected"])
        plain = {name: found[name] for name in ("kind", "layout", "dtype", "identity", "facts")}
        manifest = Manifest(**plain, model=model, files=files, expected=expected, complete=found["state"] == "complete")
        digest = found["model"]["digest"]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ConfigError(f"{path}: cannot be read ({type(error).__name__}: {error}); copy it again") from error
    if digest != model_digest(model):
        raise ConfigError(f"{path}: model.digest is {digest[:12]}, expected {model_digest(model)[:12]}; copy it again")
    _check_step(path, manifest)
    if manifest.complete:
        return replace(manifest, expected=tuple(file.name for file in files))
    if complete:
        done = len(recorded(Path(folder)))
        raise ConfigError(
            f"{folder}: not complete ({done} of {len(manifest.expected)} files written); run the command that "
            "writes it again, it goes on from here"
        )
    return manifest


def require_checkpoint(folder: str | Path) -> Manifest:
    """Return the manifest of a checkpoint of training; ConfigError for any other folder."""
    manifest = read_manifest(folder)
    if manifest.kind != CHECKPOINT or not isinstance(manifest.facts.get("step"), int):
        raise ConfigError(f"{folder} holds {manifest.kind!r}, expected a checkpoint of training and its step")
    return manifest


def _check_step(path: Path, manifest: Manifest) -> None:
    """ConfigError for a checkpoint under the name of another step."""
    step, name = manifest.facts.get("step"), SAVED.match(path.absolute().parent.name)
    if manifest.kind == CHECKPOINT and name and step != int(name[1]):
        raise ConfigError(
            f"{path}: is of step {step!r}, expected that of its folder {path.absolute().parent.name}; give the folder "
            "its own name again"
        )


def holds_critic_alone(manifest: Manifest) -> bool:
    """Whether this is a checkpoint of a run that trained a value model alone: all its weights are in critic/."""
    roles = {tensor.role for file in manifest.files for tensor in file.tensors}
    return manifest.kind == CHECKPOINT and CRITIC in manifest.facts and WEIGHT not in roles


def recorded(folder: Path) -> list[str]:
    """Names of the files that a folder which is being written has entries of."""
    return sorted(path.name.removesuffix(".json") for path in (folder / ENTRIES).glob("*.json"))


def read_record(folder: Path, name: str) -> FileEntry:
    """The entry of one of them."""
    return _file_of(read_json_object(folder / ENTRIES / f"{name}.json"))


# ---- bytes of a file


def in_data_order(tensors: Sequence[TensorEntry]) -> list[TensorEntry]:
    """`tensors` with the largest elements first, in which order every tensor of a file is aligned."""
    return sorted(tensors, key=lambda tensor: -ITEM_BYTES[tensor.dtype])


def header_of(tensors: Sequence[TensorEntry], where: str) -> bytes:
    """The head of a safetensors file: length, JSON, spaces up to 8 bytes; empty without tensors.

    ConfigError for doubled or unaligned ones.
    """
    if not tensors:
        return b""
    found, offset = {}, 0
    for tensor in tensors:
        if tensor.key in found:
            raise ConfigError(f"{where}: tensor {tensor.key!r} is given twice")
        if offset % ITEM_BYTES[tensor.dtype]:
            raise ConfigError(f"{where}: {tensor.key!r} ({tensor.dtype}) would start at byte {offset}: not aligned")
        stop = offset + tensor.size_bytes
        found[tensor.key] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps({"__metadata__": {"format": "pt"}, **found}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


# ---- verifying


@dataclass(frozen=True)
class Problem:
    """One fault of a folder: in which file and tensor (empty if none), what was expected, what was found."""

    file: str
    tensor: str
    expected: str
    found: str

    def __str__(self) -> str:
        where = f"{self.file}, {self.tensor}" if self.tensor else self.file
        return f"{where}: expected {self.expected}, found {self.found}"


def file_problems(folder: str | Path, entry: FileEntry, progress: Callable[[int], None] = lambda _: None):
    """The faults of one file against its entry, as a list of Problem; reads all of it. `progress`: bytes read."""
    path = Path(folder) / entry.name
    if not path.is_file():
        return [Problem(entry.name, "", f"a file of {entry.size_bytes} bytes", "no file")]
    if (size := path.stat().st_size) != entry.size_bytes:
        return [Problem(entry.name, "", f"{entry.size_bytes} bytes", f"{size} bytes")]
    head, sizes = header_of(entry.tensors, entry.name), [tensor.size_bytes for tensor in entry.tensors]
    with path.open("rb", buffering=0) as file:
        if file.read(len(head)) != head:
            return [Problem(entry.name, "", "the header that was written", "another header")]
        progress(len(head))
        digest, buffer = FileDigest(head, sizes), memoryview(bytearray(min(size, _CHUNK_BYTES)))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            progress(count)
    found = [
        Problem(entry.name, tensor.key, f"sha256 {tensor.sha256}", f"sha256 {seen}")
        for tensor, seen in zip(entry.tensors, digest.tensors, strict=False)  # fewer of a file that was cut meanwhile
        if tensor.sha256 != seen
    ]
    if digest.hexdigest() != entry.sha256:
        found.append(Problem(entry.name, "", f"sha256 {entry.sha256}", f"sha256 {digest.hexdigest()}"))
    return found


def folder_problems(folder: str | Path, manifest: Manifest, progress: Callable[[int], None] = lambda _: None):
    """All faults of a complete folder, as a list of Problem: damaged or missing files, and files nobody recorded."""
    found = [p for entry in manifest.files for p in file_problems(folder, entry, progress)]
    known = {entry.name for entry in manifest.files} | {MANIFEST}
    for path in sorted(Path(folder).iterdir()):
        if path.name not in known and (path.suffix == ".safetensors" or path.name.endswith(PARTIAL)):
            found.append(Problem(path.name, "", "only files of the manifest", "a file that it does not name"))
    return found


def check_headers(folder: str | Path, manifest: Manifest) -> None:
    """ConfigError unless every safetensors file is there, whole, and has the tensors of the manifest; reads headers."""
    for entry in manifest.files:
        if not entry.tensors:
            continue
        header = safetensors_header(Path(folder) / entry.name)
        expected = {t.key: (t.dtype, list(t.shape)) for t in entry.tensors}
        found = {key: (tensor["dtype"], tensor["shape"]) for key, tensor in header.items()}
        for key in sorted(expected.keys() | found.keys()):
            if expected.get(key) != found.get(key):
                raise ConfigError(
                    f"{Path(folder) / entry.name}: {key}: expected {expected.get(key, 'no such tensor')} (manifest), "
                    f"found {found.get(key, 'no such tensor')}; run `weights verify`, then copy the file again"
                )
