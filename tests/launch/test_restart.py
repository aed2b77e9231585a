"""Runs that are started again: which failures are, what each try leaves, and the one record of all of them."""

import json
import os
import shutil

import pytest

from tests.launch.drivers import FOLDER, composed
from tests.weights.cases import make_checkpoint
from verl_patches.config.checks import check_config
from verl_patches.config.compose import compose
from verl_patches.config.run_start import Start
from verl_patches.errors import ConfigError
from verl_patches.launch import launcher, restart, run_folder
from verl_patches.launch.restart import Restarts, may_help
from verl_patches.trainer.record import new_run_id, run_id
from verl_patches.watch.watcher import fault_in

WORTH = [
    "verl_patches.watch.stall.StallError: step 2: rank 1 (pid 5 on h) is stopped",
    "verl_patches.watch.stall.LostNodeError: node 10.0.0.7 with rank 3 is lost",
    "a worker process died in step 3, by a signal or out of memory: rank 1 (pid 5 on h); look at dmesg there",
    "driver ended by SIGKILL",
    "no output for 180 s (recipe.timeouts.quiet_s)",
    "rank 3 (pid 5 on h) in step 3: RuntimeError: [ERROR] HCCL function error: EI0006",
    "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
    "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
    "rank 0 (pid 1 on h) in step 1: RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer",
]
NOT_WORTH = [
    "ConfigError: HCCL_BUFFSIZE is 1",
    "verl_patches.errors.ConfigError: a worker process died of it",
    "interrupted by SIGINT",
    "still running after 60 s (recipe.timeouts.wall_s)",
    "rank 1 (pid 5 on h) in step 3: ValueError: expected 2, found 3",
    "verl_patches.log_probs.truth_check.WeightSyncError: step 3: differ",
    "AlarmError: step 3: alarm nan: NaN or infinite: actor/pg_loss",
    "torch.OutOfMemoryError: NPU out of memory. Tried to allocate 2.00 GiB",
    "the driver exited with 1; its log shows no error",
]


@pytest.mark.parametrize("reason", WORTH + NOT_WORTH)
def test_only_failures_by_chance_are_tried_again(reason):
    assert may_help(reason) is (reason in WORTH)


def steps(numbers):
    return [{"step": n, "reward": n / 10, "seconds": {"rollout": 1.0}} for n in numbers]


def driver(*tries):
    """Code of a driver whose n-th start does `tries[n]`: steps of its summary, and its error or None."""
    return f"""{FOLDER}
tries = {list(tries)!r}
count = out / "count"
number = int(count.read_text()) if count.exists() else 0
count.write_text(str(number + 1))
steps, error, overrides = *tries[number], sys.argv[1:]
from verl_patches.trainer.record import Summary, run_id
summary = Summary(out, {{"run": "t", "id": run_id(out)}})
for step in steps:
    summary.add_step(step)
    summary.add_metrics(step["step"], {{"try": number}})
summary.data["exit"] = "running" if error else "ok"
if steps: summary.write()
with (out / "progress.log").open("a") as file:
    file.write(f"| try {{number}}\\n")
if error:
    raise type(error.split(": ")[0], (Exception,), {{}})(error.split(": ", 1)[1])
"""


