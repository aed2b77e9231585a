"""Test vLLM's DeepSeek-V3 of the tiny config against transformers', in fp32, through the engine that verl builds."""

from __future__ import annotations

import pytest
import torch

from tests.rollout import engine_rank

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4  # of max |logit|


@pytest.fixture(scope="module")
def reference(one_rank):
    """Return transformers' logits [len - 1, V] of the tokens, as loaded and with the updated weight."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(one_rank["model"], torch_dtype=torch.float32)
    tokens = torch.tensor([one_rank["tokens"]])
    with torch.no_grad():
        base = model(tokens).logits[0, :-1]
        model.get_parameter(one_rank["update"]["name"]).copy_(one_rank["update"]["value"])
        updated = model(tokens).logits[0, :-1]
    return {"base": base, "updated": updated, "prompt": one_rank["prompt_tokens"]}


def worst(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Return max |difference| / max |logit|."""
    return float((logits - expected).abs().max() / expected.abs().max())


def test_tp1_prefill_and_decode(reference, one_rank):
    prompt = reference["prompt"]
    for part in (slice(prompt), slice(prompt, None)):
        assert worst(one_rank["logits"][part], reference["base"][part]) < TOLERANCE


def test_an_exported_folder_as_published_with_weights_in_bf16_is_the_same_model(one_rank):
    """Load weights that were converted to Megatron's files and exported by vLLM's own loader: logits are bit-equal.

    config.json says fp8 and has an MTP layer, whose tensors are present: row rollout.llm_arguments.
    """
    assert torch.equal(one_rank["public_folder"], one_rank["logits"])
    assert "model.layers.4.eh_proj.weight" in one_rank["without_mtp"]  # why vLLM's view keeps that entry


def test_sleeping_gives_the_cache_back_and_waking_changes_nothing(one_rank):
    assert one_rank["asleep_bytes"] == 0 < one_rank["awake_bytes"]
    assert torch.equal(one_rank["again"], one_rank["logits"])


def test_tp2_with_expert_parallel(reference, one_rank, run_rollout):
    rollout = {"tensor_model_parallel_size": 2, "engine_kwargs": {"vllm": {"enable_expert_parallel": True}}}
    spec = {**{key: one_rank[key] for key in ("model", "tokens", "prompt_tokens")}, "rollout": rollout}
    for rank in run_rollout("parity_rank:parity", spec, size=2):
        assert worst(rank["logits"], reference["base"]) < TOLERANCE


@pytest.mark.parametrize("wrong", ["no_bias", "no_mscale", "no_groups"])
def test_a_dropped_part_of_v3_is_seen(wrong, reference, one_rank):
    assert worst(one_rank[wrong], reference["base"]) > 100 * TOLERANCE


def test_update_in_memory_reaches_prefill_and_decode(reference, one_rank):
    """Update absorbed W_UK and W_UV, which are views of kv_b_proj here, so verl's load_weights need not make them."""
    assert worst(one_rank["updated"], reference["updated"]) < TOLERANCE
    assert worst(one_rank["updated"], reference["base"]) > 100 * TOLERANCE


def test_stale_absorbed_weights_are_seen(reference, one_rank):
    prompt = reference["prompt"]
    assert worst(one_rank["stale"][:prompt], reference["updated"][:prompt]) < TOLERANCE
    assert worst(one_rank["stale"][prompt:], reference["updated"][prompt:]) > 100 * TOLERANCE


def test_correction_bias_keeps_its_precision_in_bf16(one_rank):
    """Test row rollout.fp32_router."""
    stored = dict(engine_rank.hf_tensors(one_rank["model"]))
    assert one_rank["bf16_bias"]
    for layer, bias in enumerate(one_rank["bf16_bias"], start=1):
        expected = stored[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"]
        assert bias.dtype == torch.float32 and torch.equal(bias, expected)
        assert not torch.equal(bias, expected.to(torch.bfloat16).float())  # upstream's value
