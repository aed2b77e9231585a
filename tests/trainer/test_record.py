import json

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
