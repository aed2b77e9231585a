"""Work after the weights have arrived: MLA's absorbed projections."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from verl_patches.reshard.live_memory import ABSORBED, post_load

HEADS, NOPE, VALUE, LATENT = 2, 3, 4, 5


class Attention(nn.Module):
    """vLLM's Attention as far as it derives projections from kv_b_proj [HEADS * (NOPE + VALUE), LATENT]."""

    def __init__(self, copies: bool):
        super().__init__()
        self.copies, self.derived = copies, 0
        projection = nn.Linear(LATENT, HEADS * (NOPE + VALUE), bias=False)
        self.impl = SimpleNamespace(kv_b_proj=projection)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        self.derived += 1
        weight = self.impl.kv_b_proj.weight.T.unflatten(1, (HEADS, NOPE + VALUE))
        up_key, up_value = weight.split([NOPE, VALUE], dim=-1)
        self.impl.W_UV, self.impl.W_UK_T = up_value.transpose(0, 1), up_key.permute(1, 2, 0)
        if self.copies:  # vllm_ascend/attention/mla_v1.py:669
            self.impl.W_UV, self.impl.W_UK_T = self.impl.W_UV.contiguous(), self.impl.W_UK_T.contiguous()


def _model(copies: bool) -> nn.ModuleList:
    return nn.ModuleList([nn.Linear(2, 2), Attention(copies), Attention(copies)])


def _projections(attention: Attention) -> dict[str, torch.Tensor]:
    return {name: getattr(attention.impl, name) for name in ABSORBED}


@pytest.mark.parametrize("copies", [True, False])
def test_projections_follow_new_weights_where_they_are(copies):
    model = _model(copies)
    assert post_load(model) == 0 and model[1].derived == 0  # nothing derived yet: the first load
    for attention in model[1:]:
        attention.process_weights_after_loading(torch.float32)
    captured = [_projections(attention) for attention in model[1:]]  # what a graph reads
    with torch.no_grad():
        for attention in model[1:]:
            attention.impl.kv_b_proj.weight.normal_()
    assert post_load(model) == (2 if copies else 0)
    assert model[1].derived == (2 if copies else 1)  # views need no work
    for attention, held in zip(model[1:], captured, strict=True):
        now = _projections(attention)
        assert all(now[name] is held[name] for name in ABSORBED)
        fresh = Attention(copies=True)
        fresh.impl.kv_b_proj = attention.impl.kv_b_proj
        fresh.process_weights_after_loading(torch.float32)
        assert all(torch.equal(held[name], value) for name, value in _projections(fresh).items())


def test_without_it_copies_stay_at_the_first_weights():
    """Negative control."""
    attention = Attention(copies=True)
    attention.process_weights_after_loading(torch.float32)
    before = _projections(attention)["W_UV"].clone()
    with torch.no_grad():
        attention.impl.kv_b_proj.weight.normal_()
    assert torch.equal(attention.impl.W_UV, before)
    post_load(nn.ModuleList([attention]))
    assert not torch.equal(attention.impl.W_UV, before)
