"""Test runs that are started again: after which failures, what each start writes, and their common record."""

import json

import pytest

from tests.launch.drivers import FOLDER, run_named_t
from tests.weights.cases import make_start
from verl_patches.launch import restart
from verl_patches.launch.restart import Restarts, is_retryable
from verl_patches.launch.supervise.watcher import is_collective_error, is_device_error
from verl_patches.run.record.record import read_summary
from verl_patches.weights.run_folders import list_starts

RETRYABLE_REASONS = [
    "verl_patches.launch.supervise.stall.StallError: step 2: rank 1 (pid 5 on h) is stopped",
    "a worker process died in step 3, by a signal or out of memory: rank 1 (pid 5 on h); look at dmesg there",
    "driver ended by SIGKILL",
    "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
    "rank 0 (pid 1 on h) in step 1: RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer",
]
FINAL_REASONS = [
    "verl_patches.errors.ConfigError: a worker process died of it",
    "rank 1 (pid 5 on h) in step 3: ValueError: expected 2, found 3",
    "verl_patches.step.log_probs.logprob_check.WeightSyncError: step 3: differ",
    "torch.OutOfMemoryError: NPU out of memory. Tried to allocate 2.00 GiB",
]


@pytest.mark.parametrize("reason", RETRYABLE_REASONS + FINAL_REASONS)
def test_only_failures_by_chance_are_tried_again(reason):
    assert is_retryable(reason) is (reason in RETRYABLE_REASONS)


def steps(numbers):
    return [{"step": n, "reward": n / 10, "seconds": {"rollout": 1.0}} for n in numbers]


def driver(*tries):
    """Return code of a driver whose n-th start does `tries[n]`: its steps, those it saves, its error or None."""
    return f"""{FOLDER}
from omegaconf import OmegaConf
from tests.weights.cases import make_checkpoint
from verl_patches.trainer.record import Summary
steps, saved, error = {list(tries)!r}[int(out.name) - 1]
summary = Summary(out, {{"run": "t"}})
for step in steps:
    summary.add_step(step)
    summary.add_metrics(step["step"], {{"try": int(out.name)}})
for step in saved:
    make_checkpoint(out / "checkpoints", step)
summary.data["exit"] = "running" if error else "ok"
if steps: summary.write()
trainer = OmegaConf.load(out / "config.yaml").trainer
with (out / "progress.log").open("a") as file:
    file.write(f"| {{out.name}}: {{trainer.resume_mode}} {{trainer.resume_from_path}}\\n")
if error:
    raise type(error.split(": ")[0], (Exception,), {{}})(error.split(": ", 1)[1])
"""


@pytest.fixture
def run(start, tmp_path):
    """Return run(*tries, times), the launcher's run of that driver."""

    def make(*tries, times=2, **trainer):
        settings = {"default_local_dir": str(tmp_path / "t/checkpoints"), "save_freq": 1, "resume_mode": "auto"}
        recipe = {"restart.max_restarts": times, "restart.exclude_nodes": []}
        return start(driver(*tries), trainer={**settings, "total_training_steps": 9, **trainer}, **recipe)

    return make


