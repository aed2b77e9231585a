"""Identify the memory of a vLLM model's tensors, check that writes cover it, and derive MLA's projections again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

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

    `writes`: (name of the written data, view of a storage, in the storage's dtype). No data is read: the writes to each
    element are counted on the host, a byte an element of one storage at a time.
    """
    by_storage = defaultdict[int, list[tuple[str, torch.Tensor]]](list)
    for what, view in writes:
        by_storage[storage_id(view)].append((what, view))
    problems = []
    for name, tensor in tensors.items():
        views = by_storage[storage_id(tensor)]
        counts = torch.zeros(tensor.untyped_storage().nbytes() // tensor.element_size(), dtype=torch.uint8)
        for _, view in views:
            _same_view(counts, view).add_(1)
        found = _same_view(counts, tensor)
        expected = f"{name}: expected each of its {tensor.numel()} elements to be written once, found"
        if (doubled := found > 1).any():
            place = doubled.nonzero()[0].tolist()
            names = []
            for what, view in views:
                _same_view(counts.zero_(), view).fill_(1)
                names += [what] if found[tuple(place)] else []
            problems.append(f"{expected} {place} written by {' and by '.join(names)}")
            continue
        if (missing := found == 0).any():
            count, place = int(missing.sum()), missing.nonzero()[0].tolist()
            problems.append(f"{expected} {count} not written, the first at {place}")
    return problems


def _same_view(flat: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    return flat.as_strided(view.shape, view.stride(), view.storage_offset())


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
