"""Test model FLOPs: the tiny model's computed by hand, the 671B model's against 6 N T, and their dependencies."""

from dataclasses import replace
from pathlib import Path

import pytest

from verl_patches.layout.flops import batch_forward_flops, forward_flops, passes
from verl_patches.layout.inventory import read_model_shape

MODELS = Path(__file__).resolve().parents[2] / "configs" / "model"
NAMES = "deepseekv3_tiny", "deepseekv3_671b", "moonlight_tiny"
TINY, BIG, MOONLIGHT = (read_model_shape(MODELS / f"{name}.json") for name in NAMES)
ACTIVE = 37_552_297_472 - 926_679_040  # published; the embedding is looked up


@pytest.mark.parametrize(("model", "query", "experts", "total"), [
    (TINY, 128 * 64 + 64 + 64 * 4 * 48, 1 + 4, 560_512),  # shared, top-k
    (MOONLIGHT, 128 * 4 * 48, 2 + 6, 687_232),  # without a low-rank query
])  # fmt: skip
def test_a_tiny_models_forward_is_what_a_hand_counts(model, query, experts, total):
    attention = query + 128 * 48 + 32 + 32 * 4 * 64 + 4 * 32 * 128  # q, kv, its norm, o
    dense, expert = 3 * 128 * 256, 3 * 128 * 32
    moe = 16 * 128 + experts * expert  # router
    parameters = 4 * (attention + 2 * 128) + dense + 3 * moe + 512 * 128
    assert parameters == total
    squares = 10**2 + 30**2
    scores = 4 * 4 * (48 + 32) * squares  # layers, heads, qk + v; causal: half of 2 FLOPs a pair
    assert batch_forward_flops(model, [10, 30]) == 2 * parameters * 40 + scores
    assert batch_forward_flops(model, []) == 0


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
