r"""Make data/deepscaler_sample.json: original maths problems in the DeepScaleR schema, the same bytes everywhere.

    python data/make_sample.py [--rows-per-template N] [--seed S] [--output FILE]

Each row is {problem, answer, solution}; the solution ends in \boxed{answer}.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parent))
from sample_templates import templates

SAMPLE = Path(__file__).resolve().parent / "deepscaler_sample.json"
ROWS_PER_TEMPLATE = 13
SEED = 20250807


def make_rows(rows_per_template: int = ROWS_PER_TEMPLATE, seed: int = SEED) -> list[dict[str, str]]:
    """Rows of the sample, no problem twice, templates taking turns.

    Raises ValueError if a template's own check contradicts its answer, or if a template cannot give so many rows.
    """
    rng = Random(seed)
    seen: set[str] = set()
    rows = []
    for _ in range(rows_per_template):
        for template in templates():
            for _attempt in range(200):
                item = template(rng)
                if not item.check:
                    raise ValueError(f"{template.__name__}: the check contradicts {item.answer!r}: {item.problem}")
                if item.problem not in seen:
                    break
            else:
                raise ValueError(f"{template.__name__} gives fewer than {rows_per_template} different problems")
            seen.add(item.problem)
            solution = f"{item.working} The answer is $\\boxed{{{item.answer}}}$."
            rows.append({"problem": item.problem, "answer": item.answer, "solution": solution})
    return rows


def render(rows: list[dict[str, str]]) -> str:
    """The file's text: a pretty-printed JSON list with one final newline."""
    return json.dumps(rows, indent=2, ensure_ascii=True) + "\n"


def main() -> int:
    """Command line: write the sample."""
    parser = argparse.ArgumentParser(description="Make the sample of maths word problems.")
    parser.add_argument("--rows-per-template", type=int, default=ROWS_PER_TEMPLATE)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--output", type=Path, default=SAMPLE)
    args = parser.parse_args()
    rows = make_rows(args.rows_per_template, args.seed)
    args.output.write_text(render(rows), encoding="utf-8", newline="\n")
    print(f"{len(rows)} rows -> {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
