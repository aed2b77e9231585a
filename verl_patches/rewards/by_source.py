"""Score mixed data: choose the reward function by a row's data_source. Add your own reward here."""

from __future__ import annotations

from typing import Any

from verl_patches.rewards import learnable, maths


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    **maths_options: Any,
) -> dict[str, float]:
    """Score one response in verl's `custom_reward_function` contract: {score, acc, format}, each in 0..1.

    Rows of the learnable task (rewards/learnable.py) score the share of right symbols; all others are maths
    (rewards/maths.py, which takes `maths_options`). The keys are the same for both, as verl requires.
    """
    if data_source != learnable.DATA_SOURCE:
        return maths.compute_score(data_source, solution_str, ground_truth, extra_info, **maths_options)
    score = learnable.compute_score(data_source, solution_str, ground_truth, extra_info)
    return {"score": score, "acc": float(score == 1.0), "format": 1.0}
