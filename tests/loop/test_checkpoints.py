"""Checkpoints with experts split over ranks: a resumed run is the uninterrupted one, also after kills.

Line a3: test_memory_as_in_production_changes_no_update in test_layouts.py.
"""

import subprocess
import sys

import pytest
import torch
from loop_runs import hook, metrics_of, resume
from safetensors.torch import load_file

pytestmark = pytest.mark.slow
SAVING = ("--steps", "3", "trainer.save_freq=2", "trainer.max_actor_ckpt_to_keep=3")


def saved_by(run):
    """Names in the run's folder of checkpoints."""
    return sorted(path.name for path in (run.folder / "checkpoints").iterdir())


def test_a_resumed_run_goes_on_as_if_it_had_not_ended(smoke):
    first = smoke(*SAVING)
    assert saved_by(first) == ["global_step_2", "global_step_3"]
    resumed = smoke(*SAVING, *resume(first, 2))
    assert [step["step"] for step in resumed.steps] == [3] and list(resumed.folder.glob("rollouts/*_3.safetensors"))
    assert metrics_of(resumed, "grad_norm", "reward") == metrics_of(first, "grad_norm", "reward")[2:]
    found = {each["step"]: each for each in first.summary["checkpoints"]}
    state = 12 * 1_060_000  # fp32 weights and two moments of the tiny model's parameters
    assert found.keys() == {2, 3} and found[2]["bytes"] < 1.03 * state, found


def test_an_export_is_the_trained_model_for_transformers(smoke, tmp_path):
    """Log-probs of step 3, which vLLM sampled with the weights that the checkpoint of step 2 holds; not those of 3."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, worst = smoke(*SAVING), {}
    step = load_file(run.folder / "rollouts" / "step_3.safetensors")
    for number in (2, 3):
        saved, made = run.folder / "checkpoints" / f"global_step_{number}", tmp_path / str(number)
        command = [sys.executable, "-m", "verl_patches", "weights", "export", str(saved), str(made)]
        subprocess.run(command, check=True)
        model = AutoModelForCausalLM.from_pretrained(made, torch_dtype="auto", attn_implementation="eager").eval()
        assert model.dtype == torch.float32 and AutoTokenizer.from_pretrained(made)
        assert {path.name for path in made.iterdir()} >= {"generation_config.json", "tokenizer.json", "config.json"}
        assert not list(made.glob("rank_*")) and not list(made.glob("*.pt"))
        with torch.no_grad():
            logits = model(step["input_ids"], attention_mask=step["attention_mask"], position_ids=step["position_ids"])
        length = step["responses"].shape[1]
        found = logits.logits[:, -length - 1 : -1].log_softmax(-1).gather(2, step["responses"].unsqueeze(2)).squeeze(2)
        valid = step["attention_mask"][:, -length:].bool()
        worst[number] = float((found - step["rollout_log_probs"])[valid].abs().max())
    assert worst[2] < 1e-5 and worst[3] > 1e-3, worst


@pytest.mark.full
def test_another_layout_resumes_with_the_same_gradient(smoke):
    """On the responses of the first run, as another layout samples others. The log says what differs."""
    first = smoke(*SAVING)
    layout = ("--train-layout", "tp2ep2", "--rollout-tp", "2", "--replay-rollout", str(first.folder))
    resumed = smoke("--steps", "3", *layout, *resume(first, 2))
    (found,) = metrics_of(resumed, "grad_norm")
    assert found == pytest.approx(metrics_of(first, "grad_norm")[2], rel=1e-6)
    assert "actor.megatron.tensor_model_parallel_size was 1, is 2" in resumed.log


@pytest.mark.full
def test_runs_that_were_killed_in_a_save_and_in_a_step_go_on(smoke):
    """At most the work since the last complete checkpoint is lost, and the end is that of the uninterrupted run."""
    every = ("--steps", "3", "trainer.save_freq=1", "trainer.resume_mode=auto")
    first = smoke(*every, hook("killed_in_save"), ok=False)
    assert first.code and first.summary["exit"] != "ok"
    assert saved_by(first)[0] == "global_step_1" and "global_step_2" not in saved_by(first)
    there = f"trainer.default_local_dir={first.folder / 'checkpoints'}"
    second = smoke(*every, there, hook("killed_in_update"), ok=False)
    assert second.code and second.summary["exit"] != "ok" and "global_step_2" in saved_by(first)
    third = smoke(*every, there)
    assert [step["step"] for step in second.steps] == [2] and [step["step"] for step in third.steps] == [3]
    assert saved_by(first) == ["global_step_1", "global_step_2", "global_step_3"]
    whole = metrics_of(smoke(*SAVING), "grad_norm", "reward")
    assert metrics_of(second, "grad_norm", "reward") + metrics_of(third, "grad_norm", "reward") == whole[1:]
