"""Make train.parquet and test.parquet, in the schema verl trains on, from DeepScaleR or GSM8K files.

    python data/prepare_deepscaler.py FILE [FILE ...] -o DIR [--tokenizer DIR --max-prompt-length N] [--json]
    python data/prepare_deepscaler.py --learnable ROWS -o DIR [--answers paired|unpaired]

Exit codes: 0 written, 1 bad rows (each named by file and line; nothing written), 2 wrong use.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from random import Random
from typing import Any

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.tables import Problem, Row, check_free, number, read_problems, shuffled_split, verl_row, write_tables
from verl_patches.errors import ConfigError
from verl_patches.rewards.learnable import DATA_SOURCE, KINDS

INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
SHOWN = 20
LEARNABLE_TEST_ROWS = 30
MAX_ROWS = 1_000_000
PROMPT_SYMBOLS = 12


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line; wrong use ends the process with exit code 2."""
    parser = argparse.ArgumentParser(description="Make verl's train.parquet and test.parquet from maths problems.")
    parser.add_argument("inputs", nargs="*", type=Path, help="DeepScaleR or GSM8K files: .json, .jsonl, .parquet")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder for the two parquet files")
    parser.add_argument("--test-size", type=float, default=0.1, help="share (below 1) or number of test rows")
    parser.add_argument("--seed", type=int, default=0, help="seed of the shuffle")
    parser.add_argument("--instruction", default=INSTRUCTION, help="text added to each problem; may be empty")
    parser.add_argument("--prompt-key", help="key of the question in rows of another schema; with --answer-key")
    parser.add_argument("--answer-key", help="key of the answer, which is used as it is")
    parser.add_argument("--data-source", help="the name verl logs the rows under; default: by the schema of the row")
    parser.add_argument("--tokenizer", type=Path, help="model folder: drop prompts longer than --max-prompt-length")
    parser.add_argument("--max-prompt-length", type=int, help="in tokens, with the chat template")
    parser.add_argument("--skip-bad", action="store_true", help="leave bad rows out instead of refusing the file")
    parser.add_argument("--learnable", type=int, metavar="ROWS", help="make the task for tiny random models instead")
    answers = "with --learnable: columns of fixed data; unpaired: half the responses are wrong"
    parser.add_argument("--answers", choices=("paired", "unpaired"), help=answers)
    parser.add_argument("--overwrite", action="store_true", help="replace files that are there")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    args = parser.parse_args(argv)
    if bool(args.inputs) == (args.learnable is not None):
        parser.error("give input files or --learnable ROWS, one of the two")
    if args.answers and args.learnable is None:
        parser.error("--answers goes with --learnable")
    if (args.prompt_key is None) != (args.answer_key is None):
        parser.error("--prompt-key and --answer-key go together")
    if (args.tokenizer is None) != (args.max_prompt_length is None):
        parser.error("--tokenizer and --max-prompt-length go together")
    return args


def read_all(
    paths: list[Path], keys: tuple[str, str] | None, quiet: bool
) -> tuple[list[Problem], list[str], list[str]]:
    """Problems of all files, sentences about bad rows, and where problems were repeated (the first is kept)."""
    problems, bad, repeated = [], [], []
    seen: set[str] = set()
    for path in tqdm(paths, desc="read", unit="file", disable=quiet or None):
        found, wrong = read_problems(path, keys)
        bad += wrong
        for problem in found:
            key = " ".join(problem.question.split())
            if key in seen:  # it could be in train and test at once
                repeated.append(problem.origin)
            else:
                seen.add(key)
                problems.append(problem)
    return problems, bad, repeated


def drop_long(
    rows: list[Row], tokenizer_folder: Path, limit: int, quiet: bool
) -> tuple[list[Row], list[dict[str, Any]]]:
    """The rows whose prompt has at most `limit` tokens, counted as verl counts them, and a report of the others."""
    if not tokenizer_folder.is_dir():
        raise ConfigError(f"--tokenizer {tokenizer_folder}: expected a folder with a tokenizer, found nothing there")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder, local_files_only=True)
    except Exception as why:  # transformers gives many kinds for damaged files
        text = f"{type(why).__name__}: {why}"
        raise ConfigError(f"--tokenizer {tokenizer_folder}: no tokenizer can be read there: {text}") from why
    if not tokenizer.chat_template:
        raise ConfigError(f"--tokenizer {tokenizer_folder}: it has no chat template, which verl needs")
    kept, dropped = [], []
    for row in tqdm(rows, desc="tokens", unit="row", disable=quiet or None):
        tokens = len(tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True))
        if tokens <= limit:
            kept.append(row)
        else:
            dropped.append({"origin": row["extra_info"]["origin"], "tokens": tokens})
    return kept, dropped


