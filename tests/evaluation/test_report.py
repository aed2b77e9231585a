"""Reports of recorded runs: figures against ones worked out by hand, several runs side by side, and what is refused."""

import json

import pytest
from matplotlib.image import imread
from typer.testing import CliRunner

from verl_patches.__main__ import app
from verl_patches.errors import ConfigError
from verl_patches.evaluation import report
from verl_patches.evaluation.plots import runs_figure

FIRST = {"rollout": 90.0, "update": 40.0, "step": 150.0}  # with start-up, left out of medians


def step(number, rollout, update, whole, total=1200.0):
    return {
        "step": number,
        "seconds": {"rollout": rollout, "update": update, "step": whole},
        "reward": number / 10,
        "grad_norm": 2.0,
        "tokens": {"total": total, "responses": 800, "response_mean": 100.0, "response_max": 128.0, "at_limit": 0.25},
        "memory": {"peak_bytes": 5e6},
        "sync": None,
    }


def run_of(name="a", speed=1.0, **more):
    steps = [{**step(1, 0, 0, 0), "seconds": FIRST}]
    steps += [step(n, r * speed, 2.0, w * speed) for n, r, w in ((2, 4.0, 8.0), (3, 5.0, 10.0), (4, 9.0, 99.0))]
    head = {"run": name, "line": "pypi", "platform": "cpu", "dtype": "fp32", "ranks": 4, "exit": "ok"}
    return {**head, "steps": steps, "logprob_delta": {"mean": 1e-7, "max": 3e-7}, **more}


def written(folder, summary):
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def values(summary):
    return {figure.name: figure.value for figure in report.figures(summary)}


def test_medians_leave_the_first_step_out_and_rates_are_by_rank():
    found = values(run_of())
    assert (found["rollout"], found["update"], found["step"]) == (5.0, 2.0, 10.0)
    assert found["other"] == 3.0 and found["reshard"] is None
    assert found["tokens/s/rank"] == 1200 / 10 / 4  # the median of the rates: 37.5, 30, 3.03
    assert found["generated/s/rank"] == 800 / 5 / 4
    assert found["reward, last 5 steps"] == pytest.approx(0.25) and found["tracked memory of a rank, peak"] == 5.0
    alone = run_of() | {"steps": run_of()["steps"][:1]}
    assert values(alone)["rollout"] == 90.0 and "include the start" in report.markdown([alone])


def test_a_record_of_before_tokens_were_counted_has_no_rates():
    steps = [{**each, "tokens": None} for each in run_of()["steps"]]
    found = values(run_of() | {"steps": steps})
    assert found["tokens/s/rank"] is None and found["step"] == 10.0


def test_profiled_steps_are_left_out_of_medians_and_mfu_is_there_with_a_peak():
    run = run_of()
    run["steps"][2]["profile"] = {"files": ["x"], "faults": []}
    assert values(run)["step"] == (8.0 + 99.0) / 2 and values(run)["reward, last 5 steps"] == pytest.approx(0.25)
    names = {row["name"] for row in report.compare([run])}
    assert "TFLOP/s/rank" in names and "MFU, step" not in names
    for step, mfu in zip(run["steps"], (0.9, 0.1, 0.8, 0.3), strict=True):
        step["rates"] = {"tflops_per_s": {"step": 353.9 * mfu}, "mfu": {"step": mfu, "update": mfu / 2}}
    assert values(run)["MFU, step"] == pytest.approx(0.2) and values(run)["MFU, update"] == pytest.approx(0.1)
    assert values(run)["MFU, rollout"] is None and values(run)["TFLOP/s/rank"] == pytest.approx(0.2 * 353.9)
    for step in run["steps"][1:]:
        step["profile"] = {"files": [], "faults": []}
    assert values(run)["step"] == 10.0 and "not comparable" in report.markdown([run])


def test_the_first_step_after_a_resume_is_left_out_too_and_the_seam_is_named(tmp_path):
    run = run_of()
    run["steps"][2]["resumed_after"] = 2
    assert values(run)["step"] == (8.0 + 99.0) / 2 and report.facts(run)["resumed"] == "after step 2"
    assert report.facts(run_of())["resumed"] == "-"
    folder = written(tmp_path / "a", run)
    done = CliRunner().invoke(app, ["report", str(folder)])
    assert (
        "a: resumed after step 2" in done.stdout and "| resumed | after step 2 |" in (folder / "report.md").read_text()
    )


def test_a_report_names_what_the_start_took():
    start = {
        part: {"max_s": seconds, "mean_s": 1.0, "rank": 3} for part, seconds in (("imports", 12.0), ("cpu", 14.25))
    }
    assert report.facts(run_of(start=start))["start, slowest worker"] == "imports 12.0 s, cpu 14.2 s"
    assert report.facts(run_of())["start, slowest worker"] == "-"


def test_two_runs_side_by_side_have_the_ratio_of_the_last_to_the_first(tmp_path):
    folders = [written(tmp_path / name, run_of(name, speed)) for name, speed in (("a", 1.0), ("b", 0.5))]
    done = CliRunner().invoke(app, ["report", *map(str, folders), "--json"])
    answer = json.loads(done.stdout)
    rows = {row["name"]: row for row in answer["figures"]}
    assert done.exit_code == 0 and rows["step"]["values"] == [10.0, 5.0] and rows["step"]["ratio"] == 0.5
    assert rows["tokens/s/rank"]["ratio"] == 2.0 and rows["reshard"]["ratio"] is None
    text = (tmp_path / "b" / "report.md").read_text()
    assert "| step | s | 10 | 5 | 0.5 |" in text and "![report.png](report.png)" in text
    assert imread(tmp_path / "b" / "report.png").ndim == 3 and not (tmp_path / "a" / "report.md").exists()
    left, right = runs_figure([run_of("a"), run_of("b", 0.5)]).axes
    heights = {bars.get_label(): [bar.get_height() for bar in bars] for bars in right.containers}
    assert heights["rollout"] == [5.0, 2.5] and len(left.lines) == 2


def test_a_table_is_printed_and_the_file_goes_where_the_user_says(tmp_path):
    folder = written(tmp_path / "a", run_of())
    done = CliRunner().invoke(app, ["report", str(folder), "-o", str(tmp_path / "new" / "x.md")])
    assert done.exit_code == 0 and "tokens/s/rank" in done.stdout and (tmp_path / "new" / "x.md").is_file()
    assert not (folder / "report.md").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no summary.json"),
        ("{", "is no JSON"),
        ('{"steps": [], "exit": "WorkerDiedError: x"}', "WorkerDiedError"),
    ],
)
def test_a_folder_without_a_finished_step_is_refused(tmp_path, content, words):
    if content is not None:
        (tmp_path / "summary.json").write_text(content)
    with pytest.raises(ConfigError, match=words):
        report.read_run(report.find_run(tmp_path, tmp_path / "outputs"))
    assert not (tmp_path / "report.md").exists()
