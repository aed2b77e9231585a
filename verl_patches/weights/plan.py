"""What a conversion reads and writes, file by file: plain data from a source, a layout and a dtype. No torch.

Files of a layout: `dense-ppNN-tpNN` holds what a tensor-parallel rank of a pipeline stage has outside routed experts,
`experts-ppNN-epNNN-etpNN` its routed experts. Data-parallel ranks have the same, so no byte is in two files; a tensor
that tensor parallelism does not cut is in the file of tp 0 only. Cuts are those of Megatron's own modules (library
"megatron-local"), which cuts all that any library cuts; a rank of another library reads the regions that it holds.
Files of a HF folder hold tensors in the inventory's order, up to a size.

A group is the files that one pass over some source tensors writes together (all tensor-parallel parts of a stage), so
that every source byte is read once. Groups are what nodes share (`share`).
"""

from __future__ import annotations

import hashlib
import heapq
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import Parameter
from verl_patches.layout.model_folder import INDEX, MTP_LAYERS, QUANTIZATION
from verl_patches.layout.parallel import ParallelLayout
from verl_patches.layout.sharding import shards_of
from verl_patches.reshard.region import Region, region_of
from verl_patches.weights.manifest import ITEM_BYTES, Manifest, TensorEntry, header_of, small_files, whole_tensor
from verl_patches.weights.source import (
    BLOCK,
    FP8,
    FP8_KINDS,
    QUANTIZATION_CONFIG,
    Source,
    SourceTensor,
    scale_name,
    scale_shape,
)

DTYPES = ("bf16", "fp8", "keep")
LIBRARY = "megatron-local"
FILE_BYTES = 4_300_000_000  # of a HF file, as DeepSeek's
BLOCK_BYTES = 4 << 20  # of one step of the pass: rows of a tensor, in fp32
MOST_THREADS = 8  # groups that are written at the same time, on as many cores
# modelled: bytes read + written a second by a node, from a slow shared file system to a local NVMe disk
RATES = (0.3e9, 2.0e9)
_PROCESS_BYTES, _BLOCKS = 400_000_000, 4  # of an idle process with torch; blocks that a thread has in memory


class OutFile(NamedTuple):
    """One file to write: its tensors in the order of their bytes."""

    name: str
    tensors: tuple[TensorEntry, ...]
    size_bytes: int


class Group(NamedTuple):
    """Files written in one pass over the source tensors `names`, in this order; `read_bytes`: of those tensors."""

    files: tuple[OutFile, ...]
    names: tuple[str, ...]
    read_bytes: int

    @property
    def write_bytes(self) -> int:
        """Bytes of its files."""
        return sum(file.size_bytes for file in self.files)


@dataclass(frozen=True, eq=False)
class ConversionPlan:
    """A conversion. `texts`: small files with new content, by name. `copies`: names of files copied as they are."""

    source: Source
    layout: ParallelLayout | None
    dtype: str
    groups: tuple[Group, ...]
    texts: dict[str, str]
    copies: tuple[str, ...]
    manifest: Manifest

    def share(self, part: int, parts: int) -> tuple[Group, ...]:
        """The groups of one of `parts` nodes, balanced by bytes; the same on every node."""
        loads, mine = [(0, number) for number in range(parts)], []
        order = sorted(range(len(self.groups)), key=lambda n: -self.groups[n].read_bytes - self.groups[n].write_bytes)
        for number in order:
            load, owner = heapq.heappop(loads)
            heapq.heappush(loads, (load + self.groups[number].read_bytes + self.groups[number].write_bytes, owner))
            if owner == part:
                mine.append(number)
        return tuple(self.groups[number] for number in sorted(mine))


def parse_part(text: str) -> tuple[int, int]:
    """(part, parts) of "I/N"; ConfigError for another text."""
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if match is None or not int(match[1]) < int(match[2]):
        raise ConfigError(f"--part {text}: expected I/N with 0 <= I < N, such as 0/16 on the first of 16 nodes")
    return int(match[1]), int(match[2])