@pytest.mark.slow
def test_a_run_that_is_started_again_is_one_record_of_folders_that_stay(run, tmp_path):
    """Give each start the newest checkpoint; the second start ends before its first step."""
    stalled = "StallError: rank 1 is stopped"
    tries = (steps([1, 2, 3]), [2], stalled), ([], [], "StallError: b"), (steps([3, 4]), [4], None)
    outcome, summary, lines = run(*tries)
    saved = tmp_path / "t/0001/checkpoints/global_step_2"
    assert [line for line in lines if line.startswith("| 0")] == [
        "| 0001: disable None",
        f"| 0002: resume_path {saved}",
        f"| 0003: resume_path {saved}",
    ]
    said = [line for line in lines if line.startswith("| restart")]
    assert said[0].startswith("| restart 1 of 2, from the newest checkpoint") and stalled in said[0]
    assert outcome.folder == tmp_path / "t/0003" and (outcome.code, summary["exit"]) == (0, "ok")
    assert [s["step"] for s in summary["steps"]] == [3, 4] and summary["resumed_step"] == 2
    whole = read_summary(outcome.folder)
    made = [(s["step"], s["reward"], s.get("resumed_after")) for s in whole["steps"]]
    assert made == [(1, 0.1, None), (2, 0.2, None), (3, 0.3, 2), (4, 0.4, None)]
    assert [record["start"] for record in summary["restarts"]] == ["0001", "0002"]
    assert summary["restarts"][0]["reason"].endswith(stalled) and summary["restarts"][0]["exit_code"] == 1
    for name, reason in (("0001", stalled), ("0002", "StallError: b")):
        folder = tmp_path / "t" / name
        record = json.loads((folder / "summary.json").read_text())
        assert reason in record["exit"] and reason in (folder / "driver.log").read_text()
        assert (folder / "training.png").is_file()  # the second start's figure covers both starts
    assert "restarts" not in json.loads((tmp_path / "t/0001/summary.json").read_text())
    again, summary, _ = run(*tries, (steps([5]), [], None))  # a resume is a start as well
    assert again.folder.name == "0004" and [s["step"] for s in read_summary(again.folder)["steps"]] == [1, 2, 3, 4, 5]


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "tries"), [(3, 1), (2, 2)])
def test_a_run_that_fails_after_it_saved_its_last_step_is_not_started_again(run, tmp_path, saved, tries):
    """Check this because the next start would refuse the checkpoint; the run still ends with its own error."""
    made = (steps([1, 2, 3]), [saved], "StallError: a"), ([], [], "StallError: b")
    outcome, _, _ = run(*made, times=1, total_training_steps=3)
    assert outcome.code == 1 and ("StallError: a" in outcome.reason) == (tries == 1)
    assert len(list_starts(tmp_path / "t")) == tries


@pytest.fixture
def joined(tmp_path, monkeypatch):
    """Return joined(nodes) -> (Restarts of a run on 2 nodes that joined a Ray of these, its start); b is at fault."""
    folder = make_start(tmp_path / "r")

    def make(*addresses, left_out=(), times=1):
        each = {"resources": {"GPU": 2.0, "CPU": 3.0}, "here": False}
        nodes = [{"id": f"id-{address}", "address": address, **each} for address in addresses]
        monkeypatch.setattr(restart, "list_nodes", lambda address: nodes)
        (folder / "watch.json").write_text(json.dumps({"culprits": [{"name": "rank 2", "node": "id-b"}]}))
        recipe = {"restart.max_restarts": times, "restart.exclude_nodes": list(left_out), "ray_address": "auto"}
        trainer = {"nnodes": 2, "n_gpus_per_node": 2, "device": "cuda"}
        return Restarts(run_named_t(tmp_path, recipe, trainer)), folder

    return make


@pytest.mark.parametrize(("nodes", "options", "left_out", "words"), [
    ("abc", {}, ["b"], ", without b: "),
    ("ab", {}, [], ", again on b, as Ray has no spare node: "),
    ("abc", {"left_out": ["c"]}, ["c"], "no spare node"),
])  # fmt: skip
def test_the_faulty_node_is_left_out_where_a_spare_one_is_there(joined, nodes, options, left_out, words):
    restarts, folder = joined(*nodes, **options)
    assert restarts.allows_restart(1, "StallError: a") and not restarts.allows_restart(1, "ValueError: a")
    assert words in restarts.record_failure(1, "StallError: rank 2 is stopped", folder)
    assert restarts.run().recipe.restart.exclude_nodes == left_out
    assert not restarts.allows_restart(1, "StallError: again")


@pytest.mark.parametrize(("text", "kind"), [
    ("RuntimeError: ERR00100 PTA call acl api failed", "device"),
    ("RuntimeError: NPU function error: aclrtSynchronizeStream", "device"),
    ("RuntimeError: ERR02200 DIST call hccl api failed", "collective"),
    ("NPU error, error code is 507048\nEI0002: [PID: 7277] The wait execution of the Notify register", "collective"),
    ("torch.distributed.DistBackendError: timeout", "collective"),
    ("torch.OutOfMemoryError: NPU out of memory", None),
])  # fmt: skip
def test_errors_of_a_device_and_of_a_collective_are_told_apart(text, kind):
    assert (is_device_error(text), is_collective_error(text)) == (kind == "device", kind == "collective")
    assert is_retryable(text) is (kind is not None)
