"""Read tensors of a folder of weights of any kind: HF, Megatron or a training checkpoint.

Bytes are read by pread and not by mmap, because host memory then does not grow with the tensors and files, and a file
that is cut off meanwhile gives an error that names it, not a bus error. Weights are read through one buffer of
BAND_BYTES, and for FP8 twice that for the decoded band (a row of more bytes than the buffer makes it longer).

FP8 is decoded to bf16, as DeepSeek's own converter does, so a folder in FP8 and its conversion to bf16 give equal
parameters in any dtype.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from verl_patches.errors import ConfigError, RecipeError
from verl_patches.reshard.region import Region
from verl_patches.weights import fp8
from verl_patches.weights.manifest import DIGEST_DIGITS, ITEM_BYTES, MANIFEST, StoredPart, StoredState, TensorEntry
from verl_patches.weights.source import Source, SourceTensor, scale_shape

BAND_BYTES = 4 << 20  # bytes of stored values that are read at once
_LEAST_ROW_BYTES = 1024  # where the wanted columns have fewer bytes in each row, whole rows are read
_READ_BYTES = 64 << 20  # most bytes of one read, after which `progress` is called
_CACHED_REGIONS = 4  # number of regions of states that are cached for the next reads
COPY_ADVICE = "the folder is damaged: copy it again, or take an older checkpoint; `weights verify` lists every fault"
TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}  # torch's dtype -> safetensors' name


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor for `NewFile.write`; a view if it is contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())


def require_finite(value: torch.Tensor, name: str) -> None:
    """Raise RecipeError where a floating tensor holds NaN or infinity."""
    if not value.numel() or torch.stack(torch.aminmax(value)).isfinite().all():  # aminmax gives NaN if any value is NaN
        return
    raise RecipeError(
        f"{name}: holds NaN or infinity, expected finite values: the folder is damaged, or the run that wrote it "
        "diverged; download the folder again, or take an older checkpoint"
    )


class _Window(NamedTuple):
    """Describe the overlap of a stored part and a region of one tensor; a tensor [R] is taken for [R, 1].

    `rows`, `columns`: those of the part that overlap. `read`: (rows, columns) of the part that are read for them.
    `width`: number of all columns of the part. `row`, `column`: where the overlap begins in the region. `digest`: a
    sha256 over the bytes read, where they are compared with the manifest's.
    """

    part: StoredPart
    rows: range
    columns: range
    read: tuple[range, range]
    width: int
    row: int = 0
    column: int = 0
    digest: Any = None


class WeightReader:
    """Read weights of `source`, and optimizer states of a checkpoint; a context manager inside which files stay open.

    `progress` gets the bytes of each read. `verify`: stored tensors that are read whole are compared with the digests
    of a manifest; `read_whole`: all are read whole for that. Raises RecipeError for bytes of another digest, where a
    file has become shorter since `source` was opened, for NaN in FP8, and for scales that finite values cannot have.
    """

    def __init__(
        self,
        source: Source,
        progress: Callable[[int], None] = lambda _: None,
        verify: bool = False,
        read_whole: bool = False,
    ):
        self.source, self.progress, self.verify, self.read_whole = source, progress, verify, read_whole
        self.read_bytes = 0
        self._block = source.block or (1, 1)  # not used without FP8
        self._open_files = ExitStack()
        self._handles: dict[str, int] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._stacks: dict[tuple[str, int], tuple[range, torch.Tensor]] = {}  # `_lines` of the last tensor
        self._state_region = functools.lru_cache(maxsize=_CACHED_REGIONS)(self._read_state_region)

    def __enter__(self) -> WeightReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self._open_files.close()
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._stacks.clear()
        self._state_region.cache_clear()

    # ---- weights

    def position(self, region: Region) -> tuple[str, int]:
        """Return (file, offset) of the region's first part, a sort key by which files are read from start to end."""
        tensor = self.source.tensors[region.name]
        window = next(self._windows(tensor, region))
        start = window.part.offset + window.rows.start * window.width * ITEM_BYTES[tensor.dtype]
        return window.part.file, start

    def copy(self, region: Region, target: torch.Tensor) -> None:
        """Fill `target`, of the region's shape and any dtype and device, with the region; `target` may be strided.

        FP8 is decoded. Raises RecipeError for NaN and infinity.
        """
        tensor = self.source.tensors[region.name]
        scales = self._scales(tensor)
        places = {(part.file, part.offset) for part in tensor.parts if part.column_stride}
        self._stacks = {place: stack for place, stack in self._stacks.items() if place in places}
        target = target.unsqueeze(1) if target.dim() == 1 else target
        for window in self._windows(tensor, region):
            columns = slice(window.column, window.column + len(window.columns))
            for rows in self._bands(tensor, window):
                value = self._values(tensor, window, rows, scales)
                if scales is None:
                    require_finite(value, tensor.name)
                first, last = max(rows.start, window.rows.start), min(rows.stop, window.rows.stop)
                if first < last:
                    to = slice(window.row + first - window.rows.start, window.row + last - window.rows.start)
                    _copy_in_order(target[to, columns], value[first - rows.start : last - rows.start])
                del value  # before the next band is decoded
            self._compare_digest(window.part.file, window.part.region, window.part.sha256, window.digest)

    def read(self, name: str) -> torch.Tensor:
        """Return a whole tensor in the stored dtype, or in bf16 if it is stored in FP8."""
        tensor = self.source.tensors[name]
        dtype = torch.bfloat16 if tensor.scale else TORCH_DTYPES[tensor.dtype]
        value = torch.empty(tensor.shape, dtype=dtype)
        self.copy(Region(name, 0, 0, tensor.shape[0]), value)
        return value

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
            whole = self.read_whole or (len(rows), len(columns)) == (len(held[0]), width)
            digest = hashlib.sha256() if self.verify and whole and part.sha256 else None
            read_rows = range(len(held[0])) if digest else rows
            before = columns.start % self._block[1] if tensor.scale else 0  # columns before them in the first FP8 block
            read = range(columns.start - before, columns.stop)
            if digest or len(read) * ITEM_BYTES[tensor.dtype] < _LEAST_ROW_BYTES:
                read = range(width)
            at = first[0] - wanted[0].start, first[1] - wanted[1].start
            yield _Window(part, rows, columns, (read_rows, read), width, *at, digest)

    def _bands(self, tensor: SourceTensor, window: _Window) -> Iterator[range]:
        """Yield the rows of a window in bands; for FP8 each band begins with a block, or lies in one."""
        rows, columns = window.read
        if window.part.column_stride:
            yield rows
            return
        step = max(1, BAND_BYTES // (len(columns) * ITEM_BYTES[tensor.dtype]))
        height = self._block[0] if tensor.scale else 1
        step = max(height, step // height * height)
        start = rows.start
        while start < rows.stop:
            past = start % height  # rows from the block's first one
            stop = start + height - past if past else start + step
            yield range(start, min(stop, rows.stop))
            start = stop

    def _scales(self, tensor: SourceTensor) -> torch.Tensor | None:
        if tensor.scale is None:
            return None
        scales, part = torch.empty(scale_shape(tensor.shape, self._block)), tensor.scale
        view = tensor_bytes(scales)
        self._read_into(view, part.file, part.offset)
        digest = hashlib.sha256(view) if self.verify and part.sha256 else None
        self._compare_digest(part.file, part.region, part.sha256, digest)
        fp8.require_scales(scales, part.region.name)
        return scales

    def _values(self, tensor: SourceTensor, window: _Window, rows: range, scales: torch.Tensor | None) -> torch.Tensor:
        """Return [rows, columns] of a window: FP8 decoded to bf16, otherwise a view of the bytes that are read."""
        part, columns = window.part, window.read[1]
        if part.column_stride:
            lines = self._lines(part, window.columns, tensor.dtype)
            return lines[:, part.column_start + rows.start : part.column_start + rows.stop].t()
        size = len(rows) * len(columns) * ITEM_BYTES[tensor.dtype]
        if self._buffer.numel() < size:
            self._buffer = torch.empty(max(size, BAND_BYTES), dtype=torch.uint8)
        stored = self._buffer[:size]
        self._read_rows(window, rows, tensor_bytes(stored))
        value = stored.view(TORCH_DTYPES[tensor.dtype]).view(len(rows), len(columns))
        if scales is not None:
            height, width = self._block
            row_scales = scales[rows.start // height :, columns.start // width :]
            value = fp8.decode(value, row_scales, self._block, torch.bfloat16, tensor.name)
        first = window.columns.start - columns.start
        return value[:, first : first + len(window.columns)]

    def _read_rows(self, window: _Window, rows: range, view: memoryview) -> None:
        """Fill `view` with the stored bytes of `rows` of the columns that a window reads."""
        length, part, columns = len(view) // len(rows), window.part, window.read[1]
        item = length // len(columns)
        row, at = window.width * item, part.offset + rows.start * window.width * item + columns.start * item
        if length == row:
            self._read_into(view, part.file, at)
        else:
            for number in range(len(rows)):
                self._read_into(view[number * length : (number + 1) * length], part.file, at + number * row)
        if window.digest is not None:
            window.digest.update(view)

    def _lines(self, part: StoredPart, wanted: range, dtype: str) -> torch.Tensor:
        """Return stored columns `wanted` of a stack of experts, each as a row; gate and up share one read."""
        place = part.file, part.offset
        read, lines = self._stacks.get(place, (None, torch.empty(0)))
        if read != wanted:
            lines = torch.empty(len(wanted), part.column_stride, dtype=TORCH_DTYPES[dtype])
            at = part.offset + wanted.start * lines.stride(0) * lines.itemsize
            self._read_into(tensor_bytes(lines), part.file, at)
            self._stacks[place] = wanted, lines
        return lines

    def _compare_digest(self, file: str, what: Any, expected: str | None, digest: Any) -> None:
        """Raise RecipeError unless the bytes of `what` have the manifest's digest; None means not read whole."""
        found = None if digest is None else digest.hexdigest()[:DIGEST_DIGITS]
        if found not in (None, expected):
            text = f"{self.source.folder / file}: {what}: expected sha256 {expected} ({MANIFEST}), found {found}"
            raise RecipeError(f"{text}; {COPY_ADVICE}")

    # ---- states of an optimizer

    def read_state(self, wanted: TensorEntry) -> torch.Tensor:
        """Return the elements [n] of a flat range, from ranges of the same region or of all regions that overlap it."""
        start, stop = wanted.first_element, wanted.first_element + wanted.shape[0]
        states = [
            each
            for each in self._states(wanted.role, wanted.region.name)
            if each.entry.region == wanted.region and each.entry.columns == wanted.columns
        ]
        if states:
            return self._elements(states, start, stop)
        region = self._state_region(wanted.region, wanted.role)
        return (region.t() if wanted.columns else region).reshape(-1)[start:stop]

    def _states(self, role: str, name: str) -> list[StoredState]:
        found = self.source.states.get((role, name))
        if not found:
            raise ConfigError(f"{self.source.folder}: expected optimizer state {role} of {name!r}, found none")
        return found

    def _read_state_region(self, region: Region, role: str) -> torch.Tensor:
        """Return a region of states in HF's orientation, joined from flat ranges of all regions that overlap it."""
        held = self._states(role, region.name)
        whole = held[0].entry.whole
        wanted, left = _sides(region, whole), math.prod(region.shape_in(whole))
        out = torch.empty([len(side) for side in wanted], dtype=TORCH_DTYPES[held[0].entry.dtype])
        for other in dict.fromkeys(each.entry.region for each in held):
            sides = _sides(other, whole)
            shared = [range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(sides, wanted, strict=True)]
            if not all(shared):
                continue
            columns = next(each.entry.columns for each in held if each.entry.region == other)
            states = [e for e in held if e.entry.region == other and e.entry.columns == columns]
            stored = self._elements(states, 0, math.prod(map(len, sides)))
            shape = [len(side) for side in sides]
            stored = stored.view(shape[::-1]).t() if columns else stored.view(shape)
            part = stored[_relative_slice(shared[0], sides[0]), _relative_slice(shared[1], sides[1])]
            out[_relative_slice(shared[0], wanted[0]), _relative_slice(shared[1], wanted[1])] = part
            left -= part.numel()
        if left:
            place = f"{self.source.folder}: {role} of {region}"
            raise ConfigError(f"{place}: {left} elements are in no file; {COPY_ADVICE}")
        return out.view(region.shape_in(whole))

    def _elements(self, states: list[StoredState], start: int, stop: int) -> torch.Tensor:
        """Return elements [start, stop) of a region from flat ranges of it."""
        pieces, reached = [], start
        for stored in sorted(states, key=lambda each: each.entry.first_element):
            first = stored.entry.first_element
            low, high = max(reached, first), min(stop, first + stored.entry.shape[0])
            if low < high:
                if low > reached:
                    break
                pieces.append(self._read_range(stored, low - first, high - first))
                reached = high
        if reached < stop:
            place = f"{self.source.folder}: {states[0].entry.role} of {states[0].entry.region}"
            raise ConfigError(f"{place}: elements from {reached} are in no file; {COPY_ADVICE}")
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _read_range(self, stored: StoredState, start: int, stop: int) -> torch.Tensor:
        """Return elements [start, stop) of a flat range, which is read whole where its digest is compared."""
        entry = stored.entry
        whole = self.verify and entry.sha256 is not None and (self.read_whole or (start, stop) == (0, entry.shape[0]))
        low, high = (0, entry.shape[0]) if whole else (start, stop)
        values = torch.empty(high - low, dtype=TORCH_DTYPES[entry.dtype])
        view = tensor_bytes(values)
        self._read_into(view, stored.file, stored.offset + low * values.itemsize)
        if whole:
            self._compare_digest(stored.file, entry.key, entry.sha256, hashlib.sha256(view))
        return values[start - low : stop - low]

    # ---- bytes

    def _read_into(self, view: memoryview, file: str, offset: int) -> None:
        """Fill `view` with the bytes of `file` from `offset` on."""
        done = 0
        while done < len(view):
            count = os.preadv(self._handle(file), [view[done : done + _READ_BYTES]], offset + done)
            if not count:
                raise RecipeError(
                    f"{self.source.folder / file}: expected at least {offset + len(view)} bytes, found fewer: the file "
                    "became shorter after it was opened; check it and run the command again"
                )
            done += count
            self.read_bytes += count
            self.progress(count)

    def _handle(self, file: str) -> int:
        if file not in self._handles:
            handle = self._handles[file] = os.open(self.source.folder / file, os.O_RDONLY)
            self._open_files.callback(os.close, handle)
        return self._handles[file]


def _sides(region: Region, shape: Sequence[int]) -> list[range]:
    """Return the rows and the columns of a region of a tensor of `shape`."""
    sides = [range(shape[0]), range(math.prod(shape[1:]))]
    sides[region.axis] = range(region.start, region.stop)
    return sides


def _copy_in_order(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy `value` to `target` [R, C] in target's order of memory: where either is transposed, several times faster."""
    if target.stride(0) < target.stride(1):
        target, value = target.t(), value.t()
    target.copy_(value.contiguous())


def _relative_slice(part: range, whole: range) -> slice:
    """Return the slice of `part` in `whole`."""
    return slice(part.start - whole.start, part.stop - whole.start)
