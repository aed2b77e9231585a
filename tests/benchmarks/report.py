"""Make figures, the JSON report and child processes for benchmarks; importing it puts the repository on sys.path."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def figure(name: str, value: Any, unit: str, bound: float | None, peer: Any = None, **more: Any) -> dict[str, Any]:
    """Return one line of the report; `fine` defaults to `value` <= `bound` (None: reported only)."""
    if "fine" not in more:
        more["fine"] = bound is None or value <= bound
    return {"name": name, "value": value, "unit": unit, "bound": bound, "peer": peer, **more}


def print_report(name: str, figures: Iterable[dict[str, Any]], **more: Any) -> int:
    """Print the report as JSON and return the benchmark's exit code: 1 if a bound is missed."""
    figures = list(figures)
    fine = all(line["fine"] for line in figures)
    print(json.dumps({"name": name, **more, "figures": figures, "fine": fine}, indent=1))
    return 0 if fine else 1


def argument_parser(description: str | None, **defaults: int) -> argparse.ArgumentParser:
    """Return a parser with an option `--name NUMBER` for each default; the description is printed verbatim."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser


def run_python(*arguments: Any, **variables: str) -> str:
    """Run a child Python with the repository on its path and return its stdout; RuntimeError has its stderr's end."""
    command = [sys.executable, *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with code {done.returncode}:\n{done.stderr[-4000:]}")
    return done.stdout


def run_smoke(folder: str, run: str, *arguments: str) -> dict[str, Any]:
    """Run the smoke command, which writes to folder/run, and return the run's summary."""
    print(f"smoke {run}", file=sys.stderr)
    run_python("-m", "verl_patches", "smoke", "--run", run, *arguments, f"recipe.output_root={folder}")
    return json.loads((Path(folder) / run / "latest" / "summary.json").read_text())
