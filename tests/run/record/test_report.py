"""Test reports of recorded runs: figures against ones computed by hand, several runs side by side, and refusals."""

import json
import re

import pytest
from typer.testing import CliRunner

from verl_patches.__main__ import app
from verl_patches.errors import ConfigError, RecipeError
from verl_patches.run.record import report
from verl_patches.run.record.curves import read_curves
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


def values(summary):
    """Return {name: value}, and {(name, over): value} of names that a report has twice."""
    found = report.figures(summary)
    return {name: value for (name, _), value in found.items()} | found


def test_medians_leave_the_first_step_out_and_rates_are_by_rank():
    found = values(run_summary())
    assert (found["rollout s"], found["update s"], found["step s"]) == (5.0, 2.0, 10.0)
    assert found["other s"] == 3.0 and found["reshard s"] is None
    assert found["tokens/s/rank", "median"] == 1200 / 10 / 4  # the median of the rates 37.5, 30 and 3.03
    assert found["reward", report.LAST_MEAN] == pytest.approx(0.25) and found["held MB", "largest"] == 5.0
    assert found["|dlogp|", "mean"] == 1e-7 and found["|dlogp|", "largest of a token"] == 3e-7
    alone = run_summary() | {"steps": run_summary()["steps"][:1]}
    assert values(alone)["rollout s"] == 90.0
    assert "include the start" in markdown(alone) and "include the start" not in markdown(run_summary())


def markdown(*summaries):
    return report.markdown(summaries, report.compare_figures(summaries))


CORE = "val-core/maths/reward/mean@4"


def validated(summary, before, **scores):
    """Return the summary with validations: before the first step, and {"step2": score}."""

    def val(score):
        return {"score": score, "metrics": {CORE: score, "val-aux/maths/reward/pass@4": 0.875}}

    for step in summary["steps"]:
        step["val"] = val(scores[f"step{step['step']}"]) if f"step{step['step']}" in scores else None
    return summary | {"val_before": {"step": 0, "val": val(before)}}


def test_validations_are_figures_with_the_one_before_the_first_step_and_the_last_has_all_its_values(tmp_path):
    run = report.read_run(write_start(tmp_path / "a", validated(run_summary(), 0.125, step2=0.5, step4=0.25)))
    found = values(run)
    assert (found["val", "first"], found["val", "largest"], found["val", "last"]) == (0.125, 0.5, 0.25)
    text = markdown(run)
    assert f"{CORE} 0.25, val-aux/maths/reward/pass@4 0.875" in text and "| val | last | 0.25 |" in text
    assert "| val |" not in markdown(run_summary()) and "| last validation | - |" in markdown(run_summary())
    zero = validated(run_summary(), 0.0)
    assert values(zero)["val", "last"] == 0.0 and "| val | first | 0 |" in markdown(zero)


def test_profiled_steps_are_left_out_of_medians_and_mfu_is_there_with_a_peak():
    run = run_summary()
    run["steps"][2]["profile"] = {"files": ["x"], "faults": []}
    assert values(run)["step s"] == (8.0 + 99.0) / 2 and values(run)["reward", report.LAST_MEAN] == pytest.approx(0.25)
    names = {row["name"] for row in report.compare_figures([run])}
    assert "TFLOP/s/rank" in names and "MFU" not in names
    for step, mfu in zip(run["steps"], (0.9, 0.1, 0.8, 0.3), strict=True):
        step["rates"] = {"tflops_per_s_per_rank": {"step": 353.9 * mfu}, "mfu": {"step": mfu, "update": mfu / 2}}
    assert values(run)["MFU"] == pytest.approx(0.2) and values(run)["MFU of update"] == pytest.approx(0.1)
    assert values(run)["MFU of rollout"] is None and values(run)["TFLOP/s/rank"] == pytest.approx(0.2 * 353.9)
    for step in run["steps"][1:]:
        step["profile"] = {"files": [], "faults": []}
    assert values(run)["step s"] == 10.0 and "not comparable" in markdown(run)


