"""Identify the memory of a vLLM model's tensors, check that writes cover it, and derive MLA's projections again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from verl_patches.errors import RecipeError

_PLAIN_FORMATS = (0, 1, 2, 30)  # NCHW, NHWC, ND, NCDHW: elements lie where strides say; 29 is NZ


def storage_id(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage, which all views of the storage share.

    Unlike data_ptr it stays the same when the storage is offloaded by resizing, and it tells storages without memory
    and those of meta tensors apart. The storage must stay referenced: a new one may get the id of one that was freed.
    """
    return tensor.untyped_storage()._cdata


def view_id(tensor: torch.Tensor) -> tuple:
    """Return a key that is equal for tensors that are the same view (offset, shape, strides, dtype) of a storage."""
    return storage_id(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers of `model`, each once, by the engine's own names."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def restore_memory(
    model: torch.nn.Module, before: Mapping[str, torch.Tensor], data: Mapping[str, torch.Tensor], rank: int
) -> None:
    """Point tensors back to their memory where load_weights changed it, and raise RecipeError if it changed any.

    `before`: {name: tensor} as before load_weights; `data`: {name: its `.data` at that time}.
    """
    after = named_tensors(model)
    moved = [name for name in {**before, **after} if after.get(name) is not before.get(name)]
    for name, tensor in before.items():
        if view_id(tensor) != view_id(data[name]):
            tensor.data = data[name]
            moved.append(name)
    if moved:
        raise RecipeError(
            f"reshard: rank {rank}: expected load_weights to copy into the memory of the model's tensors, found new "
            f"memory for {', '.join(moved[:3])}: the weight sync cannot find where to write; use verl's own sync, "
            "recipe.patches=[-reshard.*]"
        )


def private_format(tensor: torch.Tensor) -> int | None:
    """Return CANN's number of the memory format of `tensor` on an NPU, None where strides describe the format."""
    if tensor.device.type != "npu":
        return None
    import torch_npu

    number = torch_npu.get_npu_format(tensor)
    return None if number in _PLAIN_FORMATS else number


def write_faults(tensors: Mapping[str, torch.Tensor], writes: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Return a sentence for each fault of `tensors`: elements that are never written, or written more than once.

    `writes`: (name of the written data, view of a storage). No data is read, so meta tensors serve too; the cost grows
    with the contiguous runs of the views, not with their elements.
    """
    by_storage: dict[int, list[tuple[str, np.ndarray]]] = {}
    for what, view in writes:
        by_storage.setdefault(storage_id(view), []).append((what, _runs(view)))
    problems = []
    for name, tensor in tensors.items():
        if not tensor.numel():
            continue
        expected = f"{name}: expected each of its {tensor.numel()} elements to be written once, found"
        problems += [f"{expected} {fault}" for fault in _tensor_faults(tensor, by_storage.get(storage_id(tensor), ()))]
    return problems


def _tensor_faults(tensor: torch.Tensor, writes: Sequence[tuple[str, np.ndarray]]) -> Iterable[str]:
    """Yield a fault for elements of `tensor` that are written twice, and one for those that are never written."""
    own, written = _runs(tensor), np.concatenate([np.empty((0, 2), dtype=np.int64), *(runs for _, runs in writes)])
    bounds = np.unique(np.concatenate([own, written]))  # between two bounds no run begins or ends
    inside, depth = _run_counts(bounds, own) > 0, _run_counts(bounds, written)
    doubled, missing = inside & (depth > 1), inside & (depth == 0)
    if doubled.any():
        place = bounds[doubled.argmax()]
        names = [what for what, runs in writes if ((runs[:, 0] <= place) & (place < runs[:, 1])).any()]
        yield f"{_element_index(tensor, place)} written by {' and by '.join(names)}"
    if missing.any():
        count = int(np.diff(bounds)[missing].sum()) // tensor.element_size()
        yield f"{count} not written, the first at {_element_index(tensor, bounds[missing.argmax()])}"


def _run_counts(bounds: np.ndarray, runs: np.ndarray) -> np.ndarray:
    """Return how many of `runs` contain each interval between two neighbouring `bounds`."""
    changes: np.ndarray = np.zeros(len(bounds), dtype=np.int64)
    np.add.at(changes, np.searchsorted(bounds, runs[:, 0]), 1)
    np.subtract.at(changes, np.searchsorted(bounds, runs[:, 1]), 1)
    return changes[:-1].cumsum()


def _runs(view: torch.Tensor) -> np.ndarray:
    """Return [start, stop) in bytes of each contiguous run of `view` in its storage: [runs, 2] in order of address."""
    run = 1
    starts: np.ndarray = np.zeros(1, dtype=np.int64)
    steps = zip(view.stride(), view.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in steps if size > 1):
        if len(starts) == 1 and stride == run:
            run *= size
        else:
            starts = (np.arange(size)[:, None] * stride + starts).ravel()
    bytes_each = view.element_size()
    starts = np.sort(starts + view.storage_offset()) * bytes_each
    return np.stack([starts, starts + run * bytes_each], axis=1)


def _element_index(tensor: torch.Tensor, place: int) -> list[int]:
    """Return the index in `tensor` of the element at byte `place` of the storage."""
    left, index = int(place) // tensor.element_size() - tensor.storage_offset(), [0] * tensor.dim()
    for dim in sorted(range(tensor.dim()), key=tensor.stride, reverse=True):
        if tensor.shape[dim] > 1:
            index[dim], left = divmod(left, tensor.stride(dim))
    return index


# set by vllm.attention.backends.mla.common.MLACommonImpl.process_weights_after_loading, and by
# vllm_ascend.attention.mla_v1.AscendMLAImpl.process_weights_after_loading
ABSORBED_PROJECTIONS = ("W_UV", "W_UK_T")


def post_load(model: torch.nn.Module) -> int:
    """Derive MLA's absorbed projections of every layer again where needed, and return the number of such layers.

    Call it after the last weight of a sync has been written. On an NPU with enable_weight_nz_layout the projections are
    in format NZ: copying NZ into NZ is torch_npu's work and cannot be tried here.
    """
    # vars() instead of hasattr, which is slow on modules without the attribute, because this runs at every sync
    return sum(absorb_in_place(module) for module in model.modules() if "impl" in vars(module))


def absorb_in_place(attention: Any) -> bool:
    """Derive one attention layer's projections from its present kv_b_proj, and return whether that was needed.

    `attention`: vLLM's Attention, whose `impl` holds the projections. New values go into the existing tensors: a
    captured graph reads those addresses. Nothing is done before vLLM has derived them (the first load), nor where they
    are views of kv_b_proj, as vLLM's own are (vllm-ascend copies, and MindSpeed makes torch.Tensor.view copy).
    """
    holder = attention.impl
    held = {name: getattr(holder, name) for name in ABSORBED_PROJECTIONS if hasattr(holder, name)}
    weight = getattr(getattr(holder, "kv_b_proj", None), "weight", None)
    if not held or (weight is not None and all(storage_id(tensor) == storage_id(weight) for tensor in held.values())):
        return False
    with torch.no_grad():
        attention.process_weights_after_loading(held["W_UV"].dtype)
        for name, tensor in held.items():
            tensor.copy_(getattr(holder, name))
            setattr(holder, name, tensor)
    return True
