"""Fused attention on an NPU: the one call to torch_npu that is this project's own, checked and differentiable.

MindSpeed calls torch_npu itself for norms and SwiGLU, and its op builders for the rest. Shapes and dtypes are checked
first, as torch_npu's Meta kernels let most of these calls pass and a device fails late, with a message about a kernel.
No value is read, so nothing waits for the device. torch_npu is imported on first use: the image's on a device, the
plain-torch references on platform cpu. No argument is given that the pinned 2.5.1.post1 lacks.
"""

from __future__ import annotations

import torch

from verl_patches.errors import ConfigError

MASK_SIDE = 2048  # of the causal mask, whatever the lengths
_RIGHT_DOWN_CAUSAL = 3  # sparse mode of npu_fusion_attention


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    heads: int,
    scale: float,
    mask: torch.Tensor,
    ends: list[int] | None = None,
) -> torch.Tensor:
    """softmax(scale * q k^T, causal) v in the layout of query (aclnnFlashAttentionScore).

    Without `ends` query, key and value are [S, B, N * D] (SBH); with the cumulative ends of packed sequences they are
    [T, N, D] (TND). mask: bool [2048, 2048], set above the diagonal. Raises ConfigError for shapes and dtypes that a
    device refuses.
    """
    inputs = query, key, value
    found = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}, {heads} heads, ends {ends}"
    _demand(len({x.dtype for x in inputs}) == 1 and {x.dim() for x in inputs} == {3}, "one dtype, 3 dimensions", found)
    if ends is None:
        width = query.shape[-1] // heads
        _demand(query.shape[-1] == width * heads and key.shape[-1] % width == 0, "widths of whole heads", found)
    else:
        fits = query.shape[1] == heads and heads % key.shape[1] == 0 and key.shape[1] == value.shape[1]
        _demand(fits and query.shape[-1] == key.shape[-1], "query heads, a multiple of the key's, of one width", found)
        _demand(ends[-1:] == [query.shape[0]] == [key.shape[0]], "ends up to the number of tokens", found)
    square = mask.dtype == torch.bool and mask.shape == (MASK_SIDE, MASK_SIDE)
    _demand(square, f"a bool mask of side {MASK_SIDE}", f"{mask.dtype} {list(mask.shape)}")
    import torch_npu

    more = {"atten_mask": mask, "scale": scale, "sparse_mode": _RIGHT_DOWN_CAUSAL}
    more |= {"actual_seq_qlen": ends, "actual_seq_kvlen": ends}
    return torch_npu.npu_fusion_attention(query, key, value, heads, "SBH" if ends is None else "TND", **more)[0]


def _demand(fine: bool, expected: str, found: str) -> None:
    if not fine:
        raise ConfigError(f"fused_attention: expected {expected}; found {found}")
