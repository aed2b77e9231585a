"""Run a planned conversion of weights (plan.py), which can be interrupted and continued.

Each file is written by one process and gets its name once it is whole. A conversion that was ended continues with the
missing files: the file IDENTITY_FILE tells it from others. The folder is complete with the file that is written last: a
HF folder's index, Megatron's tracker. Bytes read from a checkpoint are compared with the sha256 in its
manifest in the same pass; HF and Megatron folders have none.
"""

from __future__ import annotations

import errno
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

import torch

from verl_patches.current import Current
from verl_patches.errors import ConfigError, RecipeError
from verl_patches.layout.inventory import Inventory
from verl_patches.layout.parallel import ParallelLayout
from verl_patches.layout.sharding import Shard, local_parameters
from verl_patches.processes import die_with_parent
from verl_patches.reshard.parameters import NAMES_BY_LIBRARY, parse_name
from verl_patches.reshard.train_tensors import train_tensors_from_native
from verl_patches.shared_files import disk_errors, free_bytes, sync
from verl_patches.weights.manifest import build_header, file_problems
from verl_patches.weights.plan import ConversionPlan, OutFile, process_count
from verl_patches.weights.reader import COPY_ADVICE, TORCH_DTYPES, WeightReader, require_finite, tensor_bytes
from verl_patches.weights.source import Source
from verl_patches.weights.writer import RERUN_ADVICE, NewFile, write_text

IDENTITY_FILE = ".conversion"
Progress = Callable[[int], None]  # gets the bytes of each file that is finished, now or before


class ConversionResult(NamedTuple):
    """Count the work of a conversion: bytes read and written, files of weights kept and written."""

    read_bytes: int
    write_bytes: int
    kept: int
    written: int


class _Job(NamedTuple):
    """Hold what the processes of a conversion inherit."""

    plan: ConversionPlan
    folder: Path


_job: Current[_Job | None] = Current(None)


def convert(
    plan: ConversionPlan, folder: str | Path, processes: int | None = None, progress: Progress = lambda _: None
) -> ConversionResult:
    """Write `plan` to `folder`, with `processes` files at a time (None: `process_count`); finished files stay.

    Raises ConfigError for a folder that holds something else, RecipeError for a full disk, a source that changes
    meanwhile or is damaged, NaN and infinity. After an error the folder can be distinguished from a complete one.
    """
    folder = Path(folder)
    _check_space(folder, plan.files)
    _check_small_files(plan.source, ["config.json", *plan.texts, *plan.copies])
    _prepare_folder(plan, folder)
    kept = [file for file in plan.files if (folder / file.name).exists()]
    for file in kept:
        progress(file.size_bytes)
    todo = [file for file in plan.files if file not in kept]
    read = 0
    for file, size in _write_files(_Job(plan, folder), todo, processes or process_count(plan)):
        read += size
        progress(file.size_bytes)
    for name in (*plan.copies, *plan.texts):
        write_text(folder / name, plan.texts.get(name) or (plan.source.folder / name).read_bytes())
    return ConversionResult(read, sum(file.size_bytes for file in todo), len(kept), len(todo))


