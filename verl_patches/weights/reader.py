"""Read tensors of a folder of weights; every file of tensors is read here, whatever wrote it.

WeightReader        weights of any folder (source.py), by pread: regions into live parameters, or blocks of rows
CheckpointReader    weights and optimizer states of a checkpoint, by safetensors' memory maps

pread, because host memory then does not depend on tensors or files, and a file that is cut off meanwhile is an error
with a name, not a bus error: regions are read through one buffer of BAND_BYTES, and for FP8 twice that for the decoded
band (65 MB measured, with tables; a row of more bytes than the buffer makes it longer). Memory maps for checkpoints,
whose states a rank reads in full and once, and which are 6/7 of one: a copy through a buffer made that slower.

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
    DIGITS,
    ITEM_BYTES,
    MANIFEST,
    WEIGHT,
    Beside,
    Manifest,
    TensorEntry,
    check_headers,
    require_checkpoint,
    state_of_rank,
)
from verl_patches.weights.plan import block_rows
from verl_patches.weights.source import BLOCK, Source, SourceTensor, StoredPart, scale_shape

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


# ---- weights of any folder, by pread


class _Window(NamedTuple):
    """What a stored part and a region of one tensor share; a tensor [R] is taken for [R, 1].

    rows, columns: in the part. `read`: the columns that are read for them. `width`: all columns of the part.
    row, column: where the region has the first of them.
    """

    part: StoredPart
    rows: range
    columns: range
    read: range
    width: int
    row: int = 0
    column: int = 0


class WeightReader:
    """Weights of `source`; a context manager: files stay open inside.

    `progress` gets the bytes of each read. `sequential`: files are read from start to end. Raises RecipeError where a
    file has become shorter since `source` was opened, for NaN in FP8, and for scales that no finite values have.
    """

    def __init__(self, source: Source, progress: Callable[[int], None] = lambda _: None, sequential: bool = False):
        self.source, self.progress, self.sequential = source, progress, sequential
        self._open, self._beside = ExitStack(), Beside()
        self._handles: dict[str, int] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._digests: dict[StoredPart, Any] = {}

    def __enter__(self) -> WeightReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self._beside.close()
        self._open.close()
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def read_bytes(self, region: Region) -> int:
        """Bytes that `copy` reads for the region, scales included."""
        tensor = self.source.tensors[region.name]
        scales = math.prod(scale_shape(tensor.shape, self.source.block)) * ITEM_BYTES["F32"] if tensor.scale else 0
        windows = self._windows(tensor, region)
        return scales + sum(len(w.rows) * len(w.read) for w in windows) * ITEM_BYTES[tensor.dtype]

    def position(self, region: Region) -> tuple[str, int]:
        """(file, offset) of the first part of the region: in this order files are read from start to end."""
        tensor = self.source.tensors[region.name]
        window = next(self._windows(tensor, region))
        return window.part.file, window.part.offset + window.rows.start * window.width * ITEM_BYTES[tensor.dtype]

    def copy(self, region: Region, target: torch.Tensor) -> None:
        """Fill `target`, which has the region's shape, in its own dtype on its own device; it may be strided.

        FP8 is decoded. Raises RecipeError for NaN and infinity.
        """
        tensor = self.source.tensors[region.name]
        scales = self._scales(tensor)
        target = target.unsqueeze(1) if target.dim() == 1 else target
        for window in self._windows(tensor, region):
            columns = slice(window.column, window.column + len(window.columns))
            for rows in self._bands(tensor, window):
                size = len(rows) * len(window.read) * ITEM_BYTES[tensor.dtype]
                if self._buffer.numel() < size:
                    self._buffer = torch.empty(max(size, BAND_BYTES), dtype=torch.uint8)
                value = self._values(tensor, window, rows, scales, self._buffer[:size])
                if scales is None:
                    require_finite(value, tensor.name)
                row = window.row + rows.start - window.rows.start
                target[row : row + len(rows), columns].copy_(value)
                del value  # before the next band is decoded

    def blocks(self, tensor: SourceTensor) -> Iterator[tuple[int, torch.Tensor]]:
        """(first row, values [rows, columns]) of `tensor`, a block of rows at a time, each in memory of its own.

        FP8 is decoded to bf16, else the stored dtype. Raises RecipeError, once the last block was taken, for bytes that
        are not those of the manifest.
        """
        step = block_rows(tensor, (self.source.block or BLOCK)[0])
        self._digests = {part: hashlib.sha256() for part in tensor.stored if part.sha256 is not None}
        scales, columns = self._scales(tensor), math.prod(tensor.shape[1:])
        for start in range(0, tensor.shape[0], step):
            pieces = []
            for window in self._windows(tensor, Region(tensor.name, 0, start, min(start + step, tensor.shape[0]))):
                size = len(window.rows) * len(window.read) * ITEM_BYTES[tensor.dtype]
                stored = torch.empty(size, dtype=torch.uint8)
                pieces.append(self._values(tensor, window, window.rows, scales, stored))
            yield start, pieces[0] if len(pieces) == 1 else torch.cat(pieces, int(pieces[0].shape[1] < columns))
        self._compare()

    def _compare(self) -> None:
        """RecipeError unless the parts that were read have the digests of the manifest."""
        self._beside.wait()
        digests, self._digests = self._digests, {}
        for part, digest in digests.items():
            found = digest.hexdigest()[:DIGITS]
            if found != part.sha256:
                raise RecipeError(
                    f"{self.source.folder / part.file}: {part.region}: expected sha256 {part.sha256} ({MANIFEST}), "
                    f"found {found}; {COPY_AGAIN}"
                )

    def _windows(self, tensor: SourceTensor, region: Region) -> Iterator[_Window]:
        wanted = _sides(region, tensor.shape)
        for part in tensor.parts:
            held = _sides(part.region, tensor.shape)
            first = [max(a.start, b.start) for a, b in zip(held, wanted, strict=True)]
            last = [min(a.stop, b.stop) for a, b in zip(held, wanted, strict=True)]
            if first[0] >= last[0] or first[1] >= last[1]:
                continue
            rows, columns = (range(first[i] - held[i].start, last[i] - held[i].start) for i in (0, 1))
            width = len(held[1])
            read = range(columns.start - (columns.start % self.source.block[1] if tensor.scale else 0), columns.stop)
            if len(read) * ITEM_BYTES[tensor.dtype] < _LEAST_BYTES:
                read = range(width)
            yield _Window(part, rows, columns, read, width, first[0] - wanted[0].start, first[1] - wanted[1].start)

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
        scales = torch.empty(scale_shape(tensor.shape, self.source.block))
        rows, columns = map(range, scales.shape)
        self._read(_Window(tensor.scale, rows, columns, columns, len(columns)), rows, tensor_bytes(scales))
        fp8.require_scales(scales, tensor.scale.region.name)
        return scales

    def _values(
        self, tensor: SourceTensor, window: _Window, rows: range, scales: torch.Tensor | None, stored: torch.Tensor
    ) -> torch.Tensor:
        """[rows, columns] of a window, FP8 decoded to bf16, else a view of `stored`, the bytes that are read."""
        self._read(window, rows, tensor_bytes(stored))
        value = stored.view(TORCH_DTYPES[tensor.dtype]).view(len(rows), len(window.read))
        if scales is not None:
            height, width = self.source.block
            of_rows = scales[rows.start // height :, window.read.start // width :]
            value = fp8.decode(value, of_rows, self.source.block, torch.bfloat16, tensor.name)
        first = window.columns.start - window.read.start
        return value[:, first : first + len(window.columns)]

    def _read(self, window: _Window, rows: range, view: memoryview) -> None:
        """Fill `view` with `rows` of the columns that a window reads, as they are stored."""
        length, part = len(view) // len(rows), window.part
        item = length // len(window.read)
        row, at = window.width * item, part.offset + rows.start * window.width * item + window.read.start * item
        if length == row:
            self._read_into(view, part, at)
        else:
            for number in range(len(rows)):
                self._read_into(view[number * length : (number + 1) * length], part, at + number * row)
        if part in self._digests:
            self._beside.add(self._digests[part].update, view)
        self.progress(len(view))

    def _read_into(self, view: memoryview, part: StoredPart, offset: int) -> None:
        """Fill `view` with the bytes from `offset` on of the file that has `part`."""
        done = 0
        while done < len(view):
            count = os.preadv(self._handle(part.file), [view[done:]], offset + done)
            if not count:
                raise RecipeError(
                    f"{self.source.folder / part.file}: ends inside {part.region.name}: it has changed since the "
                    "start; check the file and start again"
                )
            done += count

    def _handle(self, file: str) -> int:
        if file not in self._handles:
            handle = self._handles[file] = os.open(self.source.folder / file, os.O_RDONLY)
            self._open.callback(os.close, handle)
            if self.sequential:
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return self._handles[file]


def _sides(region: Region, shape: Sequence[int]) -> list[range]:
    """The rows and the columns of a region of a tensor of `shape`."""
    sides = [range(shape[0]), range(math.prod(shape[1:]))]
    sides[region.axis] = range(region.start, region.stop)
    return sides


# ---- checkpoints, by memory maps


class CheckpointReader:
    """The tensors of a complete checkpoint, in whatever parts another layout wants them, as they are stored.

    A context manager: files stay open inside. Raises ConfigError for a folder that is not a complete checkpoint, and
    for files that are missing, cut off or not the manifest's.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.manifest: Manifest = require_checkpoint(folder)
        check_headers(folder, self.manifest)
        self._held: dict[tuple[str, str], list[tuple[str, TensorEntry]]] = {}
        for file in self.manifest.files:
            for entry in file.tensors:
                self._held.setdefault((entry.role, entry.region.name), []).append((file.name, entry))
        self._open = ExitStack()
        self._handles: dict[str, Any] = {}
        self._last = functools.lru_cache(maxsize=4)(self.read)

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *exc: Any) -> None:
        self._open.close()
        self._handles.clear()

    def has(self, role: str) -> bool:
        """Whether there are tensors of this role."""
        return any(held == role for held, _ in self._held)

    def state(self, rank: int) -> dict[str, Any]:
        """What `state_of_rank` holds of a rank of the layout that wrote."""
        return json.loads((self.folder / state_of_rank(rank)).read_text())

    def read(self, region: Region, role: str = WEIGHT) -> torch.Tensor:
        """A region, in its stored dtype, on the CPU: a view of the file, or joined from parts.

        Raises ConfigError where parts are missing.
        """
        held = self._parts(region.name, role)
        whole, regions = held[0][1].whole, dict.fromkeys(entry.region for _, entry in held)
        missing, _ = cover(region, regions, whole)
        if missing:
            raise ConfigError(f"{self.folder}: {missing[0]} ({role}) is in no file")
        pieces = []
        for other in regions:
            shared = overlap(region, other, whole)
            if shared is not None:
                stored = self._region([part for part in held if part[1].region == other])
                pieces.append((shared, part_of(stored, other, shared, whole)))
        if len(pieces) == 1:
            return pieces[0][1]
        out = torch.empty(region.shape_in(whole), dtype=pieces[0][1].dtype)
        for shared, piece in pieces:
            part_of(out, region, shared, whole).copy_(piece)
        return out

    def read_flat(self, wanted: TensorEntry) -> torch.Tensor:
        """The elements [n] of a flat range, from the same region's ranges or from all regions that overlap it."""
        start, stop = wanted.flat, wanted.flat + wanted.shape[0]
        parts = [
            (file, entry)
            for file, entry in self._parts(wanted.region.name, wanted.role)
            if entry.region == wanted.region and entry.columns == wanted.columns
        ]
        if parts:
            return self._elements(parts, start, stop)
        region = self._last(wanted.region, wanted.role)
        return (region.t() if wanted.columns else region).reshape(-1)[start:stop]

    def _parts(self, name: str, role: str) -> list[tuple[str, TensorEntry]]:
        """(file, entry) of each part of the tensor `name`."""
        if (role, name) not in self._held:
            raise ConfigError(f"{self.folder}: holds no {role} of {name!r}")
        return self._held[role, name]

    def _region(self, parts: list[tuple[str, TensorEntry]]) -> torch.Tensor:
        """A stored region in HF's orientation, from the tensor that holds it or from flat ranges of it."""
        file, entry = parts[0]
        if entry.flat is None:
            return self._handle(file).get_tensor(entry.key)
        shape = entry.region.shape_in(entry.whole)
        joined = self._elements(parts, 0, math.prod(shape))
        return joined.view(shape[::-1]).t() if entry.columns else joined.view(shape)

    def _elements(self, parts: list[tuple[str, TensorEntry]], start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a region from flat ranges of it."""
        pieces, reached = [], start
        for file, entry in sorted(parts, key=lambda part: part[1].flat):
            low, high = max(reached, entry.flat), min(stop, entry.flat + entry.shape[0])
            if low < high:
                if low > reached:
                    break
                pieces.append(self._handle(file).get_slice(entry.key)[low - entry.flat : high - entry.flat])
                reached = high
        if reached < stop:
            entry = parts[0][1]
            raise ConfigError(f"{self.folder}: {entry.role} of {entry.region}: elements from {reached} are in no file")
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _handle(self, file: str) -> Any:
        if file not in self._handles:
            self._handles[file] = self._open.enter_context(safe_open(self.folder / file, "pt"))
        return self._handles[file]
