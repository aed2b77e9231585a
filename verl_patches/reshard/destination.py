"""Learn from vLLM's own `load_weights` where each HF tensor lies in the rollout engine's parameters.

`load_weights` is traced once with meta tensors (`Trace`); it writes nothing, and no table of vLLM's names is needed.
From then on weights can be written straight into the views of `Destinations.tensors`. Where the trace cannot follow a
tensor, the sync is refused: verl's own path, recipe.patches=[-reshard.*], loads whatever vLLM loads.

The engine must be awake and prepared for a load as verl does: `patch_vllm_moe_model_weight_loader(model)` has run
(vllm_ascend.ops.fused_moe.AscendUnquantizedFusedMoEMethod.process_weights_after_loading makes new expert parameters
without a weight_loader).

Layouts that an engine gives its parameters after loading:
- Other strides, as vllm.model_executor.layers.fused_moe.layer.UnquantizedFusedMoEMethod._maybe_pad_weight leaves them:
  views follow strides.
- Last two axes swapped: load_weights raises for such parameters. At our pins vllm-ascend transposes expert weights in
  its forward only (vllm_ascend.ops.fused_moe.apply_mlp).
- A private NPU format (NZ): it is refused, as elements are not where strides say. At our pins vllm-ascend casts to it
  quantised weights and MLA's absorbed ones only (the latter: memory/sleep_mode.py). The query of the format through
  torch_npu cannot be tried without an NPU.

The trace feeds meta tensors of the checkpoint's shapes under a TorchDispatchMode. Views of a meta tensor know their
offset and strides, so that a copy_ shows which elements go where. Writes to live tensors are recorded and not executed;
all other operations run. Operations on a weight between the checkpoint and its copy_:

    views (narrow, chunk, transpose, ...), clone, a cast to a wider dtype    followed: the same elements
    anything else                                                            refused once its result is written
    what meta tensors cannot do (item(), a Python branch on a value)         load_weights raises, which is refused
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
from verl_patches.memory.live_memory import (
    named_tensors,
    private_format,
    restore_memory,
    storage_id,
    view_id,
    write_faults,
)
from verl_patches.reshard.region import Region

_SHOWN_PROBLEMS = 5  # number of problems that a message lists
_aten = torch.ops.aten


class Copy(NamedTuple):
    """Record that elements of HF tensor `name` go to `target`, a live view; `source` is a meta view of its shape."""

    name: str
    source: torch.Tensor
    target: torch.Tensor


class Constant(NamedTuple):
    """Record that `target`, a view of a live tensor, is filled with `value` independently of the weights."""

    value: float
    target: torch.Tensor


class _Origin(NamedTuple):
    name: str
    reason: str | None  # why it cannot be followed; None: the storage has the HF tensor's elements, in its order
    dtype: torch.dtype  # of the storage; a view as another dtype would count its offset in elements of another size


class Trace(TorchDispatchMode):
    """Record the writes of `load_weights` to `live` tensors, and as `problems` those that cannot be followed."""

    def __init__(self, live: Iterable[torch.Tensor]):
        super().__init__()
        self.copies: list[Copy] = []
        self.constants: list[Constant] = []
        self.problems: list[str] = []
        self._current = "before the first tensor"  # the HF tensor that load_weights loads now
        self._live = {storage_id(tensor): tensor.dtype for tensor in live}
        self._origins: dict[int, _Origin] = {}
        self._tracked: list[torch.Tensor] = []  # keeps storages alive, so that no other one gets their id

    def run(self, load_weights: Callable[[Iterable], Any], sources: Mapping[str, torch.Tensor]) -> None:
        """Call `load_weights` with all `sources` (HF name -> meta tensor); an exception from it is a problem, too."""
        for name, tensor in sources.items():
            self._track(tensor, name, None)
        try:
            with torch.no_grad(), self:
                load_weights(self._feed_sources(sources))
        except Exception as error:
            self.problems.append(f"{self._current}: {type(error).__name__}: {error}")

    def _feed_sources(self, sources: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for self._current, tensor in sources.items():
            yield self._current, tensor
        self._current = "after the last tensor"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        kind = _operation_kind(func)
        if kind == "view":
            return func(*args, **kwargs)
        if kind == "write":
            return self._write(func, args, kwargs)
        return self._compute(func, args, kwargs)

    def _compute(self, func: Any, args: tuple, kwargs: dict) -> Any:
        origin = self._find_origin(args, kwargs)
        if origin is None:
            return func(*args, **kwargs)
        if func in (_aten.clone.default, _aten._to_copy.default) and origin.reason is None:
            source, dtype = args[0], kwargs.get("dtype") or args[0].dtype
            if torch.promote_types(source.dtype, dtype) == dtype:
                return self._cast_storage(source, dtype, origin)
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            if storage_id(tensor) not in self._origins:  # a view is tracked already
                self._track(tensor, origin.name, origin.reason or f"{func} computes new values from this weight")
        return result

    def _cast_storage(self, source: torch.Tensor, dtype: torch.dtype, origin: _Origin) -> torch.Tensor:
        """Return `source` in `dtype`, in a storage with the same places, so that its views can still be located."""
        if dtype == source.dtype:
            return _aten.alias.default(source)
        count = source.untyped_storage().nbytes() // source.element_size()
        whole = torch.empty(count, dtype=dtype, device="meta")
        self._track(whole, origin.name, None)
        return whole.as_strided(source.shape, source.stride(), source.storage_offset())

    def _write(self, func: Any, args: tuple, kwargs: dict) -> Any:
        written = _written_tensors(func, args, kwargs)
        live = [tensor for tensor in written if storage_id(tensor) in self._live]
        if live:
            self._record(func, args, kwargs, live)
            return _in_place_result(func, written)
        origin = self._find_origin(args, kwargs)
        if origin is not None:  # the loader's own memory depends on a weight from now on
            for tensor in written:
                self._track(
                    tensor, origin.name, origin.reason or f"{func} changes this weight or copies it to other memory"
                )
            if any(tensor.is_meta for tensor in _tensors((args, kwargs))):  # it has no data to write
                return _in_place_result(func, written)
        return func(*args, **kwargs)

    def _record(self, func: Any, args: tuple, kwargs: dict, live: list[torch.Tensor]) -> None:
        if func is _aten.copy_.default:
            return self._record_copy(args[0], args[1])
        if func is _aten.fill_.Scalar:
            if live[0].numel():
                self.constants.append(Constant(args[1], live[0]))
        elif any(tensor.numel() for tensor in live):
            self._refuse(self._find_origin(args, kwargs), f"{func} computes in place on a tensor of vLLM's model")

    def _record_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if view_id(target) == view_id(source) or not target.numel():
            return  # it copies a tensor onto itself, or no elements
        origin = self._find_origin((source,), {})
        if origin is None or origin.reason is not None:
            return self._refuse(origin, "copy_ reads a tensor that is not a weight of the checkpoint")
        if (source.dtype, target.dtype) != (origin.dtype, self._live[storage_id(target)]):
            return self._refuse(origin, "copy_ reads or writes a view as another dtype")
        spread = source.expand(target.shape)  # raises for shapes for which copy_ would
        if spread.numel() != source.numel():
            return self._refuse(origin, "copy_ repeats elements by broadcasting")
        self.copies.append(Copy(origin.name, spread, target))

    def _refuse(self, origin: _Origin | None, reason: str) -> None:
        name = self._current
        if origin is not None:
            name, reason = origin.name, origin.reason or reason
        self.problems.append(f"{name}: {reason}")

    def _find_origin(self, args: tuple, kwargs: dict) -> _Origin | None:
        origins = (self._origins.get(storage_id(tensor)) for tensor in _tensors((args, kwargs)))
        return next((origin for origin in origins if origin is not None), None)

    def _track(self, tensor: torch.Tensor, name: str, reason: str | None) -> None:
        self._origins[storage_id(tensor)] = _Origin(name, reason, tensor.dtype)
        self._tracked.append(tensor)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


@functools.cache
def _operation_kind(func: Any) -> str:
    schema = func._schema
    if any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments):
        return "write"
    returns = schema.returns
    return "view" if returns and all(value.alias_info is not None for value in returns) else "compute"


def _written_tensors(func: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """Return the tensors that the operation writes to."""
    written = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += _tensors(args[place] if place < len(args) else kwargs.get(argument.name))
    return written


def _in_place_result(func: Any, written: list[torch.Tensor]) -> Any:
    """Return the value of an operation that writes in place: its target, its targets, or None."""
    count = len(func._schema.returns)
    if count == 0:
        return None
    return written[0] if count == 1 else tuple(written)


@dataclass(frozen=True, eq=False)
class RolloutTensor:
    """Hold a region of an HF tensor and its place in one live parameter.

    `tensor`: view of live memory with the region's own shape, in the parameter's dtype; possibly strided. `parameter`:
    vLLM's name of the parameter.
    """

    region: Region
    tensor: torch.Tensor
    parameter: str


@dataclass(frozen=True, eq=False)
class Destinations:
    """Hold the places of HF tensors on this rank; it references the engine's memory, so drop it with the engine.

    `tensors`: HF name -> its places, for tensors of which the rank holds a part. `constants`: values that load_weights
    fills in itself (padding of the vocabulary), to be written again only if the memory was lost. `views`: the memory of
    every parameter, and of every buffer that is loaded, by the engine's names.
    """

    tensors: dict[str, tuple[RolloutTensor, ...]]
    constants: tuple[Constant, ...]
    model: torch.nn.Module
    views: dict[str, tuple]

    def still_valid(self, model: torch.nn.Module) -> bool:
        """Return whether all parameters have the memory that was learnt; if not (rebuilt, moved), learn again.

        Reads no data. vLLM's sleep frees the memory of storages that stay: the caller must wake the engine.
        """
        present = named_tensors(model)
        return model is self.model and all(
            name in present and view_id(present[name]) == view for name, view in self.views.items()
        )


def learn_destinations(model: torch.nn.Module, inventory: Inventory, *, rank: int) -> Destinations:
    """Return the destinations of all tensors of `inventory` by tracing `model.load_weights`; parameters do not change.

    It costs about as much as one load_weights without its copies. `inventory` has the dtypes that will be sent. Raises
    RecipeError for a loader that gives parameters other memory, that transforms a tensor in a way that cannot be
    followed, or that does not write each element of every parameter, and of buffers that are loaded, exactly once. The
    message names parameter, rank, expected and found.
    """
    before = named_tensors(model)
    data = {name: tensor.data for name, tensor in before.items()}
    sources = {p.name: torch.empty(p.shape, dtype=getattr(torch, p.dtype), device="meta") for p in inventory.parameters}
    trace = Trace(before.values())
    try:
        trace.run(model.load_weights, sources)
    finally:
        restore_memory(model, before, data, rank)
    names = {storage_id(tensor): name for name, tensor in before.items()}
    tensors, problems = _map_copies(trace.copies, inventory, names)
    _raise_problems(rank, trace.problems + problems, "the direct weight sync cannot reproduce vLLM's load_weights")
    writes = [(str(place.region), place.tensor) for places in tensors.values() for place in places]
    writes += [(f"the constant {constant.value:g}", constant.target) for constant in trace.constants]
    written = {names[storage_id(target)] for _, target in writes}
    loaded = dict(model.named_parameters()) | {name: before[name] for name in written}
    _raise_problems(rank, write_faults(loaded, writes), "vLLM's load_weights does not write each element once")
    views = {name: view_id(tensor) for name, tensor in loaded.items()}
    return Destinations(tensors, tuple(trace.constants), model, views)


def _map_copies(
    copies: Iterable[Copy], inventory: Inventory, names: Mapping[int, str]
) -> tuple[dict[str, tuple[RolloutTensor, ...]], list[str]]:
    """Return (HF name -> places, problems); `names`: storage -> name of the live tensor."""
    tensors, problems = dict[str, tuple[RolloutTensor, ...]](), []
    for copy in copies:
        owner = names[storage_id(copy.target)]
        private = private_format(copy.target)
        place = _locate_copy(inventory.by_name[copy.name], copy, owner)
        if private is not None:
            problems.append(f"{copy.name}: {owner} is stored in the private NPU format {private}")
        elif place is None:
            problems.append(f"{copy.name}: {owner} receives elements that are not one range of its rows or columns")
        else:
            tensors[copy.name] = (*tensors.get(copy.name, ()), place)
    return tensors, problems


def _locate_copy(parameter: Parameter, copy: Copy, owner: str) -> RolloutTensor | None:
    """Return the copy's target with the region of the HF tensor that goes there; None if the source is not a region."""
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


def _raise_problems(rank: int, problems: list[str], failure: str) -> None:
    if problems:
        more = f" (and {len(problems) - _SHOWN_PROBLEMS} more)" if len(problems) > _SHOWN_PROBLEMS else ""
        raise RecipeError(
            f"reshard: rank {rank}: {failure}: {'; '.join(problems[:_SHOWN_PROBLEMS])}{more}.\n"
            "Use verl's own weight sync: recipe.patches=[-reshard.*]"
        )
