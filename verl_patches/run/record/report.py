"""Report one recorded run, or several side by side, from outputs/<run>/, as Markdown and plain data.

A figure has the same name as in the run's own table, `status` and the plots, and says how it is reduced over steps.
Medians are over the steps after the first, which also builds, compiles and warms up, and without those that were
profiled (recipe.profile.steps). Where no other steps exist, medians are over these, and the report says so.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from verl_patches.errors import RecipeError, our_command
from verl_patches.layout.phases import STEP_PHASES
from verl_patches.rewards.parts import REWARD_PREFIX
from verl_patches.run.record.record import SUMMARY_FILE, read_summary

END_STEPS = 5  # number of steps, the first and the last of a run, over which means are taken
FIRST_MEAN, LAST_MEAN = (f"mean of the {end} {END_STEPS}" for end in ("first", "last"))
CRITIC_PHASES = tuple(f"{phase.name} s" for phase in STEP_PHASES if phase.critic)  # shown where a run has them
# without offload, whose time is inside other phases
PHASES = tuple(each.name for each in sorted(STEP_PHASES, key=lambda each: each.critic) if each.name != "offload")
# name -> its keys in a step's record (trainer/step_record.py); docs/operate.md defines the rates
STEP_KEYS = {f"{phase} s": ("seconds", phase) for phase in (*PHASES, "step")} | {
    "tokens": ("tokens", "total"),
    "response tokens": ("tokens", "response_mean"),
    "share at the length limit": ("tokens", "at_limit"),
    "tokens/s/rank": ("rates", "tokens_per_s_per_rank"),
    "generated/s/rank": ("rates", "generated_per_s_per_rank"),
    "TFLOP/s/rank": ("rates", "tflops_per_s_per_rank", "step"),
    "MFU": ("rates", "mfu", "step"),
    "MFU of rollout": ("rates", "mfu", "rollout"),
    "MFU of update": ("rates", "mfu", "update"),
    "grad_norm": ("grad_norm",),
    "reward": ("reward",),
    "val": ("val", "score"),
    **{name: ("objective", name) for name in ("loss", "margin", "accuracy")},
    "|dlogp|": ("logprob_delta", "mean"),
    "held MB": ("memory", "peak_bytes"),
    "sync MB": ("sync", "received_bytes", "max"),
}
END_METRICS = ("reward", "loss", "margin", "accuracy")  # means at both ends; the last three exist only on fixed data
_REDUCTIONS = {"val": ("first", "largest", "last"), "|dlogp|": ("mean", "largest of a token")}
_REDUCTIONS |= dict.fromkeys(END_METRICS, (FIRST_MEAN, LAST_MEAN))
_REDUCTIONS |= dict.fromkeys(("held MB", "sync MB", "PSS MB"), ("largest",))
_NAMES = (*(f"{phase} s" for phase in PHASES), "other s", *list(STEP_KEYS)[len(PHASES) :], "PSS MB")
_ROWS = [(name, over) for name in _NAMES for over in _REDUCTIONS.get(name, ("median",))]


def read_run(folder: Path) -> dict[str, Any]:
    """Return the summary of a run; ConfigError where it is not as a run writes it, RecipeError where it has no step."""
    summary = read_summary(folder)
    if not summary.get("steps"):
        ended = summary.get("exit", "running")
        todo = "see driver.log there" if ended != "running" else f"see `{our_command('status', str(folder))}`"
        raise RecipeError(f"{folder}: {SUMMARY_FILE} has no finished step to report (exit: {ended}); {todo}")
    return summary


def facts(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return the facts of a run that a reader needs before its figures."""
    steps, layout, start = summary["steps"], summary.get("layout", {}), summary.get("start", {})
    slowest = [f"{part} {times['max_s']:.1f} s" for part, times in start.items() if times.get("max_s") is not None]
    last: list[str] = []
    for _, val in validations(summary)[-1:]:
        last = [f"{name} {_figure_text(value)}" for name, value in val["metrics"].items()]
    return {
        "run": str(summary.get("run")),
        "line, platform, dtype": ", ".join(str(summary.get(key)) for key in ("line", "platform", "dtype")),
        "training layout": layout.get("train", "-"),
        "rollout layout": layout.get("rollout", "-"),
        "steps": f"{steps[0]['step']} to {steps[-1]['step']}",
        "resumed": resumed_text(steps) or "-",
        "start, slowest worker": ", ".join(slowest) or "-",
        "last validation": ", ".join(last) or "-",
        "ended": str(summary.get("exit")),
        "versions": ", ".join(f"{name} {version}" for name, version in summary.get("versions", {}).items()),
        "modified sources": ", ".join(summary.get("dirty", {})) or "none",
    }


def figures(summary: Mapping[str, Any]) -> dict[tuple[str, str], float | None]:
    """Return {(name, reduction over the steps): value, None where the run lacks it}, always in the same order."""
    steps, delta = summary["steps"], summary.get("logprob_delta") or {}
    values = {(name, "median"): value for name, value in medians(steps, STEP_KEYS).items()}
    values |= {(name, "largest"): reduce_steps(steps, name, max) for name in ("held MB", "sync MB")}
    for name in END_METRICS:
        values[name, FIRST_MEAN] = reduce_steps(steps[:END_STEPS], name, statistics.fmean)
        values[name, LAST_MEAN] = reduce_steps(steps[-END_STEPS:], name, statistics.fmean)
    scores = [val["score"] for _, val in validations(summary)] or [None]
    values |= {("val", "first"): scores[0], ("val", "last"): scores[-1]}
    values["val", "largest"] = max((score for score in scores if score is not None), default=None)
    whole, named = values["step s", "median"], sum(values[f"{phase} s", "median"] or 0.0 for phase in PHASES)
    values["other s", "median"] = None if whole is None else max(whole - named, 0.0)
    values["|dlogp|", "mean"], values["|dlogp|", "largest of a token"] = delta.get("mean"), delta.get("max")
    values["PSS MB", "largest"] = _megabytes(summary.get("peak_pss_bytes", {}).get("total"))
    return {row: values[row] for row in _ROWS}


