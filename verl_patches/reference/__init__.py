"""Compute the device's operators in plain torch, for the emulated device and for comparisons with a real one.

A function has the name and the arguments of the operator of torch_npu that it follows, or of MindSpeed's op builder,
refuses what a device refuses, and works on tensors of the CPU. It computes in fp32 at least and rounds once, to the
dtype of its inputs, where kernels keep bf16 in places: results are close, not bit-equal; given fp32 it rounds nothing.
Where a device leaves a result undefined, the function refuses the call or defines the result in its docstring.
layers.py holds norms, activation, rotary embedding and optimizer, attention.py training's attention, paged_mla.py the
rollout's attention and its cache, experts.py routing and experts. This file holds their checks of arguments.
"""

from __future__ import annotations

from typing import Any

import torch


def demand(fine: Any, text: str) -> None:
    """Raise ValueError with `text` unless `fine`: a device would refuse this call, or compute nonsense."""
    if not fine:
        raise ValueError(text)


def demand_one_dtype(**tensors: torch.Tensor | None) -> None:
    """Raise ValueError unless all tensors, given by argument name, are of one dtype; skip those that are None."""
    found = {name: x.dtype for name, x in tensors.items() if x is not None}
    listed = ", ".join(f"{name} {dtype}" for name, dtype in found.items())
    demand(len(set(found.values())) <= 1, f"arguments must be of one dtype, found {listed}")


def demand_int32(**tensors: torch.Tensor | None) -> None:
    """Raise ValueError unless all tensors, given by argument name, are int32; skip those that are None."""
    wrong = [f"{name} {x.dtype}" for name, x in tensors.items() if x is not None and x.dtype != torch.int32]
    demand(not wrong, f"indices and lengths must be int32, found {', '.join(wrong)}")


def to_fp32(x: torch.Tensor) -> torch.Tensor:
    """Return x in fp32, or unchanged if it is fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def empty_output(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the empty tensor that an op returns for an output that was not asked for."""
    return x.new_empty(0, dtype=dtype)
