"""Plan which files a conversion of weights reads and writes, from a source, a layout and a dtype, without torch.

Files of a HF folder hold tensors in the inventory's order, up to a size. Each file of Megatron's checkpoint
(megatron.py) holds the parameters of one combination of TP, PP and EP ranks. So tensors outside routed experts are in
several files, as when Megatron writes them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import psutil

from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import Inventory, build_inventory
from verl_patches.layout.model_folder import INDEX, without_fp8_and_mtp
from verl_patches.layout.parallel import ParallelLayout
from verl_patches.layout.sharding import local_parameters
from verl_patches.weights.manifest import (
    LAYOUT_FILE,
    TRACKER,
    TensorEntry,
    build_header,
    in_data_order,
    small_files,
    whole_entry,
)
from verl_patches.weights.megatron import ITERATION_FOLDER, ranks_by_file
from verl_patches.weights.source import SAFETENSORS_NAMES, Source

LIBRARY_BY_LINE = {"a3": "mindspeed", "pypi": "megatron-local"}  # line (set of pins) -> key of sharding.LIBRARIES
FILE_BYTES = 4_300_000_000  # most bytes of a file of a HF folder, about those of DeepSeek's own files
MAX_PROCESSES = 8  # most processes that write files at the same time, on as many cores
_PROCESS_BYTES = 500_000_000  # memory of a process with torch and the buffers of its reader


class OutFile(NamedTuple):
    """Describe a file to write.

    `size_bytes`: bytes of the file, in Megatron's of tensors alone. `tensors`: those of a HF file, in their order.
    `rank`: the rank whose parameters a Megatron file holds.
    """

    name: str
    size_bytes: int
    tensors: tuple[TensorEntry, ...] = ()
    rank: int = 0


@dataclass(frozen=True, eq=False)
class ConversionPlan:
    """Describe a conversion of weights.

    `layout`: that of Megatron's checkpoint, None for a HF folder. `library`: a key of layout.sharding.LIBRARIES.
    `inventory`: in the dtypes that Megatron's parameters get. `texts`: {name: content} of small files with new content;
    the last one is written after all other files. `copies`: names of files copied as they are. `identity`: digest of
    all that the folder is made from.
    """

    source: Source
    layout: ParallelLayout | None
    library: str
    dtype: str
    inventory: Inventory
    files: tuple[OutFile, ...]
    texts: dict[str, str]
    copies: tuple[str, ...]
    identity: str


def plan_conversion(
    source: Source,
    layout: ParallelLayout | None = None,
    dtype: str | None = None,
    file_bytes: int = FILE_BYTES,
    line: str = "a3",
) -> ConversionPlan:
    """Return the plan from `source` to a Megatron checkpoint of `layout`, or to a HF folder with `layout` None.

    `dtype`: "bf16" or "keep"; None is bf16 for a source in FP8, else keep. `file_bytes`: most bytes of a file of a HF
    folder. A HF folder's correction bias keeps its dtype, Megatron's is in fp32. `line`: the line whose
    Megatron reads the checkpoint. Raises ConfigError for a layout that the model does not fit, and for a dtype that
    does not suit source or target.
    """
    dtype = dtype or ("bf16" if source.block else "keep")
    _check_dtype(source, layout, dtype)
    model = source.inventory.model if dtype == "keep" else replace(source.inventory.model, torch_dtype="bfloat16")
    inventory = source.inventory
    if model != inventory.model:
        inventory = build_inventory(model, value="value_head" in {p.kind for p in inventory.outer})
    config = without_fp8_and_mtp(source.config)  # as MTP layers are left out
    if dtype != "keep":
        config["torch_dtype"] = "bfloat16"
    library, texts = LIBRARY_BY_LINE[line], {"config.json": json.dumps(config, indent=2) + "\n"}
    if layout is None:
        files = tuple(_hf_files(source, dtype, file_bytes))
        total = sum(tensor.size_bytes for file in files for tensor in file.tensors)
        weight_map = {tensor.key: file.name for file in files for tensor in file.tensors}
        texts[INDEX] = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1) + "\n"
    else:
        files = tuple(_megatron_files(inventory, layout, library))
        texts[LAYOUT_FILE] = f"{layout}\n"
        texts[TRACKER] = str(int(ITERATION_FOLDER.removeprefix("iter_")))
    copies = tuple(path.name for path in small_files(source.folder))
    names = [file.name for file in files]
    parts = [source.identity(), layout and [str(layout), library], dtype, names, texts["config.json"], copies]
    text = json.dumps(parts)
    identity = hashlib.sha256(text.encode()).hexdigest()
    return ConversionPlan(source, layout, library, dtype, inventory, files, texts, copies, identity)


def _check_dtype(source: Source, layout: ParallelLayout | None, dtype: str) -> None:
    if dtype != "bf16" and source.block:
        raise ConfigError(
            f"--dtype {dtype}: {source.folder} is stored in FP8; expected bf16 (to keep FP8, copy the folder)"
        )
    if dtype == "keep" and layout is not None:
        stored = SAFETENSORS_NAMES[source.inventory.model.torch_dtype]
        for parameter in source.inventory.parameters:
            found = source.tensors[parameter.name].dtype
            if found != stored and parameter.kind != "router_bias":
                raise ConfigError(
                    f"--dtype keep: {source.folder}: {parameter.name}: expected {stored} (torch_dtype of config.json, "
                    f"which Megatron uses for all parameters), found {found}; give --dtype bf16"
                )


def _hf_files(source: Source, dtype: str, file_bytes: int) -> Iterator[OutFile]:
    files: list[list[TensorEntry]] = [[]]
    for parameter in source.inventory.parameters:
        kept = dtype == "keep" or parameter.kind == "router_bias"
        stored = source.tensors[parameter.name].dtype if kept else "BF16"
        entry = whole_entry(parameter.name, stored, parameter.shape)
        if files[-1] and entry.size_bytes + sum(each.size_bytes for each in files[-1]) > file_bytes:
            files.append([])
        files[-1].append(entry)
    for number, entries in enumerate(map(in_data_order, files), 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        size = len(build_header(entries, name)) + sum(entry.size_bytes for entry in entries)
        yield OutFile(name, size, tuple(entries))


def _megatron_files(inventory: Inventory, layout: ParallelLayout, library: str) -> Iterator[OutFile]:
    for name, rank in ranks_by_file(layout, library).items():
        size = local_parameters(inventory, layout, rank, library).size_bytes()
        yield OutFile(f"{ITERATION_FOLDER}/{name}", size, rank=rank)


def process_count(plan: ConversionPlan) -> int:
    """Return how many files are written at a time: one for each core of this process, limited by free memory.

    A process holds Megatron's largest file, or twice the largest HF tensor, in fp32.
    """
    widest = 8 * max(parameter.count for parameter in plan.inventory.parameters)
    largest = max(file.size_bytes for file in plan.files) if plan.layout else widest
    most = min(MAX_PROCESSES, len(os.sched_getaffinity(0)), len(plan.files))
    return max(1, min(most, psutil.virtual_memory().available // (_PROCESS_BYTES + largest)))