@pytest.mark.slow
def test_a_run_that_is_started_again_has_one_table_and_one_record(start):
    """Step 3 was not saved by the first try: the second makes it again."""
    code = driver((steps([1, 2, 3]), "StallError: rank 1 is stopped"), (steps([3, 4]), None))
    outcome, summary, lines = start(code, restart={"times": 2, "without_nodes": []})
    assert (outcome.code, summary["exit"]) == (0, "ok") and [s["step"] for s in summary["steps"]] == [1, 2, 3, 4]
    metrics = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    assert [(m["step"], m["try"]) for m in metrics] == [(1, 0), (2, 0), (3, 1), (4, 1)]
    assert [s.get("resumed_after") for s in summary["steps"]] == [None, None, 2, None]
    (record,) = summary["restarts"]
    assert "StallError: rank 1 is stopped" in record["reason"] and record["exit_code"] == 1
    first, second, third = lines
    assert (first, third) == ("| try 0", "| try 1") and second.startswith(
        "| restart 1 of 2, from the newest checkpoint"
    )
    assert "StallError" in (outcome.folder / "attempts/1/driver.log").read_text()
    assert "StallError" not in (outcome.folder / "driver.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "made"), [("auto", [(1, None), (2, None), (3, 2), (4, None)]), ("disable", [(3, 2), (4, None)])]
)
def test_a_run_that_is_resumed_has_one_table_and_one_record(start, tmp_path, mode, made):
    """As one that is started again by itself; the part before keeps its own record. Another run has nothing of it."""
    code = driver((steps([1, 2, 3]), "KeyError: a"), (steps([3, 4]), None))
    saved = tmp_path / "t/checkpoints"
    trainer = {"default_local_dir": str(saved), "save_freq": 1}
    start(code, trainer=trainer)
    make_checkpoint(saved, 2, run_id(saved.parent))
    outcome, summary, _ = start(code, trainer={**trainer, "resume_mode": mode})
    assert [(s["step"], s.get("resumed_after")) for s in summary["steps"]] == made
    metrics = [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics] == [step for step, _ in made]
    before = json.loads((outcome.folder / "earlier/1/summary.json").read_text())
    assert [s["step"] for s in before["steps"]] == [1, 2, 3] and "KeyError" in before["exit"]


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "tries"), [(3, 1), (2, 2)])
def test_a_run_that_fails_after_it_saved_its_last_step_is_not_started_again(start, tmp_path, saved, tries):
    """The next try would refuse the checkpoint. The run still ends with its own error."""
    folder = tmp_path / "t"
    code = driver((steps([1, 2, 3]), "StallError: a"), ([], "StallError: b"))
    code = code.replace("tries = ", "from tests.weights.cases import make_checkpoint\ntries = ")
    code = code.replace("if error:", f"make_checkpoint(out / 'checkpoints', {saved}, run_id(out))\nif error:")
    trainer = {"default_local_dir": str(folder / "checkpoints"), "save_freq": 1, "total_training_steps": 3}
    outcome, _, _ = start(code, trainer=trainer, restart={"times": 1, "without_nodes": []})
    assert outcome.code == 1 and ("StallError: a" in outcome.reason) == (tries == 1)
    assert int((folder / "count").read_text()) == tries


@pytest.mark.parametrize(("now", "is_saved"), [({"steps": 3}, True), ({"steps": 6}, False), ({}, False), (None, False)])
def test_the_last_step_is_the_runs_own_where_a_class_of_the_users_makes_samples_of_rows(tmp_path, now, is_saved):
    """The controls: more steps than rows say, a record without them, and a run that ended before its first call.

    A record that a loss of power emptied counts as none.
    """
    given = ["data.custom_cls.path=/mine.py", "data.custom_cls.name=Own", "trainer.total_training_steps=null"]
    config = compose("deepseekv3_tiny_cpu", [*given, f"trainer.default_local_dir={tmp_path / 'checkpoints'}"])
    make_checkpoint(tmp_path / "checkpoints", 3, new_run_id(tmp_path, "r"))
    if now is not None:
        doing = {"step": 3, "call": "save", "phase": "saving", "since": 1.0, "step_since": 1.0}
        (tmp_path / "now.json").write_text(json.dumps({**doing, **now}))
    assert restart.last_step_is_saved(config, tmp_path) is is_saved
    (tmp_path / "now.json").write_text("")
    config.trainer.total_training_steps = 3
    assert restart.last_step_is_saved(config, tmp_path)


