"""Test the main run: three real GRPO steps, its record, and how a run is refused, interrupted and ended."""

import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time

import psutil
import pytest
import torch
from loop_runs import (
    ROOT,
    STREAMS,
    add_listeners,
    assert_nobody_else_can_reach,
    assert_weights_arrive,
    exposed_listeners,
    smoke_command,
)
from pyarrow import parquet
from safetensors.torch import load_file

from tests.ranks import HANG_S
from verl_patches.catalog import (  # PACKAGE_STUBS: off where flash_attn is installed, or never imported
    PACKAGE_STUBS,
    all_rows,
)
from verl_patches.cli.live import live_facts
from verl_patches.errors import interruption_text
from verl_patches.run.record.plots import memory_figure, run_figure, save_figure
from verl_patches.run.record.report import figures
from verl_patches.tools.data.from_rollouts import Choice, write_rollout_data
from verl_patches.tools.data.samples import read_samples

pytestmark = pytest.mark.slow
PHASES = {"rollout", "reward", "ref", "update", "reshard", "offload"}
KEYS = "run line platform layout dtype versions steps logprob_delta patches peak_rss_bytes exit"


def test_three_steps_leave_a_complete_record(smoke, tmp_path):
    run, summary = smoke(), smoke().summary
    assert run.code == 0 and summary["exit"] == "ok" and [s["step"] for s in summary["steps"]] == [1, 2, 3]
    assert set(summary) >= set(KEYS.split())
    assert (summary["line"], summary["platform"], summary["dtype"]) == ("pypi", "cpu", "fp32")
    assert set(summary["layout"]) == {"train", "rollout"} and summary["versions"]["verl"] == "0.4.0"
    for step in summary["steps"]:
        assert set(step["seconds"]) >= PHASES and 0 <= step["reward"] <= 1
        assert step["rewards"].keys() == {"by_source", "by_source/acc", "by_source/format"}
        assert step["rewards"]["by_source"] == pytest.approx(step["reward"])
        assert 0 <= step["slowest_sample"]["sample"] < 8 and step["slowest_sample"]["uid"]
        usage = step["usage"]
        assert usage["node_bytes"] > usage["rss_bytes"] > 1e8 and usage["object_store_bytes"] >= 0
    health = re.findall(r"^ {5}longest response \d+ tokens, \d+% cut; .*slowest reward ", run.output, re.MULTILINE)
    assert len(health) == 3
    assert all(f"{name} s" in run.progress for name in PHASES) and summary["logprob_delta"]["mean"] < 1e-5
    stages = list(dict.fromkeys(re.findall(r"^\[ *\d+ s\] (.*)", run.output, re.MULTILINE)))  # until step 1
    stages = stages[stages.index("starting Ray") :]  # in a fresh folder the model and the data are made before it
    assert stages[1] == "Ray is up, starting the controller" and "of 2 ranks have started" in stages[2]
    assert not any("step 1" in stage for stage in stages)
    shown = [text for text in run.output.splitlines() if re.match(r"step +reward|  +\d ", text)]
    assert [text.split()[0] for text in shown] == ["step", "1", "2", "3"] and max(map(len, shown)) <= 80
    assert {int(n) for n in re.findall(r"step:(\d+) - ", run.log)} >= {1, 2, 3}  # verl's own lines, the last step's too
    peaks = summary["peak_rss_bytes"]
    assert 0 < peaks["total"] <= 12e9 and len(peaks) > 3
    for draw, name in ((run_figure, "training.png"), (memory_figure, "memory.png")):  # tests/run/record/test_plots.py
        assert (run.folder / name).read_bytes() == save_figure(draw(summary), tmp_path / name).read_bytes()
    assert any((run.folder / "tensorboard").rglob("events.out.tfevents*"))
    metrics = [json.loads(text) for text in (run.folder / "metrics.jsonl").read_text().splitlines()]
    rate = figures(summary)["tokens/s/rank"]
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert [line["reward/by_source"] for line in metrics] == [step["rewards"]["by_source"] for step in summary["steps"]]
    assert rate == pytest.approx(statistics.median(line["perf/throughput"] for line in metrics[1:]), rel=1e-3)


def test_weights_are_right_and_every_process_proved_the_rows_of_its_line(line, start):
    run, processes = start(), set()
    assert_weights_arrive(run)
    of_run = set(json.loads((run.folder / "facts.json").read_text())["rows"])
    of_line = {r.id: r for r in all_rows() if line in r.lines and "cpu" in r.platforms and r not in PACKAGE_STUBS}
    assert {name for name, r in of_line.items() if not r.feature} <= of_run
    wanted = {name: r for name, r in of_line.items() if name in of_run}
    of_others = {r.id for r in all_rows() if r.id not in of_run}
    for patch in run.summary["patches"]:
        processes.add(patch["process"])
        if patch["id"] in wanted and patch["process"].split()[0] in wanted[patch["id"]].processes:
            assert patch["state"] == "active", patch
        assert patch["id"] not in of_others or patch["state"] == "off", patch
    assert processes == {"controller", "worker 0", "worker 1"} and of_others


