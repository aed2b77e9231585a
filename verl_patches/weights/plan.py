"""Plan which files a conversion of weights reads and writes, from a source, a layout and a dtype, without torch.

Files of a HF folder hold tensors in the inventory's order, up to a size. Each file of Megatron's checkpoint
(megatron.py) holds the parameters of one combination of TP, PP and EP ranks. So tensors outside routed experts are in
several files, as when Megatron writes them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import psutil

from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import Inventory, Parameter, build_inventory
from verl_patches.layout.model_folder import INDEX, without_fp8_and_mtp
from verl_patches.layout.parallel import ParallelLayout
from verl_patches.layout.sharding import local_parameters
from verl_patches.weights.manifest import ITEM_BYTES, TRACKER, TensorEntry, build_header, small_files, whole_entry
from verl_patches.weights.megatron import ITERATION_FOLDER, ranks_by_file
from verl_patches.weights.source import SAFETENSORS_NAMES, Source, SourceTensor, scale_shape

DTYPE_OPTIONS = ("bf16", "keep")
LIBRARY_BY_LINE = {"a3": "mindspeed", "pypi": "megatron-local"}  # line (set of pins) -> key of sharding.LIBRARIES
FILE_BYTES = 4_300_000_000  # most bytes of a file of a HF folder, about those of DeepSeek's own files
MAX_PROCESSES = 8  # most processes that write files at the same time, on as many cores
# modelled: bytes read + written a second by a node, with a slow shared file system and with a local NVMe disk
DISK_RATES = (0.3e9, 2.0e9)
_PROCESS_BYTES = 500_000_000  # memory of a process with torch and the buffers of its reader


class OutFile(NamedTuple):
    """Describe a file to write.

    `read_bytes`: bytes of the source, with scales. `size_bytes`: bytes of the file, in a HF folder without the
    conversion's identity in its header, in Megatron's of tensors alone. `tensors`: those of a HF file, in their order.
    `rank`: the rank whose parameters a Megatron file holds.
    """

    name: str
    read_bytes: int
    size_bytes: int
    tensors: tuple[TensorEntry, ...] = ()
    rank: int = 0


@dataclass(frozen=True, eq=False)
class ConversionPlan:
    """Describe a conversion of weights.

    `layout`: that of Megatron's checkpoint, None for a HF folder. `library`: a key of layout.sharding.LIBRARIES.
    `inventory`: in the dtypes that Megatron's parameters get. `texts`: {name: content} of small files with new content;
    the last one is written after all other files. `copies`: names of files copied as they are. `identity`: digest of
    all that the folder is made from, which each file of weights records.
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

    @property
    def kind(self) -> str:
        """Return the kind of folder that is written: "hf" or "megatron"."""
        return "megatron" if self.layout else "hf"


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
    library, texts = LIBRARY_BY_LINE[line], {"config.json": json.dumps(_written_config(source, dtype), indent=2) + "\n"}
    if layout is None:
        files = tuple(_hf_files(source, dtype, file_bytes))
        texts[INDEX] = _index_text(files)
    else:
        files = tuple(_megatron_files(source, inventory, layout, library))
        texts[TRACKER] = str(int(ITERATION_FOLDER.removeprefix("iter_")))
    copies = tuple(path.name for path in small_files(source.folder))
    names = [file.name for file in files]
    text = json.dumps([source.identity, layout and [str(layout), library], dtype, names, texts["config.json"], copies])
    identity = hashlib.sha256(text.encode()).hexdigest()
    return ConversionPlan(source, layout, library, dtype, inventory, files, texts, copies, identity)


def _check_dtype(source: Source, layout: ParallelLayout | None, dtype: str) -> None:
    if dtype not in DTYPE_OPTIONS:
        raise ConfigError(f"--dtype {dtype}: expected one of {', '.join(DTYPE_OPTIONS)}")
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


