"""Raise an error of one rank on all ranks of a weight sync, or of another exchange, with the same message.

Without an error ranks exchange one number only. Once one rank has an error, every rank gathers the texts and raises
the same message, so that no rank waits in a collective forever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from verl_patches.errors import RecipeError

_SHOWN_PROBLEMS, _SHOWN_OF_ONE_RANK = 8, 3  # numbers of problems that a message lists in all, and of one rank


class RankError(RecipeError):
    """Report on every rank that some rank has a problem (`raise_on_any_rank`); `task` names the work that failed."""

    task: str


class ReshardError(RankError):
    """Report that weights cannot be moved or did not arrive; the message names parameter, rank, expected and found."""

    task = "reshard"


def catch_errors(check: Callable[[], Iterable[str] | None]) -> list[str]:
    """Return the problems that `check` returns, or its exception as the only one, for `raise_on_any_rank`."""
    try:
        return list(check() or ())
    except Exception as why:
        return [f"{type(why).__name__}: {why}"]


def raise_on_any_rank(
    problems: Sequence[str], group: Any, device: torch.device | str, failure: str, error: type[RankError] = ReshardError
) -> None:
    """Raise the same `error` on every rank if any rank has a problem; collective. `failure` begins the message."""
    flag = torch.tensor([len(problems)], dtype=torch.int64, device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
    if not flag.item():
        return
    by_rank = gather((len(problems), problems[:_SHOWN_OF_ONE_RANK]), group)
    lines = [f"rank {rank}: {text}" for rank, (_, texts) in enumerate(by_rank) for text in texts][:_SHOWN_PROBLEMS]
    left = sum(count for count, _ in by_rank) - len(lines)
    if left:
        lines.append(f"and {left} more")
    raise error("\n  ".join([f"{error.task}: {failure}", *lines]))


def gather(value: Any, group: Any = None) -> list[Any]:
    """Return `value` of every rank; it is pickled, which is too slow to do in every weight sync."""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
