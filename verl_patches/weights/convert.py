"""Run a planned conversion (plan.py): one pass, a few blocks of rows in memory, resumable, a share of the files a node.

Groups of files are written several at a time, each by a thread: reads, changes of dtype, checksums, writes and fsync of
different groups overlap. A thread holds a few blocks of rows whatever the files' size. What is read is compared with
the sha256 that the source's manifest has of it, in the same pass; a HF folder that was downloaded has none.
"""

from __future__ import annotations

import contextlib
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
from verl_patches.shared_files import PARTIAL
from verl_patches.weights import fp8
from verl_patches.weights.manifest import FileEntry, Manifest, TensorEntry, file_problems
from verl_patches.weights.plan import MOST_THREADS, ConversionPlan, Group, OutFile
from verl_patches.weights.reader import COPY_AGAIN, TORCH_DTYPES, WeightReader, require_finite, tensor_bytes
from verl_patches.weights.source import BLOCK, FP8, Source, scale_name
from verl_patches.weights.writer import FileWriter, begin, complete, missing_files, reopen

Progress = Callable[[int], None]  # gets the bytes of tensors, or of files that are there already, since its last call


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
    _check_small_files(plan.source, ["config.json", *small])
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
    """Those of `names` that are recorded and have the size and the sha256 of their entries; the rest lose theirs."""
    finished = {n for n in names if n in recorded and not file_problems(folder, recorded[n], progress)}
    if again := set(names) - finished:
        reopen(folder, again)
    return finished


def _without(group: Group, finished: set[str]) -> Group:
    """What is left to do of a group: without the finished files, and the tensors that only those need."""
    files = tuple(file for file in group.files if file.name not in finished)
    needed = {tensor.key for file in files for tensor in file.tensors}
    return group._replace(files=files, names=tuple(name for name in group.names if name in needed))


def _check_space(folder: Path, files: Iterable[OutFile]) -> None:
    """RecipeError where the disk has no room for the files that are not there yet; what a kill left of them is free."""
    there = {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}
    todo = [file for file in files if there.get(file.name) != file.size_bytes]
    size, left = sum(file.size_bytes for file in todo), [folder / f"{file.name}{PARTIAL}" for file in todo]
    disk = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(disk).free + sum(path.stat().st_blocks * 512 for path in left if path.exists())
    if size > free:
        raise RecipeError(
            f"{folder}: {size} bytes are to be written, {free} are free. Free space, choose another folder, or share "
            "the work between nodes with --part; then run the same command again, finished files are kept"
        )


def _check_small_files(source: Source, names: Iterable[str]) -> None:
    """RecipeError where one of these files is not the manifest's; those of tensors are compared as they are read."""
    entries = {entry.name: entry for entry in source.files}
    for name in sorted(entries.keys() & names):
        if problems := file_problems(source.folder, entries[name]):
            raise RecipeError(f"{source.folder / name}: {problems[0]}; {COPY_AGAIN}")


# ---- groups


def _write_groups(folder: Path, plan: ConversionPlan, groups: Sequence[Group], progress: Progress) -> int:
    """Write `groups`, as many at a time as there are cores; the bytes read. The first error ends the other groups."""
    stop, lock = threading.Event(), threading.Lock()

    def count(size: int) -> None:
        with lock:
            progress(size)

    def work(group: Group) -> int:
        try:
            sizes: list[int] = []
            with WeightReader(plan.source, sizes.append, sequential=True) as reader:
                _write_group(folder, plan, group, reader, count, stop)
            return sum(sizes)
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
    folder: Path, plan: ConversionPlan, group: Group, reader: WeightReader, progress: Progress, stop: threading.Event
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
