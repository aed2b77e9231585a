"""Figures of a run, of its memory records and of a reshard plan: what their axes hold; and the files made of them."""

import io
import math
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.image import imread
from matplotlib.patches import StepPatch

from verl_patches.evaluation.plots import GROUP_COLOURS, draw_memory, memory_figure, plan_figure, plot_run, run_figure
from verl_patches.memory.schedule import MEMORY_GROUPS

MB = 10**6


def pixels(figure):
    """The figure as its PNG file has it, [height, width, 4]."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=100)
    drawn.seek(0)
    return imread(drawn)


def run_of(*rewards):
    seconds = {"rollout": 1.0, "update": 2.0, "step": 9.0}
    steps = [{"step": 4 + n, "reward": reward, "seconds": seconds} for n, reward in enumerate(rewards)]
    return {"run": "a", "steps": steps}


def test_a_run_has_its_rewards_and_stacked_seconds_by_step(tmp_path):
    figure = run_figure(run_of(0.25, 0.5, 0.75))
    left, right = figure.axes
    assert np.array_equal(left.lines[0].get_xydata(), [[4, 0.25], [5, 0.5], [6, 0.75]])
    bars = {group.get_label(): [(bar.get_y(), bar.get_height()) for bar in group] for group in right.containers}
    assert bars["rollout"] == [(0, 1)] * 3 and bars["update"] == [(1, 2)] * 3 and "step" not in bars
    saved = imread(plot_run(run_of(0.25, 0.5, 0.75), tmp_path / "a.png"))
    assert np.array_equal(saved, pixels(figure)) and not np.array_equal(saved, pixels(run_figure(run_of(0, 0.5, 1))))


def test_a_resumed_run_has_a_marked_seam():
    run = run_of(0.25, 0.5, 0.75)
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
    """A run whose phase update has the highest peak: 4 MB of parameters and `update` MB of gradients."""
    phases = {
        "reshard": phase({"actor_params": 4, "grads": 0}, 5),
        "update": phase({"actor_params": 4, "grads": update}),
    }
    phases["update"]["measured"] = {name: size * MB for name, size in measured.items()}
    return {"run": "r", "steps": [{"step": number, "memory": {"phases": phases}} for number in numbers]}


def areas(axes):
    """{label: (bottoms, tops, first edge, last edge)} of everything drawn, in MB or GB."""
    found = {}
    for patch in axes.patches:
        assert isinstance(patch, StepPatch)
        values, edges, baseline = patch.get_data()
        bottoms = None if baseline is None else list(np.broadcast_to(baseline, len(values)))
        found[patch.get_label()] = (bottoms, list(values), edges[0], edges[-1])
    return found


@pytest.mark.parametrize("count", [1, 3, 40, 400])
def test_memory_of_all_steps_and_of_one_in_detail(count):
    left, right = memory_figure(memory_run(*range(1, count + 1))).axes
    whole = areas(left)
    assert whole["actor_params"] == ([0] * count, [4] * count, 0.5, count + 0.5)
    assert whole["grads"] == ([4] * count, [12] * count, 0.5, count + 0.5)
    assert whole["ledger's peak"][1] == [12] * count
    assert ("step 1" if count == 1 else f"steps 1 to {count}") in left.get_title() and left.get_xlabel() == "step"
    assert len(left.get_xticks()) <= 15 and all(tick == int(tick) for tick in left.get_xticks())
    detail = areas(right)
    assert detail["grads"][1] == [4, 12] and detail["ledger's peak"][1] == [5, 12]
    assert [label.get_text() for label in right.get_xticklabels()] == ["reshard", "update"]
    assert f"step {count} " in right.get_title()  # the last of those with the highest peak
    assert left.get_ylim()[0] == right.get_ylim()[0] == 0 and left.get_ylabel() == right.get_ylabel() == "MB"


def test_a_run_that_was_resumed_says_which_steps_it_shows_and_a_step_without_a_ledger_is_a_gap():
    run = memory_run(29, 31)
    run["steps"].insert(1, {"step": 30, "memory": None})
    run["steps"][0]["memory"] = memory_run(29, update=9)["steps"][0]["memory"]
    left, right = memory_figure(run).axes
    _, tops, first, last = areas(left)["grads"]
    assert (tops[0], tops[2], first, last) == (13, 12, 28.5, 31.5) and math.isnan(tops[1])
    assert "steps 29 to 31" in left.get_title() and "step 29 " in right.get_title()
    (title,) = [text.get_text() for text in memory_figure({"run": "r", "steps": run["steps"][1:2]}).texts]
    assert "no step" in title


def test_a_group_has_the_colour_of_its_name_whatever_else_is_drawn(tmp_path):
    assert GROUP_COLOURS.keys() == MEMORY_GROUPS.keys() and len(set(GROUP_COLOURS.values())) == len(MEMORY_GROUPS)
    both, alone = memory_run(1), memory_run(1)
    for found in alone["steps"][0]["memory"]["phases"].values():
        del found["bytes"]["actor_params"]
    for run in (both, alone):
        for axes in memory_figure(run).axes:
            colours = {patch.get_label(): to_hex(patch.get_facecolor()) for patch in axes.patches}
            assert colours["grads"] == GROUP_COLOURS["grads"] and "optimizer" not in colours  # always empty
    legend = [text.get_text() for text in memory_figure(both).legends[0].get_texts()]
    assert legend == ["actor_params", "grads", "ledger's peak"]
    saved = imread(draw_memory(both, tmp_path / "memory.png"))
    assert np.array_equal(saved, pixels(memory_figure(both)))
    assert not np.array_equal(saved, pixels(memory_figure(alone)))


def test_what_is_measured_on_the_device_is_a_line_and_rss_is_none():
    for axes in memory_figure(memory_run(1, 2, peak=13, used=14, rss=900)).axes:
        found = areas(axes)
        assert found["measured peak"][1][-1] == 13 and found["measured used"][1][-1] == 14
        assert found["measured used"][0] is None and not any("rss" in label for label in found)
        assert axes.get_ylim()[1] < 20  # RSS is on no axis
    figure = memory_figure(memory_run(1, rss=900))
    assert len(figure.axes) == 2 and not any("measured" in label for axes in figure.axes for label in areas(axes))


def test_gigabytes_where_the_peak_is_one():
    left, _ = memory_figure(memory_run(1, update=1996)).axes
    assert left.get_ylabel() == "GB" and areas(left)["grads"][1] == [2.0]


def test_a_reshard_plan_has_its_traffic_and_bytes_by_rank():
    names = {"train": "t", "train_library": "a", "rollout": "r", "rollout_library": "b", "stages": [0, 1]}
    sizes = {"sent_bytes": [3e9, 1e9], "received_bytes": [1e9, 3e9], "lower_bound_bytes": [1e9, 2e9]}
    plan = {"traffic": [[0, 3e6], [1e6, 0]], "world_size": 2, "bucket_count": 5, "bucket_bytes": 1 << 20}
    left, right, *_ = plan_figure(SimpleNamespace(**plan, **names, **sizes)).axes
    assert np.array_equal(left.images[0].get_array(), [[0, 3], [1, 0]])
    lines = {line.get_label(): list(line.get_ydata()) for line in right.lines}
    assert lines["sent"] == [3, 1] and lines["received"] == [1, 3] and lines["mean sent"] == [2, 2]
    assert "5 collectives of at most 1 MiB" in right.get_title()
