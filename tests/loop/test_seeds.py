"""Test that rollout.seed and the step decide the samples; test_layouts.py compares those of other layouts."""

import pytest
import torch
from loop_runs import KILLED
from safetensors.torch import load_file

from data.make_learnable import write_task

pytestmark = pytest.mark.slow


def test_samples_follow_the_step_and_a_step_that_is_made_again_has_the_same(smoke, tmp_path):
    """Train twice on the same four prompts without changing the weights; step 2 is killed and made again."""
    rows, _ = write_task(tmp_path / "task", 4, test_rows=3)
    given = f"data.train_files={rows}", "data.shuffle=false", "actor_rollout_ref.actor.optim.lr=1e-30"
    run = smoke("--steps", "2", *given, *KILLED, "trainer.save_freq=1")
    first, again = run.folder.parent / "0001" / "rollouts", run.folder / "rollouts"
    one, two = (load_file(first / f"step_{step}.safetensors") for step in (1, 2))
    assert run.summary["restarts"] and not (again / "step_1.safetensors").exists()
    assert torch.equal(one["prompts"], two["prompts"])
    assert not (one["responses"] == two["responses"]).all(1).any()  # one seed for all steps would give the same
    assert torch.equal(two["responses"], load_file(again / "step_2.safetensors")["responses"])