def _stored_dtype(parameter: Parameter, tensor: SourceTensor, dtype: str) -> str:
    """Return the dtype in which `tensor` is written to a HF folder."""
    return tensor.dtype if dtype == "keep" or parameter.kind == "router_bias" else "BF16"


def _scale_bytes(source: Source, tensor: SourceTensor) -> int:
    """Return the bytes of the FP8 scales of a source tensor."""
    if not tensor.scale or not source.block:
        return 0
    return math.prod(scale_shape(tensor.shape, source.block)) * ITEM_BYTES["F32"]


def _hf_files(source: Source, dtype: str, file_bytes: int) -> Iterator[OutFile]:
    files: list[list[Parameter]] = []
    size = 0
    for parameter in source.inventory.parameters:
        own = parameter.count * ITEM_BYTES[_stored_dtype(parameter, source.tensors[parameter.name], dtype)]
        if not files or size + own > file_bytes:
            files.append([])
            size = 0
        files[-1].append(parameter)
        size += own
    for number, parameters in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        stored = {p.name: _stored_dtype(p, source.tensors[p.name], dtype) for p in parameters}
        order = sorted(parameters, key=lambda p: -ITEM_BYTES[stored[p.name]])  # so all are aligned, as by in_data_order
        entries = [whole_entry(p.name, stored[p.name], p.shape) for p in order]
        size = len(build_header(entries, name)) + sum(entry.size_bytes for entry in entries)
        tensors = [source.tensors[p.name] for p in parameters]
        read = sum(tensor.size_bytes + _scale_bytes(source, tensor) for tensor in tensors)
        yield OutFile(name, read, size, tuple(entries))


def _megatron_files(source: Source, inventory: Inventory, layout: ParallelLayout, library: str) -> Iterator[OutFile]:
    for name, rank in ranks_by_file(layout, library).items():
        held = local_parameters(inventory, layout, rank, library)
        read = 0
        for shard in held.shards.values():
            tensor = source.tensors[shard.parameter.name]
            read += shard.count * ITEM_BYTES[tensor.dtype] + _scale_bytes(source, tensor)
        yield OutFile(f"{ITERATION_FOLDER}/{name}", read, held.size_bytes(), rank=rank)


def _written_config(source: Source, dtype: str) -> dict[str, Any]:
    """Return config.json of the written folder, without FP8 and without MTP layers, which are left out."""
    config = without_fp8_and_mtp(source.config)
    if dtype != "keep":
        config["torch_dtype"] = "bfloat16"
    return config


def _index_text(files: Sequence[OutFile]) -> str:
    total = sum(tensor.size_bytes for file in files for tensor in file.tensors)
    weight_map = {tensor.key: file.name for file in files for tensor in file.tensors}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1) + "\n"


def process_bytes(plan: ConversionPlan) -> int:
    """Return the modelled peak memory of one process: Megatron's largest file, or twice the largest HF tensor."""
    if plan.layout is not None:
        return _PROCESS_BYTES + max(file.size_bytes for file in plan.files)
    widest = max(parameter.count * 4 for parameter in plan.inventory.parameters)
    return _PROCESS_BYTES + 2 * widest


def process_count(plan: ConversionPlan) -> int:
    """Return how many files are written at a time: one for each core of this process, limited by free memory."""
    most = min(MAX_PROCESSES, len(os.sched_getaffinity(0)), len(plan.files))
    return max(1, min(most, psutil.virtual_memory().available // process_bytes(plan)))


def conversion_costs(plan: ConversionPlan) -> dict[str, Any]:
    """Return bytes, host memory and seconds of a conversion; memory and seconds (DISK_RATES) are modelled."""
    read, written = sum(file.read_bytes for file in plan.files), sum(file.size_bytes for file in plan.files)
    return {
        "weight_files": len(plan.files),
        "read_bytes": read,
        "write_bytes": written,
        "host_bytes_of_a_process_modelled": process_bytes(plan),
        "seconds_modelled": [round((read + written) / rate, 1) for rate in reversed(DISK_RATES)],
    }
