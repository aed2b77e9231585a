"""Test each alarm on records of steps that have it, and on records that do not."""

import math

import pytest

from verl_patches.recipe import Alarms
from verl_patches.trainer.alarms import AlarmError, check_alarms, step_alarms


def record(**changes):
    tokens = {"response_mean": 100.0, "at_limit": 0.1}
    step = {
        "grad_norm": 1.0,
        "skipped": {"steps": 0},
        "expert_load": {"train": {"max_over_mean": 3.0}},
        "seconds": {"step": 10.0},
        "usage": {"rss_bytes": 5_000_000_000},
        "profile": None,
    }
    return {**step, "tokens": tokens, "logprob_delta": {"mean": 1e-6}, **changes}


def names(step, before=5, metrics=(), **bounds):
    earlier = [record() for _ in range(before)] if isinstance(before, int) else before
    found = step_alarms(step, earlier, {"actor/pg_loss": 0.1, **dict(metrics)}, Alarms(**bounds))
    return [alarm["name"] for alarm in found]


def lengths(mean, at_limit=0.1):
    return {"tokens": {"response_mean": mean, "at_limit": at_limit}}


def load(train):
    return {"expert_load": {"train": {"max_over_mean": train}}}


def test_a_usual_step_raises_none():
    assert names(record()) == names(record(), before=0) == []
    nothing = {"grad_norm": None, "skipped": None, "expert_load": None, "tokens": None, "logprob_delta": None}
    assert names(record(**nothing)) == [] and names(record(), before=[record(**nothing)] * 5) == []


@pytest.mark.parametrize(("above", "below", "name"), [
    ({"skipped": {"steps": 2}}, {"skipped": {"steps": 0}}, "skipped_steps"),
    (load(16.5), load(15.9), "expert_collapse"),
    (lengths(24.0), lengths(25.1), "length_collapse"),
    ({"logprob_delta": {"mean": 1.1e-5}}, {"logprob_delta": {"mean": 0.9e-5}}, "dlogp_drift"),
])  # fmt: skip
def test_each_alarm_is_raised_beyond_its_bound_only(above, below, name):
    (alarm,) = step_alarms(record(**above), [record()] * 5, {}, Alarms())
    assert alarm["name"] == name and alarm["text"] and (alarm["limit"] is None or alarm["value"] != alarm["limit"])
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


def growing(key, share, count=22, noise=0.005, **changes):
    """Return records of `count` steps in which a value grows by `share` of its middle in 20 steps, with noise.

    Every sixth step, which also validates or saves, has half as much again.
    """
    shares = [1 + share * (number - count / 2) / 20 + noise * (-1) ** number for number in range(count)]
    shares = [each + 0.5 * (number % 6 == 0) for number, each in enumerate(shares)]
    if key == "seconds":
        return [record(seconds={"step": 10 * each}, **changes) for each in shares]
    return [record(usage={key: round(5e9 * each)}, **changes) for each in shares]


def growths(records, **bounds):
    return names(records[-1], records[:-1], **bounds)


@pytest.mark.parametrize(
    ("key", "alarm"),
    [
        ("rss_bytes", "rss_growth"),
        ("controller_rss_bytes", "rss_growth"),
        ("device_bytes", "device_growth"),
        ("seconds", "seconds_growth"),
    ],
)
def test_a_growth_is_a_slope_over_steps_that_single_steps_do_not_hide_or_feign(key, alarm):
    assert growths(growing(key, 0.15)) == [alarm] and growths(growing(key, 0.05)) == []
    assert growths(growing(key, -0.5)) == growths(growing(key, 0.15), growth=None) == []
    assert growths(growing(key, 0.15), growth=0.2) == [] and growths(growing(key, 0.05), growth=0.03) == [alarm]
    assert growths(growing(key, 0.15, count=20)) == []  # 19 steps without the first, which builds and compiles
    assert growths(growing(key, 0.15, profile={"files": []})) == []  # their times are not comparable
    assert growths(growing(key, 0.15, noise=0.1)) == []  # cannot be told from no growth


def test_longer_steps_of_longer_responses_and_of_validations_are_no_growth():
    records = growing("seconds", 0.3)
    for one in records:
        one["tokens"] = {**one["tokens"], "total": 100 * one["seconds"]["step"]}
    assert growths(records) == []
    records = [record(seconds={"step": 10.0 + number, "validate": float(number)}) for number in range(22)]
    assert growths(records) == []


@pytest.mark.parametrize(("share", "step", "found"), [(0.6, 0.002, ["node_growth"]), (0.6, 0.001, []), (0.9, 0.0, [])])
def test_a_node_whose_memory_is_soon_full_is_an_alarm(share, step, found):
    """Test a leak of a public report of this stack: its run died at step 223."""
    records = [record(usage={"node_share": share + step * number}) for number in range(22)]
    assert growths(records) == found and growths(records, growth=None) == []
    if found:
        check_alarms(
            {"step": 30, "alarms": [{"name": "node_growth", "value": 9.0, "text": "grows"}]}, Alarms(max_growth=0.1)
        )


def test_a_growth_ends_the_run_beyond_its_own_bound_only():
    found = {"step": 30, "alarms": [{"name": "rss_growth", "value": 0.4, "text": "grows"}]}
    check_alarms(found, Alarms())
    check_alarms(found, Alarms(max_growth=0.5))
    check_alarms(found, Alarms(action="stop"))
    with pytest.raises(AlarmError, match="step 30: alarm rss_growth: grows. recipe.alarms.max_growth is 0.3"):
        check_alarms(found, Alarms(max_growth=0.3))
    assert growths(growing("rss_bytes", 0.05), growth=None, max_growth=0.03) == ["rss_growth"]
    other = {"step": 30, "alarms": [{"name": "length_limit", "value": 0.9, "text": "long"}]}
    check_alarms(other, Alarms(max_growth=0.3))