def test_recorded_rollouts_have_their_rewards_and_become_data(smoke, tmp_path):
    """Check balanced batches and the run's own data; tests/tools/data/test_from_rollouts.py checks the choice."""
    run = smoke()
    for step in run.steps:
        responses = load_file(run.folder / "rollouts" / f"step_{step['step']}.safetensors")
        found = load_file(run.folder / "rollouts" / f"scores_{step['step']}.safetensors")
        assert found["score"].mean().item() == pytest.approx(step["reward"])
        assert torch.equal(found["score"], found["reward/by_source"])  # its weight is 1
        assert found["dlogp/max"].max().item() == pytest.approx(step["logprob_delta"]["max"])
        assert step["rewards"]["by_source/format"] == pytest.approx(found["reward/by_source/format"].mean().item())
        first, second = (responses["prompts"][at::2] for at in (0, 1))
        assert torch.equal(first, second) and torch.equal(found["uid"][::2], found["uid"][1::2])
        assert len(found["uid"].unique(dim=0)) == len(first)
    assert all(one["gold"] and one["data_source"] and one["tokens"] for one in read_samples(run.folder))
    report = write_rollout_data(run.folder, tmp_path / "best", Choice())
    rows = parquet.read_table(tmp_path / "best" / "train.parquet").to_pylist()
    assert report["steps"] == 3 and report["responses"] == 24 and 0 < len(rows) == report["rows"] <= 12
    assert {row["data_source"] for row in rows} and all(row["reward_model"]["ground_truth"] for row in rows)


def test_a_step_records_bytes_sent(smoke):
    for step in smoke().steps:
        sent = step["dispatch"]
        assert sent["calls"] >= 4 and sent["put_bytes"] > 1e5  # one batch a replica, by verl 0.4.0 itself
    assert "sent MB" in smoke().progress


def test_status_of_the_run_from_the_command_line(line, start):
    command = [sys.executable, "-m", "verl_patches", "status", "--run", str(start().folder), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    status = json.loads(done.stdout)
    assert done.returncode == 0 and status["wrong"] == []
    name, controller = {"pypi": ("model.mla_k_pe_grad", "waiting"), "a3": ("update.engine_start", "active")}[line]
    row = next(r for r in status["rows"] if r["id"] == name)
    assert (row["states"]["worker 0"], row["states"]["controller"]) == ("active", controller)


@contextlib.contextmanager
def launched(folder, *arguments):
    """Start the launcher of a run in folder/r; kill it with its session if it has not ended."""
    command, env = smoke_command(*arguments, folder=folder)
    launcher = subprocess.Popen(command, cwd=ROOT, env=env, **STREAMS, start_new_session=True)
    try:
        yield launcher
    finally:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)


def refused(folder, *arguments):
    """Return (exit code, output) of a run that must not start."""
    with launched(folder, *arguments) as launcher:
        output, _ = launcher.communicate(timeout=HANG_S)
    assert not (folder / "r").exists()
    return launcher.returncode, output


def processes_after(text, folder, launcher):
    """Return all processes of the run once progress.log has the text."""
    path, end = folder / "r" / "latest" / "progress.log", time.monotonic() + HANG_S
    while not (path.is_file() and text in path.read_text()):
        assert time.monotonic() < end, f"{text!r} not in {path}"
        time.sleep(0.2)
    return psutil.Process(launcher.pid).children(recursive=True)


def recorded_reason(folder, processes):
    """Return the reason of the run's end; all its processes must have ended too."""
    _, alive = psutil.wait_procs(processes, timeout=HANG_S)
    assert not alive, alive
    return json.loads((folder / "r" / "latest" / "summary.json").read_text())["exit"]


def test_a_killed_raylet_ends_the_run_with_its_ranks_named_and_nothing_is_left(tmp_path):
    """Check this on one node, where all other processes of Ray end too."""
    with launched(tmp_path, "--steps", "50") as launcher:
        processes = processes_after("step 1/50: reshard, rollout", tmp_path, launcher)
        (raylet,) = (process for process in processes if process.name() == "raylet")
        raylet.kill()
        output, _ = launcher.communicate(timeout=HANG_S)
    assert launcher.returncode == 1
    for text in (recorded_reason(tmp_path, processes), output):
        assert "died in step 1" in text and "rank 0" in text, text


def test_other_machines_reach_neither_ray_nor_its_folder(smoke):
    assert_nobody_else_can_reach(smoke())


def test_a_process_that_listens_on_all_addresses_is_seen():
    """Run the control of the test above."""
    program = """import socket, time
listener = socket.create_server(("", 0))
print(listener.getsockname()[1], flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        try:
            port, found = int(process.stdout.readline()), {}
            add_listeners(psutil.Process(process.pid), found, {})
        finally:
            process.kill()
    assert list(exposed_listeners(found)) == [f"0.0.0.0 {port}"]
    assert exposed_listeners({"127.0.0.1 1": "a", "::1 2": "a", "::ffff:127.0.0.1 3": "a"}) == {}


def test_an_interrupted_run_says_so_and_leaves_nothing(tmp_path):
    """Send Ctrl-C as a terminal does, to the whole process group."""
    bystander = subprocess.Popen(["sleep", "300"])
    try:
        with launched(tmp_path, "--steps", "50") as launcher:
            processes = processes_after("patches proven", tmp_path, launcher)
            os.killpg(launcher.pid, signal.SIGINT)
            output, _ = launcher.communicate(timeout=HANG_S)
        assert launcher.returncode == 130 and bystander.poll() is None
        assert recorded_reason(tmp_path, processes) == interruption_text(signal.SIGINT)
        assert f"the run was {interruption_text(signal.SIGINT)}" in output and "failed" not in output
        assert live_facts((tmp_path / "r" / "latest").resolve())["state"] == "interrupted"
    finally:
        bystander.kill()