def test_the_first_step_after_a_resume_is_left_out_too_and_the_seam_is_named(tmp_path):
    run = run_summary()
    run["steps"][2]["resumed_after"] = 2
    assert values(run)["step s"] == (8.0 + 99.0) / 2 and report.facts(run)["resumed"] == "after step 2"
    assert report.facts(run_summary())["resumed"] == "-"
    folder = write_start(tmp_path / "a", run)
    done = CliRunner().invoke(app, ["report", str(folder)])
    assert (
        "a: resumed after step 2" in done.stdout and "| resumed | after step 2 |" in (folder / "report.md").read_text()
    )


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
    run = report.read_run(last)
    assert [each["step"] for each in run["steps"]] == [1, 2, 3, 4] and run["exit"] == "ok"
    assert report.resumed_text(run["steps"]) == "after step 2"
    assert run["logprob_delta"] == pytest.approx({"mean": 0.25, "max": 0.8})
    assert [(at, each["score"]) for at, each in report.validations(run)] == [(0, 0.25), (2, 0.75)]
    assert read_curves(home, tmp_path).values["reward"] == {0: 1.0, 1: 1.0, 2: 3.0, 3: 3.0, 4: 3.0}
    shown = CliRunner().invoke(app, ["report", str(home)]).stdout
    assert "r: resumed after step 2" in shown and f"report: {last / 'report.md'}" in shown.replace("\n", "")
    first = report.read_run(home / "0001")
    assert [each["step"] for each in first["steps"]] == [1, 2, 3] and first["exit"] == "StallError"


def test_two_runs_side_by_side_have_the_ratio_to_the_first_under_its_name(tmp_path):
    folders = [write_start(tmp_path / name, run_summary(name, speed)) for name, speed in (("a", 1.0), ("b", 0.5))]
    done = CliRunner().invoke(app, ["report", *map(str, folders), "--json"])
    answer = json.loads(done.stdout)
    rows = {row["name"]: row for row in answer["figures"]}
    assert done.exit_code == 0 and rows["step s"]["values"] == [10.0, 5.0] and rows["step s"]["ratios"] == [0.5]
    assert rows["tokens/s/rank"]["ratios"] == [2.0] and rows["reshard s"]["ratios"] == [None]
    text = (folders[1] / "report.md").read_text()
    assert "| figure | over the steps | a | b (vs a) |" in text and "| step s | median | 10 | 5 (0.5) |" in text
    assert not (folders[0] / "report.md").exists()


def test_a_table_is_printed_and_the_file_goes_where_the_user_says(tmp_path):
    folder = write_start(tmp_path / "a", run_summary())
    done = CliRunner().invoke(app, ["report", str(folder), "-o", str(tmp_path / "new" / "x.md")])
    assert done.exit_code == 0 and "tokens/s/rank" in done.stdout and (tmp_path / "new" / "x.md").is_file()
    assert not (folder / "report.md").exists()
    for taken in (tmp_path, tmp_path / "picture.png"):
        done = CliRunner().invoke(app, ["report", str(folder), "-o", str(taken)])
        assert isinstance(done.exception, ConfigError) and "give --output FILE.md" in str(done.exception)


@pytest.mark.parametrize(
    ("file", "content", "error", "words"),
    [
        (None, "", ConfigError, "a folder without them"),
        ("progress.log", "| proven", RecipeError, "verl_patches status"),
        ("summary.json", '{"steps": [], "exit": "WorkerDiedError: x"}', RecipeError, "WorkerDiedError.*driver.log"),
    ],
)
def test_a_folder_without_a_finished_step_is_refused(tmp_path, file, content, error, words):
    (tmp_path / "r").mkdir()
    if file is not None:
        (tmp_path / "r" / take_start([tmp_path / "r"], None, None) / file).write_text(content)
    done = CliRunner().invoke(app, ["report", str(tmp_path / "r")])
    assert type(done.exception) is error and re.search(words, str(done.exception)), done.exception
    assert not list(tmp_path.rglob("report.md"))
