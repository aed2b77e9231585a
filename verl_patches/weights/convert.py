"""Run a planned conversion (plan.py): one pass, a few blocks of rows in memory, resumable, a share of the files a node.

Groups of files are written several at a time, each by a thread: reads, changes of dtype, checksums, writes and fsync of
different groups overlap. A thread holds a few blocks of rows whatever the files' size. What is read is compared with
the sha256 that the source's manifest has of it, in the same pass; a HF folder that was downloaded has none.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from verl_patches.errors import RecipeError
from verl_patches.reshard.region import Region, overlap
from verl_patches.weights import fp8
from verl_patches.weights.manifest import (
    DIGITS,
    MANIFEST,
    Beside,
    FileEntry,
    Manifest,
    TensorEntry,
    file_problems,
    read_manifest,
)
from verl_patches.weights.plan import MOST_THREADS, ConversionPlan, Group, OutFile, block_rows
from verl_patches.weights.reader import TORCH_DTYPES, require_finite, tensor_bytes
from verl_patches.weights.source import BLOCK, FP8, Source, SourceFiles, SourceTensor, StoredPart, scale_name
from verl_patches.weights.writer import FileWriter, begin, complete, missing_files, reopen

Progress = Callable[[int], None]  # gets the bytes of tensors, or of files that are there already, since its last call
_COPY_AGAIN = (
    "the source is damaged: copy the file again, or take an older checkpoint; `weights verify` names all faults"
)


class Done(NamedTuple):
    """What a conversion did: bytes read and written, files kept and written, files that other parts still write.

    `manifest`: that of the complete folder; None while files are missing.
    """

    read_bytes: int
    write_bytes: int
    kept: int
    written: int
    missing: tuple[str, ...]
    manifest: Manifest | None


def convert(
    plan: ConversionPlan, folder: str | Path, part: int = 0, parts: int = 1, progress: Progress = lambda _: None
) -> Done:
    """Write `plan`'s share `part` of `parts` to `folder`; finished files that are there and right stay.

    Raises ConfigError for a folder that holds something else, RecipeError for a full disk, a source that changes
    meanwhile or is damaged, NaN and infinity. Whatever happens, the folder is complete or says that it is not.
    """
    folder, groups = Path(folder), plan.share(part, parts)
    small = [*plan.texts, *plan.copies] if part == 0 else []
    mine = {file.name: file for group in groups for file in group.files}
    _check_space(folder, mine.values())
    _check_source(plan.source, groups, ["config.json", *small])
    recorded = begin(folder, plan.manifest)
    finished = _finished(folder, plan, recorded, [*mine, *small], progress)
    todo = [group for group in (_without(group, finished) for group in groups) if group.files]
    written = sum(group.write_bytes for group in todo)
    for name in small:
        if name not in finished:
            content = plan.texts[name].encode() if name in plan.texts else (plan.source.folder / name).read_bytes()
            with FileWriter(folder, name) as file:
                file.write(content)
                file.finish()
            written += len(content)
    read = _write_groups(folder, plan, todo, progress)
    manifest = complete(folder)
    missing = () if manifest else tuple(missing_files(folder))
    return Done(read, written, len(finished), len(mine) + len(small) - len(finished), missing, manifest)


def _finished(
    folder: Path, plan: ConversionPlan, recorded: dict[str, FileEntry], names: Sequence[str], progress: Progress
) -> set[str]:
    """Those of `names` that are recorded and have the size and the sha256 of their entries; reads them."""
    finished = {n for n in names if n in recorded and not file_problems(folder, recorded[n], progress)}
    if set(names) - finished and read_manifest(folder, complete=False).complete:  # a damaged file is written again
        reopen(folder, [entry for name, entry in recorded.items() if name in finished or name not in names])
    return finished


def _without(group: Group, finished: set[str]) -> Group:
    """What is left to do of a group: without the finished files, and the tensors that only those need."""
    files = tuple(file for file in group.files if file.name not in finished)
    needed = {tensor.key for file in files for tensor in file.tensors}
    return group._replace(files=files, names=tuple(name for name in group.names if name in needed))


def _check_space(folder: Path, files: Iterable[OutFile]) -> None:
    """RecipeError where the disk has no room for the files that are not there yet."""
    there = {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}
    size = sum(file.size_bytes for file in files if there.get(file.name) != file.size_bytes)
    disk = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(disk).free
    if size > free:
        raise RecipeError(
            f"{folder}: {size} bytes are to be written, {free} are free. Free space, choose another folder, or share "
            "the work between nodes with --part; then run the same command again, finished files are kept"
        )


def _check_source(source: Source, groups: Iterable[Group], small: Iterable[str]) -> None:
    """RecipeError where a file that is read is not the manifest's and its tensors have no digests of their own.

    These are small ones, and those of an older format, which are read twice.
    """
    entries = {entry.name: entry for entry in source.files}
    parts = (part for group in groups for name in group.names for part in source.tensors[name].stored)
    for name in sorted(entries.keys() & {*small, *(part.file for part in parts if part.sha256 is None)}):
        if problems := file_problems(source.folder, entries[name]):
            raise RecipeError(f"{source.folder / name}: {problems[0]}; {_COPY_AGAIN}")


# ---- groups


def _write_groups(folder: Path, plan: ConversionPlan, groups: Sequence[Group], progress: Progress) -> int:
    """Write `groups`, as many at a time as there are cores; the bytes read. The first error ends the other groups."""
    stop, lock = threading.Event(), threading.Lock()

    def count(size: int) -> None:
        with lock:
            progress(size)

    def work(group: Group) -> int:
        try:
            with _Reader(plan.source) as reader:
                _write_group(folder, plan, group, reader, count, stop)
                return reader.read_bytes
        except BaseException:
            stop.set()
            raise

    with _one_thread_each(), ThreadPoolExecutor(_threads()) as pool:
        try:
            return sum(pool.map(work, groups))
        except BaseException:  # also an interrupt of this thread
            stop.set()
            raise


def _threads() -> int:
    """Groups at a time: one for each core of this process, and one more, as a group waits for its fsync."""
    return min(MOST_THREADS, len(os.sched_getaffinity(0)) + 1)


@contextlib.contextmanager
def _one_thread_each() -> Iterator[None]:
    """One thread for each of torch's operations: OpenMP's waiting threads would take the cores of other groups."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _write_group(
    folder: Path, plan: ConversionPlan, group: Group, reader: _Reader, progress: Progress, stop: threading.Event
) -> None:
    """Write all files of a group in one pass over its tensors; they get their names together at the end.

    Nothing is left of them after an error, or once `stop` is set.
    """
    with contextlib.ExitStack() as stack:
        writers = [(file, stack.enter_context(FileWriter(folder, file.name, file.tensors))) for file in group.files]
        entries = [({tensor.key: tensor for tensor in file.tensors}, writer) for file, writer in writers]
        # made before the blocks: small tensors that outlive blocks would keep freed memory from being used again
        made = [tensor for file in group.files for tensor in file.tensors if tensor.key not in group.names]
        scales = {tensor.key: torch.empty(tensor.shape) for tensor in made}
        for name in group.names:
            wanted = [(held[name], writer) for held, writer in entries if name in held]
            for start, value in reader.blocks(plan.source.tensors[name]):
                if stop.is_set():
                    return
                progress(_write_block(name, start, value, wanted, scales))
        for file, writer in writers:
            for tensor in file.tensors:
                if tensor.key not in group.names:  # block scales
                    writer.write(tensor_bytes(scales[tensor.key]))
                    progress(tensor.size_bytes)
        for _, writer in writers:
            writer.finish()


