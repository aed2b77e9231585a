"""Test checkpoints with experts split over ranks: runs that were killed and resumed equal the uninterrupted one.

A run has three starts: the first is killed in a save; in the second, which goes on in its folder, a worker is stopped
in a step, the watch ends it, and the launcher starts it again. Then another run starts under that name, and one that
has nothing left to do. The uninterrupted run is that of all other tests, which saves nothing.
test_memory_as_in_production_changes_no_update in test_layouts.py covers line a3.
"""

import json
import re
import shutil
import subprocess
import sys

import psutil
import pytest
import torch
from loop_runs import hook, read_metrics, resume_overrides
from safetensors.torch import load_file

from tests.near_ties import load_reference_model, near_ties
from verl_patches.run.record.record import read_summary
from verl_patches.weights.manifest import folder_problems, read_manifest
from verl_patches.weights.run_folders import checkpoint_chain, read_start

pytestmark = pytest.mark.slow
LEAST_S, BOUND_S = "recipe.watch.least_s", 60
SAVING = ("--steps", "3", "trainer.save_freq=1", "trainer.resume_mode=auto")


def saved_checkpoints(run):
    """Return {step: checkpoint} of the run's chain."""
    return checkpoint_chain(read_start(run.folder)).checkpoints()


@pytest.fixture
def runs(smoke):
    """Return the run's first start and its last, whose folder has all three."""
    first = smoke(*SAVING, hook("killed_in_save"), ok=False)
    given = hook("stopped_in_update"), "recipe.restart.max_restarts=1", f"{LEAST_S}={BOUND_S}"
    return first, smoke(*SAVING, *given, after=first)


def test_runs_that_were_killed_in_a_save_and_stopped_in_a_step_go_on_as_if_they_had_not_ended(smoke, runs):
    """Check that at most the work since the last complete checkpoint is lost: of step 2, then of step 3."""
    first, last = runs
    # by a call of the trainer to it, or by the watch where that call comes late
    died = r"a worker process died in step .*rank 1 \(pid|rank 1 \(pid .* ended \d+ s ago .*by a signal"
    assert first.code and re.search(died, first.summary["exit"], re.S), first.summary["exit"]
    newest = first.folder / "checkpoints" / "global_step_1"
    assert f"newest complete checkpoint: {newest}" in first.output and " trainer.resume_mode=auto" in first.output
    assert [link.folder.name for link in last.chain] == ["0001", "0002", "0003"] and last.folder.name == "0003"
    assert read_metrics(last, "step") == [[1], [2], [3]]  # one record of all starts, with its seams
    assert [step.get("resumed_after") for step in last.steps] == [None, 1, 2]
    assert [step["step"] for step in read_summary(last.folder)["steps"]] == [1, 2, 3]
    assert (last.folder / "training.png").is_file() and "not drawn" not in last.progress
    home, places = last.folder.parent, {1: "0001", 2: "0002", 3: "0003"}
    assert saved_checkpoints(last) == {n: home / name / f"checkpoints/global_step_{n}" for n, name in places.items()}
    assert not (home / "0001/checkpoints/global_step_2").exists()  # what the killed save left
    said = [(home / name / "progress.log").read_text() for name in ("0002", "0003")]
    for step, text in enumerate(said, 1):
        assert f"| resumed from {saved_checkpoints(last)[step]}: step {step} is complete" in text
    assert [run.summary["resumed_step"] for run in runs] == [None, 2]
    assert json.loads((home / "0001/summary.json").read_text()) == first.summary
    assert list(last.folder.glob("rollouts/*_3.safetensors"))
    assert read_metrics(last, "grad_norm", "reward") == read_metrics(smoke(), "grad_norm", "reward")
    state = 12 * 1_060_000  # fp32 weights and two moments of the tiny model's parameters
    (found,) = last.summary["checkpoints"]
    assert found["step"] == 3 and found["bytes"] < 1.03 * state, found


def test_a_stopped_worker_is_named_with_its_phase_its_stack_and_nothing_of_it_is_left(runs):
    """Check the stalled start: the watch names the rank within its bound, continues it for its stack, kills it."""
    last = runs[1]
    (restart,), stalled = last.summary["restarts"], last.folder.parent / "0002"
    found = re.search(
        r"step 3: rank 1 \(pid (\d+) on .*is stopped \(state T.*in update_actor \(update\) for (\d+) s",
        restart["reason"],
    )
    assert restart["exit_code"] == 1 and found and restart["start"] == "0002", restart
    assert f"where at most {BOUND_S} s were expected ({LEAST_S}); 1 other rank is in a call" in restart["reason"]
    assert BOUND_S <= int(found[2])
    (culprit,) = restart["culprits"]
    assert (culprit["name"], culprit["pid"]) == ("rank 1", int(found[1])) and not psutil.pid_exists(culprit["pid"])
    stack = (stalled / "stacks" / "rank_1.txt").read_text()
    assert "in update" in stack and "loop_hooks.py" in stack and (stalled / "stacks" / "rank_0.txt").read_text()
    said = f"restart 1 of 1, from the newest checkpoint: {restart['reason'][:40]}"
    assert said in (stalled / "progress.log").read_text() and said in last.output
    assert not (last.folder / "watch.json").exists() and (stalled / "watch.json").is_file()


def test_an_export_is_the_trained_model_for_transformers(runs, tmp_path):
    """Compare log-probs of step 3, which vLLM sampled with the weights of checkpoint 2; those of 3 must differ."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    last = runs[1]
    step, worst = load_file(last.folder / "rollouts" / "step_3.safetensors"), {}
    for number, saved in ((2, saved_checkpoints(last)[2]), (3, last.folder.parent)):  # the newest checkpoint of a run
        made = tmp_path / str(number)
        command = [sys.executable, "-m", "verl_patches", "weights", "export", str(saved), str(made)]
        subprocess.run(command, check=True)
        model = AutoModelForCausalLM.from_pretrained(made, torch_dtype="auto", attn_implementation="eager").eval()
        assert model.dtype == torch.float32 and AutoTokenizer.from_pretrained(made)
        assert {path.name for path in made.iterdir()} >= {"generation_config.json", "tokenizer.json", "config.json"}
        assert not list(made.glob("rank_*")) and not list(made.glob("trainer.*"))
        with torch.no_grad():
            logits = model(step["input_ids"], attention_mask=step["attention_mask"], position_ids=step["position_ids"])
        length = step["responses"].shape[1]
        comparable = near_ties(model, step["input_ids"], step["attention_mask"]).comparable
        found = logits.logits[:, -length - 1 : -1].log_softmax(-1).gather(2, step["responses"].unsqueeze(2)).squeeze(2)
        valid = step["attention_mask"][:, -length:].bool() & comparable[:, -length - 1 : -1]
        worst[number] = float((found - step["rollout_log_probs"])[valid].abs().max())
    assert worst[2] < 1e-5 and worst[3] > 1e-3, worst


@pytest.mark.nightly
def test_a_slow_disk_is_no_stall_and_a_stuck_one_is_named_with_its_key(smoke):
    """Save step 1 for longer than the bound, in which bytes grow, and step 2 on a disk that takes none."""
    bound_s = 90  # of the start too
    given = f"recipe.watch.first_s={bound_s}", f"recipe.timeouts.load_s={bound_s + 1}"
    run = smoke("--steps", "2", "trainer.save_freq=1", *given, hook("slow_then_stuck_disk"), ok=False)
    (saved,) = run.summary["checkpoints"]
    assert saved["step"] == 1 and saved["complete_s"] > bound_s + 1 and [*saved_checkpoints(run)] == [1]
    found = re.search(
        r"StallError: step 2: rank 1 \(pid \d+ on .* in finish_checkpoint.* for (\d+) s without a byte read or written"
        rf", where at most {bound_s + 1} s were expected \(recipe\.timeouts\.load_s\)",
        run.summary["exit"],
    )
    assert run.code == 1 and found and int(found[1]) > bound_s, run.summary["exit"]


@pytest.mark.nightly
def test_a_new_run_of_that_name_leaves_the_checkpoints_of_the_run_before(smoke, runs):
    """Start over a run that had come further: retention counts only the new run's checkpoints."""
    before = runs[1]
    new = smoke("--steps", "2", "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=1", after=before)
    home = new.folder.parent
    assert [*saved_checkpoints(new)] == [2] and [step["step"] for step in new.steps] == [1, 2]
    assert new.folder.name == "0004"
    for step, path in saved_checkpoints(before).items():
        copied = home / path.relative_to(before.folder.parent)
        manifest = read_manifest(copied)
        assert manifest.facts["step"] == step and folder_problems(copied, manifest) == []


def test_a_run_that_has_reached_its_total_ends_before_anything_starts(smoke, runs):
    again = smoke(*SAVING, after=runs[1], ok=False)
    assert again.code == 2 and "step 3 is complete" in again.output and "trainer.total_training_steps" in again.output
    assert again.folder.name == "0003" and again.summary == runs[1].summary


@pytest.mark.slow
def test_another_layout_resumes_with_the_same_gradient(smoke, runs):
    """Train on the responses of the uninterrupted run, as rounding may change samples; the log lists differences."""
    whole = smoke()
    layout = ("layout=tp2ep2", "rollout=tp2", "--replay-rollout", str(whole.folder))
    resumed = smoke("--steps", "3", *layout, *resume_overrides(runs[1], 2))
    step = load_file(whole.folder / "rollouts" / "step_3.safetensors")
    trained = load_reference_model(saved_checkpoints(runs[1])[2])
    ties = near_ties(trained, step["input_ids"], step["attention_mask"])
    ((found,),) = read_metrics(resumed, "grad_norm")
    assert found == pytest.approx(whole.steps[2]["grad_norm"], rel=ties.norm_tolerance(1e-6))
    assert "actor.megatron.tensor_model_parallel_size was 1, is 2" in resumed.log


@pytest.mark.slow
def test_a_flipped_byte_is_refused_before_the_first_step(smoke, runs, tmp_path):
    """Flip a byte of the last tensor that rank 1 wrote, which is compared as it is read."""
    damaged = shutil.copytree(saved_checkpoints(runs[1])[2], tmp_path / "global_step_2")
    path = damaged / "rank_00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    entry = next(file for file in read_manifest(damaged).files if file.name == path.name).tensors[-1]
    given = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={damaged}")
    run = smoke("--steps", "3", *given, ok=False)
    reason = run.summary["exit"]
    assert run.code == 1 and run.steps == [] and "CheckpointError" in reason, reason
    assert f"{path.name}: {entry.key}: expected sha256 {entry.sha256}" in reason
