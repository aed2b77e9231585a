"""Fix attention, routing and data-parallel steps of DeepSeek-V3 in vllm-ascend f20869ef, by wrappers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from verl_patches.errors import RecipeError

# a key of additional_config, which verl passes on unread: an argument of vLLM's LLM that verl 54c9b736 sets itself
# (rollout/engine.py)
PREFIX_CACHING = "enable_prefix_caching"


def write_decode_kv(forward: Callable) -> Callable:
    """Wrap AscendMLAImpl.forward so that with torchair also a batch of decodes and prefills writes its decodes' KV.

    With torchair enabled upstream's `vllm_ascend.attention.mla_v1.AscendMLAImpl.forward` projects and caches the tokens
    of prefills (exec_kv_prefill), and those of decodes in batches without prefills only (exec_kv). In a mixed batch the
    decode tokens' slots keep old contents, which the next steps read. The wrapper writes them before it calls upstream,
    with the pin's own exec_kv_prefill, which takes any tokens. The batch holds decodes first: tokens
    [0, num_decode_tokens) of hidden states and slot_mapping.

    Prompts of one token, or with one token that is not in the prefix cache, count as decodes. If a batch of fresh
    prompts (PrefillNoCache) has any, upstream then writes the prefills' keys, which are cached already, a second time,
    with the slots of all tokens, which are more than these keys. So the wrapper has such a batch computed as
    ChunkedPrefill, of which PrefillNoCache is the case without earlier tokens.
    """

    @functools.wraps(forward)
    def forward_after_decode_kv(
        self: Any,
        layer: Any,
        hidden_states_or_q_c: Any,
        hidden_states_or_kv_c_normed: Any,  # hidden states where torchair is enabled
        k_pe: Any,
        kv_cache: Any,
        attn_metadata: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        hidden_states = hidden_states_or_kv_c_normed
        if _is_mixed(self, attn_metadata):
            count = attn_metadata.num_decode_tokens
            cos, sin = _cos_sin(self.rotary_emb, attn_metadata.decode.input_positions, hidden_states.dtype)
            self.exec_kv_prefill(hidden_states[:count], cos, sin, kv_cache, attn_metadata.slot_mapping[:count])
            states = type(attn_metadata.attn_state)
            if attn_metadata.attn_state == states.PrefillNoCache:
                attn_metadata = replace(attn_metadata, attn_state=states.ChunkedPrefill)
        return forward(self, layer, hidden_states_or_q_c, hidden_states, k_pe, kv_cache, attn_metadata, *args, **kwargs)

    return forward_after_decode_kv


def _is_mixed(impl: Any, attn_metadata: Any) -> bool:
    """Return whether a batch that does not run as decodes alone has tokens that count as decodes."""
    if attn_metadata is None or not impl.torchair_graph_enabled:  # None in a profiling run
        return False
    states = type(attn_metadata.attn_state)
    return attn_metadata.num_decodes > 0 and attn_metadata.attn_state not in (states.DecodeOnly, states.SpecDecoding)


def _cos_sin(rotary: Any, positions: Any, dtype: Any) -> tuple[Any, Any]:
    """Return cos and sin at `positions`, each [tokens, 1, 1, rope dimensions], as npu_kv_rmsnorm_rope_cache expects."""
    cos, sin = (table[positions].to(dtype)[:, None, None, :] for table in (rotary.cos_cached, rotary.sin_cached))
    return cos, sin


def rank_groups_by_two(topk_weights: Any, num_expert_group: int, topk_group: int) -> Any:
    """Return scores `topk_weights` [tokens, experts] with -inf outside of the `topk_group` best groups of each token.

    Replaces native_grouped_topk. DeepSeek-V3 ranks a group by the sum of its two best experts (its inference/model.py),
    upstream by the best one, as DeepSeek-V2 does. Experts of a group are neighbours. One group, as Moonlight and
    Kimi-K2 have, is not ranked: decode graphs get no operator for it.
    """
    import torch

    if num_expert_group == 1:
        return topk_weights
    groups = topk_weights.view(topk_weights.shape[0], num_expert_group, -1)
    best_two = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1)
    chosen = torch.zeros_like(best_two, dtype=torch.bool)
    chosen.scatter_(1, best_two.topk(topk_group, dim=-1, sorted=False).indices, True)
    return groups.masked_fill(~chosen.unsqueeze(-1), float("-inf")).flatten(1)


def reorder_top_k_top_p(original: Callable) -> Callable:
    """Wrap patch_sampler's _apply_top_k_top_p(logits, p, k) so that it gets p and k in the right order.

    Its one caller, vllm_ascend.patch.worker.patch_common.patch_sampler.topk_topp_forward_native, passes k before p.
    """

    @functools.wraps(original)
    def apply(logits: Any, p: Any, k: Any) -> Any:
        top_k, top_p = p, k
        return original(logits, p=top_p, k=top_k)

    return apply


def share_dp_metadata(has_unfinished_requests_dp: Callable) -> Callable:
    """Wrap LLMEngine.has_unfinished_requests_dp so that data-parallel (DP) ranks agree by one all-reduce in a step.

    Upstream runs two all-reduces over the DP group in a step: whether a rank has requests, and the maximum of tokens,
    with_prefill and dbo (vllm_ascend.worker.model_runner_v1.NPUModelRunner._get_forward_metadata_across_dp). Here the
    second answers both. A rank with requests enters it in its step, with its tokens. A rank without requests enters it
    before its step, here, with 0 tokens. The maximum is 0 if no rank has requests; otherwise the rank runs a dummy
    batch with this maximum (`reuse_dp_metadata`).
    """

    @functools.wraps(has_unfinished_requests_dp)
    def unfinished(self: Any, has_unfinished: bool) -> bool:
        if has_unfinished:
            return True
        runner = self.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        metadata = runner._get_forward_metadata_across_dp(0, False, False)
        if metadata[0] == 0:
            return False
        runner.dummy_batch_metadata, self.should_execute_dummy_batch = metadata, True
        return True

    return unfinished


def reuse_dp_metadata(get_forward_metadata_across_dp: Callable) -> Callable:
    """Wrap NPUModelRunner._get_forward_metadata_across_dp so that a dummy batch takes the metadata agreed before."""

    @functools.wraps(get_forward_metadata_across_dp)
    def across_dp(self: Any, *args: Any, **kwargs: Any) -> Any:
        agreed = self.__dict__.pop("dummy_batch_metadata", None)
        return get_forward_metadata_across_dp(self, *args, **kwargs) if agreed is None else agreed

    return across_dp


def raise_on_dropped(engine: Any) -> Callable:
    """Return `step` of vLLM's in-process LLMEngine that raises RecipeError where the Ascend scheduler drops a request.

    vllm_ascend.core.scheduler.AscendScheduler.schedule takes a waiting request whose tokens exceed a step's from its
    queue, with status FINISHED_IGNORED and no output, so that vllm.LLM.generate waits for it forever.
    """
    step, scheduler = engine.step, engine.engine_core.engine_core.scheduler

    @functools.wraps(step)
    def step_or_raise() -> Any:
        outputs = step()
        if engine.output_processor.get_num_unfinished_requests() > scheduler.get_num_unfinished_requests():
            dropped = [each for each in scheduler.requests.values() if each.status.name == "FINISHED_IGNORED"]
            if dropped:
                sizes = ", ".join(f"{each.request_id} of {each.num_tokens} tokens" for each in dropped)
                raise RecipeError(
                    f"rollout: the Ascend scheduler dropped request {sizes}; expected at most the "
                    f"{scheduler.scheduler_config.max_num_batched_tokens} tokens of max_num_batched_tokens, as it "
                    "takes a prompt, or a preempted response with its prompt, whole. Lower max_num_seqs or the "
                    "lengths, or use level=tuned, whose scheduler splits them"
                )
        return outputs

    return step_or_raise
