"""Rates of a step's record: by hand from lengths and seconds, with and without a peak and a model."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_patches.layout.flops import forward_flops_of
from verl_patches.layout.inventory import read_model_shape
from verl_patches.trainer.rates import Rates, metrics_of, profile_of_step, said_of_profile

TINY = Path(__file__).resolve().parents[2] / "configs/model/deepseekv3_tiny.json"
LENGTHS, TOKENS = [10, 30, 20, 20], {"total": 80, "responses": 60}
SECONDS = {"rollout": 2.0, "log_prob": 1.0, "ref": 1.0, "update": 4.0, "step": 10.0}


@pytest.fixture
def config(tmp_path):
    (tmp_path / "config.json").write_text(TINY.read_text())
    actor = {"ppo_mini_batch_size": 8, "ppo_epochs": 1}
    recipe = {"platform": "npu", "profile": {"peak_tflops": None}, "train": {"skip_old_log_prob": False}}
    model = {"path": str(tmp_path), "override_config": {}}
    return OmegaConf.create(
        {
            "trainer": {"nnodes": 1, "n_gpus_per_node": 2},
            "data": {"train_batch_size": 8},
            "algorithm": {"use_kl_in_reward": False},
            "actor_rollout_ref": {"actor": actor, "model": model},
            "recipe": {**recipe, "rollout": {"replay": None}},
        }
    )


def test_rates_are_model_flops_over_seconds_ranks_and_the_peak(config):
    forward = forward_flops_of(read_model_shape(TINY), LENGTHS)
    rates = Rates(config, ref=True).of_step(LENGTHS, TOKENS, SECONDS)
    assert (rates["tokens_per_s_per_rank"], rates["generated_per_s_per_rank"]) == (4.0, 15.0)
    tflops = {"rollout": forward / 2, "ref": forward, "update": 3 * forward / 4, "step": 5 * forward / 10}
    assert rates["tflops_per_s_per_rank"] == pytest.approx({phase: rate / 2 / 1e12 for phase, rate in tflops.items()})
    assert rates["mfu"] == pytest.approx(
        {phase: rate / 353.9 for phase, rate in rates["tflops_per_s_per_rank"].items()}
    )
    assert metrics_of(rates)["recipe/mfu/update"] == rates["mfu"]["update"] and metrics_of(None) == {}
    json.dumps(rates)


def test_a_pass_for_old_log_probs_counts_only_where_the_update_needs_it(config):
    def share():
        return Rates(config, ref=False).of_step(LENGTHS, TOKENS, SECONDS)["mfu"]

    on_policy = share()
    config.actor_rollout_ref.actor.ppo_mini_batch_size = 4
    assert share()["step"] / on_policy["step"] == pytest.approx(5 / 4) and "log_prob" not in on_policy
    config.recipe.rollout.replay = "a run"
    assert share()["step"] == on_policy["step"] and "rollout" not in share()


def test_the_peak_is_the_platforms_or_the_users_and_a_cpu_has_none(config):
    def rates():
        return Rates(config, ref=True).of_step(LENGTHS, TOKENS, SECONDS)

    of_die = rates()["mfu"]["step"]
    config.recipe.profile.peak_tflops = 2 * 353.9
    assert rates()["mfu"]["step"] == pytest.approx(of_die / 2)
    config.recipe.profile.peak_tflops, config.recipe.platform = None, "cpu"
    assert rates()["mfu"] is None and rates()["tflops_per_s_per_rank"]["step"] > 0
    config.actor_rollout_ref.model.path = "/nowhere"
    assert rates()["tflops_per_s_per_rank"] is None and rates()["tokens_per_s_per_rank"] == 4.0
    assert Rates(config, ref=True).of_step(None, TOKENS, SECONDS) is None  # a step without an update


def test_a_profiled_step_names_its_files_and_what_failed():
    found = profile_of_step([None, {"files": ["a", "b"], "faults": []}, {"files": [], "faults": ["rank 3: OSError"]}])
    assert found == {"files": ["a", "b"], "faults": ["rank 3: OSError"]} and profile_of_step([None]) is None
    assert "2 files" in said_of_profile(found) and "first: rank 3: OSError" in said_of_profile(found)
