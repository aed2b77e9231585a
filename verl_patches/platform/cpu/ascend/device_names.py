"""Places where torch itself is told "npu": the CPU is meant.

This module may be imported while torch is half built, so it looks at torch only inside functions.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


def _is_npu(device: Any) -> bool:
    return isinstance(device, str) and device.split(":")[0] == "npu"


def npu(self: torch.Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> torch.Tensor:
    """Tensor.npu: it is there already."""
    return self


def to_on_cpu(original):
    """Wrap Tensor.to: "npu" means the CPU."""

    @functools.wraps(original)
    def to(self, *args, **kwargs):
        if args and _is_npu(args[0]):
            args = ("cpu", *args[1:])
        if _is_npu(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return original(self, *args, **kwargs)

    return to


def unpinned(original):
    """Wrap a tensor factory: no memory is pinned, because there is no device to copy from, and "npu" means the CPU."""

    @functools.wraps(original)
    def make(*args, **kwargs):
        kwargs.pop("pin_memory", None)
        if _is_npu(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return original(*args, **kwargs)

    return make


def histc_of_integers(original):
    """Wrap torch.histc: integers are counted too, as on a device."""

    @functools.wraps(original)
    def histc(input, *args, **kwargs):
        if input.is_floating_point():
            return original(input, *args, **kwargs)
        return original(input.double(), *args, **kwargs).to(input.dtype)

    return histc


def script_nothing(obj: Any, optimize: Any = None, _frames_up: int = 0, _rcb: Any = None,
                   example_inputs: Any = None) -> Any:  # fmt: skip
    """torch.jit.script, which gives back what it is given."""
    return obj


def implement_on_cpu(original):
    """Row provider for `torch.library.Library.impl`: what MindSpeed implements for the NPU is for the CPU here.

    The NPU's dispatch key is PrivateUse1 (mindspeed/ops/gmm.py:153).
    """

    def impl(self, op_name, fn, dispatch_key="", **kwargs):
        if self.ns == "mindspeed" and dispatch_key == "PrivateUse1":
            dispatch_key = "CPU"
        return original(self, op_name, fn, dispatch_key, **kwargs)

    return impl


def type_as_on_a_device(type_wrapper):
    """Row provider for MindSpeed's `type_wrapper`: a CPU tensor too calls itself torch.cuda.FloatTensor.

    MindSpeed puts it over Tensor.type, to turn "npu" in a type's name into "cuda"; here there is no "npu" in it.
    """

    @functools.wraps(type_wrapper)
    def wrap(fn):
        @functools.wraps(fn)
        def type(self, *args, **kwargs):
            found = fn(self, *args, **kwargs)
            return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found

        return type_wrapper(type)

    return wrap
