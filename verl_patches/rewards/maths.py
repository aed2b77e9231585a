r"""Score maths answers: the last \boxed{...} of a response, compared with the gold answer by math-verify.

Deviates from common rewards, which search the whole response: only the content of the last box counts, so a gold
string in the reasoning, in an earlier box or in an unclosed box earns nothing.

A correct answer earns 1.0. A wrong answer in the right form earns `format_weight`, anything else earns nothing. The
form's share may be small, as GRPO divides by the spread inside a group: if no response of a group is correct, the form
alone decides the advantages, however small its weight; a weight of 0 switches that off.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from typing import Any

from verl_patches.errors import ConfigError
from verl_patches.recipe import CPU_LIMIT_S, FORMAT_WEIGHT
from verl_patches.rewards.helper_process import CallError, HelperProcess

TAIL_CHARS = 65_536  # a box further from the end than this is not an answer; it also bounds the time
MAX_ANSWER_CHARS = 512
_log = logging.getLogger(__name__)
_TOKEN = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)  # "\{" is text, and "\\boxed{" opens no box


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str | int | float,
    extra_info: dict[str, Any] | None = None,
    format_weight: float = FORMAT_WEIGHT,
    cpu_limit_s: float = CPU_LIMIT_S,
) -> dict[str, float]:
    """Score one response, in verl's `custom_reward_function` contract.

    Returns score in 0..1 (as above), acc (1.0 if the answer is right) and format (1.0 if there is a closed, non-empty
    last box); the keys are the same for every response, as verl requires. `format_weight` and `cpu_limit_s` (of one
    comparison) are keys of an entry of recipe.rewards. May be called from any thread or process. Raises ConfigError for
    a gold answer that is empty or not a string or number.
    """
    gold = str(ground_truth) if isinstance(ground_truth, str | int | float) else ""
    if not gold.strip():
        raise ConfigError(
            f"reward: a row of {data_source!r} has the gold answer {ground_truth!r}; expected a number or a text in "
            "reward_model.ground_truth: make the data with `data build`, handler maths or gsm8k (docs/data.md)"
        )
    gold = last_box(gold) or gold
    answer = last_box(solution_str) or ""
    well_formed = 0 < len(answer) <= MAX_ANSWER_CHARS
    correct = well_formed and (answer == gold.strip() or _are_equal(gold, answer, cpu_limit_s))
    score = 1.0 if correct else float(format_weight * well_formed)
    return {"score": score, "acc": float(correct), "format": float(well_formed)}


@functools.cache
def _process_helper(process_id: int) -> HelperProcess:
    """Return the helper of one process, so that a fork never talks to its parent's helper."""
    return HelperProcess("verl_patches.rewards.equivalence:equivalent", trial=(r"\frac{1}{2}", "0.5"))


def _are_equal(gold: str, answer: str, cpu_limit_s: float) -> bool:
    """Return whether answers are equal, by a helper process (equivalence.py); False if the comparison fails."""
    try:
        return _process_helper(os.getpid()).call(gold, answer, cpu_limit_s=cpu_limit_s)
    except CallError as why:
        _log.info("reward: comparing an answer with the gold answer failed, so it scores as wrong: %s", why)
        return False


def format_score(
    data_source: str, solution_str: str, ground_truth: Any = None, extra_info: dict[str, Any] | None = None
) -> float:
    """Return 1.0 if there is a closed, non-empty last box, else 0.0: part `format`, which needs no gold answer."""
    return float(0 < len(last_box(solution_str) or "") <= MAX_ANSWER_CHARS)


def last_box(text: str) -> str | None:
    r"""Return the content of the last \boxed{...}, stripped; None if there is none, or it is open or holds a box.

    Braces must balance inside the box; \{ and \} are text. Only the last 65,536 characters are read.
    """
    open_braces: list[int | None] = []  # where a box's content begins, None for other braces
    open_boxes, nested, content = 0, False, None
    tail = text[-TAIL_CHARS:]
    for token in _TOKEN.finditer(tail):
        mark = token.group()
        if mark.startswith(r"\boxed"):
            open_braces.append(token.end())
            open_boxes += 1
        elif mark == "{":
            open_braces.append(None)
        start = open_braces.pop() if mark == "}" and open_braces else None
        if start is None:
            continue
        open_boxes -= 1
        content = None if nested else tail[start : token.start()].strip()
        nested = open_boxes > 0  # the box around this one holds a box
    return None if open_boxes else content
