"""What a reward's parts are called in a batch and in metrics, and the penalty of long responses. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

METRIC = "reward/"  # before a part's label: its scores in verl's extra information, and its mean among the metrics
RM_SCORES = "rm_scores"  # [B, M] fp32 in a batch: scores of the M reward models, in the order of their entries


def length_penalty(tokens: int, longest: int, buffer: int) -> float:
    """DAPO's penalty of a response of `tokens` tokens, in -1..0 (arXiv:2503.14476, eq. 13).

    0 up to `longest - buffer`, then linear to -1 at `longest`.
    """
    return max(min((longest - buffer - tokens) / buffer, 0.0), -1.0)


def part_means(columns: Mapping[str, Any]) -> dict[str, float]:
    """{label: mean score over the batch} of the parts, from the columns that verl makes of a manager's information."""
    found = {name.removeprefix(METRIC): values for name, values in columns.items() if name.startswith(METRIC)}
    return {label: statistics.fmean(values) for label, values in found.items()}
