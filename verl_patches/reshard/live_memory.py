"""Live memory of an engine's model: identity and owner of views, shapes while loading, and whether writes cover it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from verl_patches.errors import RecipeError

_PLAIN_FORMATS = (0, 1, 2, 30)  # NCHW, NHWC, ND, NCDHW: elements lie where strides say; 29 is NZ


def storage_id(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage, which its views share.

    Unlike data_ptr it survives offload by resizing, and differs between storages without memory and meta tensors. The
    storage must stay referenced: a new one may get the id of one that was freed.
    """
    return tensor.untyped_storage()._cdata


def view_id(tensor: torch.Tensor) -> tuple:
    """Equal for two tensors that are the same view (offset, shape, strides, dtype) of the same storage."""
    return storage_id(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, each once, by the engine's own names."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


class Live(NamedTuple):
    """A parameter or buffer at the time of mapping: a view of its memory, and the dict of its module that has it."""

    tensor: torch.Tensor
    view: tuple
    holder: Mapping[str, torch.Tensor | None]
    key: str

    @classmethod
    def of(cls, model: torch.nn.Module, name: str) -> Live:
        """The parameter or buffer `name` of `model`."""
        module, _, key = name.rpartition(".")
        module = model.get_submodule(module)
        holder = module._parameters if key in module._parameters else module._buffers
        return cls(holder[key].detach(), view_id(holder[key]), holder, key)

    def is_there(self) -> bool:
        """Whether the module still has it, in the same memory."""
        now = self.holder.get(self.key)
        return now is not None and view_id(now) == self.view


class Owners:
    """Finds the parameter or buffer that a view of live memory belongs to."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self._by_storage: dict[int, list[tuple[int, str]]] = {}
        for name, tensor in tensors.items():
            start = tensor.storage_offset() * tensor.element_size()
            self._by_storage.setdefault(storage_id(tensor), []).append((start, name))

    def of(self, view: torch.Tensor) -> str:
        """The last one that begins at or before `view` in its storage."""
        places, start = sorted(self._by_storage[storage_id(view)]), view.storage_offset() * view.element_size()
        return next((name for begin, name in reversed(places) if begin <= start), places[0][1])


def restore_memory(
    model: torch.nn.Module, before: Mapping[str, torch.Tensor], data: Mapping[str, torch.Tensor], rank: int
) -> None:
    """Undo changes of the memory of tensors by load_weights, and raise RecipeError if there were any."""
    after = named_tensors(model)
    moved = [name for name in {**before, **after} if after.get(name) is not before.get(name)]
    for name, tensor in before.items():
        if view_id(tensor) != view_id(data[name]):
            tensor.data = data[name]
            moved.append(name)
    if moved:
        raise RecipeError(
            f"reshard: rank {rank}: load_weights gives {', '.join(moved[:3])} other memory instead of copying into it, "
            "which cannot be traced: use verl's path, recipe.patches=[-reshard.*]"
        )


def private_format(tensor: torch.Tensor) -> int | None:
    """CANN's number of the memory format of `tensor` on an NPU, unless strides describe it."""
    if tensor.device.type != "npu":
        return None
    import torch_npu

    number = torch_npu.get_npu_format(tensor)
    return None if number in _PLAIN_FORMATS else number


def not_written_once(tensors: Mapping[str, torch.Tensor], writes: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """A sentence for each fault of `tensors`: elements that no write or more than one write reaches.

    `writes`: (what is written there, view of a storage). No data is read, so meta tensors serve too; the cost follows
    the contiguous runs of the views, not their elements.
    """
    by_storage: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for what, view in writes:
        by_storage.setdefault(storage_id(view), []).append((what, view))
    written = {storage: _Written(its_writes) for storage, its_writes in by_storage.items()}
    problems = []
    for name, tensor in tensors.items():
        storage = written.get(storage_id(tensor))
        faults = storage.faults(tensor) if storage else ["none written"]
        expected = f"{name}: expected each of its {tensor.numel()} elements to be written once, found"
        problems += [f"{expected} {fault}" for fault in faults if tensor.numel()]
    return problems


class _Written:
    """The writes to one storage: intervals [start, stop) in bytes, in order of address."""

    def __init__(self, writes: list[tuple[str, torch.Tensor]]):
        runs = [_runs(view) for _, view in writes]
        writers = np.repeat(np.arange(len(runs)), [len(run) for run in runs])
        intervals = np.concatenate(runs)
        order = np.argsort(intervals[:, 0], kind="stable")
        self.names, self.writers = [what for what, _ in writes], writers[order]
        self.starts, self.stops = intervals[order].T
        reach = np.maximum.accumulate(self.stops)
        self.again = np.flatnonzero(self.starts[1:] < reach[:-1]) + 1  # they begin inside an earlier one, and share:
        self.shared = np.stack([self.starts[self.again], np.minimum(self.stops[self.again], reach[self.again - 1])], 1)
        heads = np.flatnonzero(np.concatenate([[True], self.starts[1:] > reach[:-1]]))  # where a gap ends
        self.merged = np.stack([self.starts[heads], reach[np.append(heads[1:] - 1, len(reach) - 1)]], axis=1)

    def faults(self, tensor: torch.Tensor) -> list[str]:
        """Which element of `tensor` is written twice, by which writes, and how many elements are never written."""
        wanted, faults = _runs(tensor), []
        doubled = np.flatnonzero(_below(wanted, self.shared[:, 1]) > _below(wanted, self.shared[:, 0]))
        if len(doubled):
            second, begin = self.again[doubled[0]], self.shared[doubled[0], 0]
            place = max(begin, wanted[wanted[:, 1] > begin][0, 0])  # the first that is of this tensor
            first = np.flatnonzero(self.stops[:second] > place)[0]
            pair = f"{self.names[self.writers[first]]} and by {self.names[self.writers[second]]}"
            faults.append(f"{_index(tensor, place)} written by {pair}")
        missing = wanted[:, 1] - wanted[:, 0] - (_below(self.merged, wanted[:, 1]) - _below(self.merged, wanted[:, 0]))
        if missing.any():
            begin = wanted[np.flatnonzero(missing)[0], 0]
            around = np.flatnonzero((self.merged[:, 0] <= begin) & (begin < self.merged[:, 1]))
            first = self.merged[around[0], 1] if len(around) else begin
            count = int(missing.sum()) // tensor.element_size()
            faults.append(f"{count} not written, the first at {_index(tensor, first)}")
        return faults


def _runs(view: torch.Tensor) -> np.ndarray:
    """[start, stop) in bytes of each contiguous run of `view` in its storage, shape [runs, 2], in order of address."""
    run, starts = 1, np.zeros(1, dtype=np.int64)
    steps = zip(view.stride(), view.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in steps if size > 1):
        if len(starts) == 1 and stride == run:
            run *= size
        else:
            starts = (np.arange(size)[:, None] * stride + starts).ravel()
    bytes_each = view.element_size()
    starts = np.sort(starts + view.storage_offset()) * bytes_each
    return np.stack([starts, starts + run * bytes_each], axis=1)


def _below(intervals: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Bytes of the disjoint, sorted intervals that lie below each place."""
    before = np.concatenate([[0], np.cumsum(intervals[:, 1] - intervals[:, 0])])
    at = np.searchsorted(intervals[:, 0], places, side="right")
    return before[at] - np.where(at > 0, np.maximum(intervals[at - 1, 1] - places, 0), 0)


def _index(tensor: torch.Tensor, place: int) -> list[int]:
    """The index of the element at byte `place` of the storage."""
    left, index = int(place) // tensor.element_size() - tensor.storage_offset(), [0] * tensor.dim()
    for dim in sorted(range(tensor.dim()), key=tensor.stride, reverse=True):
        if tensor.shape[dim] > 1:
            index[dim], left = divmod(left, tensor.stride(dim))
    return index


ABSORBED = ("W_UV", "W_UK_T")  # vllm/attention/backends/mla/common.py:1115, vllm_ascend/attention/mla_v1.py:622


def post_load(model: torch.nn.Module) -> int:
    """Derive the absorbed projections of every layer again where needed; how many layers that were.

    Call it after the last weight of a sync has been written. On an NPU with enable_weight_nz_layout the projections are
    in format NZ: copying NZ into NZ is torch_npu's work and cannot be tried here.
    """
    # vars: hasattr on a module is slow where the answer is no, and this runs at every sync
    return sum(absorb_in_place(module) for module in model.modules() if "impl" in vars(module))


def absorb_in_place(attention: Any) -> bool:
    """Give one attention layer the projections of its present kv_b_proj; whether anything had to be done.

    `attention`: vLLM's Attention, its `impl` holds the projections. New values go into the tensors that are there: a
    captured graph reads those addresses. Nothing is done before vLLM has derived them (the first load), and where they
    are views of kv_b_proj, as vLLM's own are (vllm-ascend copies, and MindSpeed makes torch.Tensor.view copy).
    """
    holder = attention.impl
    held = {name: getattr(holder, name) for name in ABSORBED if hasattr(holder, name)}
    weight = getattr(getattr(holder, "kv_b_proj", None), "weight", None)
    if not held or (weight is not None and all(storage_id(tensor) == storage_id(weight) for tensor in held.values())):
        return False
    with torch.no_grad():
        attention.process_weights_after_loading(held["W_UV"].dtype)
        for name, tensor in held.items():
            tensor.copy_(getattr(holder, name))
            setattr(holder, name, tensor)
    return True
