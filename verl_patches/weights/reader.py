"""Read tensors of a folder of weights; every file of tensors is read here, whatever wrote it.

RegionReader, BlockReader    any folder (source.py), by pread: regions into live parameters, complete tensors in blocks
ShardReader                  a folder with a manifest, by safetensors' memory maps: regions, and single entries
CheckpointReader             the same, with the flat ranges of an optimizer's states

pread, because host memory then does not depend on tensors or files, and a file that is cut off meanwhile is an error
with a name, not a bus error: a RegionReader has one buffer of BAND_BYTES, and for FP8 twice that for the decoded band
(65 MB measured, with tables; a row of more bytes than the buffer makes it longer). Memory maps for states, which a rank
reads in full and once, and which are 6/7 of a checkpoint: a copy through a buffer made that slower.

FP8 is decoded to bf16, as DeepSeek's own converter does, so a folder in FP8 and its conversion to bf16 give equal
parameters in any dtype.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from verl_patches.errors import ConfigError, RecipeError
from verl_patches.reshard.region import Region, cover, overlap, part_of
from verl_patches.weights import fp8
from verl_patches.weights.manifest import (
    CHECKPOINT,
    DIGITS,
    ITEM_BYTES,
    MANIFEST,
    WEIGHT,
    Beside,
    Manifest,
    TensorEntry,
    check_headers,
    read_manifest,
    state_of_rank,
)
from verl_patches.weights.plan import block_rows
from verl_patches.weights.source import BLOCK, Source, SourceTensor, StoredPart

BAND_BYTES = 16 << 20  # of stored values that are read at once
_LEAST_BYTES = 4096  # columns of fewer bytes a row are not read one by one: whole rows are
COPY_AGAIN = (
    "the source is damaged: copy the file again, or take an older checkpoint; `weights verify` names all faults"
)
TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}  # torch's dtype -> safetensors' name


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor as `FileWriter.write` takes them; a view if it is contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())


def require_finite(value: torch.Tensor, name: str) -> None:
    """RecipeError where a floating tensor holds NaN or infinity. A sum is finite only if all is, and costs one read."""
    if value.sum(dtype=torch.float32).isfinite() or value.isfinite().all():  # the sum alone may be too large
        return
    raise RecipeError(
        f"{name}: holds NaN or infinity: the weights are damaged, or the run that wrote them was; download the folder "
        "again, or take an older checkpoint"
    )


# ---- any folder, by pread


class SourceFiles:
    """Files of a source, each opened once, read with pread; a context manager. RecipeError where one is cut off.

    pread and no memory map: a process holds what it asked for whatever the files' size, and a file that is cut off
    meanwhile is an error with a name, not a bus error. `sequential`: they are read from start to end.
    """

    def __init__(self, folder: Path, sequential: bool = False):
        self.folder, self.sequential = folder, sequential
        self._handles: dict[str, int] = {}

    def __enter__(self) -> SourceFiles:
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()

    def read_into(self, view: memoryview, part: StoredPart, offset: int) -> None:
        """Fill `view` with the bytes from `offset` on of the file that has `part`."""
        done = 0
        while done < len(view):
            count = os.preadv(self._handle(part.file), [view[done:]], offset + done)
            if not count:
                raise RecipeError(
                    f"{self.folder / part.file}: ends inside {part.region.name}: it has changed since the start; check "
                    "the file and start again"
                )
            done += count

    def _handle(self, file: str) -> int:
        if file not in self._handles:
            handle = self._handles[file] = os.open(self.folder / file, os.O_RDONLY)
            if self.sequential:
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return self._handles[file]


class _Window(NamedTuple):
    """Rows and columns of one stored part that belong to a region; `read`: the columns that are read for them.

    `width`: columns of the stored part. `shared`: the same values as a region of the complete tensor.
    """

    part: StoredPart
    rows: range
    columns: range
    read: range
    width: int
    shared: Region


class RegionReader:
    """Regions of the tensors of `source`; a context manager: files stay open inside.

    `progress` gets the bytes of each read. RecipeError where a file has become shorter since `source` was opened, and
    for NaN, infinity and scales of such values.
    """

    def __init__(self, source: Source, progress: Callable[[int], None] = lambda _: None):
        self.source, self.progress = source, progress
        self._files = SourceFiles(source.folder)
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> RegionReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self._files.__exit__(*exc)
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def read_bytes(self, region: Region) -> int:
        """Bytes that `copy` reads for the region, scales included."""
        tensor = self.source.tensors[region.name]
        scales = math.prod(self.source.scale_shape(tensor)) * ITEM_BYTES["F32"] if tensor.scale else 0
        windows = self._windows(tensor, region)
        return scales + sum(len(w.rows) * len(w.read) for w in windows) * ITEM_BYTES[tensor.dtype]

    def position(self, region: Region) -> tuple[str, int]:
        """(file, offset) of the first part of the region: in this order files are read from start to end."""
        tensor = self.source.tensors[region.name]
        window = next(self._windows(tensor, region))
        return window.part.file, window.part.offset + window.rows.start * window.width * ITEM_BYTES[tensor.dtype]

    def copy(self, region: Region, target: torch.Tensor) -> None:
        """Fill `target`, which has the region's shape, in its own dtype on its own device; it may be strided."""
        tensor = self.source.tensors[region.name]
        scales = self._scales(tensor)
        for window in self._windows(tensor, region):
            out = part_of(target, region, window.shared, tensor.shape)
            for rows in self._bands(tensor, window):
                value = self._read(window, rows, TORCH_DTYPES[tensor.dtype])
                if scales is not None:
                    height, width = self.source.block
                    of_band = scales[rows.start // height :, window.read.start // width :]
                    value = fp8.decode(value, of_band, self.source.block, torch.bfloat16, tensor.name)
                else:
                    require_finite(value, tensor.name)
                first = window.columns.start - window.read.start
                value = value[:, first : first + len(window.columns)]
                at = out.narrow(0, rows.start - window.rows.start, len(rows))
                at.copy_(value.reshape(at.shape))

    def _windows(self, tensor: SourceTensor, region: Region) -> Iterator[_Window]:
        item = ITEM_BYTES[tensor.dtype]
        for part in tensor.parts:
            shared = overlap(region, part.region, tensor.shape)
            if shared is None:
                continue
            stored = part.region.shape_in(tensor.shape)
            width, start = math.prod(stored[1:]), part.region.along(shared.axis, tensor.shape).start
            wanted = range(shared.start - start, shared.stop - start)
            rows, columns = (wanted, range(width)) if shared.axis == 0 else (range(stored[0]), wanted)
            first = columns.start - (columns.start % self.source.block[1] if tensor.scale else 0)
            read = range(first, columns.stop)
            if len(read) * item < _LEAST_BYTES:
                read = range(width)
            yield _Window(part, rows, columns, read, width, shared)

    def _bands(self, tensor: SourceTensor, window: _Window) -> Iterator[range]:
        """The rows of a window in bands; for FP8 each begins with a block, or lies in one."""
        step = max(1, BAND_BYTES // (len(window.read) * ITEM_BYTES[tensor.dtype]))
        height = self.source.block[0] if tensor.scale else 1
        step = max(height, step // height * height)
        start = window.rows.start
        while start < window.rows.stop:
            stop = start + height - start % height if start % height else start + step
            yield range(start, min(stop, window.rows.stop))
            start = stop

    def _scales(self, tensor: SourceTensor) -> torch.Tensor | None:
        if tensor.scale is None:
            return None
        rows, width = self.source.scale_shape(tensor)
        window = _Window(tensor.scale, range(rows), range(width), range(width), width, tensor.scale.region)
        scales = self._read(window, window.rows, torch.float32).clone()
        fp8.require_scales(scales, tensor.scale.region.name)
        return scales

    def _read(self, window: _Window, rows: range, dtype: torch.dtype) -> torch.Tensor:
        """[rows, columns that are read] as stored: a view of the buffer, valid until the next read."""
        row, length = window.width * dtype.itemsize, len(window.read) * dtype.itemsize
        size = len(rows) * length
        if self._buffer.numel() < size:
            self._buffer = torch.empty(max(size, BAND_BYTES), dtype=torch.uint8)
        out, at = self._buffer[:size], window.part.offset + rows.start * row + window.read.start * dtype.itemsize
        view = tensor_bytes(out)
        if length == row:
            self._files.read_into(view, window.part, at)
        else:
            for number in range(len(rows)):
                self._files.read_into(view[number * length : (number + 1) * length], window.part, at + number * row)
        self.progress(size)
        return out.view(dtype).view(len(rows), len(window.read))


class BlockReader:
    """Blocks of rows of source tensors; counts the bytes that it reads. Files stay open inside.

    Raises RecipeError for a tensor whose bytes are not those of the manifest, once its last block was taken.
    """

    def __init__(self, source: Source):
        self.source, self.read_bytes = source, 0
        self._files = SourceFiles(source.folder, sequential=True)
        self._beside, self._digests = Beside(), {}

    def __enter__(self) -> BlockReader:
        return self

    def __exit__(self, *exc) -> None:
        self._beside.close()
        self._files.__exit__(*exc)

    def blocks(self, tensor: SourceTensor) -> Iterator[tuple[int, torch.Tensor]]:
        """(first row, values) of `tensor`, a block of rows at a time; FP8 is decoded to bf16, else the stored dtype."""
        step, scales = block_rows(tensor, (self.source.block or BLOCK)[0]), None
        self._digests = {part: hashlib.sha256() for part in tensor.stored if part.sha256 is not None}
        if tensor.scale:
            shape = self.source.scale_shape(tensor)
            scales = self._rows(tensor.scale, shape, torch.float32, 0, shape[0])
            fp8.require_scales(scales, tensor.scale.region.name)
        for start in range(0, tensor.shape[0], step):
            stop = min(start + step, tensor.shape[0])
            value = self._block(tensor, start, stop)
            if scales is not None:
                block = self.source.block
                value = fp8.decode(value, scales[start // block[0] :], block, torch.bfloat16, tensor.name)
            yield start, value
        self._compare()

    def _compare(self) -> None:
        """RecipeError unless the parts that were read have the digests of the manifest."""
        self._beside.wait()
        for part, digest in self._digests.items():
            found = digest.hexdigest()[:DIGITS]
            if found != part.sha256:
                raise RecipeError(
                    f"{self.source.folder / part.file}: {part.region}: expected sha256 {part.sha256} ({MANIFEST}), "
                    f"found {found}; {COPY_AGAIN}"
                )

    def _block(self, tensor: SourceTensor, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop), joined from the parts that hold them."""
        dtype, pieces, axis = TORCH_DTYPES[tensor.dtype], [], 0
        for part in tensor.parts:
            region = part.region
            if region.axis == 1 and region.rows < tensor.shape[1]:
                axis, first, last = 1, start, stop
            else:
                region = region.along(0, tensor.shape)
                first, last = max(start, region.start) - region.start, min(stop, region.stop) - region.start
            if first < last:
                pieces.append(self._rows(part, part.region.shape_in(tensor.shape), dtype, first, last))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, axis)

    def _rows(self, part: StoredPart, shape: Sequence[int], dtype: torch.dtype, first: int, last: int) -> torch.Tensor:
        """Rows [first, last) of a part that is stored in `shape`."""
        out = torch.empty((last - first, *shape[1:]), dtype=dtype)
        row = out.nbytes // len(out)
        view = tensor_bytes(out)
        self._files.read_into(view, part, part.offset + first * row)
        if part in self._digests:
            self._beside.add(self._digests[part].update, view)
        self.read_bytes += out.nbytes
        return out


# ---- folders with a manifest, by memory maps


class ShardReader:
    """The tensors of one complete folder. A context manager: files stay open inside.

    Raises ConfigError for a folder that is not complete, and for files that are missing, cut off or not the manifest's.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.manifest: Manifest = read_manifest(folder)
        check_headers(folder, self.manifest)
        self._held: dict[tuple[str, str], list[tuple[str, TensorEntry]]] = {}
        for file in self.manifest.files:
            for entry in file.tensors:
                self._held.setdefault((entry.role, entry.region.name), []).append((file.name, entry))
        self._open = ExitStack()
        self._handles: dict[str, Any] = {}

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *exc: Any) -> None:
        self._open.close()
        self._handles.clear()

    def names(self, role: str = WEIGHT) -> list[str]:
        """Names of the complete tensors that have parts of this role."""
        return [name for held_role, name in self._held if held_role == role]

    def entries(self, name: str, role: str = WEIGHT) -> list[tuple[str, TensorEntry]]:
        """(file, entry) of each part of the tensor `name`; ConfigError where there is none."""
        if (role, name) not in self._held:
            raise ConfigError(f"{self.folder}: holds no {role} of {name!r}")
        return self._held[role, name]

    def shape(self, name: str, role: str = WEIGHT) -> tuple[int, ...]:
        """Shape of the complete tensor."""
        return self.entries(name, role)[0][1].whole

    def read_entry(self, file: str, key: str) -> torch.Tensor:
        """The tensor `key` of one file, as it is stored."""
        return self._handle(file).get_tensor(key)

    def read(self, name: str, region: Region | None = None, role: str = WEIGHT) -> torch.Tensor:
        """The complete tensor, or one region of it, in its stored dtype, on the CPU.

        Raises ConfigError where parts are missing, or are flat ranges, which only `read_entry` reads.
        """
        held = self.entries(name, role)
        if any(entry.flat is not None for _, entry in held):
            raise ConfigError(f"{self.folder}: {role} of {name} is stored in flat ranges; read them one by one")
        whole = held[0][1].whole
        region = region or Region(name, 0, 0, whole[0])
        missing, _ = cover(region, (entry.region for _, entry in held), whole)
        if missing:
            raise ConfigError(f"{self.folder}: {missing[0]} ({role}) is in no file")
        pieces = [(overlap(region, entry.region, whole), file, entry) for file, entry in held]
        pieces = [piece for piece in pieces if piece[0] is not None]
        if len(pieces) == 1:
            return self._part(*pieces[0])
        out = torch.empty(region.shape_in(whole), dtype=TORCH_DTYPES[held[0][1].dtype])
        for part, file, entry in pieces:
            part_of(out, region, part, whole).copy_(self._part(part, file, entry))
        return out

    def _part(self, part: Region, file: str, entry: TensorEntry) -> torch.Tensor:
        """The rows or columns of `part` in one stored tensor, whose region contains it."""
        held = entry.region.along(part.axis, entry.whole)
        start, stop = part.start - held.start, part.stop - held.start
        stored = self._handle(file).get_slice(entry.key)
        return stored[start:stop] if part.axis == 0 else stored[:, start:stop]

    def _handle(self, file: str) -> Any:
        if file not in self._handles:
            self._handles[file] = self._open.enter_context(safe_open(self.folder / file, "pt"))
        return self._handles[file]


class CheckpointReader(ShardReader):
    """The tensors of a complete checkpoint, in whatever parts another layout wants them; a context manager."""

    def __init__(self, folder: str | Path):
        super().__init__(folder)
        if self.manifest.kind != CHECKPOINT:
            raise ConfigError(f"{folder}: holds {self.manifest.kind!r}, expected a checkpoint of training")
        self._last = functools.lru_cache(maxsize=4)(self._region)

    def has(self, role: str) -> bool:
        """Whether there are tensors of this role."""
        return any(held == role for held, _ in self._held)

    def state(self, rank: int) -> dict[str, Any]:
        """What `state_of_rank` holds of a rank of the layout that wrote."""
        return json.loads((self.folder / state_of_rank(rank)).read_text())

    def read_flat(self, wanted: TensorEntry) -> torch.Tensor:
        """The elements [n] of a flat range, from the same region's ranges or from all regions that overlap it."""
        name, start, stop = wanted.region.name, wanted.flat, wanted.flat + wanted.shape[0]
        parts = [
            (file, entry)
            for file, entry in self.entries(name, wanted.role)
            if entry.region == wanted.region and entry.columns == wanted.columns
        ]
        if parts:
            return self._elements(wanted.role, parts, start, stop)
        whole = self._last(name, wanted.role, wanted.region)
        return (whole.t() if wanted.columns else whole).reshape(-1)[start:stop]

    def _elements(self, role: str, parts: list[tuple[str, TensorEntry]], start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a region from flat ranges of it."""
        found, reached = [], start
        for file, entry in sorted(parts, key=lambda part: part[1].flat):
            low, high = max(reached, entry.flat), min(stop, entry.flat + entry.shape[0])
            if low < high:
                if low > reached:
                    break
                found.append(self._handle(file).get_slice(entry.key)[low - entry.flat : high - entry.flat])
                reached = high
        if reached < stop:
            raise ConfigError(f"{self.folder}: {role} of {parts[0][1].region}: elements from {reached} are in no file")
        return found[0] if len(found) == 1 else torch.cat(found)

    def _region(self, name: str, role: str, region: Region) -> torch.Tensor:
        """A region in HF's orientation, joined from flat ranges of other regions."""
        held = self.entries(name, role)
        whole, regions = held[0][1].whole, {entry.region: entry.columns for _, entry in held}
        missing, _ = cover(region, regions, whole)
        if missing:
            raise ConfigError(f"{self.folder}: {missing[0]} ({role}) is in no file")
        out = torch.empty(region.shape_in(whole))
        for other, columns in regions.items():
            shared = overlap(region, other, whole)
            if shared is None:
                continue
            shape = other.shape_in(whole)
            parts = [(file, entry) for file, entry in held if entry.region == other]
            joined = self._elements(role, parts, 0, math.prod(shape))
            joined = joined.view(shape[::-1]).t() if columns else joined.view(shape)
            part_of(out, region, shared, whole).copy_(part_of(joined, other, shared, whole))
        return out
