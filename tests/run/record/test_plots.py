"""Test figures of a run and of its memory records: the contents of their axes, and the files made of them."""

import math

import numpy as np
import pytest

from verl_patches.errors import ConfigError
from verl_patches.run.record.plots import memory_figure, run_figure, save_figure

MB = 10**6


def run_summary(*rewards):
    seconds = {"rollout": 1.0, "update": 2.0, "step": 9.0}
    steps = [{"step": 4 + n, "reward": reward, "seconds": seconds} for n, reward in enumerate(rewards)]
    return {"run": "a", "steps": steps}


def areas(axes):
    """Return {label: (bottoms, tops, first edge, last edge)} of everything drawn, in MB or GB."""
    found = {}
    for patch in axes.patches:
        values, edges, baseline = patch.get_data()
        bottoms = None if baseline is None else list(np.broadcast_to(baseline, len(values)))
        found[patch.get_label()] = (bottoms, list(values), edges[0], edges[-1])
    return found


def test_a_run_has_its_rewards_and_stacked_seconds_by_step(tmp_path):
    figure = run_figure(run_summary(0.25, 0.5, 0.75))
    left, right = figure.axes
    assert np.array_equal(left.lines[0].get_xydata(), [[4, 0.25], [5, 0.5], [6, 0.75]])
    found = areas(right)
    assert found["rollout s"] == ([0] * 3, [1] * 3, 3.5, 6.5) and found["update s"][:2] == ([1] * 3, [3] * 3)
    assert "step s" not in found and right.get_legend() and left.get_legend() is None
    assert save_figure(figure, tmp_path / "new" / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="new cannot be written"):
        save_figure(figure, tmp_path / "new")


def test_each_of_several_parts_of_the_reward_has_a_line():
    run = run_summary(0.5, 0.25, 0.5)
    run["steps"][0]["rewards"], run["steps"][2]["rewards"] = {"maths": 0.5, "length": -0.25}, {"maths": 0.5}
    left, _ = run_figure(run).axes
    assert [line.get_label() for line in left.lines[1:]] == ["maths", "length"] and left.get_legend()
    assert np.array_equal(left.lines[2].get_ydata(), [-0.25, np.nan, np.nan], equal_nan=True)
    del run["steps"][0]["rewards"]["length"]
    assert len(run_figure(run).axes[0].lines) == 1  # the only part equals the reward, so it is not drawn


def test_validations_are_a_curve_that_begins_before_the_first_step():
    run = run_summary(0.25, 0.5, 0.75)
    run["steps"][1]["val"] = {"score": 0.6, "metrics": {}}
    run["val_before"] = {"step": 3, "val": {"score": 0.1, "metrics": {}}}
    left = run_figure(run).axes[0]
    assert np.array_equal(left.lines[1].get_xydata(), [[3, 0.1], [5, 0.6]])


def test_a_run_on_fixed_data_has_its_loss():
    run = run_summary(None, None)
    for number, each in enumerate(run["steps"]):
        each["objective"] = {"loss": 0.5 - number / 4}
    left = run_figure(run).axes[0]
    assert left.get_ylabel() == "loss" and np.array_equal(left.lines[0].get_ydata(), [0.5, 0.25])


def test_a_resumed_run_has_a_marked_seam():
    run = run_summary(0.25, 0.5, 0.75)
    assert not any(axes.texts for axes in run_figure(run).axes)  # control
    run["steps"][1]["resumed_after"] = 4
    for axes in run_figure(run).axes:
        assert [text.get_text() for text in axes.texts] == ["resumed after step 4"]
        assert list(axes.lines[-1].get_xdata()) == [4.5, 4.5]


def phase(bytes_, peak=None, **measured):
    sizes = {name: size * MB for name, size in bytes_.items()}
    measured = {name: size * MB for name, size in measured.items()}
    peak_bytes = sum(sizes.values()) if peak is None else peak * MB
    return {"rank": 0, "peak_bytes": peak_bytes, "bytes": sizes, "measured": measured}


def memory_run(*numbers, update=8, **measured):
    """Make a run whose phase update has the highest peak: 4 MB of parameters and `update` MB of gradients."""
    phases = {
        "reshard": phase({"actor_params": 4, "grads": 0}, 5),
        "update": phase({"actor_params": 4, "grads": update}, **measured),
    }
    return {"run": "r", "steps": [{"step": number, "memory": {"phases": phases}} for number in numbers]}


@pytest.mark.parametrize("count", [1, 30])
def test_memory_of_all_steps_and_of_one_in_detail(count):
    left, right = memory_figure(memory_run(*range(1, count + 1))).axes
    whole = areas(left)
    assert whole["actor_params"] == ([0] * count, [4] * count, 0.5, count + 0.5)
    assert whole["grads"] == ([4] * count, [12] * count, 0.5, count + 0.5)
    assert whole["held (peak)"][1] == [12] * count and left.get_xlabel() == "step"
    detail = areas(right)
    assert detail["grads"][1] == [4, 12] and detail["held (peak)"][1] == [5, 12]
    assert [label.get_text() for label in right.get_xticklabels()] == ["reshard", "update"]
    assert f"step {count} " in right.get_title()  # the last of those with the highest peak


def test_a_step_without_a_ledger_is_a_gap():
    run = memory_run(29, 31)
    run["steps"].insert(1, {"step": 30, "memory": None})
    run["steps"][0]["memory"] = memory_run(29, update=1996)["steps"][0]["memory"]
    left, right = memory_figure(run).axes
    _, tops, first, last = areas(left)["grads"]
    assert (tops[0], tops[2], first, last) == (2.0, 0.012, 28.5, 31.5) and math.isnan(tops[1])
    assert "step 29 " in right.get_title() and left.get_ylabel() == "GB"


def test_what_is_measured_on_the_device_is_a_line_and_rss_is_none():
    for axes in memory_figure(memory_run(1, 2, used=14, rss=900)).axes:
        found = areas(axes)
        assert found["measured used"][1][-1] == 14 and found["measured used"][0] is None
        assert not any("rss" in label for label in found) and axes.get_ylim()[1] < 20  # RSS is not drawn
    figure = memory_figure(memory_run(1, rss=900))
    assert not any("measured" in label for axes in figure.axes for label in areas(axes))
