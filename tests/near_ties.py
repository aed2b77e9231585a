"""Find near ties, tokens whose experts depend on rounding, which comparisons of trained models leave out.

If the scores of the last expert that a router selects and of the first one that it does not are within rounding of each
other, two layouts, libraries or CPUs may select different experts, and each is right. Untrained tiny models were drawn
without such tokens in the tests' inputs; an update can create them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from verl_patches.layout.inventory import SCORE, SCORE_BIAS
from verl_patches.reshard.region import Region
from verl_patches.weights.reader import WeightReader
from verl_patches.weights.source import open_source

SCORE_NOISE = 2e-5  # bound of rounding in a router's fp32 scores; log-probs and values of two layouts differ by 2e-6
MAX_NEAR_TIES = 3  # number of near ties that a comparison may leave out
NORM_CHANGE = 1e-3  # relative change of a gradient norm by one near tie: at most 6e-4 at the smallest margins


@dataclass(frozen=True)
class NearTies:
    """Hold the number of near ties of a batch, and which tokens [B, S] are not affected by any of them."""

    count: int
    comparable: torch.Tensor

    def norm_tolerance(self, rel: float) -> float:
        """Return the relative tolerance of a gradient norm over the batch, `rel` where it has no near tie."""
        return rel + NORM_CHANGE * self.count


def norm_tolerance(update: int, rel: float) -> float:
    """Return the relative tolerance of the gradient norm of update 1, 2, ...: later ones may have near ties."""
    return rel if update == 1 else rel + NORM_CHANGE * MAX_NEAR_TIES


def assert_all_but_few_below(differences: torch.Tensor, limit: float) -> None:
    """Assert that at most MAX_NEAR_TIES tokens differ by `limit` or more.

    This is for weights that Adam has moved apart: it turns gradients that are only rounding into whole steps, so a
    margin does not tell which tokens are near ties.
    """
    beyond = differences[differences >= limit]
    assert len(beyond) <= MAX_NEAR_TIES, f"{len(beyond)} tokens differ by {limit} or more: {beyond[:10].tolist()}"


def near_ties(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> NearTies:
    """Find the near ties of transformers' DeepSeek-V3 in ids [B, S]; `mask` is true for real tokens.

    A near tie is not comparable; if a later layer attends to it, the tokens after it in its sequence are not either.
    Raises AssertionError for more than MAX_NEAR_TIES different ones: they mean a fault, or inputs that prove nothing.
    """
    comparable, found = mask.bool().clone(), set()
    for row, keep in enumerate(mask.bool()):
        tied = router_margins(model, ids[row][keep]) < SCORE_NOISE
        found |= {(tuple(ids[row][keep][: place + 1].tolist()), layer) for layer, place in tied.nonzero().tolist()}
        reached = tied[-1] | (tied[:-1].any(0).cumsum(0) > 0)
        comparable[row, keep.nonzero()[:, 0][reached]] = False
    assert len(found) <= MAX_NEAR_TIES, (
        f"{len(found)} tokens are near ties (margin below {SCORE_NOISE}); expected at most {MAX_NEAR_TIES}"
    )
    return NearTies(len(found), comparable)


@torch.no_grad()
def router_margins(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the margin [L, S] of each token of ids [S] to another selection, for each layer with experts."""
    margins: list[torch.Tensor] = []
    routers = [module for module in model.modules() if hasattr(module, "e_score_correction_bias")]

    def note(router: torch.nn.Module, args: tuple[torch.Tensor], output: object) -> None:
        margins.append(_token_margins(router, args))

    hooks = [router.register_forward_hook(note) for router in routers]
    model(ids[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(margins)


def router_scores(router: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Return the scores [T, E] by which a router selects: sigmoids with the correction bias."""
    logits = torch.nn.functional.linear(hidden.view(-1, hidden.shape[-1]).float(), router.weight.float())
    return logits.sigmoid() + router.e_score_correction_bias


def _token_margins(router: torch.nn.Module, args: tuple[torch.Tensor]) -> torch.Tensor:
    """Return the smaller of two gaps [T]: of the last selected group, and of the last selected expert, to the next."""
    scores, config = router_scores(router, *args), router.config
    by_group = scores.view(len(scores), config.n_group, -1)
    groups = by_group.topk(2).values.sum(-1)
    chosen = torch.zeros_like(groups, dtype=torch.bool).scatter_(1, groups.topk(config.topk_group).indices, True)
    experts = by_group.masked_fill(~chosen[..., None], -torch.inf).flatten(1)
    return torch.minimum(_score_gap(groups, config.topk_group), _score_gap(experts, config.num_experts_per_tok))


def _score_gap(values: torch.Tensor, count: int) -> torch.Tensor:
    if values.shape[1] == count:
        return torch.full_like(values[:, 0], torch.inf)
    ordered = values.topk(count + 1).values
    return ordered[:, -2] - ordered[:, -1]


def load_reference_model(folder: Path) -> torch.nn.Module:
    """Return transformers' DeepSeek-V3 in fp32 with the weights of a HF folder or a checkpoint."""
    source = open_source(folder)
    weights = {name: torch.empty(tensor.shape) for name, tensor in source.tensors.items()}
    with WeightReader(source) as reader:
        for name, tensor in weights.items():
            reader.copy(Region(name, 0, 0, tensor.shape[0]), tensor)
    return model_with_weights(folder, weights)


def model_with_weights(folder: Path, weights: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """Return transformers' DeepSeek-V3 in fp32 by a folder's config, with these weights, which may lack the head."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), attn_implementation="eager").float()
    missing, unexpected = model.load_state_dict(dict(weights), strict=False)
    assert {*missing} <= {"lm_head.weight"} and {*unexpected} <= {SCORE, SCORE_BIAS}, (missing, unexpected)
    return model.eval()
