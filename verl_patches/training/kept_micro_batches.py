"""Dynamic batch size with recipe.tensor_cache.enabled: verl's actor takes the micro batches that the plan has.

verl packs each rank's samples by itself, into as many micro batches as the rank with the most tokens needs at least
(verl/utils/seqlen_balancing.py, rearrange_micro_batches of 0.4.0): some come out above the token budget, and the n-th
ones of two replicas are not of one length. Here all replicas follow one plan (comm/micro_batches.py). Without
trainer.balance_batch everything is in verl's order, and verl packs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain, cycle
from typing import Any

import torch

from verl_patches.comm import micro_batches
from verl_patches.comm.batch_plan import BatchPlan
from verl_patches.errors import RecipeError

Parts = list[list[int]]  # [micro batch] -> places in the batch that verl splits
_following: _Following | None = None


class _Following:
    """What the stage that runs now splits its batches into, in order; over again for each epoch."""

    def __init__(self, splits: Sequence[Parts], tokens: Sequence[Sequence[int]]):
        self._splits = cycle(zip(splits, tokens, strict=True))
        self.reached = 0

    def next(self, found: list[int]) -> Parts:
        """Of a batch whose rows have so many tokens; RecipeError where the plan has others here."""
        parts, expected = next(self._splits)
        if found != list(expected):
            raise RecipeError(f"micro batches: batch {self.reached} of this stage has {len(found)} rows of "
                              f"{sum(found)} tokens, the plan has {len(expected)} of {sum(expected)} there, or in "
                              "another order")
        self.reached += 1
        return parts


def planned(
    stage: str, budget: int | None, plan: BatchPlan, replica: int, tokens: Sequence[int] | None
) -> AbstractContextManager[None]:
    """A stage, "update" or a forward pass, in which dynamic micro batches of a replica are the plan's.

    `tokens`: [sample] -> tokens. Micro batches are verl's without a budget (their size is not dynamic) or tokens.
    """
    if budget is None or tokens is None:
        return nullcontext()
    split = update_splits(plan, replica) if stage == "update" else pass_splits(plan, replica, tokens, budget)
    return following(split, [tokens[sample] for sample in plan.placed[replica]])


def update_splits(plan: BatchPlan, replica: int) -> list[Parts]:
    """[mini batch] -> its micro batches; the update has its samples in the order of the plan."""
    return [_places(mini, list(chain.from_iterable(mini))) for mini in plan.schedule[replica]]


def pass_splits(plan: BatchPlan, replica: int, lengths: Sequence[int], token_budget: int) -> list[Parts]:
    """One batch of all samples of a replica, for a forward pass with a budget of its own."""
    packed = micro_batches.packed(plan.placed, lengths, token_budget, balance=False)  # the plan has dealt them
    return [_places(packed[replica], plan.placed[replica])]


def _places(parts: Sequence[Sequence[int]], order: Sequence[int]) -> Parts:
    place = {sample: at for at, sample in enumerate(order)}
    return [[place[sample] for sample in part] for part in parts]


@contextmanager
def following(splits: Sequence[Parts], tokens: Sequence[int]) -> Iterator[None]:
    """A stage whose dynamic micro batches are `splits`, of rows with these tokens, all batches one after another.

    Raises RecipeError where verl's actor did not ask for them.
    """
    global _following
    rows = iter(tokens)
    now = _following = _Following(splits, [[next(rows) for part in parts for _ in part] for parts in splits])
    try:
        yield
    finally:
        _following = None
    if not now.reached:
        raise RecipeError("micro batches: the actor did not split by the plan; row update.micro_batches_as_planned "
                          "must reach verl.workers.actor.megatron_actor: look at `status --run DIR`")  # fmt: skip


def as_planned(rearrange_micro_batches: Callable) -> Callable:
    """Provider for verl's rearrange_micro_batches: (micro batches, places), by the plan inside `following`."""

    @functools.wraps(rearrange_micro_batches)
    def rearrange(batch: Any, *args: Any, **kwargs: Any) -> tuple[list[Any], Parts]:
        if _following is None:
            return rearrange_micro_batches(batch, *args, **kwargs)
        parts = _following.next(batch["attention_mask"].sum(dim=1).tolist())
        return [batch[torch.tensor(part, device=batch["attention_mask"].device)] for part in parts], parts

    return rearrange
