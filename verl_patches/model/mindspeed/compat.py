"""Give Megatron core_r0.8.0 what verl 54c9b736 and MindSpeed-LLM 2.0.0 expect of it and it lacks or does differently.

These are names that verl imports or calls, RoPE of packed sequences, and the router's correction bias in fp32. Megatron
is imported inside functions only, because patches add these names while it is half imported. Shape letters: T packed
tokens, N heads, D rotary size.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_LENGTHS_ATTRIBUTE = "verl_patches_lengths"  # attribute of cu_seqlens that caches its Lengths
_ROUTER_BUFFERS = ("expert_bias", "local_tokens_per_expert")


class MLATransformerConfig:
    """Stand in for the class that verl names in annotations; MLA's sizes are arguments of MindSpeed-LLM on line a3."""


def add_padded_lengths(original: type) -> type:
    """Return PackedSeqParams with two more fields, which verl sets to the values of cu_seqlens_q and cu_seqlens_kv."""
    added = [(f"cu_seqlens_{which}_padded", Any, dataclasses.field(default=None)) for which in ("q", "kv")]
    return dataclasses.make_dataclass(original.__name__, added, bases=(original,))


def without_deepseekv3_saver(get_weight_saver: Any) -> Any:
    """Wrap verl's `get_weight_saver`: None for DeepSeek-V3, for which verl has no saver on Megatron core_r0.8.0."""

    @functools.wraps(get_weight_saver)
    def get(arch: str) -> Any:
        return None if arch == "DeepseekV3ForCausalLM" else get_weight_saver(arch)

    return get


def get_gpt_decoder_block_spec(*args: Any, **kwargs: Any) -> Any:
    """Refuse verl's models other than DeepSeek-V3; no other code calls this function."""
    raise NotImplementedError("Megatron core_r0.8.0 has no get_gpt_decoder_block_spec; line a3 runs DeepSeek-V3 only")


def expert_tensor_parallel_world_size() -> int:
    """Return the number of ranks that share one expert: TP, or 1 if TP extends EP."""
    from megatron.core import parallel_state
    from megatron.training import get_args

    return 1 if get_args().moe_tp_extend_ep else parallel_state.get_tensor_model_parallel_world_size()


def expert_tensor_parallel_rank() -> int:
    """Return this rank's index among the ranks that share its experts."""
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_rank() if expert_tensor_parallel_world_size() > 1 else 0


def expert_tensor_parallel_group() -> Any:
    """Return the process group of the ranks that share each expert, None where each rank has whole experts."""
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group() if expert_tensor_parallel_world_size() > 1 else None


class Lengths(NamedTuple):
    """Hold the `ends` of packed sequences, on the host, and `positions` [T] int64 of tokens in their own sequence."""

    ends: list[int]
    positions: torch.Tensor


def packed_lengths(cu_seqlens: torch.Tensor) -> Lengths:
    """Return the Lengths of `cu_seqlens` (of PackedSeqParams, from 0 to T), cached on that tensor.

    verl makes one such tensor per forward, and every layer gets it, in recomputation too. So the host waits for the
    device once, not in every layer.
    """
    lengths = getattr(cu_seqlens, _LENGTHS_ATTRIBUTE, None)
    if lengths is None:
        ends = cu_seqlens[1:].tolist()
        tokens = torch.arange(ends[-1], device=cu_seqlens.device)
        starts = torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff(), output_size=ends[-1])
        lengths = Lengths(ends, tokens - starts)
        setattr(cu_seqlens, _LENGTHS_ATTRIBUTE, lengths)
    return lengths


