"""Measure how evenly tokens go to experts (recipe.expert_load): max / mean tokens of an expert.

Every rank counts the tokens that it sends in training, after each router, once its choice is final. A histogram of each
call is added on the device, without waiting; one all-reduce a step sums them. The rollout engine has the same routers
and the same tokens, so its ranks' load follows from the same histogram. Sums are over a step, so changes of the load
between calls are not visible.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist


class ExpertLoad:
    """Count this rank's tokens by layer and expert; fp32 [layers, experts], zero in layers of other ranks.

    ranks: number of ranks that share the experts, by side; those of a rank are adjacent.
    """

    def __init__(self, layers: int, experts: int, ranks: Mapping[str, int], device: torch.device):
        self.counts, self.ranks = torch.zeros(layers, experts, device=device), ranks

    def add(self, layer: int, experts: torch.Tensor) -> None:
        """Count one call: expert ids [tokens, k], or a map bool [tokens, experts]."""
        size = self.counts.shape[1]
        chosen = experts.detach()
        is_map = chosen.dtype == torch.bool
        self.counts[layer] += chosen.sum(0) if is_map else torch.histc(chosen.float(), bins=size, min=0, max=size)

    def take(self) -> dict[str, dict[str, float]] | None:
        """Return {side: {max_over_mean (least even layer), mean_over_layers, ranks_over_mean, layers}} of a step.

        ranks_over_mean: tokens of the busiest rank over the mean of all ranks, mean over layers. A layer takes longer
        by this factor, as all ranks wait for the busiest (`plan --expert-load`). A side whose ranks hold unequally many
        experts is left out. Collective over all ranks; equal results on each. None if no token was counted since the
        last call.
        """
        total = self.counts.clone()
        self.counts.zero_()
        dist.all_reduce(total)
        used = total[total.sum(1) > 0].double()
        if not len(used):
            return None
        ratios = used.amax(1) / used.mean(1)
        spread = {"max_over_mean": float(ratios.max()), "mean_over_layers": float(ratios.mean()), "layers": len(used)}
        even = {side: count for side, count in self.ranks.items() if used.shape[1] % count == 0}
        tokens = {side: used.unflatten(1, (count, -1)).sum(2) for side, count in even.items()}
        busiest = {side: float((each.amax(1) / each.mean(1)).mean()) for side, each in tokens.items()}
        return {side: {**spread, "ranks_over_mean": share} for side, share in busiest.items()}


def count_training_load(chunks: Iterable[torch.nn.Module], ranks: Mapping[str, int]) -> ExpertLoad | None:
    """Return a load that counts tokens after each router of `chunks`, experts split over `ranks`; None without experts.

    Pipeline ranks without a router count nothing, but take part in `take`.
    """
    from megatron.core.transformer.moe.router import TopKRouter

    chunks = list(chunks)
    config = chunks[0].config
    if not config.num_moe_experts:
        return None
    load = ExpertLoad(config.num_layers, config.num_moe_experts, ranks, next(chunks[0].parameters()).device)
    for router in (module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)):
        router.register_forward_hook(lambda router, _, output: load.add(router.layer_number - 1, output[1]))
    return load
