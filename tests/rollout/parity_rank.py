"""Compute the parity tests' logits on a rank."""

from __future__ import annotations

import torch

from tests.rollout import engine_rank
from verl_patches.memory import measure


def forced_logits(llm, spec: dict) -> torch.Tensor:
    """Return logits [len - 1, V] of all tokens but the last: the prompt in one prefill, the rest forced one by one."""
    from vllm import SamplingParams

    tokens, prompt_tokens = spec["tokens"], spec["prompt_tokens"]
    forced = tokens[prompt_tokens:]

    def force(past: list[int], logits: torch.Tensor) -> torch.Tensor:
        return torch.full_like(logits, float("-inf")).index_fill(0, torch.tensor(forced[len(past)]), 0.0)

    seen, stop = engine_rank.watch_logits(llm)
    params = SamplingParams(max_tokens=len(forced), prompt_logprobs=0, logits_processors=[force], ignore_eos=True)
    llm.generate([{"prompt_token_ids": tokens[:prompt_tokens]}], params, use_tqdm=False)
    stop()
    return torch.cat(seen)


def parity(spec: dict) -> dict:
    """Return the logits of one engine in the spec's layout."""
    llm = engine_rank.awake(spec["model"], **spec["rollout"])
    return {"logits": forced_logits(llm, spec)}


def one_rank(spec: dict) -> dict:
    """Run parity, its negative controls, an update in memory, and the reference of the data-parallel tests."""
    llm = engine_rank.awake(spec["model"], **spec["rollout"])
    model = engine_rank.engine_model(llm)
    found = {"logits": forced_logits(llm, spec), "generated": engine_rank.generate_with(llm, spec["requests"])}
    found["asleep_bytes"], found["awake_bytes"] = _sleep_and_wake(llm)
    found["again"] = forced_logits(llm, spec)

    biases = [layer.mlp.gate.e_score_correction_bias for layer in model.model.layers[1:]]
    kept = [bias.data.clone() for bias in biases]
    for bias in biases:
        bias.data.zero_()
    found["no_bias"] = forced_logits(llm, spec)
    for bias, value in zip(biases, kept, strict=True):
        bias.data.copy_(value)

    name = "model.layers.1.self_attn.kv_b_proj.weight"
    old = dict(engine_rank.hf_tensors(spec["model"]))[name]
    new = old.flip(1).contiguous()
    found["update"] = {"name": name, "value": new}
    model.load_weights([(name, new)])
    found["updated"] = forced_logits(llm, spec)
    model.load_weights([(name, old)])
    attention = model.model.layers[1].self_attn.mla_attn.impl
    attention.W_UV, attention.W_UK_T = attention.W_UV.clone(), attention.W_UK_T.clone()
    model.load_weights([(name, new)])
    found["stale"] = forced_logits(llm, spec)  # as a backend that keeps copies of the absorbed weights would give

    for name, overrides in spec.get("wrong_configs", {}).items():
        rollout = {**spec["rollout"], "engine_kwargs": {"vllm": {"hf_overrides": overrides}}}
        found[name] = forced_logits(engine_rank.awake(spec["model"], **rollout), spec)
    found["public_folder"] = forced_logits(engine_rank.awake(spec["public_folder"], **spec["rollout"]), spec)
    try:
        overrides = {"vllm": {"hf_overrides": {"num_nextn_predict_layers": 0}}}
        engine_rank.awake(spec["public_folder"], **spec["rollout"], engine_kwargs=overrides)
    except KeyError as error:  # a tensor that vLLM's loader does not have in its model
        found["without_mtp"] = str(error)
    bf16 = engine_rank.engine_model(engine_rank.awake(spec["model"], **spec["rollout"], dtype="bfloat16"))
    found["bf16_bias"] = [layer.mlp.gate.e_score_correction_bias.data.clone() for layer in bf16.model.layers[1:]]
    return found


def _sleep_and_wake(llm) -> tuple[int, int]:
    """Return KV cache bytes while asleep, and after waking as verl 0.4.0 does: weights first, then kv_cache."""
    llm.sleep(level=1)
    asleep = measure.held_bytes(measure.kv_caches(llm), "cpu")
    llm.wake_up(tags=["weights"])
    llm.wake_up(tags=["kv_cache"])
    return asleep, measure.held_bytes(measure.kv_caches(llm), "cpu")
