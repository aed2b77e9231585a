"""Fused attention on an NPU: the one call to torch_npu that is this project's own, checked and differentiable.

MindSpeed calls torch_npu itself for norms and SwiGLU, and its op builders for the rest. Shapes and dtypes are checked
first, as torch_npu's Meta kernels let most of these calls pass and a device fails late, with a message about a kernel.
No value is read, so nothing waits for the device. torch_npu is imported on first use: the image's on a device, the
plain-torch references on platform cpu. No argument is given that the pinned 2.5.1.post1 lacks.
"""

from __future__ import annotations

import torch

from verl_patches.errors import ConfigError

HEAD_AXIS = {"BNSD": 1, "BSND": 2, "TND": 1, "BSH": None, "SBH": None}  # by layout; None: heads are part of the width
MASK_SIDE = 2048  # of the mask that the sparse modes 2, 3 and 4 take, whatever the lengths


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    heads: int,
    layout: str,
    scale: float,
    mask: torch.Tensor | None = None,
    sparse_mode: int = 0,
    q_ends: list[int] | None = None,
    kv_ends: list[int] | None = None,
) -> torch.Tensor:
    """softmax(scale * q k^T, masked) v in the layout of query (aclnnFlashAttentionScore).

    layout: BSH, SBH, BNSD, BSND, or TND with the cumulative ends of its sequences. mask: set is hidden; sparse_mode 0
    takes it as it is, 2 and 3 are causal (to the left upper, right lower corner) and take the 2048 x 2048 triangle.
    Raises ConfigError for shapes, dtypes and combinations that a device refuses.
    """
    shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
    _demand(layout in HEAD_AXIS, f"unknown layout {layout!r}, expected one of {', '.join(HEAD_AXIS)}")
    dtypes = query.dtype, key.dtype, value.dtype
    _demand(len(set(dtypes)) == 1, f"query, key and value must be of one dtype, found {dtypes}")
    dims = {query.dim(), key.dim(), value.dim()}
    _demand(dims == {len(layout)}, f"{shapes}: layout {layout} needs {len(layout)} dimensions")
    _check_heads(query, key, value, heads, HEAD_AXIS[layout], shapes)
    needed = (layout == "TND") == (q_ends is not None) == (kv_ends is not None)
    _demand(
        needed, f"layout {layout}: cumulative ends of the sequences (q_ends, kv_ends) are needed for TND, and TND only"
    )
    if layout == "TND":
        cover = q_ends[-1:] == [query.shape[0]] and kv_ends[-1:] == [key.shape[0]] and len(q_ends) == len(kv_ends)
        both = f"q_ends {q_ends} and kv_ends {kv_ends}"
        _demand(cover, f"{shapes}: {both} must be as many and end at the tokens' number")
    _demand(sparse_mode in (0, 2, 3), f"sparse_mode is {sparse_mode}, expected 0 (mask as given), 2 or 3 (causal)")
    found = None if mask is None else list(mask.shape)
    side = [MASK_SIDE, MASK_SIDE]
    _demand(sparse_mode == 0 or found == side, f"sparse_mode {sparse_mode} takes a mask {side}, found {found}")
    _demand(mask is None or mask.dtype in (torch.bool, torch.uint8), "the mask must be bool or uint8")
    import torch_npu

    ends = {"actual_seq_qlen": q_ends, "actual_seq_kvlen": kv_ends}
    more = {"atten_mask": mask, "scale": scale, "sparse_mode": sparse_mode, **ends}
    return torch_npu.npu_fusion_attention(query, key, value, heads, layout, **more)[0]


def _check_heads(query, key, value, heads: int, axis: int | None, shapes: str) -> None:
    if axis is None:
        fits = query.shape[-1] % heads == 0 and key.shape[-1] % (query.shape[-1] // heads) == 0
        _demand(
            fits, f"{shapes}: the query's width must be a multiple of {heads} heads, the key's one of a head's width"
        )
        return
    fits = query.shape[axis] == heads and heads % key.shape[axis] == 0 and key.shape[axis] == value.shape[axis]
    _demand(fits, f"{shapes}: expected {heads} query heads, a multiple of the key's, as many value heads as key heads")
    _demand(query.shape[-1] == key.shape[-1], f"{shapes}: query and key must be of one width")


def _demand(fine: bool, text: str) -> None:
    if not fine:
        raise ConfigError(f"fused_attention: {text}")
