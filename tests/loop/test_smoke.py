"""The main job: three real GRPO steps, and what they leave behind."""

import json
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from loop_runs import ROOT, smoke_command

pytestmark = pytest.mark.slow
PHASES = {"rollout", "reward", "ref", "update", "reshard", "offload"}


def test_three_steps_leave_a_whole_record(smoke):
    run = smoke()
    summary = run.summary
    assert run.code == 0 and summary["exit"] == "ok" and [s["step"] for s in summary["steps"]] == [1, 2, 3]
    assert set(summary) >= {
        "run",
        "line",
        "platform",
        "layout",
        "dtype",
        "versions",
        "steps",
        "logprob_delta",
        "patches",
        "peak_pss_bytes",
        "exit",
    }
    assert (summary["line"], summary["platform"], summary["dtype"]) == ("pypi", "cpu", "fp32")
    assert set(summary["layout"]) == {"train", "rollout"} and summary["versions"]["verl"] == "0.4.0"
    for step in summary["steps"]:
        assert set(step["seconds"]) >= PHASES and step["grad_norm"] > 0 and 0 <= step["reward"] <= 1
    assert all(name in run.output for name in PHASES)
    log = (run.folder / "driver.log").read_text()  # verl's own lines too, the last step's as well
    assert {int(n) for n in re.findall(r"step:(\d+) - ", log)} >= {1, 2, 3}


def test_weights_are_right_in_vllm_after_every_sync(smoke):
    run = smoke()
    assert all(s["logprob_delta"]["mean"] < 1e-5 for s in run.steps)
    assert run.summary["logprob_delta"]["mean"] < 1e-5


def test_every_process_proved_its_own_rows(smoke):
    patches = smoke().summary["patches"]
    assert {p["process"] for p in patches} == {"controller", "worker 0", "worker 1"}
    from verl_patches.catalog import NO_BUILD, ROWS

    wanted = {r.id: r for r in ROWS if "pypi" in r.lines and "cpu" in r.platforms and r not in NO_BUILD}
    for patch in patches:
        kind = patch["process"].split()[0]
        if patch["id"] in wanted and kind in wanted[patch["id"]].processes:
            assert patch["state"] == "active", patch


def test_what_was_sent_to_workers_and_when_they_started(smoke):
    stages = {"generate_sequences", "compute_log_prob", "compute_ref_log_prob", "update_actor"}
    for step in smoke().steps:
        sent, skew = step["dispatch"], step["dispatch"]["start_skew_s"]
        assert sent["calls"] >= len(stages) and sent["put_bytes"] > 1e5  # one batch a replica, by verl 0.4.0 itself
        assert stages <= set(skew["by_call"]) and 0 < skew["max"] == max(skew["by_call"].values())
    assert "skew s" in smoke().output and f"{skew['max']:.4f}" in smoke().output


def test_memory_and_pictures(smoke):
    run = smoke()
    peaks = run.summary["peak_pss_bytes"]
    assert 0 < peaks["total"] <= 12e9 and len(peaks) > 3
    assert (run.folder / "training.png").read_bytes().startswith(b"\x89PNG")
    assert any((run.folder / "tensorboard").rglob("events.out.tfevents*"))


def test_status_of_the_run_from_the_command_line(smoke):
    import sys

    done = subprocess.run(
        [sys.executable, "-m", "verl_patches", "status", "--run", str(smoke().folder), "--json"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["wrong"] == []
    row = next(r for r in found["rows"] if r["id"] == "model.mla_k_pe_grad")
    assert row["states"]["worker 0"] == "active" and row["states"]["controller"] == "waiting"


def start(folder, *arguments):
    command, env = smoke_command(*arguments, folder=folder, run="r")
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for(text, path, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if path.is_file() and text in path.read_text():
            return
        time.sleep(0.2)
    raise AssertionError(f"{text!r} not in {path} after {seconds} s")


def run_processes(launcher):
    return psutil.Process(launcher.pid).children(recursive=True)


def assert_all_gone(processes):
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive, alive


def test_a_killed_worker_ends_the_run_with_a_reason_and_nothing_left(tmp_path):
    launcher = start(tmp_path, "--steps", "50")
    try:
        wait_for("step 1/50: reshard, rollout", tmp_path / "r" / "progress.log", 240)
        started = run_processes(launcher)
        worker = next(p for p in started if "WorkerDict" in " ".join(p.cmdline()))
        killed_at = time.monotonic()
        worker.send_signal(signal.SIGKILL)
        output, _ = launcher.communicate(timeout=120)
    finally:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)
    assert launcher.returncode not in (0, 2) and time.monotonic() - killed_at < 90
    reason = json.loads((tmp_path / "r" / "summary.json").read_text())["exit"]
    assert re.search(r"[Dd]ied|dead", reason), reason
    assert re.search(r"[Dd]ied|dead", output), output
    assert_all_gone(started)


def test_an_interrupted_run_leaves_nothing(tmp_path):
    bystander = subprocess.Popen(["sleep", "300"])
    launcher = start(tmp_path, "--steps", "50")
    try:
        wait_for("patches proven", tmp_path / "r" / "progress.log", 240)
        started = run_processes(launcher)
        launcher.send_signal(signal.SIGINT)
        launcher.communicate(timeout=60)
    finally:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)
        untouched = bystander.poll() is None
        bystander.kill()
    assert launcher.returncode not in (0, 2) and untouched
    assert_all_gone(started)
    assert "SIGINT" in json.loads((tmp_path / "r" / "summary.json").read_text())["exit"]


def test_a_taken_port_is_refused_before_anything_starts(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        launcher = start(tmp_path, f"recipe.ray_port={port}")
        output, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 2 and str(port) in output and "taken" in output
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--train-layout", "ep3"], "expected one of"),
        (["--rollout-tp", "2", "--rollout-dp", "2"], "needs 4"),
        (["recipe.typo=1"], "recipe.typo"),
        (["--replay-rollout", "no_such_folder"], "no_such_folder"),
    ],
)
def test_wrong_use_is_refused_with_code_2(tmp_path, arguments, words):
    launcher = start(tmp_path, *arguments)
    output, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 2 and words in output and not Path(tmp_path / "r").exists()
