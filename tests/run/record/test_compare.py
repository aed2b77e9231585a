"""Test mean errors against the formulas of the pages that define them, verdicts, baselines, and the command."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.run.record.test_curves import VERL, rows, write_rows
from verl_patches.errors import ConfigError
from verl_patches.run.record.compare import LIMITS, curve_errors, limit_checks, limits_for
from verl_patches.run.record.curves import LOSSES_OF_POLICY, Curves
from verl_patches.weights.run_folders import take_start


def strictly(text):
    """Parse JSON as other programs do, without NaN and Infinity."""

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


NUMBERS = st.floats(-1e6, 1e6)
STEPS = st.dictionaries(st.integers(1, 50), st.tuples(NUMBERS, NUMBERS), min_size=1)


def curves(name="a", **values):
    values = {metric: dict(enumerate(v, 1)) if isinstance(v, list) else v for metric, v in values.items()}
    return Curves(name, "JSONL", values, {metric: f"x/{metric}" for metric in values})


def test_the_formula_of_the_pages():
    """Check sum_i |loss_i of the NPU - loss_i of the GPU| / N x 100 %, N: the steps (OpenRLHF's README for Ascend)."""
    npu, gpu = [2.00, 1.50, 1.25, 1.00], [2.02, 1.47, 1.25, 1.03]
    (error,) = curve_errors(curves(loss=npu), curves(loss=gpu))
    assert error.absolute == pytest.approx((0.02 + 0.03 + 0 + 0.03) / 4) and error.steps == 4
    assert error.relative == pytest.approx((0.02 / 2.02 + 0.03 / 1.47 + 0.03 / 1.03) / 4)
    assert error.largest == pytest.approx(0.03) and error.at in (2, 4)
    (check,) = limit_checks([error], limits_for([error]))
    assert check.ok and "2 %" in check.detail


@given(STEPS, st.floats(0, 10), st.dictionaries(st.integers(51, 99), NUMBERS))
def test_curves_of_a_known_error_have_it(pairs, error, alone):
    """Move b from a by `error`, up or down, at each step; steps that only one has do not count."""
    a = {step: value for step, (value, _) in pairs.items()}
    b = {step: value + (error if sign >= 0 else -error) for step, (value, sign) in pairs.items()}
    (found,) = curve_errors(curves(reward=a | alone), curves(reward=b))
    assert found.steps == len(pairs) and (found.first, found.last) == (min(pairs), max(pairs))
    assert found.absolute == pytest.approx(error, abs=1e-8) and found.largest == pytest.approx(error, abs=1e-8)
    expected = sum(abs(a[s] - b[s]) / abs(b[s]) if b[s] else (math.inf if a[s] else 0) for s in pairs) / len(pairs)
    assert found.relative == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("metric", LIMITS)
@pytest.mark.parametrize(("share", "ok"), [(1.0, True), (1.01, False)])
def test_an_error_of_the_limit_is_within_it(metric, share, ok):
    assert LIMITS == {"loss": 0.02, "reward": 0.04}  # verl's page for Ascend
    b = [0.1, 0.2, 0.3, 0.7]
    errors = curve_errors(curves(**{metric: [value + share * LIMITS[metric] for value in b]}), curves(**{metric: b}))
    (check,) = limit_checks(errors, limits_for(errors))
    assert check.ok is ok and check.name == metric


def test_a_reward_is_judged_before_a_loss_and_what_is_named_alone():
    a, b = curves(loss=[1.0], reward=[0.5], length=[9.0]), curves(loss=[2.0], reward=[0.52], length=[9.5])
    errors = curve_errors(a, b)
    assert [check.ok for check in limit_checks(errors, limits_for(errors))] == [True]
    assert limits_for([e for e in errors if e.metric != "reward"]) == {"loss": 0.02}
    assert [c.ok for c in limit_checks(errors, {"length": 0.1, "reward": 0.02})] == [False, True]
    with pytest.raises(ConfigError, match="--limit"):
        limits_for([e for e in errors if e.metric == "length"])
    with pytest.raises(ConfigError, match="expected entropy"):
        limit_checks(errors, {"entropy": 1.0})


def test_a_loss_of_a_policy_is_judged_only_where_it_is_named():
    a, b = curves(loss=[0.0]), curves(loss=[0.0])
    assert limits_for(curve_errors(a, b)) == {"loss": 0.02}  # control
    a.names["loss"] = min(LOSSES_OF_POLICY)
    with pytest.raises(ConfigError, match="name a metric to judge: --limit"):
        limits_for(curve_errors(a, b))
    assert limit_checks(curve_errors(a, b), {"loss": 0.02})[0].ok


def test_a_run_that_ended_before_its_reference_fails():
    short, whole = curves(reward=[0.5]), curves(reward=[0.5] * 200)
    (check,) = limit_checks(curve_errors(short, whole), {"reward": 0.04})
    assert not check.ok and check.detail.endswith("expected a to reach step 200, found 1")
    assert limit_checks(curve_errors(whole, short), {"reward": 0.04})[0].ok  # a longer curve has all compared steps


def test_a_value_that_is_not_finite_fails():
    bad = math.nan
    a, b = curves(reward=[0.5, bad, 0.5]), curves(reward=[0.5, 0.5, 0.51])
    (error,) = curve_errors(a, b)
    assert error.not_finite == 2 and error.absolute == pytest.approx(0.005)
    (check,) = limit_checks([error], {"reward": 1.0})
    assert not check.ok and "step 2" in check.detail
    (error,) = curve_errors(curves(reward=[bad]), curves(reward=[bad]))
    assert error.absolute is None and not limit_checks([error], {"reward": 1.0})[0].ok
    strictly(json.dumps(error.as_dict()))


def test_a_relative_error_of_a_zero_is_infinite_and_none_in_json():
    (error,) = curve_errors(curves(reward=[0.1, 0.0]), curves(reward=[0.0, 0.0]))
    assert error.relative == math.inf and error.as_dict()["relative"] is None


def test_curves_without_common_steps_are_refused():
    with pytest.raises(ConfigError, match=r"reward at steps 1 to 2; b: "):
        curve_errors(curves(reward=[1.0, 2.0]), curves("b", reward={7: 1.0}))


# ---- the command


@pytest.fixture
def sources(tmp_path):
    """Make folders of a run, and of verl logs whose rewards are 0.01 and 0.1 higher."""
    run = tmp_path / "run"
    write_rows(run / take_start([run], None, None) / "metrics.jsonl", rows())
    for name, more in (("near", 0.01), ("far", 0.1)):
        lines = [(row["step"], row["actor/pg_loss"], row["critic/score/mean"] + more) for row in rows()]
        (tmp_path / f"{name}.log").write_text("".join(VERL.format(step=n, loss=of, reward=r) for n, of, r in lines))
    return tmp_path


def test_the_command_says_what_it_read_and_fails_beyond_a_limit(call, sources):
    code, out, err = call(["compare", str(sources / "run"), str(sources / "near.log")])
    assert code == 0 and "ok: reward: mean of |a - b| over 3 common steps (1 to 3) is 1 %, at most 4 %" in out
    title, names = out.splitlines()[0], out.splitlines()[2]
    assert (
        title.endswith("(a console log)") and names.split() == "metric name steps absolute relative largest at".split()
    )
    assert out.count("critic/score/mean") == 1
    code, out, _ = call(["compare", str(sources / "run"), str(sources / "far.log")])
    assert code == 1 and "FAILED: reward: " in out and "found 10 %" in out
    code, out, _ = call(["compare", str(sources / "run"), str(sources / "far.log"), "--limit", "reward=0.1", "--json"])
    found = strictly(out)
    assert code == 0 and found["ok"] and found["limits"] == {"reward": 0.1} and found["rule"] == "mean of |a - b|"
    assert {e["metric"]: e["names"] for e in found["errors"]}["reward"] == ["critic/score/mean"] * 2


def test_wrong_use_is_one_sentence(call, sources):
    code, out, err = call(["compare", str(sources / "run"), str(sources / "near.log"), "--limit", "reward=nan"])
    assert code == 2 and err.startswith("verl_patches: ") and err.count("\n") == 1 and "\x1b" not in err and not out
