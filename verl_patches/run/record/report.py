"""Reduce the recorded steps of a run to one figure for each name of the run's own table, `status` and the plots."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from verl_patches.layout.phases import STEP_PHASES
from verl_patches.rewards.parts import REWARD_PREFIX

END_STEPS = 5  # number of last steps over which the mean of END_METRICS is taken
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
END_METRICS = ("reward", "loss", "margin", "accuracy")  # the last three exist only on fixed data
PEAKS = ("held MB", "sync MB")


def figures(summary: Mapping[str, Any]) -> dict[str, float | None]:
    """Return {name of STEP_KEYS: its median, None where the run lacks it}, always in the same order.

    Names of other reductions say which it is. The seconds of a start are those of the slowest worker.
    """
    steps, scores = summary["steps"], [val["score"] for _, val in validations(summary)]
    found = {f"start, {part} s": times.get("max_s") for part, times in summary.get("start", {}).items()}
    found |= medians(steps, [name for name in STEP_KEYS if name not in (*END_METRICS, *PEAKS, "val")])
    for name in END_METRICS:
        found[f"{name}, mean of the last {END_STEPS}"] = reduce_steps(steps[-END_STEPS:], name, statistics.fmean)
    found |= {f"{name}, largest": reduce_steps(steps, name, max) for name in PEAKS}
    return found | {"val, last": scores[-1] if scores else None}


def validations(summary: Mapping[str, Any]) -> list[tuple[int, Mapping[str, Any]]]:
    """Return (step, {score, metrics}) of each validation; the one before the first step comes first."""
    every = [summary.get("val_before") or {}, *summary["steps"]]
    return [(each["step"], each["val"]) for each in every if each.get("val")]


def medians(steps: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, float | None]:
    """Return the medians of names of STEP_KEYS over the steps that show the run's pace.

    These are not the first after each start, which warms up, nor profiled ones, unless there are no others.
    """
    usual = [step for step in steps[1:] if not step.get("profile") and not step.get("resumed_after")]
    return {name: reduce_steps(usual or steps[1:] or steps, name, statistics.median) for name in names}


def step_value(step: Mapping[str, Any], name: str) -> float | None:
    """Return one step's value of a name of STEP_KEYS, or of reward/LABEL of a part; None where its record lacks it."""
    value: Any = step
    for key in STEP_KEYS.get(name) or ("rewards", name.removeprefix(REWARD_PREFIX)):
        value = (value or {}).get(key)
    return value / 1e6 if value is not None and name.endswith(" MB") else value


def reduce_steps(steps: Iterable[Mapping[str, Any]], name: str, by: Callable[[list[float]], float]) -> float | None:
    """Return the values of a name of STEP_KEYS in some steps, reduced `by` a function; None where there are none."""
    values = [value for step in steps if (value := step_value(step, name)) is not None]
    return by(values) if values else None


def resumed_text(steps: Sequence[Mapping[str, Any]]) -> str:
    """Return as text after which steps the run was resumed or restarted; empty where it never was."""
    return ", ".join(f"after step {step['resumed_after']}" for step in steps if step.get("resumed_after"))
