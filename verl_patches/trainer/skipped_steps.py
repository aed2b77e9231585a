"""Optimizer steps that the workers left out (worker/step_guard.py): in the step's record, and as the end of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl_patches.errors import RecipeError

METRIC = "actor/skipped_steps"
_KEY = "recipe.train.max_skipped_steps"


class SkippedStepsError(RecipeError):
    """Too many optimizer steps in a row had NaN or infinite gradients."""


def skipped_of_step(reports: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """What the ranks' guards say of one training step, by rank; None without guards.

    steps: optimizer steps left out; in_a_row: without one between them that was not; ranks: those whose own gradients
    are not finite; nearest: rank, stage and parameter nearest to the loss, where NaN comes first; None if no rank's
    own gradient is to blame.
    """
    if any(report is None for report in reports):
        return None
    faulty = {rank: report for rank, report in enumerate(reports) if report["fault"]}
    nearest = None
    if faulty:
        rank = max(faulty, key=lambda rank: (faulty[rank]["stage"], -rank))
        fault = faulty[rank]["fault"]
        nearest = {"rank": rank, "stage": faulty[rank]["stage"], "parameter": fault["nearest"]}
        nearest["parameters"] = fault["parameters"]
    return {
        "steps": max(report["skipped"] for report in reports),
        "in_a_row": max(report["in_a_row"] for report in reports),
        "ranks": sorted(faulty),
        "nearest": nearest,
    }


def said_of(found: dict[str, Any]) -> str:
    """One line about the steps that were left out; empty if there are none."""
    if not found["steps"]:
        return ""
    nearest = found["nearest"]
    if nearest is None:
        where = "no rank's own gradient is: their sum over data-parallel ranks, or its norm, is too large for fp32"
    else:
        ranks = found["ranks"]
        others = f" ({len(ranks)} ranks have such gradients)" if len(ranks) > 1 else ""
        where = (
            f"rank {nearest['rank']}, pipeline stage {nearest['stage']}, {nearest['parameter']} and "
            f"{nearest['parameters'] - 1} more parameters{others}"
        )
    return f"{found['steps']} optimizer step(s) skipped, {found['in_a_row']} in a row, for NaN or inf: {where}"


def check(step: int, found: dict[str, Any], limit: int) -> None:
    """SkippedStepsError if at least `limit` optimizer steps in a row were left out."""
    if found["in_a_row"] >= limit:
        raise SkippedStepsError(
            f"step {step}: {said_of(found)}; expected fewer than {limit} in a row ({_KEY}). The weights are those of "
            "the last step that was done. Look at that rank's inputs and kernels first; a lower learning rate helps "
            "only if grad_norm grew before"
        )
