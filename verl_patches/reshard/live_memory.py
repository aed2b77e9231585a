"""The live memory of an engine's model: what it is, whose it is, and how to leave it as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from verl_patches.errors import RecipeError

_PLAIN_FORMATS = (0, 1, 2, 30)  # NCHW, NHWC, ND, NCDHW: elements lie where strides say; 29 is NZ


def named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, each once, by the engine's own names."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def memory(tensor: torch.Tensor) -> tuple:
    """What says that two tensors are the same view of the same memory."""
    # the storage's identity, not its address: offload that resizes a storage leaves views of it right
    place = tensor.untyped_storage()._cdata, tensor.storage_offset()
    return (*place, tensor.shape, tensor.stride(), tensor.dtype)


class Live(NamedTuple):
    """A parameter or buffer as it was: a view of its memory, and where its module keeps it."""

    tensor: torch.Tensor
    memory: tuple
    holder: Mapping[str, torch.Tensor | None]
    key: str

    @classmethod
    def of(cls, model: torch.nn.Module, name: str) -> Live:
        """The one that the model calls `name`."""
        module, _, key = name.rpartition(".")
        module = model.get_submodule(module)
        holder = module._parameters if key in module._parameters else module._buffers
        return cls(holder[key].detach(), memory(holder[key]), holder, key)

    def is_there(self) -> bool:
        """Whether the module still has it, in the same memory."""
        now = self.holder.get(self.key)
        return now is not None and memory(now) == self.memory


class Owners:
    """Which parameter or buffer a view of live memory belongs to."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self._by_storage: dict[int, list[tuple[int, str]]] = {}
        for name, tensor in tensors.items():
            at = tensor.storage_offset() * tensor.element_size(), name
            self._by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(at)
        for places in self._by_storage.values():
            places.sort()

    def of(self, view: torch.Tensor) -> str:
        """The last one that begins at or before it in its storage."""
        places, at = self._by_storage[view.untyped_storage()._cdata], view.storage_offset() * view.element_size()
        return next((name for begin, name in reversed(places) if begin <= at), places[0][1])


@contextlib.contextmanager
def in_load_shape(
    tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]], rank: int
) -> Iterator[None]:
    """Meanwhile parameters whose last two axes the engine swapped are as loaded; RecipeError for any other shape."""
    swapped = {}
    for name, shape in shapes.items():
        if name not in tensors or tuple(tensors[name].shape) == tuple(shape):
            continue
        if len(shape) < 2 or (*tensors[name].shape[:-2], *tensors[name].shape[:-3:-1]) != tuple(shape):
            raise RecipeError(
                f"reshard: rank {rank}: {name}: expected shape {tuple(shape)} as load_weights fills it, or its last "
                f"two axes swapped, found {tuple(tensors[name].shape)}: the engine changes weights after loading in a "
                "way that is not known here; use verl's path, recipe.patches=[-reshard.*]"
            )
        swapped[name] = tensors[name].data
    try:
        for name, data in swapped.items():
            tensors[name].data = data.transpose(-1, -2)
        yield
    finally:
        for name, data in swapped.items():
            tensors[name].data = data


def put_back(
    model: torch.nn.Module, before: Mapping[str, torch.Tensor], data: Mapping[str, torch.Tensor], rank: int
) -> None:
    """RecipeError if load_weights gave tensors other memory; what had it before has it again."""
    after = named_tensors(model)
    moved = [name for name in {**before, **after} if after.get(name) is not before.get(name)]
    for name, tensor in before.items():
        if memory(tensor) != memory(data[name]):
            tensor.data = data[name]
            moved.append(name)
    if moved:
        raise RecipeError(
            f"reshard: rank {rank}: load_weights gives {', '.join(moved[:3])} other memory instead of copying into it, "
            "which cannot be traced: use verl's path, recipe.patches=[-reshard.*]"
        )


def private_format(tensor: torch.Tensor) -> int | None:
    """CANN's number of the memory format in which `tensor` is kept on an NPU, unless strides describe it."""
    if tensor.device.type != "npu":
        return None
    import torch_npu

    number = torch_npu.get_npu_format(tensor)
    return None if number in _PLAIN_FORMATS else number