def plan_conversion(
    source: Source, layout: ParallelLayout | None = None, dtype: str | None = None, file_bytes: int = FILE_BYTES
) -> ConversionPlan:
    """The plan from `source` to shards of `layout`, or to a HF folder with files of up to `file_bytes`.

    `dtype`: "bf16", "fp8" (HF only) or "keep"; None is bf16 for a source in FP8, else keep. A correction bias keeps its
    dtype. Raises ConfigError for a layout that the model does not fit, and for a dtype that does not go together with
    source or target.
    """
    dtype = dtype or ("bf16" if source.block else "keep")
    _check_dtype(source, layout, dtype)
    groups = tuple(_hf_groups(source, dtype, file_bytes) if layout is None else _shard_groups(source, layout, dtype))
    texts = {"config.json": json.dumps(_config(source, dtype), indent=2) + "\n"}
    if layout is None:
        texts[INDEX] = _index(groups)
    copies = tuple(path.name for path in small_files(source.folder))
    names = [file.name for group in groups for file in group.files]
    identity = json.dumps([source.identity, layout and str(layout), dtype, names, texts["config.json"], copies])
    model = source.inventory.model if dtype == "keep" else replace(source.inventory.model, torch_dtype="bfloat16")
    manifest = Manifest(
        kind="hf" if layout is None else "shards",
        model=model,
        layout=layout and str(layout),
        dtype=dtype,
        identity=hashlib.sha256(identity.encode()).hexdigest(),
        expected=(*names, *texts, *copies),
    )
    return ConversionPlan(source, layout, dtype, groups, texts, copies, manifest)


def _check_dtype(source: Source, layout: ParallelLayout | None, dtype: str) -> None:
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype}: expected one of {', '.join(DTYPES)}")
    if dtype == "fp8" and layout is not None:
        raise ConfigError("--dtype fp8: shards hold what training loads, bf16; expected bf16 or keep with --layout")
    if dtype != "bf16" and source.block:
        raise ConfigError(
            f"--dtype {dtype}: {source.folder} is stored in FP8; expected bf16 (a copy of the folder keeps FP8)"
        )


def _stored(parameter: Parameter, tensor: SourceTensor, dtype: str) -> str:
    """The dtype in which `tensor` is written."""
    if dtype == "keep" or parameter.kind == "router_bias":
        return tensor.dtype
    return FP8 if dtype == "fp8" and parameter.kind in FP8_KINDS else "BF16"


def read_bytes(source: Source, name: str) -> int:
    """Bytes of a source tensor and its scales."""
    tensor = source.tensors[name]
    scales = scale_shape(tensor.shape, source.block) if tensor.scale else (0, 0)
    return tensor.size_bytes + scales[0] * scales[1] * ITEM_BYTES["F32"]


def _group(source: Source, dtype: str, parameters: Sequence[Parameter], files: Iterable[tuple[str, dict]]) -> Group:
    """The group of `parameters`, whose regions in each file are given: (file, {name: region})."""
    stored = {p.name: _stored(p, source.tensors[p.name], dtype) for p in parameters}
    order = sorted(parameters, key=lambda p: -ITEM_BYTES[stored[p.name]])  # aligned, see in_data_order
    made = []
    for file, regions in files:
        entries = []
        for parameter in order:
            if region := regions.get(parameter.name):
                name, whole = parameter.name, parameter.shape
                entries.append(TensorEntry(name, stored[name], region.shape_in(whole), region, whole))
        # scales are known only after their weights, so they are last; header_of refuses them where they are not aligned
        weights = [entry for entry in entries if entry.dtype == FP8]
        entries += [whole_tensor(scale_name(e.key), "F32", scale_shape(e.whole, BLOCK)) for e in weights]
        if entries:
            size = len(header_of(entries, file)) + sum(entry.size_bytes for entry in entries)
            made.append(OutFile(file, tuple(entries), size))
    names = tuple(p.name for p in order)
    return Group(tuple(made), names, sum(read_bytes(source, name) for name in names))


def _hf_groups(source: Source, dtype: str, file_bytes: int) -> Iterator[Group]:
    files: list[list[Parameter]] = []
    size = 0
    for parameter in source.inventory.parameters:
        own = parameter.count * ITEM_BYTES[_stored(parameter, source.tensors[parameter.name], dtype)]
        if not files or size + own > file_bytes:
            files.append([])
            size = 0
        files[-1].append(parameter)
        size += own
    for number, parameters in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        yield _group(source, dtype, parameters, [(name, {p.name: _whole(p) for p in parameters})])


def _whole(parameter: Parameter) -> Region:
    return Region(parameter.name, 0, 0, parameter.shape[0])


