import json

import pytest

from verl_patches.evaluation.report import validations
from verl_patches.trainer.record import Progress, Summary


def test_summary_is_whole_after_every_step(tmp_path):
    summary = Summary(tmp_path, {"run": "x"})
    for step, mean in ((1, 1e-7), (2, 3e-7)):
        summary.add_step({"step": step, "logprob_delta": {"mean": mean, "max": 2 * mean}})
        on_disk = json.loads((tmp_path / "summary.json").read_text())
        assert len(on_disk["steps"]) == step and on_disk["exit"] == "running"
    assert on_disk["logprob_delta"] == {"mean": 2e-7, "max": 6e-7}
    summary.add_step({"step": 3, "logprob_delta": None})
    assert summary.data["logprob_delta"]["max"] == 6e-7
    assert list(tmp_path.iterdir()) == [tmp_path / "summary.json"]


def test_metrics_of_every_step_are_a_line_of_json_without_nan(tmp_path):
    summary = Summary(tmp_path, {})
    for step, value in ((1, 0.5), (2, float("nan"))):
        summary.add_metrics(step, {"a/b": value, "count": 3, "text": "x"})
    lines = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "a/b": 0.5, "count": 3.0}, {"step": 2, "count": 3.0}]


@pytest.mark.parametrize(("first", "kept"), [(3, [1, 2]), (1, []), (5, [1, 2, 3, 4]), (9, [1, 2, 3, 4])])
def test_a_run_that_goes_on_has_one_record_with_its_seam(tmp_path, first, kept):
    """The last line of the part before was not written to its end; steps that are made again are the later part's."""
    before = Summary(tmp_path, {})
    for step in (1, 2, 3, 4):
        before.add_step({"step": step, "reward": 0.0, "logprob_delta": {"mean": 1e-7, "max": 1e-7}})
        before.add_metrics(step, {"part": 1})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "pa')
    summary = Summary(tmp_path, {"run": "x"})
    assert len(summary.data["steps"]) == 4 and summary.own_steps == []
    for step in (first, first + 1):
        summary.add_step({"step": step, "reward": 1.0, "logprob_delta": None})
        summary.add_metrics(step, {"part": 2})
    record = json.loads((tmp_path / "summary.json").read_text())
    made = [(step["step"], step["reward"], step.get("resumed_after")) for step in record["steps"]]
    seam = None if first == 1 else first - 1
    assert made == [*((step, 0.0, None) for step in kept), (first, 1.0, seam), (first + 1, 1.0, None)]
    assert [step["step"] for step in summary.own_steps] == [first, first + 1]
    lines = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["part"]) for line in lines] == [*((s, 1) for s in kept), (first, 2), (first + 1, 2)]
    assert (record["logprob_delta"] is not None) == bool(kept)


VAL = {"score": 0.5, "metrics": {"val-core/a/reward/mean@1": 0.5}}


def test_a_validation_before_the_first_step_is_step_0_and_at_a_seam_that_steps(tmp_path):
    """metrics.jsonl has a line of it; lines of steps that are made again are cut before it, not with it."""
    before = Summary(tmp_path, {})
    before.add_validation(0, VAL)
    before.add_metrics(0, {"part": 1})
    for step in (1, 2, 3):
        before.add_step({"step": step, "logprob_delta": None, "val": VAL if step == 2 else None})
        before.add_metrics(step, {"part": 1})
    assert "resumed_after" not in before.own_steps[0]
    assert [step for step, _ in validations(before.data)] == [0, 2]
    after, later = Summary(tmp_path, {}), {**VAL, "score": 0.75}
    after.add_validation(2, later)
    after.add_metrics(2, {"part": 2})
    after.add_step({"step": 3, "logprob_delta": None})
    after.add_metrics(3, {"part": 2})
    record = json.loads((tmp_path / "summary.json").read_text())
    assert record["val_before"] == {"step": 0, "val": VAL} and record["steps"][-1]["resumed_after"] == 2
    assert [(step, val["score"]) for step, val in validations(after.data)] == [(0, 0.5), (2, 0.75)]
    lines = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["part"]) for line in lines] == [(0, 1), (1, 1), (2, 1), (2, 2), (3, 2)]


def test_the_record_of_another_run_is_not_gone_on_with_and_is_not_lost(tmp_path):
    before = Summary(tmp_path, {"id": "a"})
    before.add_step({"step": 1, "logprob_delta": None})
    before.add_metrics(1, {"part": 1})
    assert [step["step"] for step in Summary(tmp_path, {"id": "a"}).data["steps"]] == [1]
    after = Summary(tmp_path, {"id": "b"})
    after.add_step({"step": 2, "logprob_delta": None})
    assert [step["step"] for step in json.loads((tmp_path / "summary.json").read_text())["steps"]] == [2]
    assert json.loads((tmp_path / "earlier/1/summary.json").read_text())["id"] == "a"
    assert (tmp_path / "earlier/1/metrics.jsonl").is_file() and not (tmp_path / "metrics.jsonl").exists()


def test_without_a_folder_lines_go_to_the_log_and_nothing_is_written(tmp_path, caplog, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text in ("| a", "~ b", "- c", "+ d"):
        Progress(None).say(text)
    summary = Summary(None, {})
    summary.add_step({"step": 1, "logprob_delta": {"mean": 1e-7, "max": 2e-7}})
    assert (
        caplog.messages == ["verl_patches: a", "verl_patches: c"]
        and summary.data["steps"]
        and not list(tmp_path.iterdir())
    )


FULL_DISK = """
import resource, sys
from pathlib import Path
from verl_patches.trainer.record import Progress, Summary
folder = Path(sys.argv[1])
progress, summary = Progress(folder), Summary(folder, {})
progress.say("| one")
summary.write()
resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))  # a write beyond fails as on a full disk
for write in (lambda: progress.say("x" * 99), summary.write, lambda: summary.add_metrics(1, {"a" * 99: 1.0})):
    try:
        write()
        print("written")
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_a_record_that_cannot_be_written_is_named_and_the_last_whole_one_stays(tmp_path, run_python):
    lines = run_python(FULL_DISK, str(tmp_path)).check().out.splitlines()
    for line, name in zip(lines, ("progress.log", "summary.json", "metrics.jsonl"), strict=True):
        assert line.startswith(f"RecipeError {tmp_path / name} could not be written: File too large; its disk has "), (
            line
        )
    assert json.loads((tmp_path / "summary.json").read_text())["exit"] == "running"
    assert not list(tmp_path.glob(".summary*"))
