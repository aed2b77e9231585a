"""Test figures of recorded runs against ones computed by hand, several runs side by side, and refusals."""

import json
import re

import pytest
from typer.testing import CliRunner

from verl_patches.__main__ import app
from verl_patches.errors import RecipeError
from verl_patches.run.record.curves import read_curves
from verl_patches.run.record.record import read_summary
from verl_patches.run.record.report import figures, resumed_text, validations
from verl_patches.weights.run_folders import take_start

FIRST = {"rollout": 90.0, "update": 40.0, "step": 150.0}  # the first step includes the start; medians leave it out


def step(number, rollout, update, whole, total=1200.0):
    return {
        "step": number,
        "seconds": {"rollout": rollout, "update": update, "step": whole},
        "reward": number / 10,
        "grad_norm": 2.0,
        "tokens": {"total": total, "responses": 800, "response_mean": 100.0, "response_max": 128.0, "at_limit": 0.25},
        "memory": {"peak_bytes": 5e6},
        "sync": None,
        "rates": {"tokens_per_s_per_rank": 0.25 * total / whole, "generated_per_s_per_rank": 50.0, "mfu": None},
    }


def run_summary(name="a", speed=1.0, **more):
    steps = [{**step(1, 0, 0, 150.0), "seconds": FIRST}]
    steps += [step(n, r * speed, 2.0, w * speed) for n, r, w in ((2, 4.0, 8.0), (3, 5.0, 10.0), (4, 9.0, 99.0))]
    head = {"run": name, "line": "pypi", "platform": "cpu", "dtype": "fp32", "ranks": 4, "exit": "ok"}
    return {**head, "steps": steps, "logprob_delta": {"mean": 1e-7, "max": 3e-7}, **more}


def write_start(home, summary, parent=None):
    """Make the folder of a new start of the run `home`, with this record."""
    folder = home / take_start([home], parent, None)
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_medians_leave_the_first_step_out_and_rates_are_by_rank():
    found = figures(run_summary(start={"models": {"max_s": 7.0}}))
    assert (found["rollout s"], found["update s"], found["step s"]) == (5.0, 2.0, 10.0)
    assert found["start, models s"] == 7.0 and found["reshard s"] is None
    assert found["tokens/s/rank"] == 1200 / 10 / 4  # the median of the rates 37.5, 30 and 3.03
    assert found["reward, mean of the last 5"] == pytest.approx(0.25) and found["held MB, largest"] == 5.0
    assert figures(run_summary() | {"steps": run_summary()["steps"][:1]})["rollout s"] == 90.0


def test_the_last_validation_is_a_figure_also_the_one_before_the_first_step():
    run = run_summary(val_before={"step": 0, "val": {"score": 0.0, "metrics": {}}})
    assert figures(run_summary())["val, last"] is None and figures(run)["val, last"] == 0.0
    run["steps"][1]["val"] = {"score": 0.5, "metrics": {}}
    assert figures(run)["val, last"] == 0.5


def test_profiled_steps_and_the_first_one_after_a_resume_are_left_out_of_medians():
    run = run_summary()
    run["steps"][2]["profile"] = {"files": ["x"], "faults": []}
    assert figures(run)["step s"] == (8.0 + 99.0) / 2
    run = run_summary()
    run["steps"][2]["resumed_after"] = 2
    assert figures(run)["step s"] == (8.0 + 99.0) / 2 and resumed_text(run["steps"]) == "after step 2"
    for step in run["steps"][1:]:
        step["profile"] = {"files": [], "faults": []}
    assert figures(run)["step s"] == 10.0  # there are no others


def test_a_run_of_several_starts_is_one_curve_with_its_seams(tmp_path):
    """Join starts: 2 made step 3 and was lost before it saved; 3 goes on from step 2 again and validates there."""

    def part(*numbers, **more):
        steps = [{**step(n, 1.0, 1.0, 10.0), "logprob_delta": {"mean": n / 10, "max": n / 5}} for n in numbers]
        if numbers[0] > 1:
            steps[0]["resumed_after"] = numbers[0] - 1
        return run_summary("r", **{**more, "steps": steps})

    home, val = tmp_path / "r", {"score": 0.75, "metrics": {}}
    write_start(home, part(1, 2, 3, exit="StallError", val_before={"step": 0, "val": {**val, "score": 0.25}}))
    write_start(home, part(3), ("0001", 2))
    last = write_start(home, part(3, 4, exit="ok", val_before={"step": 2, "val": val}), ("0002", 2))
    for folder, numbers in zip(sorted(home.glob("0*")), ((0, 1, 2, 3), (3,), (2, 3, 4)), strict=True):
        lines = [json.dumps({"step": n, "critic/score/mean": int(folder.name)}) for n in numbers]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step')  # the last line was being written
    run = read_summary(last)
    assert [each["step"] for each in run["steps"]] == [1, 2, 3, 4] and run["exit"] == "ok"
    assert resumed_text(run["steps"]) == "after step 2"
    assert run["logprob_delta"] == pytest.approx({"mean": 0.25, "max": 0.8})
    assert [(at, each["score"]) for at, each in validations(run)] == [(0, 0.25), (2, 0.75)]
    assert read_curves(home, tmp_path).values["reward"] == {0: 1.0, 1: 1.0, 2: 3.0, 3: 3.0, 4: 3.0}
    first = read_summary(home / "0001")
    assert [each["step"] for each in first["steps"]] == [1, 2, 3] and first["exit"] == "StallError"


def test_runs_are_shown_side_by_side(tmp_path):
    names = [str(write_start(tmp_path / name, run_summary(name, speed))) for name, speed in (("a", 1.0), ("b", 0.5))]
    found = json.loads(CliRunner().invoke(app, ["report", *names, "--json"]).stdout)
    assert [found[name]["step s"] for name in names] == [10.0, 5.0]
    shown = CliRunner().invoke(app, ["report", *names]).stdout
    assert re.search(r"^step s +10 +5$", shown, re.MULTILINE) and "reshard s" not in shown


def test_a_folder_without_a_finished_step_is_refused(tmp_path):
    take_start([tmp_path / "r"], None, None)
    done = CliRunner().invoke(app, ["report", str(tmp_path / "r")])
    assert type(done.exception) is RecipeError and "verl_patches status" in str(done.exception), done.exception