@pytest.mark.slow
def test_each_try_is_handed_the_checkpoint_that_is_the_newest_then(start, tmp_path):
    """The driver reads the configuration that the launcher wrote, and looks for no checkpoint itself."""
    code = driver((steps([1, 2, 3]), "StallError: a"), (steps([4]), "StallError: b"), (steps([5]), None))
    read = """from omegaconf import OmegaConf
from tests.weights.cases import make_checkpoint
trainer = OmegaConf.load(out / "config.yaml").trainer
with (out / "read").open("a") as file: file.write(f"{trainer.resume_mode} {trainer.resume_from_path}\\n")
if number < 2: make_checkpoint(out / "checkpoints", step["step"], run_id(out))
if error:"""
    saved = tmp_path / "t/checkpoints"
    trainer = {"default_local_dir": str(saved), "save_freq": 1, "resume_mode": "auto", "total_training_steps": 9}
    outcome, *_ = start(code.replace("if error:", read), trainer=trainer, restart={"times": 2, "without_nodes": []})
    found = [f"resume_path {saved / f'global_step_{step}'}" for step in (3, 4)]
    assert outcome.code == 0 and (tmp_path / "t/read").read_text().splitlines() == ["auto None", *found]


@pytest.mark.slow
def test_a_disk_that_fails_between_two_tries_ends_the_run_with_both_reasons(start, monkeypatch):
    def fails(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(launcher, "start_again", fails)
    code = driver((steps([1]), "StallError: a"), (steps([2]), None))
    outcome, summary, _ = start(code, restart={"times": 1, "without_nodes": []})
    assert outcome.code == 1 and "StallError: a" in summary["exit"] and "Input/output error" in summary["exit"]
    assert "restarts" not in summary and (outcome.folder / "driver.log").is_file()  # no try was begun


@pytest.mark.slow
def test_what_was_recorded_stays_where_no_later_try_makes_a_step(start):
    """The second and third try end before their first step, and before they have a record."""
    code = driver((steps([1, 2]), "StallError: a"), (steps([]), "StallError: b"), (steps([]), "StallError: c"))
    outcome, summary, _ = start(code, restart={"times": 2, "without_nodes": []})
    assert [s["step"] for s in summary["steps"]] == [1, 2] and "StallError: c" in summary["exit"]
    assert (outcome.folder / "training.png").is_file() and len(summary["restarts"]) == 2
    assert len((outcome.folder / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_damaged_record_of_an_earlier_part_is_left_out(tmp_path):
    """A run that goes on does not end for it."""
    part, folder = tmp_path / "part", tmp_path / "run"
    part.mkdir()
    folder.mkdir()
    whole = json.dumps({"steps": steps([1, 2])})
    for text, found in ((whole, True), ("{", False), (whole.replace("2", '"x"', 1), False), ("[]", False)):
        (part / "summary.json").write_text(text)
        run_folder.carry_on(part, folder)
        assert (folder / "summary.json").exists() == found
        (folder / "summary.json").unlink(missing_ok=True)
    os.mkfifo(part / "metrics.jsonl")
    run_folder.carry_on(part, folder)
    assert not list(folder.iterdir())


@pytest.fixture
def joined(tmp_path, monkeypatch):
    """joined(nodes) -> Restarts of a run on 2 nodes that joined a Ray of these; node b is the culprit's."""

    def make(*addresses, left_out=(), dies=2, action="stop", times=1):
        nodes = [{"id": f"id-{a}", "address": a, "resources": {"GPU": float(dies)}} for a in addresses]
        monkeypatch.setattr(restart, "list_nodes", lambda address: nodes)
        (tmp_path / "watch.json").write_text(json.dumps({"culprits": [{"name": "rank 2", "node": "id-b"}]}))
        config = composed().copy()
        config.recipe.update({"restart": {"times": times, "without_nodes": list(left_out)}, "ray_address": "auto"})
        config.recipe.watch.action = action
        config.trainer.update({"nnodes": 2, "n_gpus_per_node": 2, "device": "cuda"})
        config.trainer.default_local_dir = str(tmp_path / "checkpoints")
        return Restarts(config, tmp_path)

    return make


@pytest.mark.parametrize(("nodes", "options", "left_out", "words"), [
    ("abc", {}, ["b"], ", without b: "),
    ("ab", {}, [], ", on b again, as no spare node is there: "),
    ("abc", {"left_out": ["c"]}, ["c"], "no spare node"),
    ("abcd", {"left_out": ["c"]}, ["c", "b"], ", without b: "),
    ("ac", {}, [], "from the newest checkpoint: "),  # Ray has lost it already
    ("abc", {"dies": 1}, [], "from the newest checkpoint: "),  # no node of the run's kind
    ("abc", {"action": "report"}, [], "from the newest checkpoint: "),  # the record is of a stall that was survived
])  # fmt: skip
def test_the_faulty_node_is_left_out_where_a_spare_one_is_there(joined, nodes, options, left_out, words):
    restarts = joined(*nodes, **options)
    assert restarts.another(1, "StallError: a") and not restarts.another(1, "ValueError: a")
    assert words in restarts.after(1, "StallError: rank 2 is stopped")
    assert restarts.config(Start()).recipe.restart.without_nodes == left_out
    assert not restarts.another(1, "StallError: again")


def test_a_node_is_left_out_for_an_error_of_its_device_at_once_and_for_one_of_a_collective_the_second_time(joined):
    """The rank that raises the second may only have waited for another one."""

    def after(raised, *nodes):
        restarts = joined(*"abc", times=3)
        left_out = []
        for node in nodes:
            record = {"culprits": [{"name": "rank 2", "node": node}], "raised": raised}
            (restarts._folder / "watch.json").write_text(json.dumps(record))
            restarts.after(1, "rank 2 (pid 1 on h) in step 3: RuntimeError: EI0002: HCCL")
            left_out.append(restarts.config(Start()).recipe.restart.without_nodes)
        shutil.rmtree(restarts._folder / "attempts")
        return left_out

    assert after("device", "id-b") == [["b"]]
    assert after("collective", "id-b", "id-b") == [[], ["b"]]
    assert after("collective", "id-a", "id-b") == [[], []]


@pytest.mark.parametrize(("text", "kind"), [
    ("RuntimeError: ERR00100 PTA call acl api failed", "device"),
    ("RuntimeError: NPU function error: aclrtSynchronizeStream", "device"),
    ("RuntimeError: ERR02200 DIST call hccl api failed", "collective"),
    ("NPU error, error code is 507048\nEI0002: [PID: 7277] The wait execution of the Notify register", "collective"),
    ("torch.distributed.DistBackendError: timeout", "collective"),
    ("RuntimeError: ERR00005 PTA internal error", None),
    ("torch.OutOfMemoryError: NPU out of memory", None),
])  # fmt: skip
def test_errors_of_a_device_and_of_a_collective_are_told_apart(text, kind):
    assert fault_in(text) == kind and may_help(text) is (kind is not None)


def test_a_restart_needs_checkpoints_that_it_finds():
    for overrides, words in (
        (["trainer.save_freq=1", "trainer.resume_mode=auto"], None),
        (["trainer.save_freq=-1", "trainer.resume_mode=auto"], "trainer.save_freq is -1"),
        (["trainer.save_freq=1", "trainer.resume_mode=disable"], "resume_mode is disable"),
        (["trainer.save_freq=1", "trainer.resume_mode=auto", "recipe.restart.without_nodes=[a]"], "recipe.ray_address"),
    ):
        config = compose("deepseekv3_tiny_cpu", ["recipe.restart.times=1", *overrides])
        faults = [check.detail for check in check_config(config) if check.name == "restart" and not check.ok]
        assert faults == [] if words is None else len(faults) == 1 and words in faults[0]
    with pytest.raises(ConfigError, match="recipe.restart.times is -1"):
        compose("deepseekv3_tiny_cpu", ["recipe.restart.times=-1"])
