"""Replace torch's own functions on platform npu_emulated, so that device "npu" means the CPU.

This module may be imported before torch's own import has ended, so it reads torch only inside functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def is_device(given: Any) -> bool:
    """Return whether the argument names the accelerator: "npu", "npu:0", "cuda", torch.device("npu")."""
    if isinstance(given, torch.device):
        return given.type in ("npu", "cuda")
    return isinstance(given, str) and given.partition(":")[0] in ("npu", "cuda")


class DefaultDevice:
    """Hold whether tensors without a stated device are the accelerator's: inside `with torch.device("npu")`."""

    is_device = False


def enter_context(enter: Callable) -> Callable:
    """Wrap DeviceContext.__enter__ to use the CPU: as the lowest mode it adds its device after HostTensorMode ran."""

    @functools.wraps(enter)
    def __enter__(self):
        self.outer_default, DefaultDevice.is_device = DefaultDevice.is_device, is_device(self.device)
        if DefaultDevice.is_device:
            self.device = torch.device("cpu")
        return enter(self)

    return __enter__


def exit_context(leave: Callable) -> Callable:
    """Wrap DeviceContext.__exit__ to restore the outer default."""

    @functools.wraps(leave)
    def __exit__(self, exc_type, exc_val, exc_tb):
        DefaultDevice.is_device = self.outer_default
        return leave(self, exc_type, exc_val, exc_tb)

    return __exit__


def generator_on_host(generator: type) -> type:
    """Replace torch.Generator by a class that makes CPU generators for device "npu"."""

    class Meta(type):
        def __instancecheck__(cls, instance):
            return isinstance(instance, generator)

        def __subclasscheck__(cls, subclass):
            return issubclass(subclass, generator)

    class Generator(metaclass=Meta):
        """Make a torch.Generator on the CPU."""

        def __new__(cls, device="cpu"):
            return generator(device="cpu" if is_device(device) else device)

    return Generator


def implement_on_host(impl: Callable) -> Callable:
    """Wrap Library.impl to register the CPU kernels that MindSpeed and vLLM implement for the device.

    The NPU's dispatch key is PrivateUse1; vLLM registers some functions for CUDA on every platform
    (vllm_ascend/patch/platform/patch_common).
    """

    @functools.wraps(impl)
    def implement(self, op_name, fn, dispatch_key="", **kwargs):
        if self.ns in ("mindspeed", "vllm") and dispatch_key in ("PrivateUse1", "CUDA"):
            dispatch_key = "CPU"
        return impl(self, op_name, fn, dispatch_key, **kwargs)

    return implement


def no_accelerator() -> bool:
    """Replace torch.accelerator.is_available: no hooks of a device are registered in C++."""
    return False


def no_triton() -> bool:
    """Replace has_triton: there is no device that Triton supports."""
    return False


def accelerator_is_host(check: Any = None) -> torch.device:
    """Replace torch._C._get_accelerator, which names the device on which dist.barrier makes its tensor."""
    return torch.device("cpu")


@property  # type: ignore[misc]  # a row makes it one of torch.Tensor's
def is_npu(self: torch.Tensor) -> bool:
    """Replace Tensor.is_npu: tensors are in host memory."""
    return False


def is_true(self: Any) -> bool:
    """Define OptimizedModule.__bool__: without it torch 2.13 answers by the module's length."""
    return True


def use_hccl_for_nccl(init_process_group: Callable) -> Callable:
    """Wrap init_process_group: nccl means hccl, as with transfer_to_npu; the device id is dropped."""

    @functools.wraps(init_process_group)
    def init(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_id", None)
        init_process_group(backend.replace("nccl", "hccl") if backend else backend, *args, **kwargs)

    return init


def all_to_all_of_lists(all_to_all: Callable) -> Callable:
    """Wrap dist.all_to_all, which gloo does not have, to make one exchange of flat tensors."""

    @functools.wraps(all_to_all)
    def exchange_lists(output_tensor_list, input_tensor_list, group=None, async_op=False):
        if async_op:
            raise NotImplementedError("all_to_all of the emulated HCCL: async_op=True is not supported")
        sizes = [[tensor.numel() for tensor in tensors] for tensors in (output_tensor_list, input_tensor_list)]
        flat = torch.cat([tensor.reshape(-1) for tensor in input_tensor_list])
        out = flat.new_empty(sum(sizes[0]))
        torch.distributed.all_to_all_single(out, flat, *sizes, group=group)
        for tensor, part in zip(output_tensor_list, out.split(sizes[0]), strict=True):
            tensor.copy_(part.view(tensor.shape))

    return exchange_lists


def all_gather_of_any_sizes(all_gather: Callable) -> Callable:
    """Wrap dist.all_gather to pad tensors of different lengths, which HCCL accepts and gloo refuses."""

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
    """Wrap OptimizedModule.__call__ so that Dynamo does not trace the process's TorchFunctionMode.

    In the mode, Dynamo would meet the torch.Tensor.view of mindspeed.megatron_adaptor.torch_adaptation, which it cannot
    trace; without a mode it takes a tensor's methods by name, as on a device.
    """

    @functools.wraps(call)
    def __call__(self, *args, **kwargs):
        with torch.overrides._pop_mode_temporarily():
            return call(self, *args, **kwargs)

    return __call__
