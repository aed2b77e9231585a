r"""Reward for maths answers: the last \boxed{...} of a response, compared with the gold answer by math-verify.

Deviates from common rewards, which search the whole response: only what stands in the last box counts, so a gold
string in the reasoning, in an earlier box or in a box that is never closed earns nothing.
"""

from __future__ import annotations

import re
from typing import Any

from verl_patches.errors import ConfigError
from verl_patches.rewards.compose import FORMAT_WEIGHT, compose
from verl_patches.rewards.judge import CPU_LIMIT_S, shared_judge

TAIL_CHARS = 65_536  # a box further from the end than this is not an answer; it also bounds the time
MAX_ANSWER_CHARS = 512
_TOKEN = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)  # an escaped brace is text, and so is "\\" before a word


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str | int | float,
    extra_info: dict[str, Any] | None = None,
    format_weight: float = FORMAT_WEIGHT,
    cpu_limit_s: float = CPU_LIMIT_S,
) -> dict[str, float]:
    """Score one response, as verl's reward managers `naive` and `dapo` call a `custom_reward_function`.

    Returns score in 0..1 (see compose.py), acc (1.0 if the answer is right) and format (1.0 if there is a closed,
    non-empty last box); verl logs the last two, and takes acc as the validation metric. The keys are the same for
    every response, which verl relies on. `format_weight` and `cpu_limit_s` come from
    custom_reward_function.reward_kwargs. May be called from any thread or process; takes at most about `cpu_limit_s`
    of CPU time.

    Raises ConfigError for a gold answer that is empty or not a string or number.
    """
    gold = str(ground_truth) if isinstance(ground_truth, str | int | float) else ""
    if not gold.strip():
        raise ConfigError(
            f"reward: a row of {data_source!r} has the gold answer {ground_truth!r}; expected a string that is not "
            "empty, or a number, in reward_model.ground_truth: prepare the data with data/prepare_deepscaler.py"
        )
    gold = last_box(gold) or gold
    answer = last_box(solution_str)
    well_formed = answer is not None and 0 < len(answer) <= MAX_ANSWER_CHARS
    correct = well_formed and (answer == gold.strip() or _judged(gold, answer, cpu_limit_s))
    score = compose(correct, well_formed, format_weight)
    return {"score": score, "acc": float(correct), "format": float(well_formed)}


def last_box(text: str) -> str | None:
    r"""Content of the last \boxed{...}, stripped; None if there is none, it is not closed, or it holds another box.

    Braces must balance inside the box; \{ and \} are text. Only the last 65,536 characters are read.
    """
    open_braces: list[bool] = []  # True: a brace that opens a box
    open_boxes, start, nested, content = 0, 0, False, None
    tail = text[-TAIL_CHARS:]
    for token in _TOKEN.finditer(tail):
        mark = token.group()
        if mark.startswith(r"\boxed"):
            start, nested = (start, True) if open_boxes else (token.end(), False)
            open_boxes += 1
            open_braces.append(True)
        elif mark == "{":
            open_braces.append(False)
        elif mark == "}" and open_braces and open_braces.pop():
            open_boxes -= 1
            if not open_boxes:
                content = None if nested else tail[start : token.start()].strip()
    return None if open_boxes else content


def _judged(gold: str, answer: str, cpu_limit_s: float) -> bool:
    return len(gold) <= MAX_ANSWER_CHARS and shared_judge().equivalent(gold, answer, cpu_limit_s)
