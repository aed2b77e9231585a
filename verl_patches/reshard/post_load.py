"""What the rollout engine derives from its weights and must derive again when new ones have arrived.

At our pins, unquantised, that is MLA's absorbed projections alone. Other work of process_weights_after_loading changes
how parameters lie in memory, once (padding, axes: see destination.py), and weights are written into that; quantised
methods make other values of them, which a sync of plain weights cannot: their scales are then found unwritten by
`Destinations.check_covers`.
"""

from __future__ import annotations

from typing import Any

import torch

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
    if not held or (weight is not None and all(_share_memory(tensor, weight) for tensor in held.values())):
        return False
    with torch.no_grad():
        attention.process_weights_after_loading(held["W_UV"].dtype)
        for name, tensor in held.items():
            tensor.copy_(getattr(holder, name))
            setattr(holder, name, tensor)
    return True


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata
