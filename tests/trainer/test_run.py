"""Test the controller's side of a run: its table, the proofs before step 1, and how it names dead workers."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from tests.runs import tiny
from verl_patches.patching import engine
from verl_patches.patching.spec import PatchSpec
from verl_patches.patching.switches import Switches
from verl_patches.recipe import Alarms, Objective, Recipe, Train
from verl_patches.step.objectives.advantages import FixedData
from verl_patches.trainer import run
from verl_patches.trainer.alarms import AlarmError, SkippedStepsError
from verl_patches.trainer.record import Progress, Summary
from verl_patches.trainer.step_record import NARROW_COLUMNS, WIDE_COLUMNS, health_text, table_header
from verl_patches.weights.checkpoint_files import CheckpointError

CORE = "val-core/maths/reward/mean@1"
REPORT = {  # what a worker reports of a step in which nothing happened
    **dict.fromkeys(("memory", "emulated", "preempted", "skipped", "profile", "routing_replay")),
    "log_prob_sums": None,
    "seconds": {},
    "sync": [],
    "moves": [],
    "usage": {"rss_bytes": 3 << 40, "pinned_bytes": 5},
    "expert_load": {"train": {"max_over_mean": 1.5}},
}


@pytest.fixture
def made(tmp_path):
    """Make a Run that writes to tmp_path, with a group that runs step 7."""
    made = object.__new__(run.TrainerRun)
    made.summary, made.progress, made.worker_places = Summary(tmp_path, {}), Progress(tmp_path), {}
    made.emulated = made.checkpoints = made.fixed_data = None
    made.run = tiny()
    made.rates = SimpleNamespace(step_rates=lambda *measured: None)
    made.group = SimpleNamespace(step=7, cache=None, sampled_check=None, end_step=dict, lengths=None)
    return made


def after_steps(made, *numbers, skipped=None, test_freq=-1, val=None, objective="rl", log=dict, **bounds):
    """Return the progress lines of these steps; `bounds`: recipe.alarms; `val`: {step: score} of validations."""
    report = {**REPORT, "skipped": skipped}
    made.trainer = SimpleNamespace(actor_rollout_wg=SimpleNamespace(take_report=lambda: [report]))
    recipe = Recipe(
        train=Train(max_skipped_steps=2), alarms=Alarms(**bounds), objective=Objective(objective), platform="npu"
    )
    recipe.logprob_check.action = "report"
    verl = OmegaConf.create({"trainer": {"test_freq": test_freq}})
    made.recipe, made.run = recipe, replace(tiny(), recipe=recipe, verl=verl)
    made.not_compared = "not here"
    for number in numbers:
        validated = {CORE: val[number]} if val and number in val else {}
        timers = {"timing_s/step": 2.0, "timing_s/update_actor": 1.0}
        metrics = made.after_step({"critic/score/mean": 0.5, **timers, **validated}, number, log)
        assert metrics["recipe/expert_load/train"] == 1.5
    return made.progress.path.read_text().splitlines()


@pytest.mark.parametrize("first", [1, 29])
def test_the_header_comes_before_the_first_row_of_the_process(made, first):
    lines = after_steps(made, first, first + 1)
    for prefix, columns in (("- ", NARROW_COLUMNS), ("+ ", WIDE_COLUMNS)):
        title, *rows = [text[2:] for text in lines if text.startswith(prefix)]
        assert title == table_header(columns) and [int(row.split()[0]) for row in rows] == [first, first + 1]
    steps = json.loads(made.summary.path.read_text())["steps"]
    assert [step["step"] for step in steps] == [first, first + 1] and steps[0]["seconds"]["step"] == 2.0


def test_a_run_on_fixed_data_shows_loss_margin_and_accuracy_in_place_of_the_reward(made):
    made.fixed_data = FixedData(Objective("dpo"))
    made.fixed_data.metrics = {"objective/loss": 0.6931471, "objective/margin": 0.25, "objective/accuracy": 0.75}
    lines = after_steps(made, 3, objective="dpo")
    title, values = (text[2:].split() for text in lines if text.startswith("- "))
    assert title[:4] == ["step", "loss", "grad_norm", "margin"] and "reward" not in title and "rollout" not in title
    assert (values[:2], values[3:5]) == (["3", "0.693147"], ["0.2500", "0.7500"])
    (step,) = json.loads(made.summary.path.read_text())["steps"]
    assert step["reward"] is None and step["objective"] == {"loss": 0.6931471, "margin": 0.25, "accuracy": 0.75}
    (metrics,) = map(json.loads, made.summary.path.with_name("metrics.jsonl").read_text().splitlines())
    assert metrics["objective/loss"] == 0.6931471
    assert "update" in title


def test_a_skipped_step_is_in_the_table_and_the_record_and_too_many_end_the_run(made):
    fault = {"parameters": 2, "nearest": "decoder.layers.5.w"}
    skipped = {"skipped": 1, "in_a_row": 1, "stage": 3, "fault": fault}
    lines = after_steps(made, 4, skipped=skipped)
    assert [text.split()[3] for text in lines if text[:2] in ("- ", "+ ") and "reward" not in text] == ["skipped"] * 2
    assert any(text.startswith("| step 4: 1 optimizer step(s) skipped") for text in lines)
    (step,) = json.loads(made.summary.path.read_text())["steps"]
    assert (step["skipped"]["steps"], step["skipped"]["nearest"]["parameter"]) == (1, "decoder.layers.5.w")
    with pytest.raises(SkippedStepsError, match="step 5: .* rank 0, pipeline stage 3, decoder.layers.5.w"):
        after_steps(made, 5, skipped={**skipped, "in_a_row": 2})
    lines = made.summary.path.with_name("metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == 5  # the step that ended the run
    made.recipe.train.max_skipped_steps = 3
    metrics = made.after_step({"critic/score/mean": 0.5, "actor/grad_norm": float("inf")}, 6, dict)
    steps = json.loads(made.summary.path.read_text(), parse_constant=pytest.fail)["steps"]
    assert steps[-1]["grad_norm"] is None and metrics["recipe/skipped_steps"] == 1


def test_a_step_has_a_line_of_its_health_and_curves_of_what_it_uses(made):
    slowest = {"sample": 3, "uid": "u", "data_source": "d", "seconds": 2.5}
    rewards = {"python": 0.5, "python/acc": 0.25}
    made.group.end_step = lambda: {"rewards": rewards, "slowest_sample": slowest}
    lines = after_steps(made, 4)
    health = "slowest reward 2.50 s (sample 3 of d); busiest expert 1.5 x the mean"
    assert f"=      {health}" in lines
    (step,) = json.loads(made.summary.path.read_text())["steps"]
    (metrics,) = map(json.loads, made.summary.path.with_name("metrics.jsonl").read_text().splitlines())
    assert step["slowest_sample"] == slowest and metrics["reward/python/acc"] == step["rewards"]["python/acc"] == 0.25
    assert metrics["recipe/slowest_reward_s"] == 2.5
    assert {f"recipe/usage/{name}": size for name, size in step["usage"].items()}.items() <= metrics.items()
    own = {name: step["usage"].pop(name) for name in ("controller_rss_bytes", "node_bytes")}
    assert all(size > 1 << 20 for size in own.values()) and 0 < step["usage"].pop("node_share") < 1
    assert step["usage"].pop("pinned_bytes") >= REPORT["usage"].pop("pinned_bytes")  # other tests of this process
    assert step["usage"] == REPORT["usage"]
    record = {**step, "preempted": 2, "tokens": {"response_max": 64.0, "at_limit": 0.25}}
    assert health_text(record) == f"longest response 64 tokens, 25% cut; 2 preempted; {health}"


def test_dead_workers_are_named_with_rank_pid_node_and_step(made):
    made.worker_places = {rank: f"pid {100 + rank} on node-{rank // 2}" for rank in range(3)}
    assert "a worker process died in step 7" in (one := made.death_text([1])) and "rank 1 (pid 101 on node-0)" in one
    assert "2 worker processes died" in (two := made.death_text([2, 5]))
    assert "(pid 102 on node-1), rank 5 (pid un" in two
    assert "rank 15 (" in (many := made.death_text(list(range(40)))) and "rank 16" not in many and "24 more" in many


def test_a_step_that_fails_with_a_dead_worker_ends_with_its_place(made):
    """Check also that without a dead worker the step's own error stays."""
    made.worker_places, made.compare_patches, made.wrap_groups = {1: "pid 101 on here"}, lambda: None, lambda: None

    def fit():
        raise ValueError("no answer")

    for dead, error in (([1], run.WorkerDiedError), ([], ValueError)):
        made.dead_workers = lambda dead=dead: dead
        with pytest.raises(error) as failed:
            made.fit_recorded(fit)
        assert ("rank 1 (pid 101 on here)" in str(failed.value)) is bool(dead)
        assert "no answer" in made.summary.data["exit"] and "no answer" in str(failed.value)


def test_an_alarm_is_below_the_row_in_the_record_and_in_the_metrics(made):
    lines = after_steps(made, 3, expert_load=1.4)
    assert "| step 3: alarm expert_collapse: the busiest expert gets 1.5 times" in "\n".join(lines)
    (step,) = json.loads(made.summary.path.read_text())["steps"]
    (alarm,) = step["alarms"]
    assert (alarm["name"], alarm["value"], alarm["limit"]) == ("expert_collapse", 1.5, 1.4)
    metrics = json.loads(made.summary.metrics.read_text())
    assert metrics["recipe/alarms/expert_collapse"] == 1.0
    assert not any("alarm" in text for text in after_steps(made, 4)[len(lines) :])
    after_steps(made, 5, action="stop")
    with pytest.raises(AlarmError, match="step 6: alarm expert_collapse"):
        after_steps(made, 6, expert_load=1.4, action="stop")


@pytest.fixture
def prove(monkeypatch):
    """Return prove(states of two workers) -> progress lines of TrainerRun.compare_patches; workers have one row."""
    off = PatchSpec("a.off", "no_such_module_here:g", "wrap", "o:f", "w", "e")
    row = PatchSpec("a.b", "no_such_module_here:f", "wrap", "o:f", "w", "e", processes=frozenset({"worker"}))
    current = engine.Engine([row, off], Switches("pypi", "cpu", ("-a.off",), drift="warn"))
    current.apply()
    monkeypatch.setattr(engine.process_engine, "value", current)

    def prove(*states):
        proof = {"where": "here", "error": None, "cpu_s": 1.0, "digest": current.digest(), "intent": current.intent()}
        rows = [[{"id": "a.b", "state": state, "target": row.target, "reason": "r"}] for state in states]
        workers = [{"rank": rank, "status": status, **proof} for rank, status in enumerate(rows)]
        monkeypatch.setattr(run, "gather_proofs", lambda group: workers)
        lines, made = [], object.__new__(run.TrainerRun)
        made.trainer = SimpleNamespace(actor_rollout_wg=SimpleNamespace(take_report=lambda: [{"seconds": {}}] * 2))
        made.summary, made.not_compared = SimpleNamespace(data={}, write=lambda: None), ""
        made.progress = SimpleNamespace(say=lines.append)
        made.compare_patches()
        recorded = {entry["id"]: entry for entry in made.summary.data["patches"] if entry["process"] == "controller"}
        assert recorded["a.off"]["reason"] == "switched off by -a.off" and "reason" not in recorded["a.b"]
        assert made.worker_places == {0: "here", 1: "here"}
        return lines

    return prove


