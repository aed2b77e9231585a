"""Test the state of a run on the command line: from a live launcher's files, and after an end, failure or kill."""

import json
import os
import re
import shutil
import signal

import pytest
from typer.testing import CliRunner

from verl_patches.__main__ import app
from verl_patches.cli.live import live_facts
from verl_patches.errors import ConfigError, interruption_text
from verl_patches.run.record.report import figures
from verl_patches.shared_files import lock_file
from verl_patches.trainer.record import write_json
from verl_patches.weights.run_folders import take_start

NOW = 1_000_000.0


def step(number, seconds):
    rates = {"tokens_per_s_per_rank": 200.0, "tflops_per_s_per_rank": {"step": 0.5}, "mfu": None}
    return {
        "step": number,
        "seconds": {"rollout": 3.0, "reshard": 1.0, "ref": 2.0, "step": seconds},
        "reward": number / 10,
        "grad_norm": 2.0,
        "logprob_delta": {"mean": 1e-7},
        "rates": rates,
    }


@pytest.fixture
def folder(tmp_path):
    """Make a start in its third of ten steps, 2 s into its second call; its launcher holds the lock."""
    home, tmp_path = tmp_path, tmp_path / take_start([tmp_path], None, None)
    summary = {"run": "r", "exit": "running", "steps": [step(1, 50.0), step(2, 10.0)]}
    write_json(tmp_path / "summary.json", summary)
    doing = {"step": 3, "steps": 10, "call": "generate_sequences", "phase": "reshard, rollout"}
    write_json(tmp_path / "now.json", {**doing, "since": NOW - 2, "step_since": NOW - 4})
    (tmp_path / "progress.log").write_text("| proven\n- row\n~ step 3/10: reshard, rollout\n| step 2: a note\n")
    for file in tmp_path.iterdir():
        os.utime(file, (NOW - 7, NOW - 7))
    with lock_file(home / ".lock"):
        yield tmp_path


def test_a_running_run_has_phase_pace_and_end(folder):
    found = live_facts(folder, NOW)
    assert (found["state"], found["step"], found["steps"], found["phase"]) == ("running", 3, 10, "reshard, rollout")
    assert (found["phase_s"], found["phase_last_s"], found["quiet_s"]) == (2.0, 4.0, 7.0)
    assert found["eta_s"] == 8 * 10.0 - 4  # steps 3 to 10, without the first one's warm-up
    assert found["lines"] == ["proven", "step 2: a note"]


def test_a_figure_says_whether_it_is_of_the_last_step_and_its_median_is_the_reports(folder):
    steps = [step(1, 50.0), step(2, 10.0), step(3, 20.0), step(4, 12.0)]
    for each, rate in zip(steps, (1.0, 5.0, 9.0, 4.0), strict=True):
        each["rates"] = {"tokens_per_s_per_rank": rate, "tflops_per_s_per_rank": {"step": rate / 2}, "mfu": None}
    summary = {"run": "r", "exit": "running", "steps": steps}
    write_json(folder / "summary.json", summary)
    shown = {name: (of["last step"], of["median"]) for name, of in live_facts(folder, NOW)["figures"].items()}
    assert (
        shown["step s"] == (12.0, 12.0)
        and shown["reward"] == (0.4, pytest.approx(0.3))
        and shown["MFU"] == (None, None)
    )
    assert shown["tokens/s/rank"] == (4.0, 5.0) and shown["TFLOP/s/rank"] == (2.0, 2.5)
    assert figures(summary)["tokens/s/rank"] == 5.0 and figures(summary)["TFLOP/s/rank"] == 2.5
    printed = CliRunner().invoke(app, ["status", str(folder)]).stdout
    assert re.search(r"last step +median", printed) and re.search(r"tokens/s/rank +4 +5\b", printed)
    assert "MFU" not in printed


def test_before_the_first_step_ends_there_is_no_pace(folder):
    write_json(folder / "summary.json", {"run": "r", "exit": "running", "steps": []})
    found = live_facts(folder, NOW)
    assert found["state"] == "running" and found["eta_s"] is None and found["phase_last_s"] is None
    for name in ("now.json", "summary.json"):
        (folder / name).unlink()
        assert live_facts(folder, NOW)["state"] == "starting"
    assert live_facts(folder, NOW)["run"] == folder.parent.name


def test_a_launcher_that_is_gone_is_seen_by_its_lock(folder):
    copied = shutil.copytree(folder.parent, folder.parent / "copy") / folder.name
    assert (live_facts(copied, NOW)["state"], live_facts(folder, NOW)["state"]) == ("lost", "running")
    (copied.parent / ".lock").unlink()
    assert live_facts(copied, NOW)["state"] == "running"  # without a launcher there is no lock


@pytest.mark.parametrize(
    ("reason", "state", "code"),
    [
        ("ok", "ended", 0),
        ("WorkerDiedError: rank 3", "failed", 1),
        (interruption_text(signal.SIGINT), "interrupted", 1),
    ],
)
def test_the_command_says_how_a_run_ended(folder, reason, state, code):
    summary = json.loads((folder / "summary.json").read_text())
    write_json(folder / "summary.json", {**summary, "exit": reason})
    if state != "ended":
        assert live_facts(folder, NOW)["state"] == "ending"  # its launcher ends processes, or restarts it
        (folder.parent / ".lock").unlink()
    done = CliRunner().invoke(app, ["status", str(folder)])
    assert done.exit_code == code and f"r: {state}" in done.stdout
    assert {"proven", "step 2: a note"} <= set(done.stdout.splitlines())  # each on a line of its own
    assert "tokens/s/rank" in done.stdout
    assert bool(re.search(rf"^reason +{re.escape(reason)}", done.stdout, re.M)) == (state != "ended")


def test_the_command_prints_json_once_and_refuses_what_contradicts(folder):
    done = CliRunner().invoke(app, ["status", str(folder), "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["state"] == "running"
    here = str(folder)
    for words in ([here, "--run", here], [here, "--switches", "line=pypi"]):
        assert isinstance(CliRunner().invoke(app, ["status", *words]).exception, ConfigError)
