"""Make train.parquet and test.parquet of the task that tiny random models can learn.

    python data/make_learnable.py ROWS -o DIR [--answers paired|unpaired] [--seed N]
    python data/make_learnable.py ROWS -o FILE.jsonl [--seed N] [--overwrite]     records for `data build`

verl_patches/rewards/learnable.py rewards it and `scripts/smoke.sh` trains on it. Exit codes: 0 written, 2 wrong use.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from verl_patches.errors import ConfigError
from verl_patches.rewards.learnable import DATA_SOURCE, KINDS
from verl_patches.shared_files import write_whole
from verl_patches.tools.data.handlers import parquet_schema
from verl_patches.tools.data.output import TEST, TRAIN, new_folder, write_rows

Row = dict[str, Any]
ANSWER_COLUMNS = ("response", "chosen", "rejected", "label", "steps", "labels")
TEST_ROWS = 30
MAX_ROWS = 1_000_000
PROMPT_SYMBOLS = 12
# With the two end tokens of a reward model these fill data.max_response_length of the learning runs.
RECORD_SYMBOLS = 14


def make_rows(count: int, seed: int = 0, answers: str | None = None) -> list[Row]:
    """Return `count` rows in verl's schema, the same for the same seed.

    Each three neighbours (rows 0-2, 3-5, ...) ask for the three kinds, in random order, so every batch of a multiple
    of three rows is balanced if the data is not shuffled again. `answers` adds the columns of fixed data
    (verl_patches/step/objectives/settings.py): chosen and rejected are answers in the prompt's kind and in another,
    response is the chosen one (paired), or every second time the rejected one (unpaired), and label says which; steps
    are in either kind, with their labels. Raises ConfigError for fewer than three rows, or more than MAX_ROWS.
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
    rows, answer_rng = [], Random(f"answers {seed}")
    for at, kind in enumerate(order[:count]):
        prompt = " ".join(rng.choice(KINDS[kind]) for _ in range(PROMPT_SYMBOLS))
        row = {"data_source": DATA_SOURCE, "prompt": [{"role": "user", "content": prompt}], "ability": "kinds"}
        row["reward_model"] = {"style": "rule", "ground_truth": kind}
        row["extra_info"] = {"index": -1, "split": "", "answer": kind, "solution": "", "origin": f"seed {seed}"}
        good = answers == "paired" or at % 2 == 0
        if answers:
            row |= _answers(answer_rng, kind, good)
        rows.append(row)
    return rows


def _answers(rng: Random, kind: str, good: bool) -> Row:
    """Return the columns of fixed data: answers of 4 to 12 symbols, three steps of 1 to 4."""
    other = rng.choice([each for each in KINDS if each != kind])

    def text(of: str, least: int, most: int) -> str:
        return "".join(rng.choice(KINDS[of]) for _ in range(rng.randint(least, most)))

    chosen, rejected = text(kind, 4, 12), text(other, 4, 12)
    labels = [rng.random() < 0.5 for _ in range(3)]
    steps = [text(kind if right else other, 1, 4) for right in labels]
    answers = {"chosen": chosen, "rejected": rejected, "response": chosen if good else rejected, "label": good}
    return {**answers, "steps": steps, "labels": [float(label) for label in labels]}


def write_task(
    folder: Path, count: int, seed: int = 0, test_rows: int = TEST_ROWS, answers: str | None = None
) -> tuple[Path, Path]:
    """Write the task's train.parquet (`count` rows) and test.parquet to `folder` and return their paths."""
    schema = parquet_schema(ANSWER_COLUMNS if answers else ())
    parts = {TRAIN: (count, seed), TEST: (test_rows, seed + 1_000_003)}
    made = {name: make_rows(rows, start, answers) for name, (rows, start) in parts.items()}
    with new_folder(folder) as work:
        for name, rows in made.items():
            write_rows(work / "out" / name, rows, schema)
    return folder / TRAIN, folder / TEST


def write_records(file: Path, count: int, seed: int = 0, overwrite: bool = False) -> None:
    """Write `count` JSON lines {prompt, response, answer, chosen, rejected}, which `data build` reads.

    response and chosen are RECORD_SYMBOLS symbols of the prompt's kind, rejected is as many of another: the reward
    prefers long answers. Raises ConfigError if the file exists and `overwrite` is false.
    """
    if file.exists() and not overwrite:
        raise ConfigError(f"{file}: expected a new file, found an existing one; replace it with --overwrite")
    rng, lines = Random(f"records {seed}"), []
    for row in make_rows(count, seed):
        kind = row["reward_model"]["ground_truth"]
        other = rng.choice([each for each in KINDS if each != kind])
        good, bad = ("".join(rng.choices(KINDS[each], k=RECORD_SYMBOLS)) for each in (kind, other))
        record = {"prompt": row["prompt"][0]["content"], "answer": kind}
        lines.append(json.dumps(record | {"response": good, "chosen": good, "rejected": bad}) + "\n")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, "".join(lines))


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="Make the task that tiny random models learn.")
    parser.add_argument("rows", type=int, help="number of rows to train on")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder or FILE.jsonl to make")
    parser.add_argument("--seed", type=int, default=0, help="seed of the rows (default: 0)")
    answers = "also write the columns that objectives on fixed data read; unpaired: half the responses are wrong"
    parser.add_argument("--answers", choices=("paired", "unpaired"), help=answers)
    parser.add_argument("--overwrite", action="store_true", help="replace an existing FILE.jsonl")
    args = parser.parse_args(argv)
    try:
        if args.output.suffix == ".jsonl":
            write_records(args.output, args.rows, args.seed, args.overwrite)
            print(f"{args.rows} records -> {args.output}")
            return 0
        files = write_task(args.output, args.rows, args.seed, answers=args.answers)
    except ConfigError as why:
        print(f"error: {why}", file=sys.stderr)
        return 2
    print(f"{args.rows} train rows -> {files[0]}, {TEST_ROWS} test rows -> {files[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
