"""Test model FLOPs: the tiny model's computed by hand, the 671B model's against 6 N T, and their dependencies."""

from dataclasses import replace
from pathlib import Path

import pytest

from verl_patches.layout.flops import batch_forward_flops, forward_flops, passes
from verl_patches.layout.inventory import read_model_shape

MODELS = Path(__file__).resolve().parents[2] / "configs" / "model"
TINY, BIG = (read_model_shape(MODELS / f"deepseekv3_{name}.json") for name in ("tiny", "671b"))
ACTIVE = 37_552_297_472 - 926_679_040  # published; the embedding is looked up


def test_the_tiny_models_forward_is_what_a_hand_counts():
    attention = 128 * 64 + 64 + 64 * 4 * 48 + 128 * 48 + 32 + 32 * 4 * 64 + 4 * 32 * 128  # q, kv, o and two norms
    dense, expert = 3 * 128 * 256, 3 * 128 * 32
    moe = 16 * 128 + expert + 4 * expert  # router, shared, top-4
    parameters = 4 * (attention + 2 * 128) + dense + 3 * moe + 512 * 128
    assert parameters == 560_512
    squares = 10**2 + 30**2
    scores = 4 * 4 * (48 + 32) * squares  # layers, heads, qk + v; causal: half of 2 FLOPs a pair
    assert batch_forward_flops(TINY, [10, 30]) == 2 * parameters * 40 + scores
    assert batch_forward_flops(TINY, []) == 0


def test_the_step_of_671b_is_6_n_t_and_the_share_of_attention():
    """Use sequences of 3132 tokens, as in the published run: N without attention scores, which are below a tenth."""
    lengths = [3132] * 8
    tokens, three = sum(lengths), 3 * batch_forward_flops(BIG, lengths)
    pairs = 61 * 128 * (192 + 128) * 3132**2 * 8
    assert three == pytest.approx(6 * ACTIVE * tokens + 3 * pairs, rel=1e-3)
    assert 0.05 < three / (6 * ACTIVE * tokens) - 1 < 0.12


def test_routed_experts_count_by_top_k_and_not_by_their_number():
    more = replace(TINY, n_routed_experts=32)
    assert forward_flops(more, 1, 0) - forward_flops(TINY, 1, 0) == 2 * 3 * 16 * 128  # routers
    assert forward_flops(replace(TINY, num_experts_per_tok=8), 1, 0) > 1.2 * forward_flops(TINY, 1, 0)
    assert batch_forward_flops(TINY, [40]) > batch_forward_flops(TINY, [20, 20])  # control: lengths, not their sum


def test_passes_that_could_be_left_out_do_not_count():
    on_policy = {"rollout": True, "ref": True, "old_log_prob": False, "epochs": 1}
    assert passes(**on_policy) == {"rollout": 1, "ref": 1, "update": 3}
    assert passes(**on_policy | {"old_log_prob": True, "epochs": 2})["log_prob"] == 1
    assert passes(rollout=False, ref=False, old_log_prob=False, epochs=2) == {"update": 6}
