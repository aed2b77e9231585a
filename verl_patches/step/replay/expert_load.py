"""Measure how evenly tokens go to experts (recipe.expert_load): max / mean tokens of an expert.

Every rank counts the tokens that it sends, once the router's choice is final: in training after the router, in
rollout where vllm-ascend passes expert ids to its exchange. A histogram of each call is added on the device, without
waiting; one all-reduce a step sums them. Rollout is counted outside graphs only: prompts, and decode steps with
enforce_eager. Sums are over a step, so changes of the load between calls are not visible.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from verl_patches.current import Current


class ExpertLoad:
    """Count this rank's tokens by layer and expert; fp32 [layers, experts], zero in layers of other ranks.

    local: number of experts on a rank, which are adjacent.
    """

    def __init__(self, layers: int, experts: int, local: int, device: torch.device):
        self.counts, self.local = torch.zeros(layers, experts, device=device), local

    def add(self, layer: int, experts: torch.Tensor) -> None:
        """Count one call: expert ids [tokens, k], or a map bool [tokens, experts]."""
        size = self.counts.shape[1]
        chosen = experts.detach()
        is_map = chosen.dtype == torch.bool
        self.counts[layer] += chosen.sum(0) if is_map else torch.histc(chosen.float(), bins=size, min=0, max=size)

    def take(self) -> dict[str, float] | None:
        """Return {max_over_mean (least even layer), mean_over_layers, ranks_over_mean, layers} since the last call.

        ranks_over_mean: tokens of the busiest rank over the mean of all ranks, mean over layers. A layer takes longer
        by this factor, as all ranks wait for the busiest (`plan --expert-load`). Collective over all ranks; equal
        results on each. None if no token was counted.
        """
        total = self.counts.clone()
        self.counts.zero_()
        dist.all_reduce(total)
        used = total[total.sum(1) > 0].double()
        if not len(used):
            return None
        ratios = used.amax(1) / used.mean(1)
        rank_tokens = torch.stack([expert_tokens.sum(1) for expert_tokens in used.split(self.local, 1)], 1)
        busiest = float((rank_tokens.amax(1) / rank_tokens.mean(1)).mean())
        spread = {"max_over_mean": float(ratios.max()), "mean_over_layers": float(ratios.mean())}
        return {**spread, "ranks_over_mean": busiest, "layers": len(used)}


# counts tokens of the rollout engine's experts; maps id() of a layer's weight to the layer's number
rollout_load: Current[tuple[ExpertLoad, dict[int, int]] | None] = Current(None)


def count_training_load(chunks: Iterable[torch.nn.Module], ranks: int) -> ExpertLoad | None:
    """Return a load that counts tokens after each router of `chunks`, experts split over `ranks`; None without experts.

    Pipeline ranks without a router count nothing, but take part in `take`.
    """
    from megatron.core.transformer.moe.router import TopKRouter

    chunks = list(chunks)
    config = chunks[0].config
    if not config.num_moe_experts:
        return None
    experts, device = config.num_moe_experts, next(chunks[0].parameters()).device
    load = ExpertLoad(config.num_layers, experts, experts // ranks, device)
    for router in (module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)):
        router.register_forward_hook(functools.partial(_count_routed, load))
    return load


def _count_routed(load: ExpertLoad, router: Any, inputs: Any, output: tuple) -> None:
    load.add(router.layer_number - 1, output[1])


def count_rollout_load(model: torch.nn.Module) -> ExpertLoad | None:
    """Return a load of what vllm-ascend's `model` sends to experts (patches rollout.count_*); None without experts."""
    layers = [module for module in model.modules() if hasattr(module, "w13_weight")]
    if not layers:
        return None
    weights = [layer.w13_weight for layer in layers]
    load = ExpertLoad(len(layers), layers[0].global_num_experts, len(weights[0]), weights[0].device)
    rollout_load.value = load, {id(weight): place for place, weight in enumerate(weights)}
    return load


def count_experts(original: Callable) -> Callable:
    """Wrap one of vllm-ascend's three fused_experts functions: count tokens by the ids after balanced routing."""

    @functools.wraps(original)
    def experts(
        hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not torch.compiler.is_compiling() and rollout_load.value is not None:
            load, places = rollout_load.value
            load.add(places[id(w1)], topk_ids)
        return original(hidden_states, w1, w2, topk_weights, topk_ids, *args, **kwargs)

    return experts
