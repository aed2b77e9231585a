"""Raise named alarms from the record of each step: the run goes on, but learning probably goes wrong.

    alarm            what is compared                                               bound (recipe.alarms)
    nan              one of FINITE_METRICS is NaN or infinite                       none: always
    skipped_steps    optimizer steps skipped for NaN or infinite gradients          none: always
    expert_collapse  tokens of the busiest expert / mean                            expert_load
    length_collapse  mean response length / median of the first steps               length_share
    length_limit     share of the responses that end at the length limit            at_limit
    dlogp_drift      mean |dlogp| / median of the first steps                       dlogp_factor
    rss_growth       growth of the resident memory of the largest worker, or of     growth, max_growth
                     the controller
    node_growth      steps in which the fullest node's memory is full               NODE_STEPS, where growth is set
    device_growth    growth of the memory in use on the fullest device              growth, max_growth
    seconds_growth   growth of the seconds of a step, and of those for each token   growth, max_growth

A growth is taken over the last GROWTH_STEPS steps: their slope times their number, as a share of their median.
A growth ends a run above max_growth only. These bounds are far below those that end a run by themselves
(logprob_check, max_skipped_steps). "The first steps" are those of this process: a resumed run has its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from statistics import median
from typing import Any

from verl_patches.errors import RecipeError
from verl_patches.layout.phases import VALIDATE
from verl_patches.trainer.step_record import skipped_text

Alarm = dict[str, Any]  # of one step: its name, the value found and its limit (numbers or None), text: a sentence
GROWTH_STEPS, NODE_STEPS = 20, 200
_USAGES = ("rss", "controller_rss", "device")
_GROWTHS = {"rss_growth", "device_growth", "seconds_growth", "node_growth"}
FINITE_METRICS = (
    "actor/pg_loss",
    "objective/loss",
    "actor/kl_loss",
    "actor/grad_norm",
    "critic/vf_loss",
    "critic/grad_norm",
    "critic/score/mean",
    "critic/rewards/mean",
    "critic/advantages/mean",
    "response_length/mean",
)


class AlarmError(RecipeError):
    """Report an alarm of a run that sets recipe.alarms.action to stop."""


class SkippedStepsError(RecipeError):
    """Report that too many optimizer steps in a row had NaN or infinite gradients."""


def step_alarms(
    step: Mapping[str, Any], before: Sequence[Mapping[str, Any]], metrics: Mapping[str, Any], bounds: Any
) -> list[Alarm]:
    """Return the alarms of `step`, a record as in summary.json.

    before: earlier records of this process; metrics: all metrics of the step; bounds: recipe.alarms.
    """
    first = before[: bounds.baseline_steps]
    compared = first if len(first) == bounds.baseline_steps else []
    # the first step builds and compiles
    return [*_step_alarms(step, compared, metrics, bounds), *_growth_alarms([*before[1:], step], bounds)]


def _step_alarms(
    step: Mapping[str, Any], first: Sequence[Mapping[str, Any]], metrics: Mapping[str, Any], bounds: Any
) -> Iterator[Alarm]:
    """Yield the alarms of a step by itself, or compared with `first`, the first steps."""
    names = [name for name in FINITE_METRICS if name in metrics and not math.isfinite(metrics[name])]
    if names:
        yield _alarm("nan", None, None, f"NaN or infinite: {', '.join(names)}")
    if count := (step["skipped"] or {}).get("steps"):
        yield _alarm("skipped_steps", count, None, f"{count} optimizer step(s) skipped for NaN or infinite gradients")
    if step["expert_load"]:
        share = step["expert_load"]["train"]["max_over_mean"]
        text = f"the busiest expert gets {share:.1f} times the mean number of tokens"
        yield from _above("expert_collapse", share, bounds.expert_load, text)
    tokens = step["tokens"]
    if tokens and not step.get("objective"):  # the lengths of fixed data do not depend on the model
        mean = tokens["response_mean"]
        usual = _median(first, lambda record: (record["tokens"] or {}).get("response_mean"))
        limit = (bounds.length_share or 0.0) * (usual or 0.0)
        if mean < limit:
            text = (
                f"responses have {mean:.1f} tokens on average; expected at least {limit:.1f}, {bounds.length_share:g}"
            )
            yield _alarm("length_collapse", mean, limit, f"{text} of the first steps' {usual:.1f}")
        text = f"{tokens['at_limit']:.0%} of the responses end at the length limit"
        yield from _above("length_limit", tokens["at_limit"], bounds.at_limit, text)
    usual = _median(first, lambda record: (record["logprob_delta"] or {}).get("mean"))
    if usual and bounds.dlogp_factor is not None and step["logprob_delta"]:
        mean = step["logprob_delta"]["mean"]
        yield from _above("dlogp_drift", mean, bounds.dlogp_factor * usual, f"mean |dlogp| is {mean:.2e}")


def _alarm(name: str, value: float | None, limit: float | None, text: str) -> Alarm:
    return {"name": name, "value": value, "limit": limit, "text": text}


def _above(name: str, value: float, limit: float | None, text: str) -> Iterator[Alarm]:
    """Yield an alarm if `value` is above `limit`; None is no limit."""
    if limit is not None and value > limit:
        yield _alarm(name, value, limit, f"{text}; expected at most {limit:.3g}")


def _growth_alarms(records: Sequence[Mapping[str, Any]], bounds: Any) -> Iterator[Alarm]:
    """Yield the alarms of growth; seconds must grow for each token too, as longer responses take longer."""
    last = [record for record in records if not record["profile"]][-GROWTH_STEPS:]
    limit = min((each for each in (bounds.growth, bounds.max_growth) if each is not None), default=None)
    if limit is None or len(last) < GROWTH_STEPS:
        return
    seconds = [record["seconds"]["step"] - record["seconds"].get(VALIDATE, 0.0) for record in last]
    tokens = [(record["tokens"] or {}).get("total") or 1 for record in last]
    token_seconds = [each / count for each, count in zip(seconds, tokens, strict=True)]
    growths = {"seconds_growth": min(_growth(seconds), _growth(token_seconds))}
    usages = [record["usage"] for record in last]
    sizes = {name: _growth([usage.get(f"{name}_bytes", 0) for usage in usages]) for name in _USAGES}
    growths |= {"rss_growth": max(sizes["rss"], sizes["controller_rss"]), "device_growth": sizes["device"]}
    for name, growth in growths.items():
        yield from _above(name, growth, limit, f"{growth:.1%} over the last {GROWTH_STEPS} steps")
    shares = [usage.get("node_share", 0.0) for usage in usages]
    if (slope := _slope(shares)) > 0 and (left := (1 - shares[-1]) / slope) < NODE_STEPS:
        text = (
            f"the memory of the fullest node, {shares[-1]:.0%} of which is in use, is full after {left:.0f} more steps"
        )
        yield _alarm("node_growth", left, NODE_STEPS, f"{text} that grow as the last {GROWTH_STEPS}")


def _growth(values: Sequence[float]) -> float:
    """Return the growth over `values` as a share of their median."""
    return _slope(values) * len(values) / (median(values) or math.inf)


def _slope(values: Sequence[float]) -> float:
    """Return the median slope of all pairs of values (Theil-Sen).

    It is 0 unless 70 % of the pairs rise, which 20 values without a trend do in 1 % of cases (Kendall's test).
    """
    slopes = sorted((b - a) / (j - i) for (i, a), (j, b) in combinations(enumerate(values), 2))
    return median(slopes) if slopes[len(slopes) * 3 // 10] > 0 else 0.0


def _median(records: Sequence[Mapping[str, Any]], value: Any) -> float | None:
    """Return the median of the values that are not None; None without any."""
    values = [each for each in map(value, records) if each is not None and math.isfinite(each)]
    return median(values) if values else None


def check_alarms(record: Mapping[str, Any], bounds: Any) -> None:
    """Raise AlarmError for the first alarm of a step's record that ends the run by `bounds`, recipe.alarms."""
    for alarm in record["alarms"]:
        text = f"step {record['step']}: alarm {alarm['name']}: {alarm['text']}"
        if alarm["name"] not in _GROWTHS:
            if bounds.action == "stop":
                raise AlarmError(f"{text}. Set recipe.alarms.action=warn to continue with a warning")
        elif alarm["name"] != "node_growth" and bounds.max_growth is not None and alarm["value"] > bounds.max_growth:
            raise AlarmError(f"{text}. recipe.alarms.max_growth is {bounds.max_growth:g}: raise it, or null only warns")


def check_skipped_steps(record: Mapping[str, Any], limit: int) -> None:
    """Raise SkippedStepsError if at least `limit` optimizer steps in a row were skipped."""
    skipped = record["skipped"]
    if skipped and skipped["in_a_row"] >= limit:
        raise SkippedStepsError(
            f"step {record['step']}: {skipped_text(skipped)}; expected fewer than {limit} in a row "
            "(recipe.train.max_skipped_steps). The weights are those of the last step that was not skipped. Check that "
            "rank's inputs and kernels first; a lower learning rate helps only if grad_norm grew before"
        )
