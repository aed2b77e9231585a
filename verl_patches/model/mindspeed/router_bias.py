"""The router's correction bias in fp32, which a bf16 wrapper would round.

MindSpeed-LLM 2.0.0 makes `expert_bias` an fp32 buffer (core/transformer/moe/router.py), and Megatron's Float16Module
turns every buffer into bf16; megatron-core 0.12.2 undoes that at each forward, nothing does so here. Near scores would
change places, and tokens go to other experts than in vLLM.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core.transformer.moe.router import TopKRouter

_BUFFERS = ("expert_bias", "local_tokens_per_expert")


def keep_fp32_when_cast(model: torch.nn.Module) -> None:
    """Make the correction biases and token counts of every router in `model` stay fp32 through model.bfloat16()."""
    for module in model.modules():
        if isinstance(module, TopKRouter):
            _guard(module)


def _guard(router: TopKRouter) -> None:
    apply_of_module = router._apply  # what bfloat16(), half(), cuda() and to() call for each module

    def _apply(fn: Callable, recurse: bool = True) -> TopKRouter:
        kept = {name: router._buffers[name] for name in _BUFFERS if router._buffers.get(name) is not None}
        apply_of_module(fn, recurse)
        for name, before in kept.items():
            now = router._buffers[name]
            router._buffers[name] = before.to(now.device)  # moved, not rounded
        return router

    router._apply = _apply