def make_rows(count: int, seed: int = 0, answers: str | None = None) -> list[Row]:
    """`count` rows in verl's schema, the same for the same seed.

    Any three neighbours (rows 0-2, 3-5, ...) ask for the three kinds, in a drawn order, so every batch of a multiple
    of three rows is balanced if the data is not shuffled again. `answers` adds the columns of fixed data
    (verl_patches/objectives/settings.py): chosen and rejected are answers in the prompt's kind and in another, response
    is the chosen one (paired), or every second time the rejected one (unpaired), and label says which; steps are of
    either kind, with their labels. Raises ConfigError for fewer than three rows, or more than MAX_ROWS.
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
    rows, of_answers = [], Random(f"answers {seed}")
    for at, kind in enumerate(order[:count]):
        prompt = " ".join(rng.choice(KINDS[kind]) for _ in range(PROMPT_SYMBOLS))
        row = verl_row(DATA_SOURCE, prompt, kind, ability="kinds", origin=f"seed {seed}")
        good = answers == "paired" or at % 2 == 0
        rows.append({**row, **(_answers(of_answers, kind, good) if answers else {})})
    return rows


def _answers(rng: Random, kind: str, good: bool) -> Row:
    """The columns of fixed data: answers of 4 to 12 symbols, three steps of 1 to 4."""
    other = rng.choice([each for each in KINDS if each != kind])

    def text(of: str, least: int, most: int) -> str:
        return "".join(rng.choice(KINDS[of]) for _ in range(rng.randint(least, most)))

    chosen, rejected = text(kind, 4, 12), text(other, 4, 12)
    labels = [rng.random() < 0.5 for _ in range(3)]
    steps = [text(kind if right else other, 1, 4) for right in labels]
    answers = {"chosen": chosen, "rejected": rejected, "response": chosen if good else rejected, "label": good}
    return {**answers, "steps": steps, "labels": labels}


def write_task(
    folder: Path, count: int, seed: int = 0, test_rows: int = 30, overwrite: bool = False, answers: str | None = None
) -> tuple[Path, Path]:
    """Write the task's train.parquet (`count` rows) and test.parquet to `folder` and return their paths."""
    train, test = make_rows(count, seed, answers), make_rows(test_rows, seed + 1_000_003, answers)
    return write_tables(folder, number(train, "train"), number(test, "test"), overwrite)


def prepare(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Exit code and report; ConfigError for wrong use."""
    check_free(args.output, args.overwrite)
    if args.learnable is not None:
        files = write_task(args.output, args.learnable, args.seed, LEARNABLE_TEST_ROWS, args.overwrite, args.answers)
        return 0, {"files": [str(file) for file in files], "train": args.learnable, "test": LEARNABLE_TEST_ROWS}
    keys = (args.prompt_key, args.answer_key) if args.prompt_key else None
    problems, bad, repeated = read_all(args.inputs, keys, args.json)
    report: dict[str, Any] = {"read": len(problems) + len(repeated), "bad": bad, "repeated": repeated, "too_long": []}
    if bad and not args.skip_bad:
        return 1, report
    rows = []
    for problem in problems:
        prompt, source = f"{problem.question} {args.instruction}".strip(), args.data_source or problem.data_source
        rows.append(verl_row(source, prompt, problem.answer, "math", problem.solution, problem.origin))
    if args.tokenizer is not None:
        rows, report["too_long"] = drop_long(rows, args.tokenizer, args.max_prompt_length, args.json)
    train, test = shuffled_split(rows, args.test_size, args.seed)
    files = write_tables(args.output, train, test, args.overwrite)
    return 0, {**report, "files": [str(file) for file in files], "train": len(train), "test": len(test)}


def show(code: int, report: dict[str, Any]) -> None:
    """The report for people: what was left out on stderr, what was written on stdout."""
    too_long = [f"{item['origin']}: {item['tokens']} tokens" for item in report.get("too_long", [])]
    left_out = {"bad": report.get("bad", []), "repeated, left out": report.get("repeated", [])}
    for title, lines in {**left_out, "too long, left out": too_long}.items():
        for line in lines[:SHOWN]:
            print(f"{title}: {line}", file=sys.stderr)
        if len(lines) > SHOWN:
            print(f"{title}: {len(lines) - SHOWN} more", file=sys.stderr)
    if code:
        print(f"{len(report['bad'])} bad rows: nothing written. Mend them, or give --skip-bad.", file=sys.stderr)
    else:
        train, test = report["files"]
        print(f"{report['train']} train rows -> {train}, {report['test']} test rows -> {test}")


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    args = parse_arguments(argv)
    try:
        code, report = prepare(args)
    except (ConfigError, OSError, UnicodeError) as why:
        if args.json:
            print(json.dumps({"exit": 2, "error": str(why)}))
        else:
            print(f"error: {why}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps({"exit": code, **report}))
    else:
        show(code, report)
    return code


if __name__ == "__main__":
    sys.exit(main())
