"""MLA's absorbed projections after a weight sync: derived again where an engine copies them, at their old addresses."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from verl_patches.reshard.live_memory import ABSORBED, post_load

HEADS, NOPE, VALUE, LATENT = 2, 3, 4, 5


class Attention(nn.Module):
    """vLLM's Attention as far as it derives projections from kv_b_proj [HEADS * (NOPE + VALUE), LATENT]."""

    def __init__(self, copies):
        super().__init__()
        self.copies, self.derived = copies, 0
        self.impl = SimpleNamespace(kv_b_proj=nn.Linear(LATENT, HEADS * (NOPE + VALUE), bias=False))

    def process_weights_after_loading(self, act_dtype):
        self.derived += 1
        weight = self.impl.kv_b_proj.weight.data.T.unflatten(1, (HEADS, NOPE + VALUE))
        up_key, up_value = weight.split([NOPE, VALUE], dim=-1)
        self.impl.W_UV, self.impl.W_UK_T = up_value.transpose(0, 1), up_key.permute(1, 2, 0)
        if self.copies:  # vllm_ascend/attention/mla_v1.py:669
            self.impl.W_UV, self.impl.W_UK_T = self.impl.W_UV.contiguous(), self.impl.W_UK_T.contiguous()

    def projections(self):
        return [getattr(self.impl, name) for name in ABSORBED]


@pytest.mark.parametrize("copies", [True, False])
def test_projections_follow_new_weights_at_their_addresses(copies):
    model = nn.ModuleList([nn.Linear(2, 2), Attention(copies), Attention(copies)])
    attention = model[1]
    assert post_load(model) == 0 and attention.derived == 0  # nothing derived yet: the first load
    for layer in model[1:]:
        layer.process_weights_after_loading(torch.float32)
    captured = attention.projections()  # a graph reads these
    before = [tensor.clone() for tensor in captured]
    attention.impl.kv_b_proj.weight.data.normal_()
    assert all(map(torch.equal, before, captured)) == copies  # negative control: copies are stale without post_load
    assert post_load(model) == (2 if copies else 0) and attention.derived == (2 if copies else 1)
    assert all(now is held for now, held in zip(attention.projections(), captured, strict=True))
    fresh = Attention(copies=True)
    fresh.impl.kv_b_proj = attention.impl.kv_b_proj
    fresh.process_weights_after_loading(torch.float32)
    assert all(map(torch.equal, captured, fresh.projections()))
