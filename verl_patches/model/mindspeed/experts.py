"""The two tensors that hold all routed experts of a rank, and the experts in them.

Megatron's GroupedMLP makes weight1 as [H, e * 2F] and weight2 as [e * F, H]. MindSpeed reads weight1 as
`view(e, H, 2F)` (mindspeed/core/transformer/moe/experts.py, groupedmlp_forward), which is another order of the same
memory than the shape says: an expert is a slice of the view, never a slice of columns. Shape letters: H hidden, F this
rank's part of an expert's intermediate size, e local experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def stack_up(experts: Sequence[torch.Tensor]) -> torch.Tensor:
    """weight1 [H, e * 2F] of experts [2F, H] each, rows of gate first and then of up."""
    stacked = torch.stack([expert.t() for expert in experts])  # [e, H, 2F]
    return stacked.view(stacked.shape[1], -1)


def stack_down(experts: Sequence[torch.Tensor]) -> torch.Tensor:
    """weight2 [e * F, H] of experts [H, F] each."""
    return torch.cat([expert.t() for expert in experts])


def split_up(weight1: torch.Tensor, count: int) -> list[torch.Tensor]:
    """[2F, H] of each of `count` experts: the inverse of `stack_up`, as views."""
    return [expert.t() for expert in weight1.view(count, weight1.shape[0], -1)]


def split_down(weight2: torch.Tensor, count: int) -> list[torch.Tensor]:
    """[H, F] of each of `count` experts: the inverse of `stack_down`, as views."""
    return [expert.t() for expert in weight2.view(count, -1, weight2.shape[1])]