def test_a_drifted_row_is_reported(prove):
    assert "| drifted (drift=warn, reasons in summary.json): a.b" in prove("drifted", "drifted")


@pytest.mark.parametrize("dead", [[], [3]])
def test_the_reason_is_recorded_before_a_checkpoint_is_waited_for(made, monkeypatch, dead):
    """Check this because an end of the process meanwhile, such as by the watch, would hide the reason."""
    seen = []

    def abort_save(wait):
        seen.append((wait, json.loads(made.summary.path.read_text())["exit"]))

    made.checkpoints = SimpleNamespace(abort_save=abort_save)
    returned = {"compare_patches": None, "wrap_groups": None, "raising_rank_text": "", "dead_workers": dead}
    for name, value in returned.items():
        monkeypatch.setattr(made, name, lambda *error, value=value: value, raising=False)

    def fit():
        raise AlarmError("step 7: expert_collapse")

    with pytest.raises(run.WorkerDiedError if dead else AlarmError):
        made.fit_recorded(fit)
    ((wait, reason),) = seen[:1]
    monkeypatch.setattr(made, "record_outcome", lambda reason: made.summary.missing, raising=False)
    with pytest.raises(AttributeError):  # as with a full disk, the outcome cannot be written
        made.fit_recorded(fit)
    assert len(seen) == 2
    assert wait is (not dead) and "AlarmError: step 7: expert_collapse" in reason and ("rank 3" in reason) is bool(dead)


def test_the_rank_of_a_failed_checkpoint_write_is_named(made):
    actors = [SimpleNamespace(_actor_id=each) for each in (b"\x01", b"\x02")]
    made.group, made.worker_places = SimpleNamespace(_workers=actors, step=3), {1: "pid 12 on node"}
    error = CheckpointError("checkpoint: disk full")
    assert made.raising_rank_text(error) == ""
    error.__cause__ = RuntimeError("ray::finish_checkpoint() (pid=12, ip=10.0.0.1, actor_id=02, repr=Worker)")
    assert made.raising_rank_text(error) == "rank 1 (pid 12 on node) in step 3: "
