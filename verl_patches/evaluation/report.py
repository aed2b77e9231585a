"""A report of recorded runs, one or several side by side, from what outputs/<run>/ holds; Markdown and plain data.

Seconds and tokens are medians over the steps after the first, which also builds, compiles and warms up, and without
those that were profiled (recipe.profile.steps); a run that has no others has those, and the report says so.

    tokens/s/rank          prompt and response tokens of a step, without padding / (seconds of the step * ranks);
                           verl's perf/throughput. A rank is one process on one die; an Atlas A3 card has two
    generated/s/rank       response tokens of a step / (seconds of its rollout * ranks)
    TFLOP/s/rank, MFU      model FLOPs of a step, or of its rollout or update, over seconds and ranks, and over the
                           peak rate of a device too: layout/flops.py
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from verl_patches.errors import ConfigError
from verl_patches.evaluation.plots import PHASES
from verl_patches.evaluation.record import SUMMARY, read_summary

ENDS = 5  # steps of the means at the start and at the end of a run


class Figure(NamedTuple):
    """One figure of a run; `value` is None where the run does not have it."""

    name: str
    unit: str
    value: float | None


def find_run(given: Path, root: Path, having: Sequence[str] = (SUMMARY,)) -> Path:
    """The folder of a run that a user names: a path, or a name below `root`. ConfigError where it has none of `having`.

    Without a summary no process of the run has reported yet.
    """
    folders = given, root / given
    for folder in folders:
        if any(os.path.lexists(folder / name) for name in having):
            return folder
    raise ConfigError(
        f"{given}: no {SUMMARY} in {' or '.join(str(folder.absolute()) for folder in folders)}; give the folder of a "
        "run, or the name of one in outputs/ of this repository"
    )


def read_run(folder: Path) -> dict[str, Any]:
    """The summary of a run. ConfigError where it is not as a run writes it, or has no step."""
    summary = read_summary(folder)
    if not summary.get("steps"):
        ended = summary.get("exit", "unknown")
        raise ConfigError(
            f"{folder / SUMMARY}: holds no finished step (the run ended: {ended}); see driver.log beside it"
        )
    return summary


def facts(summary: Mapping[str, Any]) -> dict[str, str]:
    """What a reader must know of a run before its figures."""
    steps, layout, start = summary["steps"], summary.get("layout", {}), summary.get("start", {})
    slowest = [f"{part} {of['max_s']:.1f} s" for part, of in start.items() if of.get("max_s") is not None]
    return {
        "run": str(summary.get("run")),
        "line, platform, dtype": ", ".join(str(summary.get(key)) for key in ("line", "platform", "dtype")),
        "training layout": layout.get("train", "-"),
        "rollout layout": layout.get("rollout", "-"),
        "steps": f"{steps[0]['step']} to {steps[-1]['step']}",
        "resumed": resumed(steps) or "-",
        "start, slowest worker": ", ".join(slowest) or "-",
        "ended": str(summary.get("exit")),
        "versions": ", ".join(f"{name} {version}" for name, version in summary.get("versions", {}).items()),
        "modified sources": ", ".join(summary.get("dirty", {})) or "none",
    }


def figures(summary: Mapping[str, Any]) -> list[Figure]:
    """Seconds of phases, tokens, rewards, log-probs and memory of a run, always the same names in the same order."""
    steps = summary["steps"]
    timed = timed_steps(steps)
    seconds = {phase: median(step["seconds"].get(phase) for step in timed) for phase in (*PHASES, "step")}
    named = sum(seconds[phase] or 0.0 for phase in PHASES)
    other = None if seconds["step"] is None else max(seconds["step"] - named, 0.0)
    found = [Figure(phase, "s", seconds[phase]) for phase in PHASES]
    found += [Figure("other", "s", other), Figure("step", "s", seconds["step"])]
    found += _token_figures(timed, summary.get("ranks")) + _flop_figures(timed)
    found += [
        Figure(f"reward, first {ENDS} steps", "", _mean(step["reward"] for step in steps[:ENDS])),
        Figure(f"reward, last {ENDS} steps", "", _mean(step["reward"] for step in steps[-ENDS:])),
        Figure("grad_norm", "", median(step.get("grad_norm") for step in steps)),
    ]
    delta = summary.get("logprob_delta") or {}
    found += [Figure("|dlogp|, mean", "", delta.get("mean")), Figure("|dlogp|, largest", "", delta.get("max"))]
    held = _largest(step["memory"]["peak_bytes"] for step in steps if step.get("memory"))
    received = _largest(step["sync"]["received_bytes"].get("max") for step in steps if step.get("sync"))
    found += [
        Figure("tracked memory of a rank, peak", "MB", _mb(held)),
        Figure("weights received by a rank in a step", "MB", _mb(received)),
        Figure("host memory of the starting node, peak", "MB", _mb(summary.get("peak_pss_bytes", {}).get("total"))),
    ]
    return found


def _token_figures(steps: Sequence[Mapping[str, Any]], ranks: int | None) -> list[Figure]:
    """Tokens of a step, and their rates; None for a summary that does not count them."""
    counted = [step for step in steps if step.get("tokens") and ranks]
    total = [step["tokens"]["total"] for step in counted]
    rate = [_rate(step["tokens"]["total"], step["seconds"].get("step"), ranks) for step in counted]
    generated = [_rate(step["tokens"]["responses"], step["seconds"].get("rollout"), ranks) for step in counted]
    return [
        Figure("tokens of a step", "", median(total)),
        Figure("tokens/s/rank", "1/s", median(rate)),
        Figure("generated/s/rank", "1/s", median(generated)),
        Figure("response length, mean", "tokens", median(step["tokens"]["response_mean"] for step in counted)),
        Figure("responses at the length limit", "share", median(step["tokens"]["at_limit"] for step in counted)),
    ]


def timed_steps(steps: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Steps whose seconds are those of the run's pace: not the first of each part, which warms up; none profiled."""
    usual = [step for step in steps[1:] if not step.get("profile") and not step.get("resumed_after")]
    return usual or steps[1:] or steps