def _shard_groups(source: Source, layout: ParallelLayout, dtype: str) -> Iterator[Group]:
    inventory = source.inventory
    ranks = {}
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        ranks.setdefault((at.pp, at.ep), rank)
    for stage in range(layout.pp):
        layers = layout.stage_layers(stage, inventory.model.num_hidden_layers)
        dense = [p for p in inventory.outer if stage == (0 if p.part == "embedding" else layout.pp - 1)]
        dense += [p for layer in layers for p in inventory.layers[layer]]
        files = _cut(source, layout, dense, [f"dense-pp{stage:02d}-tp{n:02d}" for n in range(layout.tp)])
        if dense:
            yield _group(source, dtype, dense, files)
        for ep in range(layout.ep):
            experts = layout.local_experts(ranks[stage, ep], inventory.model.n_routed_experts)
            held = [
                p for layer in layers if inventory.experts[layer] for e in experts for p in inventory.experts[layer][e]
            ]
            names = [f"experts-pp{stage:02d}-ep{ep:03d}-etp{n:02d}" for n in range(layout.etp)]
            if held:
                yield _group(source, dtype, held, _cut(source, layout, held, names))


def _cut(source: Source, layout: ParallelLayout, parameters: Sequence[Parameter], names: Sequence[str]):
    """(file, {name: region}) of each of `names`, one for each tensor-parallel (or expert tensor-parallel) index."""
    files: list[dict[str, Region]] = [{} for _ in names]
    for parameter in parameters:
        shards = shards_of(source.inventory, layout, LIBRARY, parameter)
        for index, shard in enumerate(shards):
            if index == 0 or shard.axis is not None:
                files[index][parameter.name] = region_of(shard)
    return [(f"{name}.safetensors", regions) for name, regions in zip(names, files, strict=True)]


def _config(source: Source, dtype: str) -> dict[str, Any]:
    """config.json of what is written: FP8 as it is stored, and no layers for multi-token prediction, left out here."""
    config = {key: value for key, value in source.config.items() if key != QUANTIZATION}
    if config.get(MTP_LAYERS):
        config[MTP_LAYERS] = 0
    if dtype != "keep":
        config["torch_dtype"] = "bfloat16"
    return {**config, QUANTIZATION: QUANTIZATION_CONFIG} if dtype == "fp8" else config


def _index(groups: Sequence[Group]) -> str:
    files = [file for group in groups for file in group.files]
    total = sum(tensor.size_bytes for file in files for tensor in file.tensors)
    weight_map = {tensor.key: file.name for file in files for tensor in file.tensors}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1) + "\n"


def costs(plan: ConversionPlan, parts: int) -> list[dict[str, Any]]:
    """Bytes, host memory and seconds of each part. Seconds and memory are modelled: RATES, blocks and the process."""
    found = []
    for part in range(parts):
        groups = plan.share(part, parts)
        read, written = (sum(getattr(group, f"{what}_bytes") for group in groups) for what in ("read", "write"))
        slow, fast = RATES
        found.append(
            {
                "part": f"{part}/{parts}",
                "files": sum(len(group.files) for group in groups),
                "read_bytes": read,
                "write_bytes": written,
                "host_bytes_modelled": host_bytes(plan, groups),
                "seconds_modelled": [round((read + written) / fast, 1), round((read + written) / slow, 1)],
            }
        )
    return found


def host_bytes(plan: ConversionPlan, groups: Sequence[Group]) -> int:
    """Modelled peak memory of a process that converts `groups`: each thread's blocks and scales, the process itself."""
    scales = 0
    for group in groups:
        for file in group.files:
            scales = max(scales, sum(e.size_bytes for e in file.tensors if e.dtype == "F32"))
    widest = max((block_bytes(plan.source.tensors[name]) for group in groups for name in group.names), default=0)
    return _PROCESS_BYTES + min(MOST_THREADS, len(groups)) * (_BLOCKS * widest + scales)


def block_bytes(tensor: SourceTensor) -> int:
    """Bytes in fp32 of the rows of `tensor` that are in memory at once."""
    columns = tensor.shape[1] if len(tensor.shape) > 1 else 1
    return min(block_rows(tensor), tensor.shape[0]) * columns * ITEM_BYTES["F32"]


def block_rows(tensor: SourceTensor, multiple: int = BLOCK[0]) -> int:
    """Rows of `tensor` that are read at once: whole FP8 blocks, BLOCK_BYTES in fp32 or one block."""
    columns = tensor.shape[1] if len(tensor.shape) > 1 else 1
    return max(1, BLOCK_BYTES // (columns * ITEM_BYTES["F32"]) // multiple) * multiple
