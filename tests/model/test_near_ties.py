"""Comparisons of trained models leave out near ties, and nothing else: two routers' rows are made equal on purpose."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.near_ties import MOST, near_ties, router_margins, router_scores

LIMIT = 1e-4  # of test_value.py
TOKEN = 30


@pytest.fixture(scope="module")
def model(tiny_model):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model, torch_dtype=torch.float32, attn_implementation="eager")


@pytest.fixture(scope="module")
def ids():
    return torch.randint(6, 512, (1, 64), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def logits(model, ids):
    return model(ids, use_cache=False).logits[0]


def routers(model):
    return [module for module in model.modules() if hasattr(module, "e_score_correction_bias")]


@torch.no_grad()
def plant(model, ids, layer):
    """(a copy of the model with two equal rows in a layer's router, of which TOKEN selects one; the two experts)."""
    model = copy.deepcopy(model)
    router, seen = routers(model)[layer], []
    handle = router.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    logits(model, ids)
    handle.remove()
    (every,), k = seen, router.top_k
    hidden, apart = every[TOKEN], every[TOKEN] - every.mean(0)
    by_group = router_scores(router, hidden)[0].view(router.n_group, -1)
    selected = by_group.topk(2).values.sum(-1).topk(router.topk_group).indices
    pair = selected[0] * by_group.shape[1] + by_group[selected[0]].topk(2, largest=False).indices
    others = by_group[selected].flatten()
    others = others[~torch.isin(others, by_group.flatten()[pair])].sort(descending=True).values
    router.weight[pair] = 3 * apart / (apart @ hidden)  # other tokens have a lower score there
    router.e_score_correction_bias[pair] = (others[k - 2] + others[k - 1]) / 2 - torch.tensor(3.0).sigmoid()
    return model, pair


@torch.no_grad()
def rounded(model, layer, expert, by):
    """The logits' model as another layout may see it: one router row is larger by a share of itself."""
    model = copy.deepcopy(model)
    routers(model)[layer].weight[expert] *= 1 + by
    return model


@pytest.mark.parametrize("layer", [0, -1])
def test_a_planted_tie_is_left_out_and_a_wrong_value_is_not(model, ids, layer):
    planted, pair = plant(model, ids, layer)
    one, other = (logits(rounded(planted, layer, pair[0], by), ids) for by in (1e-5, -1e-5))
    ties = near_ties(planted, ids, torch.ones_like(ids))
    differs = (one - other).abs().amax(-1)
    assert differs[TOKEN] > LIMIT  # the comparison of all tokens fails
    assert (differs[TOKEN + 1 :].max() > LIMIT) == (layer == 0)  # later layers attend to it
    assert 1 <= ties.count <= MOST and not ties.comparable[0, TOKEN] and ties.comparable.sum() >= TOKEN
    assert differs[ties.comparable[0]].max() < LIMIT
    wrong = rounded(planted, layer, pair[0] - 4, 0.5)  # of an expert in another group
    assert (logits(wrong, ids) - one).abs().amax(-1)[ties.comparable[0]].max() > LIMIT


def test_a_model_of_ties_is_refused(model, ids):
    equal = copy.deepcopy(model)
    for router in routers(equal):
        for values in (router.weight.data, router.e_score_correction_bias):
            by_group = values.view(router.n_group, -1, *values.shape[1:])
            by_group[:, 2:] = by_group[:, 1:2].clone()  # three equal experts in each group
    with pytest.raises(AssertionError, match="tokens are near ties"):
        near_ties(equal, ids, torch.ones_like(ids))
    assert router_margins(model, ids[0]).min() > 0 and near_ties(model, ids, torch.ones_like(ids)).count == 0
