"""Compute fused causal attention on an NPU, by the only call to torch_npu that this project makes itself.

MindSpeed calls torch_npu for norms and SwiGLU, and its op builders for the rest. torch_npu is imported on first use:
on a device it is that of the image, without one a stand-in in plain torch (emulation/). The call uses only arguments
that the pinned 2.5.1.post1 has.
"""

from __future__ import annotations

import functools

import torch

from verl_patches.errors import ConfigError

_MASK_SIDE = 2048  # of the causal mask, the same for all lengths
_RIGHT_DOWN_CAUSAL = 3  # sparse mode of npu_fusion_attention


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    heads: int,
    scale: float,
    ends: list[int] | None = None,
) -> torch.Tensor:
    """Return softmax(scale * q k^T, causal) v in the layout of query (aclnnFlashAttentionScore).

    Without `ends` query, key and value are [S, B, N * D] (SBH); with the cumulative ends of packed sequences they are
    [T, N, D] (TND). Raises ConfigError where the last end is not T, which torch_npu checks only on a device.
    """
    if ends is not None and ends[-1:] != [query.shape[0]]:
        raise ConfigError(f"fused_attention: expected `ends` whose last is {query.shape[0]}, the tokens; found {ends}")
    import torch_npu

    more = {"atten_mask": _causal_mask(query.device), "scale": scale, "sparse_mode": _RIGHT_DOWN_CAUSAL}
    more |= {"actual_seq_qlen": ends, "actual_seq_kvlen": ends}
    return torch_npu.npu_fusion_attention(query, key, value, heads, "SBH" if ends is None else "TND", **more)[0]


@functools.lru_cache(maxsize=1)
def _causal_mask(device: torch.device) -> torch.Tensor:
    return torch.ones(_MASK_SIDE, _MASK_SIDE, dtype=torch.bool, device=device).triu(1)