def _prepare_folder(plan: ConversionPlan, folder: Path) -> None:
    """Make the folder, or check that it is one of this conversion."""
    mark = folder / IDENTITY_FILE
    is_own = mark.is_file() and mark.read_text() == plan.identity
    if folder.exists() and not is_own and any(not path.name.startswith(mark.name) for path in folder.iterdir()):
        raise ConfigError(
            f"{folder}: expected a new or empty folder, or one of this conversion "
            f"({plan.layout or 'a HF folder'} from {plan.source.folder}), found others; choose another folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_text(mark, plan.identity)


def _check_space(folder: Path, files: Iterable[OutFile]) -> None:
    """Raise RecipeError if the disk has no room for the missing files."""
    size, free = sum(f.size_bytes for f in files if not (folder / f.name).exists()), free_bytes(folder)
    if size > free:
        raise RecipeError(
            f"{folder}: expected {size} free bytes to write, found {free}. Free space or choose another folder, then "
            "run the same command again: finished files are kept"
        )


def _check_small_files(source: Source, names: Iterable[str]) -> None:
    """Raise RecipeError if a file of `names` differs from the manifest; weight files are compared as they are read."""
    entries = {entry.name: entry for entry in source.files}
    for name in sorted(entries.keys() & names):
        if problems := file_problems(source.folder, entries[name]):
            raise RecipeError(f"{problems[0]}; {COPY_ADVICE}")


# ---- files


def _write_files(job: _Job, files: list[OutFile], processes: int) -> Iterator[tuple[OutFile, int]]:
    """Write `files` in `processes` processes, and yield (file, bytes read) as they end; an error ends the rest."""
    if processes == 1:
        for file in files:
            yield file, _write_file(job, file)
        return
    fork = multiprocessing.get_context("fork")  # so that the large plan of 671B is not pickled
    with ProcessPoolExecutor(processes, fork, _start_process, (job,)) as pool:
        futures = {pool.submit(_write_file_in_process, file): file for file in files}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool:
            raise RecipeError(
                f"{job.folder}: a process of the conversion was killed, perhaps for lack of memory; run the same "
                "command again with fewer --processes: finished files are kept"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _start_process(job: _Job) -> None:
    die_with_parent()
    torch.set_num_threads(1)  # other processes use the other cores; OpenMP's threads do not survive a fork
    _job.value = job


def _write_file_in_process(file: OutFile) -> int:
    assert _job.value is not None  # _start_process has set it
    return _write_file(_job.value, file)


def _write_file(job: _Job, file: OutFile) -> int:
    """Write one file, and return the bytes read."""
    plan = job.plan
    if plan.layout is None:
        return _write_hf(job, file)
    path = job.folder / file.name
    return write_megatron_file(path, plan.source, plan.inventory, plan.layout, file.rank, plan.library)


def _write_hf(job: _Job, file: OutFile) -> int:
    """Write a file of a HF folder, a tensor at a time, and return the bytes read."""
    with WeightReader(job.plan.source, verify=True) as reader, NewFile(job.folder / file.name) as writer:
        writer.write(build_header(file.tensors, file.name))
        for entry in file.tensors:
            value = reader.read(entry.key)
            if value.dtype != TORCH_DTYPES[entry.dtype]:
                value = value.to(TORCH_DTYPES[entry.dtype])
                require_finite(value, entry.key)
            writer.write(tensor_bytes(value))
        writer.finish()
    return reader.read_bytes


# ---- a file of Megatron's checkpoint


def empty_chunks(
    inventory: Inventory, layout: ParallelLayout, rank: int, library: str
) -> list[dict[str, torch.Tensor]]:
    """Return uninitialised parameters of `rank` by Megatron's names, for each of its model chunks."""
    names, experts = NAMES_BY_LIBRARY[library][0], layout.local_experts(rank, inventory.model.n_routed_experts)
    layers = layout.chunk_layers(inventory.model.num_hidden_layers)[layout.coordinates(rank).pp :: layout.pp]
    joined: list[dict[str, list[Shard]]] = [{} for _ in layers]
    for shard in local_parameters(inventory, layout, rank, library).shards.values():
        kind, layer, expert = shard.parameter.kind, shard.parameter.layer, shard.parameter.expert
        if layer is None:
            chunk, number = (0 if kind == "embedding" else len(layers) - 1), 0
        else:
            chunk = next(n for n, held in enumerate(layers) if layer in held)
            number = layer - layers[chunk].start
        name = names[kind].format(layer=number, expert=None if expert is None else expert - experts.start)
        joined[chunk].setdefault(name, []).append(shard)
    return [{name: _empty_parameter(name, shards, library) for name, shards in chunk.items()} for chunk in joined]


def _empty_parameter(name: str, shards: list[Shard], library: str) -> torch.Tensor:
    """Return an uninitialised parameter `name` that can hold `shards`."""
    experts = len({shard.parameter.expert for shard in shards})
    rows = sum(shard.shape[0] for shard in shards) // experts
    shape = parse_name(name, library).shape((rows, *shards[0].shape[1:]), experts)
    return torch.empty(shape, dtype=getattr(torch, shards[0].dtype))


def write_megatron_file(
    path: Path, source: Source, inventory: Inventory, layout: ParallelLayout, rank: int, library: str
) -> int:
    """Write the file of `rank` under another name, and give it its own once it is whole; return the bytes read.

    `inventory`: in the dtypes that are written. The parameters are in memory meanwhile.
    """
    chunks = empty_chunks(inventory, layout, rank, library)
    with WeightReader(source, verify=True) as reader:
        views = train_tensors_from_native(chunks, inventory, layout, rank, library).values()
        for held in sorted(views, key=lambda each: reader.position(each.region)):
            reader.copy(held.region, held.tensor)
    keys = ["model"] if layout.vpp == 1 else [f"model{n}" for n in range(layout.vpp)]
    state = {**dict(zip(keys, chunks, strict=True)), "checkpoint_version": 3.0, "iteration": 1}
    with disk_errors(path, RERUN_ADVICE):
        path.parent.mkdir(parents=True, exist_ok=True)
    with NewFile(path) as file:
        try:
            torch.save(state, file.partial)
        except RuntimeError as error:  # torch's zip writer raises it when a write fails
            with disk_errors(path, RERUN_ADVICE):
                raise OSError(errno.ENOSPC, str(error).splitlines()[0]) from error
        file.finish()
    sync(path.parent)
    return reader.read_bytes
