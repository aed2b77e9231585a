"""The place of each HF tensor in the rollout engine's parameters, learnt from vLLM's own `load_weights`.

`load_weights` is traced once with meta tensors (trace.py); nothing is written, and there is no table of vLLM's names.
From then on weights can be written straight into the views of `Destinations.tensors`. A tensor that cannot be traced is
named in `unmapped`, with the reason: load_weights itself must load it, complete.

Call it when the engine is awake and prepared for a load as verl does: `patch_vllm_moe_model_weight_loader(model)` has
run (vllm-ascend's fused_moe.py:878 makes new expert parameters that have lost their weight_loader).

Layouts that an engine gives its parameters after loading:
- Another stride, as `_maybe_pad_weight` of vLLM (fused_moe/layer.py:510) leaves: views follow strides.
- Last two axes swapped: load_weights raises for such parameters, so their HF tensors are unmapped. At our pins
  vllm-ascend transposes expert weights in its forward only (ops/fused_moe.py:275, :288).
- A private NPU format (NZ): elements are not where strides say, so its tensors are unmapped. At our pins vllm-ascend
  casts quantised weights and MLA's absorbed ones only (the latter: memory/sleep_mode.py). The query of the format
  through torch_npu cannot be tried without an NPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from verl_patches.errors import RecipeError
from verl_patches.layout.inventory import Inventory, Parameter
from verl_patches.layout.parallel import ParallelLayout
from verl_patches.layout.sharding import local_parameters
from verl_patches.reshard.live_memory import (
    Live,
    Owners,
    named_tensors,
    not_written_once,
    private_format,
    restore_memory,
)
from verl_patches.reshard.region import Region, region_of
from verl_patches.reshard.trace import Constant, Copy, Opaque, Trace


@dataclass(frozen=True, eq=False)
class RolloutTensor:
    """A region of an HF tensor and its place in one live parameter.

    `tensor`: view of live memory with the region's own shape, in the parameter's dtype; possibly strided. `parameter`:
    vLLM's name.
    """

    region: Region
    tensor: torch.Tensor
    parameter: str


@dataclass(frozen=True, eq=False)
class Destinations:
    """Where HF tensors go on this rank. References its engine's memory: drop it together with the engine.

    `tensors`: HF name -> its places, only of tensors of which the rank holds a part. `constants`: what load_weights
    fills in itself (padding of the vocabulary), to be written again only if the memory was lost. `unmapped`: HF name
    -> why load_weights must load it; `opaque`: the parts of live memory to which those go, as far as known.
    """

    rank: int
    tensors: dict[str, tuple[RolloutTensor, ...]]
    constants: tuple[Constant, ...]
    unmapped: dict[str, str]
    opaque: tuple[Opaque, ...]
    model: torch.nn.Module
    live: dict[str, Live]

    def still_valid(self, model: torch.nn.Module) -> bool:
        """Whether all parameters have the memory that was learnt; if not (rebuilt, moved), learn again.

        Reads no data; a few ms at 671B. Does not notice a module that replaced another. vLLM's sleep frees the memory
        of storages that stay: the caller must wake the engine.
        """
        return model is self.model and all(memory.is_there() for memory in self.live.values())

    def check_covers(self, model: torch.nn.Module) -> None:
        """RecipeError unless each element of every parameter, and of buffers that are loaded, is written exactly once.

        Counts `tensors`, `constants` and `opaque`. The message names parameter, rank, expected and found.
        """
        if not self.still_valid(model):
            raise RecipeError(f"reshard: rank {self.rank}: parameters moved since they were learnt: learn them again")
        live = {name: memory.tensor for name, memory in self.live.items()}
        writes = [(str(place.region), place.tensor) for places in self.tensors.values() for place in places]
        writes += [(f"the constant {constant.value:g}", constant.target) for constant in self.constants]
        writes += [(f"{write.name} ({write.reason})", write.target) for write in self.opaque]
        _raise(self.rank, not_written_once(live, writes), "the rollout would compute with stale values")

    def check_against_plan(self, inventory: Inventory, layout: ParallelLayout, library: str) -> None:
        """RecipeError unless the learnt regions are those that layout/sharding.py gives this rank; unmapped ones aside.

        `library`: "vllm" or "vllm-ascend". ConfigError for a layout that has no plan, as experts that do not divide.
        """
        shards = local_parameters(inventory, layout, self.rank, library).shards
        planned = {name: region_of(shard) for name, shard in shards.items()}
        planned = {name: region for name, region in planned.items() if region.rows}
        problems = []
        for name in dict.fromkeys([*planned, *self.tensors]):
            places, region, shape = self.tensors.get(name, ()), planned.get(name), inventory.by_name[name].shape
            learnt = sorted({str(place.region.along(0, shape)) for place in places})
            if name not in self.unmapped and learnt != ([str(region.along(0, shape))] if region else []):
                where = ", ".join(dict.fromkeys(place.parameter for place in places)) or "no parameter"
                problems.append(
                    f"{name} in {where}: expected {region or 'nothing'} by layout {layout} of {library}, "
                    f"found {', '.join(learnt) or 'nothing'} in load_weights"
                )
        _raise(self.rank, problems, "the engine runs with another layout or config than the plan")


def learn_destinations(model: torch.nn.Module, inventory: Inventory, *, rank: int) -> Destinations:
    """Trace `model.load_weights` with every tensor of `inventory`: where each goes. Parameters are not changed.

    Costs about what one load_weights costs without its copies. `inventory` in the dtypes that will be sent.
    Raises RecipeError for a loader that gives parameters other memory, and for one that cannot be traced at all (see
    `Trace.run`).
    """
    before = named_tensors(model)
    data = {name: tensor.data for name, tensor in before.items()}
    sources = {p.name: torch.empty(p.shape, dtype=getattr(torch, p.dtype), device="meta") for p in inventory.parameters}
    trace = Trace(before.values())
    try:
        trace.run(model.load_weights, sources)
    finally:
        restore_memory(model, before, data, rank)
    unnamed = [write for write in trace.opaque if write.name not in sources]
    if unnamed:
        raise RecipeError(
            f"reshard: rank {rank}: load_weights changes parameters {unnamed[0].name} ({unnamed[0].reason}), which no "
            "weight sync can follow: use verl's path, recipe.patches=[-reshard.*]"
        )
    return _destinations(trace, inventory, model, rank)


def _destinations(trace: Trace, inventory: Inventory, model: torch.nn.Module, rank: int) -> Destinations:
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    owners = Owners({**parameters, **buffers})
    unmapped = dict(trace.failed) | {write.name: write.reason for write in trace.opaque}
    tensors: dict[str, list[RolloutTensor]] = {}
    for copy in trace.copies:
        owner = owners.of(copy.target)
        private, placed = private_format(copy.target), _placed(inventory.by_name[copy.name], copy, owner)
        if private is not None:
            unmapped[copy.name] = f"{owner} is kept in the private NPU format {private}"
        elif placed is None:
            unmapped.setdefault(copy.name, f"{owner} gets elements of it that are no block of its rows or columns")
        else:
            tensors.setdefault(copy.name, []).append(placed)
    opaque = [*trace.opaque, *(Opaque(c.name, unmapped[c.name], c.target) for c in trace.copies if c.name in unmapped)]
    mapped = {name: tuple(places) for name, places in tensors.items() if name not in unmapped}
    written = {owners.of(record.target) for record in (*trace.copies, *trace.constants, *trace.opaque)}
    live = {n: Live.of(model, n) for n in parameters | buffers if n in parameters or n in written}
    return Destinations(rank, mapped, tuple(trace.constants), unmapped, tuple(opaque), model, live)


def _placed(parameter: Parameter, copy: Copy, owner: str) -> RolloutTensor | None:
    """The copy's target as a region of the HF tensor that its source is a view of; None if it is no region."""
    shape, source, target = parameter.shape, copy.source, copy.target
    steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]  # its strides: the meta tensor is contiguous
    axes = {source.stride(dim): dim for dim in range(source.dim()) if source.shape[dim] > 1}
    left, begins, sizes, strides = source.storage_offset(), [], [], []
    for length, step in zip(shape, steps, strict=True):
        begin, left = divmod(left, step)
        dim = axes.get(step) if length > 1 else None
        begins.append(begin)
        sizes.append(1 if dim is None else source.shape[dim])
        strides.append(1 if dim is None else target.stride(dim))
    cut = [axis for axis, size in enumerate(sizes) if size != shape[axis]]
    inside = all(begin + size <= length for begin, size, length in zip(begins, sizes, shape, strict=True))
    if math.prod(sizes) != target.numel() or not inside or len(cut) > 1:
        return None
    axis = cut[0] if cut else 0
    region = Region(parameter.name, axis, begins[axis], begins[axis] + sizes[axis])
    return RolloutTensor(region, target.as_strided(sizes, strides, target.storage_offset()), owner)


def _raise(rank: int, problems: list[str], meaning: str) -> None:
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise RecipeError(f"reshard: rank {rank}: {'; '.join(problems[:5])}{more}: {meaning}")
