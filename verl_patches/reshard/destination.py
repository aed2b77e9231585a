"""The place of each HF tensor in the rollout engine's parameters, learnt from vLLM's own `load_weights`.

`load_weights` is traced once with meta tensors (`Trace`); nothing is written, and there is no table of vLLM's names.
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

The trace feeds meta tensors of the checkpoint's shapes under a TorchDispatchMode. Views of a meta tensor have its
offset and strides, so that a copy_ shows which elements go where. Writes to live tensors are recorded and not executed;
everything else runs. Operations on a weight between the checkpoint and its copy_:

    views (narrow, chunk, transpose, ...), clone, a cast to a wider dtype    followed: the same elements
    anything else                                                            the copy_ is recorded without its source
    what meta tensors cannot do (item(), a Python branch on a value)         load_weights raises: repeated with zeros

So a write without a source still names its place, and does not affect the trace of other tensors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
    storage_id,
    view_id,
)
from verl_patches.reshard.region import Region, region_of

_MOST_RESTARTS = 64  # each costs load_weights' own preparation; a loader that fails more often is not followed at all
_aten = torch.ops.aten


class Copy(NamedTuple):
    """Elements of the HF tensor `name` go to `target`, a view of a live tensor; `source`: a meta view of its shape."""

    name: str
    source: torch.Tensor
    target: torch.Tensor


class Constant(NamedTuple):
    """`target`, a view of a live tensor, is filled with `value`, whatever the weights are."""

    value: float
    target: torch.Tensor


class Opaque(NamedTuple):
    """Something is written to `target` while the HF tensor `name` is loaded, and `reason` is why it is not followed."""

    name: str
    reason: str
    target: torch.Tensor


class _Origin(NamedTuple):
    name: str
    reason: str | None  # None: the storage's elements are those of the HF tensor, in its order
    dtype: torch.dtype  # what the storage holds; a view as another dtype counts its offset otherwise


class Trace(TorchDispatchMode):
    """Records what `load_weights` writes to `live` tensors (see the module); `failed` names tensors it raised for."""

    def __init__(self, live: Iterable[torch.Tensor]):
        super().__init__()
        self.copies: list[Copy] = []
        self.constants: list[Constant] = []
        self.opaque: list[Opaque] = []
        self.failed: dict[str, str] = {}
        self.current: str | None = None  # the HF tensor that load_weights is at
        self._live = {storage_id(tensor): tensor.dtype for tensor in live}
        self._origins: dict[int, _Origin] = {}
        self._tracked: list[torch.Tensor] = []  # references to storages, so that no other one gets their id
        self._values_needed: str | None = None  # why `current` has values (zeros) this time

    def run(self, load_weights: Callable[[Iterable], Any], sources: Mapping[str, torch.Tensor]) -> None:
        """Call `load_weights` with all `sources` (HF name -> meta tensor); again from where it raised, if it does.

        Raises RecipeError if it raises before the first or after the last tensor, or for more than 64 of them.
        """
        for name, tensor in sources.items():
            self._track(tensor, name, None)
        left = dict(sources)  # each is removed once load_weights has gone on to the next one
        while left:
            self.current = None
            try:
                with torch.no_grad(), self:
                    load_weights(self._feed(left))
                return
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                if self.current is None or len(self.failed) >= _MOST_RESTARTS:
                    raise RecipeError(
                        f"reshard: load_weights cannot be traced with meta tensors ({len(self.failed)} tensors failed, "
                        f"now at {self.current or 'none of them'}): {why}. Use verl's path, recipe.patches=[-reshard.*]"
                    ) from error
                for records, length in zip((self.copies, self.constants, self.opaque), self._lengths, strict=True):
                    del records[length:]  # of the present tensor
                self._values_needed = why if self.current not in self.failed else None
                if self._values_needed is None:
                    del left[self.current]
                self.failed[self.current] = why

    def _feed(self, left: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in list(left.items()):
            self.current, self._lengths = name, (len(self.copies), len(self.constants), len(self.opaque))
            if self._values_needed is not None:
                tensor = torch.zeros(tensor.shape, dtype=tensor.dtype)
                self._track(tensor, name, self._values_needed)
            yield name, tensor
            self._values_needed = None
            del left[name]
        self.current = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        kind = _kind(func)
        if kind == "view":
            return func(*args, **kwargs)
        return (self._write if kind == "write" else self._compute)(func, args, kwargs)

    def _compute(self, func: Any, args: tuple, kwargs: dict) -> Any:
        origin = self._origin_of(args, kwargs)
        if origin is None:
            return func(*args, **kwargs)
        if func in (_aten.clone.default, _aten._to_copy.default) and origin.reason is None:
            source, dtype = args[0], kwargs.get("dtype") or args[0].dtype
            if torch.promote_types(source.dtype, dtype) == dtype:
                return self._same_elements(source, dtype, origin)
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            if storage_id(tensor) not in self._origins:  # else it is a view after all
                self._track(tensor, origin.name, origin.reason or f"{func} computes something from it")
        return result

    def _same_elements(self, source: torch.Tensor, dtype: torch.dtype, origin: _Origin) -> torch.Tensor:
        """A copy of `source` whose storage has the same elements in the same places, so that views stay right."""
        if dtype == source.dtype:
            return _aten.alias.default(source)
        count = source.untyped_storage().nbytes() // source.element_size()
        whole = torch.empty(count, dtype=dtype, device="meta")
        self._track(whole, origin.name, None)
        return whole.as_strided(source.shape, source.stride(), source.storage_offset())

    def _write(self, func: Any, args: tuple, kwargs: dict) -> Any:
        written = _written(func, args, kwargs)
        live = [tensor for tensor in written if storage_id(tensor) in self._live]
        if live:
            self._record(func, args, kwargs, live)
            return _answer(func, written)
        origin = self._origin_of(args, kwargs)
        if origin is not None:  # the loader's own memory: it depends on a weight from now on
            for tensor in written:
                self._track(tensor, origin.name, origin.reason or f"{func} changes it, or stores it elsewhere")
            if any(tensor.is_meta for tensor in _tensors((args, kwargs))):
                return _answer(func, written)
        return func(*args, **kwargs)

    def _record(self, func: Any, args: tuple, kwargs: dict, live: list[torch.Tensor]) -> None:
        if func is _aten.copy_.default:
            return self._record_copy(args[0], args[1])
        value = self._filled_with(func, args)
        if value is not None and self._values_needed is None:
            return self._add(self.constants, Constant(value, live[0]))
        for tensor in live:
            self._add(self.opaque, Opaque(*self._blame(args, kwargs, f"{func} writes it"), tensor))

    def _record_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if view_id(target) == view_id(source):
            return  # a tensor onto itself
        origin = self._origin_of((source,), {})
        if origin is None or origin.reason is not None:
            reason = "copy_ of a tensor that is none of the weights"
            return self._add(self.opaque, Opaque(*self._blame((source,), {}, reason), target))
        if (source.dtype, target.dtype) != (origin.dtype, self._live[storage_id(target)]):
            return self._add(self.opaque, Opaque(origin.name, "copy_ between views of another dtype", target))
        spread = source.expand(target.shape)  # raises where copy_ would
        if spread.numel() != source.numel():
            return self._add(self.opaque, Opaque(origin.name, "copy_ repeats elements", target))
        self._add(self.copies, Copy(origin.name, spread, target))

    def _filled_with(self, func: Any, args: tuple) -> float | None:
        """The number that fills the target, if no weight and no live tensor decides it."""
        if func is _aten.zero_.default:
            return 0.0
        if func is _aten.fill_.Scalar:
            return args[1]
        if func is _aten.fill_.Tensor and not {storage_id(args[1])} & {*self._live, *self._origins}:
            return args[1].item()
        return None

    def _add(self, records: list, record: Any) -> None:
        if record.target.numel():
            records.append(record)

    def _blame(self, args: tuple, kwargs: dict, reason: str) -> tuple[str, str]:
        origin = self._origin_of(args, kwargs)
        if origin is not None:
            return origin.name, origin.reason or reason
        return self.current or "after the last tensor", self._values_needed or reason

    def _origin_of(self, args: tuple, kwargs: dict) -> _Origin | None:
        origins = (self._origins.get(storage_id(tensor)) for tensor in _tensors((args, kwargs)))
        return next((origin for origin in origins if origin is not None), None)

    def _track(self, tensor: torch.Tensor, name: str, reason: str | None) -> None:
        self._origins[storage_id(tensor)] = _Origin(name, reason, tensor.dtype)
        self._tracked.append(tensor)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


@functools.cache
def _kind(func: Any) -> str:
    schema = func._schema
    if any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments):
        return "write"
    returns = schema.returns
    return "view" if returns and all(value.alias_info is not None for value in returns) else "compute"


def _written(func: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """The tensors that the operation writes to."""
    written = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += _tensors(args[place] if place < len(args) else kwargs.get(argument.name))
    return written


def _answer(func: Any, written: list[torch.Tensor]) -> Any:
    """What an operation that writes in place returns: its target, its targets, or nothing."""
    count = len(func._schema.returns)
    return None if count == 0 else written[0] if count == 1 else tuple(written)


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