def resumed(steps: Sequence[Mapping[str, Any]]) -> str:
    """The seams of a run that was resumed or restarted, as text; empty without any."""
    return ", ".join(f"after step {step['resumed_after']}" for step in steps if step.get("resumed_after"))


def _flop_figures(steps: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """Model FLOPs over time, and as shares of the peak; None for a summary or a device without them."""
    rates = [step["rates"] for step in steps if step.get("rates")]

    def middle(name: str, phase: str) -> float | None:
        return median((rate.get(name) or {}).get(phase) for rate in rates)

    found = [Figure("TFLOP/s/rank", "", middle("tflops_per_s", "step"))]
    return found + [Figure(f"MFU, {phase}", "share", middle("mfu", phase)) for phase in ("step", "rollout", "update")]


def _rate(count: float | None, seconds: float | None, ranks: int) -> float | None:
    return _ratio(_ratio(count, seconds), ranks)


def _ratio(above: float | None, below: float | None) -> float | None:
    """Their ratio; None without both, and where it is no number."""
    found = above / below if above is not None and below else math.inf
    return found if math.isfinite(found) else None


def median(values: Iterable[float | None]) -> float | None:
    """Median of the values that are there."""
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None


def _mean(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.fmean(found) if found else None


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _mb(size_bytes: float | None) -> float | None:
    return None if size_bytes is None else size_bytes / 1e6


def compare(summaries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each figure with its value in every run: {name, unit, values, ratio}; ratio: last / first, None without both.

    MFU is left out where no run has it: a CPU has no peak rate.
    """
    rows = []
    for row in zip(*map(figures, summaries), strict=True):
        values = [figure.value for figure in row]
        if row[0].name.startswith("MFU") and not any(values):
            continue
        first, last = values[0], values[-1]
        ratio = _ratio(last, first) if len(values) > 1 else None
        rows.append({"name": row[0].name, "unit": row[0].unit, "values": values, "ratio": ratio})
    return rows


def texts(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """`compare`'s rows as text: name, unit, a value for each run and, with several runs, the ratio."""
    several = len(rows[0]["values"]) > 1
    cells = []
    for row in rows:
        numbers = [*row["values"], *([row["ratio"]] if several else [])]
        cells.append([row["name"], row["unit"], *("-" if n is None else f"{n:.4g}" for n in numbers)])
    return cells


def markdown(summaries: Sequence[Mapping[str, Any]], pictures: Sequence[str] = ()) -> str:
    """The report of one run, or of several side by side, as Markdown; `pictures`: file names beside it."""
    names, every = [str(summary.get("run")) for summary in summaries], [facts(summary) for summary in summaries]
    ratio = ["ratio"] if len(names) > 1 else []
    rows = [[key, *(f[key] for f in every)] for key in every[0]]
    parts = [f"# {_cell(' and '.join(names))}", _table(["", *names], rows)]
    if any(len(summary["steps"]) == 1 for summary in summaries):
        parts.append("A run of one step: its seconds include the start.")
    elif any(step.get("profile") for summary in summaries for step in timed_steps(summary["steps"])):
        parts.append("A run whose steps after the first were all profiled: its seconds are not comparable.")
    parts.append(_table(["figure", "unit", *names, *ratio], texts(compare(summaries))))
    parts += [f"![{name}]({name})" for name in pictures]
    return "\n\n".join(parts) + "\n"


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, row))} |" for row in lines)


def _cell(text: str) -> str:
    """A text in one line of Markdown: no column, no HTML."""
    return escape(text, quote=False).replace("|", "&#124;").replace("\n", " ")
