"""Test that every layout trains, its weights arrive in vLLM, and gradients do not depend on the model's split.

test_emulated_npu.py tests the layouts of line a3.
"""

import re

import pytest
import torch
from loop_runs import ACTOR, REF, TP2EP2, VERIFY, assert_weights_arrive, hook, read_metrics, resume_overrides
from safetensors.torch import load_file

from tests.weights.cases import copy_in_fp8
from verl_patches.layout.parallel import parse_layout
from verl_patches.model.tiny import make_tiny_model
from verl_patches.weights.convert import convert
from verl_patches.weights.plan import plan_conversion
from verl_patches.weights.source import open_source

pytestmark = pytest.mark.slow
EP2PP2 = ("layout=ep2pp2", "rollout=tp2dp2", "--steps", "2", VERIFY)


@pytest.mark.parametrize("arguments", [TP2EP2, EP2PP2], ids=["tp2ep2", "ep2pp2"])
def test_weights_arrive_and_the_first_gradient_is_that_of_every_layout(smoke, arguments):
    """Test row reshard.direct; in fp32 all layouts sample the same first responses, whichever ranks have a prompt.

    tp2ep2 has small buckets, and everything is offloaded.
    """
    run, other = smoke(*arguments), smoke()
    assert_weights_arrive(run, verified=True)
    assert run.steps[0]["grad_norm"] == pytest.approx(other.steps[0]["grad_norm"], rel=1e-3)
    assert run.steps[0]["reward"] == pytest.approx(other.steps[0]["reward"], rel=1e-6)  # summed in another order
    recorded, expected = (load_file(each.folder / "rollouts" / "step_1.safetensors") for each in (run, other))
    assert all(torch.equal(recorded[name], expected[name]) for name in ("prompts", "responses"))  # seeds have no rank


def test_dp_ranks_with_uneven_sequences_do_not_hang(smoke):
    """Let one DP rank finish before the other, which must not hang.

    verl takes tokens after a stop token for valid ones, so log-probs are not compared here; tests/rollout does.
    """
    unchecked = ("data.max_response_length=48", "recipe.logprob_check.action=off", "algo=reinforce_plus_plus")
    run = smoke("rollout=dp2", "--steps", "2", hook("stop_early"), *unchecked)
    responses = load_file(run.folder / "rollouts" / "step_1.safetensors")["responses"]
    lengths = [max(int((row < 32).int().argmax()) for row in half) for half in responses.chunk(2)]
    assert run.summary["exit"] == "ok" and lengths[0] != lengths[1], lengths


def test_weights_of_an_fp8_folder_arrive_in_bf16_and_are_read_once(smoke, tiny_model, tmp_path):
    """Test row model.load_hf: the reference reads the folder, the actor copies it; vLLM gets it by the weight sync."""
    copy_in_fp8(tiny_model, tmp_path / "fp8")
    stored = sum(path.stat().st_size for path in (tmp_path / "fp8").glob("*.safetensors"))
    options = VERIFY, "recipe.expert_load=true", "algo=pass_k", f"actor_rollout_ref.model.path={tmp_path / 'fp8'}"
    run = smoke("--dtype", "bf16", "--steps", "2", *options)
    assert_weights_arrive(run, 0.05)
    for load in (step["expert_load"] for step in run.steps):  # loads of Megatron's own router
        assert load["train"]["max_over_mean"] > 1 and load["rollout"]["ranks_over_mean"] >= 1
    (own,) = re.findall(r"all ranks have read \S+ in \S+ s, this one (\d+) bytes", run.log)  # one load, not one a model
    assert 0.4 * stored < int(own) < stored  # two ranks: the experts once, the rest on each
    assert run.log.count("weights: copied from the reference, 0 bytes read from") == 1  # rank 0's line


@pytest.mark.nightly
def test_the_first_layers_of_a_folder_train_as_a_folder_of_only_these(smoke, tmp_path):
    """Test recipe.num_hidden_layers; vLLM reads the folder too. A tiny model's values depend on name, shape and seed.

    ReMax makes a second weight sync for its greedy responses.
    """
    options = ("--steps", "2", VERIFY, "recipe.num_hidden_layers=3", "actor_rollout_ref.rollout.load_format=auto")
    options += ("algo=remax",)
    short = make_tiny_model(tmp_path / "three", overrides={"num_hidden_layers": 3})
    run, expected = smoke(*options), smoke(*options, f"actor_rollout_ref.model.path={short}")
    assert_weights_arrive(run, verified=True, syncs=2)
    assert read_metrics(run, "grad_norm", "reward") == read_metrics(expected, "grad_norm", "reward")
    assert run.steps[0]["reward"] != pytest.approx(smoke().steps[0]["reward"], rel=1e-3)  # with all 4 layers


@pytest.mark.upstream
def test_memory_as_in_production_changes_no_update(a3):
    """Compare host optimizer, offload and full recompute, in bf16, with a run without them.

    A checkpoint has the states that MindSpeed keeps on the host: a resumed run goes on as if it had not ended. With
    rows memory.offload_model and memory.load_model nothing of the actor is on the device during rollout, experts
    included; tests/memory/test_offload.py has the control, verl's own offload.
    """
    bf16, model = ("--dtype", "bf16", "--steps", "2"), "actor_rollout_ref.model"
    offload = [f"{ACTOR}.param_offload=true", f"{ACTOR}.grad_offload=true", f"{REF}.param_offload=true"]
    swap = [f"{ACTOR}.optimizer_offload=false", "recipe.train.swap_optimizer=true"]
    recompute = {"granularity": "full", "method": "block", "num_layers": 4}.items()
    recompute = [
        f"{model}.gradient_checkpointing_kwargs.activations_checkpoint_{key}={value}" for key, value in recompute
    ]
    recompute.append(f"{model}.enable_gradient_checkpointing=true")
    production = (*bf16, *offload, hook("nothing_left"), *swap, *recompute)
    plain, saving = a3(*bf16), a3(*production, "trainer.save_freq=1")
    assert_weights_arrive(plain, 0.05)
    assert_weights_arrive(saving, 0.05)
    assert "swap_optimizer=True" in saving.log and "recompute_granularity='full'" in saving.log  # Megatron's arguments
    assert read_metrics(saving, "grad_norm") == read_metrics(plain, "grad_norm")
    resumed = a3(*production, *resume_overrides(saving, 1))
    assert read_metrics(resumed, "grad_norm", "reward") == read_metrics(saving, "grad_norm", "reward")[1:]


def test_a_run_starts_from_megatrons_checkpoint_of_another_layout(smoke, tiny_model, tmp_path):
    """Compare with a run from the HF folder that it was made of: the same responses and gradient."""
    folder = tmp_path / "megatron"
    convert(plan_conversion(open_source(tiny_model), parse_layout("tp2 ep4 etp1 @4"), "keep"), folder)
    run, other = smoke("--steps", "1", VERIFY, f"actor_rollout_ref.model.path={folder}"), smoke()
    assert_weights_arrive(run, verified=True)
    assert run.steps[0]["grad_norm"] == pytest.approx(other.steps[0]["grad_norm"], rel=1e-6)
    assert run.steps[0]["reward"] == other.steps[0]["reward"]
