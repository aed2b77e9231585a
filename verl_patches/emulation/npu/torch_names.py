"""Rows of torch itself on platform npu_emulated: providers of names that do not depend on whether there is a device.

This module may be imported while torch is half built, so it looks at torch only inside functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def is_device(given: Any) -> bool:
    """True for "npu", "npu:0", "cuda", torch.device("npu")."""
    if isinstance(given, torch.device):
        return given.type in ("npu", "cuda")
    return isinstance(given, str) and given.partition(":")[0] in ("npu", "cuda")


class Default:
    """Whether tensors are made on the device where no device is given: inside `with torch.device("npu")`."""

    is_device = False


def enter_context(enter: Callable) -> Callable:
    """Row provider for DeviceContext.__enter__, which puts itself below all modes: its device must be the CPU."""

    @functools.wraps(enter)
    def __enter__(self):
        self.outer_default, Default.is_device = Default.is_device, is_device(self.device)
        if Default.is_device:
            self.device = torch.device("cpu")
        return enter(self)

    return __enter__


def exit_context(leave: Callable) -> Callable:
    """Row provider for DeviceContext.__exit__."""

    @functools.wraps(leave)
    def __exit__(self, exc_type, exc_val, exc_tb):
        Default.is_device = self.outer_default
        return leave(self, exc_type, exc_val, exc_tb)

    return __exit__


def generator_on_host(generator: type) -> type:
    """Row provider for torch.Generator: one of the device is one of the CPU."""

    class Meta(type):
        def __instancecheck__(cls, instance):
            return isinstance(instance, generator)

        def __subclasscheck__(cls, subclass):
            return issubclass(subclass, generator)

    class Generator(metaclass=Meta):
        """torch.Generator of the CPU."""

        def __new__(cls, device="cpu"):
            return generator(device="cpu" if is_device(device) else device)

    return Generator


def implement_on_host(impl: Callable) -> Callable:
    """Row provider for Library.impl: what MindSpeed and vLLM implement for the device is for the CPU here.

    The NPU's dispatch key is PrivateUse1; vLLM registers some functions for CUDA whatever the platform
    (vllm_ascend/patch/platform/patch_common).
    """

    @functools.wraps(impl)
    def implement(self, op_name, fn, dispatch_key="", **kwargs):
        if self.ns in ("mindspeed", "vllm") and dispatch_key in ("PrivateUse1", "CUDA"):
            dispatch_key = "CPU"
        return impl(self, op_name, fn, dispatch_key, **kwargs)

    return implement


def no_accelerator() -> bool:
    """torch.accelerator.is_available: no hooks of a device are registered in C++."""
    return False


def no_triton() -> bool:
    """has_triton: no device of Triton's is there."""
    return False


def accelerator_is_host(check: Any = None) -> torch.device:
    """torch._C._get_accelerator: dist.barrier makes its tensor there."""
    return torch.device("cpu")


@property  # type: ignore[misc]  # a row makes it one of torch.Tensor's
def is_npu(self: torch.Tensor) -> bool:
    """Tensor.is_npu: tensors are in host memory."""
    return False


def is_true(self: Any) -> bool:
    """OptimizedModule.__bool__."""
    return True


def with_hccl_for_nccl(init_process_group: Callable) -> Callable:
    """Row provider for init_process_group: nccl means hccl, as with transfer_to_npu; no device id."""

    @functools.wraps(init_process_group)
    def init(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_id", None)
        init_process_group(backend.replace("nccl", "hccl") if backend else backend, *args, **kwargs)

    return init


def all_to_all_of_lists(all_to_all: Callable) -> Callable:
    """Row provider for dist.all_to_all, which gloo does not have: one exchange of flat tensors."""

    @functools.wraps(all_to_all)
    def exchange_lists(output_tensor_list, input_tensor_list, group=None, async_op=False):
        if async_op:
            raise NotImplementedError("all_to_all of the emulated HCCL: async_op is not supported")
        sizes = [[tensor.numel() for tensor in tensors] for tensors in (output_tensor_list, input_tensor_list)]
        flat = torch.cat([tensor.reshape(-1) for tensor in input_tensor_list])
        out = flat.new_empty(sum(sizes[0]))
        torch.distributed.all_to_all_single(out, flat, *sizes, group=group)
        for tensor, part in zip(output_tensor_list, out.split(sizes[0]), strict=True):
            tensor.copy_(part.view(tensor.shape))

    return exchange_lists


def all_gather_of_any_sizes(all_gather: Callable) -> Callable:
    """Row provider for dist.all_gather: tensors of different lengths are padded, which HCCL takes and gloo refuses."""

    @functools.wraps(all_gather)
    def gather(tensor_list, tensor, group=None, async_op=False):
        lengths = {len(out) for out in tensor_list} if tensor.dim() else set()
        if len(lengths) < 2 or async_op:
            return all_gather(tensor_list, tensor, group=group, async_op=async_op)
        padded = tensor.new_zeros(max(lengths), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        gathered = [torch.empty_like(padded) for _ in tensor_list]
        all_gather(gathered, padded, group=group)
        for out, whole in zip(tensor_list, gathered, strict=True):
            out.copy_(whole[: len(out)])
        return None

    return gather


def call_outside_mode(call: Callable) -> Callable:
    """Row provider for OptimizedModule.__call__: Dynamo does not trace the process's TorchFunctionMode.

    In it, Dynamo would meet the torch.Tensor.view of mindspeed.megatron_adaptor.torch_adaptation, which it cannot
    trace; without a mode it takes a tensor's methods by name, as on a device.
    """

    @functools.wraps(call)
    def __call__(self, *args, **kwargs):
        with torch.overrides._pop_mode_temporarily():
            return call(self, *args, **kwargs)

    return __call__