def _write_block(name: str, start: int, value: torch.Tensor, wanted, scales) -> int:
    """Cut rows [start, ...) of a tensor as each file wants them, and write them; the bytes written."""
    rows, size = Region(name, 0, start, start + value.shape[0]), 0
    for entry, writer in wanted:
        dtype = TORCH_DTYPES[entry.dtype]
        if entry.dtype == FP8 and value.dtype != dtype:
            stored, scale = fp8.encode(value, BLOCK, name)
            scales[scale_name(name)][start // BLOCK[0] :][: len(scale)] = scale
        else:
            cut = _cut(value, rows, entry)
            if cut is None:
                continue
            stored = cut.to(dtype)
            require_finite(stored, name)
        writer.write(tensor_bytes(stored))
        size += stored.nbytes
    return size


def _cut(value: torch.Tensor, rows: Region, entry: TensorEntry) -> torch.Tensor | None:
    """The elements of `entry` in a block of rows; None if it has none of them."""
    region = entry.region
    if region.axis == 1:
        return value[:, region.start : region.stop]
    shared = overlap(region, rows, entry.whole)
    return None if shared is None else value[shared.start - rows.start : shared.stop - rows.start]


# ---- reading


class _Reader:
    """Blocks of rows of source tensors; counts the bytes that it reads. Files stay open inside.

    Raises RecipeError for a tensor whose bytes are not those of the manifest, once its last block was taken.
    """

    def __init__(self, source: Source):
        self.source, self.read_bytes = source, 0
        self._files = SourceFiles(source.folder, sequential=True)
        self._beside, self._digests = Beside(), {}

    def __enter__(self) -> _Reader:
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
                    f"found {found}; {_COPY_AGAIN}"
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
