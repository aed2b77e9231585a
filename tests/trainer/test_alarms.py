"""Test each alarm on records of steps that have it, and on records that do not."""

import math

import pytest

from verl_patches.recipe import Alarms
from verl_patches.trainer.alarms import step_alarms


def record(**changes):
    tokens = {"response_mean": 100.0, "at_limit": 0.1}
    step = {
        "grad_norm": 1.0,
        "skipped": {"steps": 0},
        "expert_load": {"train": {"max_over_mean": 3.0}, "rollout": None},
    }
    return {**step, "tokens": tokens, "logprob_delta": {"mean": 1e-6}, **changes}


def names(step, before=5, metrics=(), **bounds):
    earlier = [record() for _ in range(before)] if isinstance(before, int) else before
    found = step_alarms(step, earlier, {"actor/pg_loss": 0.1, **dict(metrics)}, Alarms(**bounds))
    return [alarm.name for alarm in found]


def lengths(mean, at_limit=0.1):
    return {"tokens": {"response_mean": mean, "at_limit": at_limit}}


def load(train, rollout=None):
    return {"expert_load": {"train": {"max_over_mean": train}, "rollout": rollout and {"max_over_mean": rollout}}}


def test_a_usual_step_raises_none():
    assert names(record()) == names(record(), before=0) == []
    nothing = {"grad_norm": None, "skipped": None, "expert_load": None, "tokens": None, "logprob_delta": None}
    assert names(record(**nothing)) == [] and names(record(), before=[record(**nothing)] * 5) == []


@pytest.mark.parametrize(("above", "below", "name"), [
    ({"skipped": {"steps": 2}}, {"skipped": {"steps": 0}}, "skipped_steps"),
    (load(16.5), load(15.9), "expert_collapse"),
    (load(2.0, 16.5), load(2.0, 15.9), "expert_collapse"),
    (lengths(24.0), lengths(25.1), "length_collapse"),
    ({"logprob_delta": {"mean": 1.1e-5}}, {"logprob_delta": {"mean": 0.9e-5}}, "dlogp_drift"),
])  # fmt: skip
def test_each_alarm_is_raised_beyond_its_bound_only(above, below, name):
    (alarm,) = step_alarms(record(**above), [record()] * 5, {}, Alarms())
    assert alarm.name == name and alarm.text and (alarm.limit is None or alarm.value != alarm.limit)
    assert names(record(**below)) == []


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_metric_that_is_not_finite(value):
    assert names(record(), metrics={"actor/kl_loss": value}) == ["nan"]
    assert names(record(), metrics={"actor/entropy": value}) == []  # NaN where the update takes its own log-probs


def test_what_is_compared_with_the_first_steps_waits_for_them():
    both = record(**lengths(5.0), logprob_delta={"mean": 1e-3})
    assert names(both, before=4) == [] and names(both, before=4, baseline_steps=4) == ["length_collapse", "dlogp_drift"]
    later = [record()] * 5 + [record(**lengths(10.0))] * 50  # the first steps stay what is compared with
    assert names(record(**lengths(10.0)), before=later) == ["length_collapse"]


def test_the_alarm_for_the_length_limit_is_off_unless_asked_for():
    assert names(record(**lengths(100.0, 0.9))) == []
    assert names(record(**lengths(100.0, 0.9)), at_limit=0.5) == ["length_limit"]


def test_null_switches_an_alarm_off():
    step = record(**load(99.0), logprob_delta={"mean": 1.0}) | lengths(1.0)
    assert names(step) == ["expert_collapse", "length_collapse", "dlogp_drift"]
    assert names(step, expert_load=None, length_share=None, dlogp_factor=None) == []
