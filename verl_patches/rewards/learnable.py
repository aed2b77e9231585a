"""A task that a tiny random model learns in a few dozen GRPO steps: answer in the kind of symbols of the prompt.

A prompt is twelve symbols of one of three kinds: small letters, capitals, or marks (digits and punctuation). The
reward is the share of the response's characters that are of the same kind. The kinds are disjoint and equally
frequent, so an answer that does not depend on the prompt earns at most 1/3 on average; the prompt's kind throughout
earns 1. Every single token changes the reward, and random tokens of the tiny model's tokenizer earn about 0.3, so there
is a gradient from the first step.
"""

from __future__ import annotations

import string
from pathlib import Path
from random import Random
from typing import Any

from verl_patches.errors import ConfigError
from verl_patches.rewards.tables import Row, number, verl_row, write_tables

DATA_SOURCE = "verl_patches/same_kind"
KINDS: dict[str, str] = {
    "small": string.ascii_lowercase,
    "capitals": string.ascii_uppercase,
    "marks": string.digits + string.punctuation,
}
MAX_ROWS = 1_000_000
PROMPT_SYMBOLS = 12
MIN_CHARS = 16  # a shorter answer is paid as if it were this long: stopping at once must not pay


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> float:
    """Share in 0..1 of the response's characters, white space aside, that are of the kind `ground_truth`.

    Follows verl's `custom_reward_function`. Bytes that are no text decode to a character of no kind. Raises
    ConfigError for a kind that does not exist.
    """
    if ground_truth not in KINDS:
        raise ConfigError(
            f"reward: a row of {data_source!r} asks for {ground_truth!r}; expected one of {', '.join(KINDS)}: "
            "make the data with data/prepare_deepscaler.py --learnable"
        )
    kind = frozenset(KINDS[ground_truth])
    chars = [char for char in solution_str if not char.isspace()]
    return sum(char in kind for char in chars) / max(len(chars), MIN_CHARS)


def make_rows(count: int, seed: int = 0) -> list[Row]:
    """`count` rows in verl's schema, the same for the same seed.

    Any three neighbours (rows 0-2, 3-5, ...) ask for the three kinds, in a drawn order, so every batch of a multiple
    of three rows is balanced if the data is not shuffled again. Raises ConfigError for fewer than three rows, or more
    than MAX_ROWS.
    """
    if not len(KINDS) <= count <= MAX_ROWS:
        raise ConfigError(
            f"learnable task: expected at least {len(KINDS)} rows (one of each kind) and at most {MAX_ROWS}, "
            f"found {count}"
        )
    rng = Random(seed)
    order: list[str] = []
    while len(order) < count:
        order += rng.sample(list(KINDS), len(KINDS))
    rows = []
    for kind in order[:count]:
        prompt = " ".join(rng.choice(KINDS[kind]) for _ in range(PROMPT_SYMBOLS))
        rows.append(verl_row(DATA_SOURCE, prompt, kind, ability="kinds", origin=f"seed {seed}"))
    return rows


def write_task(
    folder: Path, count: int, seed: int = 0, test_rows: int = 30, overwrite: bool = False
) -> tuple[Path, Path]:
    """Write the task's train.parquet (`count` rows) and test.parquet to `folder` and return their paths."""
    train, test = make_rows(count, seed), make_rows(test_rows, seed + 1_000_003)
    return write_tables(folder, number(train, "train"), number(test, "test"), overwrite)
