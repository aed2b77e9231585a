"""Run megatron-core 0.12.2 without Transformer Engine, apex and CUDA, by completing its own local modules.

Each function here replaces or wraps one of Megatron or verl; this file imports neither of them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention


class RMSNorm(torch.nn.RMSNorm):
    """Compute RMS norm in fp32, with Megatron's mark for sequence parallelism on its weight.

    Input and output are [..., hidden_size] of one dtype. The mark makes Megatron sum the weight's gradient over TP
    ranks, each of which sees its part of the sequence (megatron.core.distributed.finalize_model_grads).
    """

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **unused: Any):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps).to(x.dtype)


def torch_norm(original_new):
    """Wrap `WrappedTorchNorm.__new__` to make the RMSNorm above where the config asks for one."""

    @functools.wraps(original_new)
    def __new__(cls, config, hidden_size, eps=1e-5, *args, **kwargs):
        if config.normalization != "RMSNorm":
            return original_new(cls, config, hidden_size, eps, *args, **kwargs)
        return RMSNorm(config, hidden_size, eps)

    return __new__


def accept_mla_channels(original_init):
    """Wrap `DotProductAttention.__init__` to accept MLA's channel counts, which forward does not need."""

    @functools.wraps(original_init)
    def __init__(self, *args, k_channels=None, v_channels=None, **kwargs):
        original_init(self, *args, **kwargs)

    return __init__


def causal_attention(
    self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None
):
    """Replace `DotProductAttention.forward`: causal, packed or not, with k and v of different widths.

    query, key [S, B, N, D] and value [S, B, N, Dv] give [S, B, N * Dv]; packed: [T, N, D] and [T, N, Dv] give [T, N,
    Dv]. Padding is on the right (verl removes it on the left), so a causal mask suffices, as it does for Transformer
    Engine with the same attn_mask_type; `attention_mask` is ignored.
    """
    if (attn_mask_type or self.attn_mask_type).name != "causal" or attention_bias is not None:
        found = f"{attn_mask_type or self.attn_mask_type} and {attention_bias}"
        raise NotImplementedError(f"DotProductAttention on CPU: expected a causal mask and no bias, found {found}")
    attend = functools.partial(scaled_dot_product_attention, is_causal=True, scale=self.softmax_scale)
    if packed_seq_params is None:
        out = attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value)))
        return out.permute(2, 0, 1, 3).flatten(2)
    lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
    parts = zip(*(x.split(lengths) for x in (query, key, value)), strict=True)
    return torch.cat([attend(*(x.transpose(0, 1) for x in part)).transpose(0, 1) for part in parts])


def disable_transformer_engine(original):
    """Wrap verl's `_get_base_transformer_config` to turn off features of Transformer Engine and apex."""

    @functools.wraps(original)
    def base_config(*args, **kwargs):
        found = original(*args, **kwargs)
        found.update(
            moe_grouped_gemm=False,
            moe_shared_expert_overlap=False,
            persist_layer_norm=False,
            masked_softmax_fusion=False,
        )
        return found

    return base_config


def local_block_spec(original):
    """Wrap `get_gpt_decoder_block_spec` to use Megatron's own modules in place of Transformer Engine's."""

    @functools.wraps(original)
    def block_spec(config, use_transformer_engine, *args, **kwargs):
        return original(config, False, *args, **kwargs)

    return block_spec


def cpu_tensor_to_numpy(original):
    """Wrap `maybe_move_tensor_to_cpu` to return a numpy array with as_numpy for CPU tensors too."""

    @functools.wraps(original)
    def move(tensor, as_numpy=False, record_stream=False):
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    return move


def set_rng_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
    """Replace `_set_cuda_rng_state`: set the state of the CPU generator."""
    torch.set_rng_state(new_state)


def skip_quantize(original):
    """Wrap `quantize_param_shard` to do nothing where there is no fp8 parameter."""

    @functools.wraps(original)
    def quantize(model_params, *args, **kwargs):
        return original(model_params, *args, **kwargs) if model_params else None

    return quantize
