"""What is checked before an NPU op is called: shapes and dtypes only; no value is read, nothing waits for the device.

torch_npu's Meta kernels let most of these pass, and a device fails late, with a message about a kernel.
"""

from __future__ import annotations

from typing import Any

import torch

from verl_patches.errors import ConfigError

HEAD_AXIS = {"BNSD": 1, "BSND": 2, "TND": 1, "BSH": None, "SBH": None}  # by layout; None: heads are part of the width
MASK_SIDE = 2048  # of the mask that the sparse modes 2, 3 and 4 take, whatever the lengths


def demand(fine: Any, op: str, text: str) -> None:
    """ConfigError "op: text" unless `fine`."""
    if not fine:
        raise ConfigError(f"{op}: {text}")


def norm(op: str, x: torch.Tensor, gamma: torch.Tensor) -> None:
    """gamma is as wide as x, and of its dtype or fp32."""
    demand(gamma.dim() == 1 and x.shape[-1:] == gamma.shape, op,
           f"gamma {list(gamma.shape)} must be as wide as the last dimension of x {list(x.shape)}")
    demand(gamma.dtype in (x.dtype, torch.float32), op, f"gamma is {gamma.dtype}, expected {x.dtype} (as x) or float32")


def halves(op: str, x: torch.Tensor) -> None:
    """The last dimension is two halves."""
    demand(x.shape[-1] % 2 == 0, op, f"the last dimension of x {list(x.shape)} must be even: gate and up side by side")


def rotation(op: str, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Four dimensions each; cos and sin alike, as wide as x, else as long as x or 1."""
    shapes = f"x {list(x.shape)}, cos {list(cos.shape)}, sin {list(sin.shape)}"
    demand(x.dim() == cos.dim() == sin.dim() == 4, op, f"{shapes}: expected 4 dimensions each")
    demand(cos.shape == sin.shape and cos.shape[-1] == x.shape[-1], op,
           f"{shapes}: expected cos and sin of one shape, as wide as x")
    demand(all(c in (1, n) for c, n in zip(cos.shape, x.shape, strict=True)), op,
           f"{shapes}: cos does not broadcast to x")
    demand(x.shape[-1] % 2 == 0, op, f"x {list(x.shape)}: the head width must be even")


def attention(op: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads: int, layout: str,
              mask: torch.Tensor | None, sparse_mode: int, q_ends: list[int] | None, kv_ends: list[int] | None) -> None:
    """A layout that exists, tensors that fit it and one another, cumulative ends for TND, the sparse mode's mask."""
    shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
    demand(layout in HEAD_AXIS, op, f"unknown layout {layout!r}, expected one of {', '.join(HEAD_AXIS)}")
    demand(query.dtype == key.dtype == value.dtype, op,
           f"query, key and value must be of one dtype, found {query.dtype}, {key.dtype}, {value.dtype}")
    demand(all(x.dim() == len(layout) for x in (query, key, value)), op,
           f"{shapes}: layout {layout} needs {len(layout)} dimensions")
    axis = HEAD_AXIS[layout]
    if axis is None:
        demand(query.shape[-1] % heads == 0 and key.shape[-1] % (query.shape[-1] // heads) == 0, op,
               f"{shapes}: the query's width must be a multiple of {heads} heads, the key's one of a head's width")
    else:
        demand(query.shape[axis] == heads and heads % key.shape[axis] == 0 and key.shape[axis] == value.shape[axis], op,
               f"{shapes}: expected {heads} query heads, a multiple of the key's, as many value heads as key heads")
        demand(query.shape[-1] == key.shape[-1], op, f"{shapes}: query and key must be of one width")
    demand((layout == "TND") == (q_ends is not None) == (kv_ends is not None), op,
           f"layout {layout}: cumulative ends of the sequences (q_ends, kv_ends) are needed for TND, and for TND only")
    if layout == "TND":
        demand(q_ends[-1:] == [query.shape[0]] and kv_ends[-1:] == [key.shape[0]] and len(q_ends) == len(kv_ends), op,
               f"{shapes}: q_ends {q_ends} and kv_ends {kv_ends} must be as many and end at the tokens' number")
    demand(sparse_mode in (0, 2, 3), op, f"sparse_mode is {sparse_mode}, expected 0 (mask as given), 2 or 3 (causal)")
    if sparse_mode in (2, 3):
        demand(mask is not None and tuple(mask.shape) == (MASK_SIDE, MASK_SIDE), op,
               f"sparse_mode {sparse_mode} takes a mask [{MASK_SIDE}, {MASK_SIDE}], found "
               f"{None if mask is None else list(mask.shape)}")
    demand(mask is None or mask.dtype in (torch.bool, torch.uint8), op, "the mask must be bool or uint8")


def gate(op: str, logits: torch.Tensor, bias: torch.Tensor, k: int, groups: int, groups_kept: int) -> None:
    """logits [T, E], bias [E], E in `groups` equal groups, of which `groups_kept` hold at least k experts."""
    demand(logits.dim() == 2 and bias.shape == logits.shape[1:], op,
           f"logits {list(logits.shape)} and bias {list(bias.shape)}, expected [T, E] and [E]")
    experts = logits.shape[1]
    demand(experts % groups == 0 and 0 < groups_kept <= groups and k <= groups_kept * (experts // groups), op,
           f"{k} of {experts} experts from {groups_kept} of {groups} groups cannot be chosen")


def order(op: str, tokens: torch.Tensor, experts: torch.Tensor) -> None:
    """tokens [T, H] and their experts [T, k]."""
    demand(tokens.dim() == experts.dim() == 2 and len(tokens) == len(experts), op,
           f"tokens {list(tokens.shape)} and experts {list(experts.shape)}, expected [T, H] and [T, k]")
    demand(experts.dtype in (torch.int32, torch.int64), op, f"experts must be int32 or int64, found {experts.dtype}")


def way_back(op: str, rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> None:
    """rows [T * k, H], places [T * k], weights [T, k]."""
    demand(rows.dim() == 2 and weights.dim() == 2 and tuple(places.shape) == (weights.numel(),) and
           len(rows) == len(places), op, f"rows {list(rows.shape)}, places {list(places.shape)} and weights "
           f"{list(weights.shape)}, expected [T * k, H], [T * k] and [T, k]")


def product(op: str, x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> None:
    """x [M, K], weight [E, K, N] of its dtype, counts [E] int64."""
    shapes = f"x {list(x.shape)}, weight {list(weight.shape)}"
    demand(x.dim() == 2 and weight.dim() == 3, op, f"{shapes}: expected [M, K] and [E, K, N]")
    demand(x.shape[1] == weight.shape[1], op, f"{shapes}: K differs, {x.shape[1]} and {weight.shape[1]}")
    demand(x.dtype == weight.dtype, op, f"x is {x.dtype}, weight {weight.dtype}: they must be of one dtype")
    demand(counts.dtype == torch.int64 and tuple(counts.shape) == weight.shape[:1], op,
           f"counts must be int64 [{len(weight)}], the rows of each expert; found {counts.dtype} {list(counts.shape)}")
