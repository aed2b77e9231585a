"""Compare the accuracy of a training with a reference: the mean error of curves over the steps that both have.

The rule is that of verl's and OpenRLHF's pages for Ascend, where a is the NPU's curve and b the GPU's:

    mean error = sum_i |a_i - b_i| / N x 100 %

OpenRLHF asks for less than 2 % of loss and reward; verl for at most 2 % of the loss of supervised training and at most
4 % of the reward in reinforcement learning, which are LIMITS. The pages write the absolute error, which is judged; the
relative one, sum_i |a_i - b_i| / |b_i| / N, is given beside it. Where both curves have a reward, it is judged; the loss
of a policy is only shown, because it is about 0 whatever the model learns. An `a` that ends before `b` fails.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from verl_patches.errors import Check, ConfigError, either
from verl_patches.run.record.curves import JUDGED_METRICS, LOSSES_OF_POLICY, Curves

RULE = "mean of |a - b|"
LIMITS = {"loss": 0.02, "reward": 0.04}
_ROUNDING = 1e-9  # relative: an error that exceeds the limit only in its last bits passes


@dataclass(frozen=True)
class Error:
    """Hold the errors of one metric over `steps` common steps, `first` to `last`.

    names: those in a and in b. absolute, relative: means over the steps where both are finite, None without one;
    relative is infinite where b is 0 and a is not. largest: the largest |a - b|, at step `at`. not_finite: the first
    step where one of them is NaN or infinite. ends: the last steps of a and of b.
    """

    metric: str
    names: tuple[str, str]
    steps: int
    first: int
    last: int
    absolute: float | None
    relative: float | None
    largest: float | None
    at: int | None
    not_finite: int | None
    ends: tuple[int, int]

    def as_dict(self) -> dict[str, Any]:
        """Return the errors for JSON, which has no infinity: None stands for it."""
        return {name: None if value == math.inf else value for name, value in asdict(self).items()}


def curve_errors(a: Curves, b: Curves) -> list[Error]:
    """Return the errors of each metric that both have at common steps; raise ConfigError where there is none."""
    common = {metric: sorted(values.keys() & b.values.get(metric, {}).keys()) for metric, values in a.values.items()}
    found = [_metric_error(metric, steps, a, b) for metric, steps in common.items() if steps]
    if not found:
        ranges = []
        for curves in (a, b):
            for metric, values in curves.values.items():
                ranges.append(f"{curves.name}: {metric} at steps {min(values)} to {max(values)}")
        raise ConfigError(
            f"compare: expected a metric that both have at common steps, found {'; '.join(ranges)}; give other sources"
        )
    return found


def _metric_error(metric: str, steps: list[int], a: Curves, b: Curves) -> Error:
    values_a, values_b = a.values[metric], b.values[metric]
    finite = [step for step in steps if math.isfinite(values_a[step]) and math.isfinite(values_b[step])]
    errors = {step: abs(values_a[step] - values_b[step]) for step in finite}
    relative = []
    for step, error in errors.items():
        reference = abs(values_b[step])
        relative.append(error / reference if reference else math.inf if error else 0.0)
    at, largest = max(errors.items(), key=lambda found: found[1], default=(None, None))
    not_finite = next((step for step in steps if step not in errors), None)
    return Error(
        metric=metric,
        names=(a.names[metric], b.names[metric]),
        steps=len(steps),
        first=steps[0],
        last=steps[-1],
        absolute=sum(errors.values()) / len(errors) if errors else None,  # fsum raises where the sum overflows
        relative=sum(relative) / len(relative) if relative else None,
        largest=largest,
        at=at,
        not_finite=not_finite,
        ends=(max(values_a), max(values_b)),
    )


def limits_for(errors: Sequence[Error]) -> dict[str, float]:
    """Return {metric: limit} of the judged metrics: the reward, or without one a loss that is not a policy's.

    Raise ConfigError where there is none.
    """
    found = {error.metric: error.names for error in errors}
    for metric in JUDGED_METRICS:
        if metric in found and not {*found[metric]} & {*LOSSES_OF_POLICY}:
            return {metric: LIMITS[metric]}
    raise ConfigError(
        f"compare: expected {' or '.join(JUDGED_METRICS)} in both at common steps, found {', '.join(found)} (the loss "
        "of a policy is not judged); name a metric to judge: --limit METRIC=VALUE"
    )


def limit_checks(errors: Sequence[Error], limits: Mapping[str, float]) -> list[Check]:
    """Return a Check for each metric of `limits`, {metric: largest error, a fraction}.

    A metric with a value that is not finite fails. Raise ConfigError where a metric of `limits` is not among `errors`.
    """
    found = {error.metric: error for error in errors}
    if missing := [metric for metric in limits if metric not in found]:
        raise ConfigError(
            f"compare: expected {' and '.join(missing)} in both at common steps, found {', '.join(found)}; give "
            "another --limit"
        )
    return [_limit_check(found[metric], limit) for metric, limit in limits.items()]


def _limit_check(error: Error, limit: float) -> Check:
    value = error.absolute
    over = f"{RULE} over {error.steps} common steps ({error.first} to {error.last})"
    if error.ends[0] < error.ends[1]:
        return Check(error.metric, False, f"{over}: expected a to reach step {error.ends[1]}, found {error.ends[0]}")
    if error.not_finite is not None:
        return Check(error.metric, False, f"{over}: expected numbers, found NaN or infinity at step {error.not_finite}")
    assert value is not None  # all values are finite, so there is a mean
    largest = f"the largest is {error.largest:.4g} at step {error.at}"
    fault = f"expected at most {percent(limit)}, found {percent(value)}; {largest}"
    held = f"{over} is {percent(value)}, at most {percent(limit)}"
    return either(error.metric, value <= limit * (1 + _ROUNDING), held, f"{over}: {fault}")


def percent(value: float | None) -> str:
    """Return a fraction in percent, with three digits."""
    return "-" if value is None or math.isinf(value) else f"{100 * value:.3g} %"
