"""Copy regions of the tensors of a folder (source.py) into live parameters, a band of rows at a time.

Only the bytes of a region are read, with pread; the parts of several files are joined in the target itself. FP8 is
decoded to bf16, as DeepSeek's own converter does, so a folder in FP8 and its conversion to bf16 give equal parameters
in any dtype. Host memory does not depend on tensors or files: one buffer of BAND_BYTES, and for FP8 twice that for the
decoded band (65 MB measured, with tables; a row of more bytes than the buffer makes it longer).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from verl_patches.reshard.region import Region, overlap, part_of
from verl_patches.weights import fp8
from verl_patches.weights.manifest import ITEM_BYTES
from verl_patches.weights.shards import TORCH_DTYPES, require_finite, tensor_bytes
from verl_patches.weights.source import Part, Source, SourceFiles, SourceTensor

BAND_BYTES = 16 << 20  # of stored values that are read at once
_LEAST_BYTES = 4096  # columns of fewer bytes a row are not read one by one: whole rows are


class _Window(NamedTuple):
    """Rows and columns of one stored part that belong to a region; `read`: the columns that are read for them.

    `width`: columns of the stored part. `shared`: the same values as a region of the complete tensor.
    """

    part: Part
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