def validations(summary: Mapping[str, Any]) -> list[tuple[int, Mapping[str, Any]]]:
    """Return (step, {score, metrics}) of each validation; the one before the first step comes first."""
    every = [summary.get("val_before") or {}, *summary["steps"]]
    return [(each["step"], each["val"]) for each in every if each.get("val")]


def medians(steps: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, float | None]:
    """Return the medians of names of STEP_KEYS over the timed steps."""
    timed = timed_steps(steps)
    return {name: reduce_steps(timed, name, statistics.median) for name in names if name not in _REDUCTIONS}


def step_value(step: Mapping[str, Any], name: str) -> float | None:
    """Return one step's value of a name of STEP_KEYS, or of reward/LABEL of a part; None where its record lacks it."""
    value: Any = step
    for key in STEP_KEYS.get(name) or ("rewards", name.removeprefix(REWARD_PREFIX)):
        value = (value or {}).get(key)
    return _megabytes(value) if name.endswith(" MB") else value


def reduce_steps(steps: Iterable[Mapping[str, Any]], name: str, by: Callable[[list[float]], float]) -> float | None:
    """Return the values of a name of STEP_KEYS in some steps, reduced `by` a function; None where there are none."""
    values = [value for step in steps if (value := step_value(step, name)) is not None]
    return by(values) if values else None


def _megabytes(size_bytes: float | None) -> float | None:
    return None if size_bytes is None else size_bytes / 1e6


def timed_steps(steps: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the steps that show the run's pace: not the first after each start, which warms up, nor profiled ones."""
    usual = [step for step in steps[1:] if not step.get("profile") and not step.get("resumed_after")]
    return usual or steps[1:] or steps


def resumed_text(steps: Sequence[Mapping[str, Any]]) -> str:
    """Return as text after which steps the run was resumed or restarted; empty where it never was."""
    return ", ".join(f"after step {step['resumed_after']}" for step in steps if step.get("resumed_after"))


def run_names(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a name for each run, with its number in front where two have the same."""
    names = [str(summary.get("run")) for summary in summaries]
    return names if len({*names}) == len(names) else [f"{number}: {name}" for number, name in enumerate(names, 1)]


def compare_figures(summaries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return each figure of all runs: {name, over, values, ratios}; ratios: of each later run to the first, or None.

    Figures that no run has are left out if they are MFU (a CPU has no peak rate), val, phases of a critic, or those of
    fixed data.
    """
    rows, runs = [], [figures(summary) for summary in summaries]
    optional = ("MFU", "val", *END_METRICS[1:], *CRITIC_PHASES)
    for name, over in runs[0]:
        values = [each[name, over] for each in runs]
        if any(value is not None for value in values) or not name.startswith(optional):
            ratios = [_ratio(value, values[0]) for value in values[1:]]
            rows.append({"name": name, "over": over, "values": values, "ratios": ratios})
    return rows


def _ratio(above: float | None, below: float | None) -> float | None:
    ratio = above / below if above is not None and below else math.inf
    return ratio if math.isfinite(ratio) else None


def table_lines(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[list[str]]:
    """Return `compare_figures`'s rows as text below a line of titles: a column a run, with its ratio to the first."""
    lines = [["figure", "over the steps", names[0], *(f"{name} (vs {names[0]})" for name in names[1:])]]
    for row in rows:
        first, *others = map(_figure_text, row["values"])
        others = [f"{value} ({_figure_text(ratio)})" for value, ratio in zip(others, row["ratios"], strict=True)]
        lines.append([row["name"], row["over"], first, *others])
    return lines


def _figure_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def markdown(
    summaries: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]], pictures: Sequence[str] = ()
) -> str:
    """Return the report of one or several runs as Markdown; rows: `compare_figures`'s; pictures: files beside it."""
    names, every = run_names(summaries), [facts(summary) for summary in summaries]
    table = _table([["", *names], *([key, *(f[key] for f in every)] for key in every[0])])
    parts = [f"# {_cell(', '.join(names))}", table]
    if any(len(summary["steps"]) == 1 for summary in summaries):
        parts.append("A run of one step: its seconds include the start.")
    elif any(step.get("profile") for summary in summaries for step in timed_steps(summary["steps"])):
        parts.append("A run whose steps after the first were all profiled: its seconds are not comparable.")
    parts += [_table(table_lines(rows, names)), *(f"![{name}]({name})" for name in pictures)]
    return "\n\n".join(parts) + "\n"


def _table(lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(map(_cell, row))} |" for row in (lines[0], ["---"] * len(lines[0]), *lines[1:]))


def _cell(text: str) -> str:
    """Return a text as one line of Markdown, without columns or HTML."""
    return escape(text, quote=False).replace("|", "&#124;").replace("\n", " ")
