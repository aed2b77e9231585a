"""Score a task that a tiny random model learns in a few dozen GRPO steps: answer in the prompt's kind of symbols.

A prompt is twelve symbols of one of three kinds: small letters, capitals, or marks (digits and punctuation). The reward
is the share of the response's characters that are of the same kind. The kinds are disjoint and equally frequent, so an
answer that does not depend on the prompt earns at most 1/3 on average; only the prompt's kind throughout earns 1. Every
single token changes the reward, and random tokens of the tiny model's tokenizer earn about 0.3, so there is a gradient
from the first step. data/make_learnable.py makes the rows.
"""

from __future__ import annotations

import string
from typing import Any

from verl_patches.errors import ConfigError

DATA_SOURCE = "verl_patches/same_kind"
KINDS: dict[str, str] = {
    "small": string.ascii_lowercase,
    "capitals": string.ascii_uppercase,
    "marks": string.digits + string.punctuation,
}
MIN_CHARS = 16  # a shorter answer is scored as if it were this long, so that stopping at once does not pay


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> float:
    """Return the share, 0..1, of the response's characters, without white space, that are of kind `ground_truth`.

    Follows verl's `custom_reward_function`. Bytes that are not text decode to a character of no kind. Raises
    ConfigError for an unknown kind.
    """
    if ground_truth not in KINDS:
        raise ConfigError(
            f"reward: a row of {data_source!r} has the ground truth {ground_truth!r}; expected one of "
            f"{', '.join(KINDS)}: make the data with data/make_learnable.py"
        )
    kind = frozenset(KINDS[ground_truth])
    chars = [char for char in solution_str if not char.isspace()]
    return sum(char in kind for char in chars) / max(len(chars), MIN_CHARS)