def packed_rope(apply_rotary_pos_emb_thd):
    """Wrap Megatron's `apply_rotary_pos_emb_thd` so that it accepts [T, 1, N, D] of MindSpeed-LLM's MLA.

    Megatron's own splits T and expects the rest to be [N, D]. Each token gets the angle of its position in its own
    sequence; freqs is [>= longest sequence, 1, 1, D]. Under context parallelism t has this rank's contiguous part of T.
    """

    @functools.wraps(apply_rotary_pos_emb_thd)
    def apply(t, cu_seqlens, freqs, rotary_interleaved=False):
        if t.dim() != 4:
            return apply_rotary_pos_emb_thd(t, cu_seqlens, freqs, rotary_interleaved)
        from megatron.core import parallel_state
        from megatron.core.models.common.embeddings.rotary_pos_embedding import apply_rotary_pos_emb_bshd  # MindSpeed's

        first = len(t) * parallel_state.get_context_parallel_rank()
        positions = packed_lengths(cu_seqlens).positions[first : first + len(t)]
        return apply_rotary_pos_emb_bshd(t, freqs[positions], rotary_interleaved)

    return apply


def keep_all_positions(rotary: torch.nn.Module, size: int, rank: int) -> None:
    """Make `rotary` (Megatron's RotaryEmbedding) give all positions to each of `size` context-parallel ranks.

    Upstream cuts the positions into `size` parts and returns this `rank`'s (MindSpeed's get_pos_emb_on_this_cp_rank,
    Ulysses), as if the micro batch were one sequence; `packed_rope` needs those of every sequence. So this asks for
    `size` times as many, shifted so that this rank's part is the max_seq_len positions from `offset` on.
    """
    forward = rotary.forward

    @functools.wraps(forward)
    def whole(max_seq_len: int, offset: int = 0) -> torch.Tensor:
        return forward(max_seq_len * size, offset - max_seq_len * rank)

    rotary.forward = whole


def keep_router_buffers_fp32(model: torch.nn.Module) -> None:
    """Keep the correction biases and token counts of every router in `model` in fp32 through model.bfloat16().

    MindSpeed-LLM 2.0.0 makes `expert_bias` an fp32 buffer (core/transformer/moe/router.py), and Megatron's
    Float16Module turns every buffer into bf16; megatron-core 0.12.2 undoes that at each forward, core_r0.8.0 does not.
    Close scores would change order, and tokens would go to other experts than in vLLM.
    """
    from megatron.core.transformer.moe.router import TopKRouter

    for module in model.modules():
        if isinstance(module, TopKRouter):
            _keep_fp32(module)


def count_trained_tokens_only(model: torch.nn.Module) -> None:
    """Leave tokens of passes without gradients out of the token counts of every router, as MindSpeed-LLM intends.

    Its router counts tokens for the correction bias where gradients are enabled
    (mindspeed_llm.core.transformer.moe.router.topk_router_routing).
    With the experts' exchange overlapped, MindSpeed enables them around the router in every pass
    (moe_layer_overlap_all2all.py, MoELayerOverlapAll2All.forward): the pass for old log-probs would be counted with the
    first mini batch.
    """
    from megatron.core.transformer.moe.moe_layer import BaseMoELayer

    for layer in model.modules():
        if isinstance(layer, BaseMoELayer) and layer.router._buffers.get("local_tokens_per_expert") is not None:
            layer.register_forward_pre_hook(_save_token_counts)
            layer.register_forward_hook(_restore_token_counts)


def _save_token_counts(layer: torch.nn.Module, args: tuple) -> None:
    layer.tokens_before_pass = None
    if not torch.is_grad_enabled():
        layer.tokens_before_pass = layer.router.local_tokens_per_expert.clone()


def _restore_token_counts(layer: torch.nn.Module, args: tuple, output: Any) -> None:
    if layer.tokens_before_pass is not None:
        layer.router.local_tokens_per_expert.copy_(layer.tokens_before_pass)


def _keep_fp32(router: torch.nn.Module) -> None:
    original_apply = router._apply  # bfloat16(), half(), cuda() and to() call it for each module

    def _apply(fn: Callable, recurse: bool = True) -> torch.nn.Module:
        uncast = {name: router._buffers[name] for name in _ROUTER_BUFFERS if router._buffers.get(name) is not None}
        original_apply(fn, recurse)
        for name, buffer in uncast.items():
            router._buffers[name] = buffer.to(router._buffers[name].device)  # moved but not rounded to bf16
        return router

    router._apply = _apply
