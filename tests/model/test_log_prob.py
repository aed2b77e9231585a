"""model/log_prob.py against the plain formula in float64, at TP 1 and 2; its rows in verl's actor."""

import os

import pytest
import torch

from tests.model.log_prob_job import CASES, actor_batch

PATCHES = "line=pypi,platform=cpu"
JOB = "tests.model.log_prob_job"
# fp32 results: 1e-6 absolute or relative (near 12 nats one fp32 step is 1e-6); a bf16 gradient is rounded once
FP32, BF16 = {"rtol": 1e-6, "atol": 1e-6}, {"rtol": 2**-8, "atol": 1e-6}


@pytest.fixture(scope="module", params=[1, 2])
def found(request, run_ranks):
    return run_ranks(f"{JOB}:answers", size=request.param, patches=PATCHES)


def faults(case, ranks, name):
    """Names of results that are not the formula's on one of the ranks."""
    expected, wrong = case.expected(), []
    gradient = torch.cat([rank[name]["gradient"] for rank in ranks], dim=-1)
    assert gradient.dtype == case.dtype
    results = [("gradient", gradient)]
    results += [(key, value) for rank in ranks for key, value in rank[name].items() if key != "gradient"]
    for key, value in results:
        near = BF16 if value.dtype == torch.bfloat16 else FP32
        if key != "gradient":
            assert value.dtype == torch.float32
        if not torch.allclose(value.double(), expected[key], **near):
            wrong.append(f"{key}: {(value.double() - expected[key]).abs().max():.1e}")
    return wrong


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_the_formula(found, name):
    assert faults(CASES[name], found, name) == []


def test_a_missing_maximum_or_all_reduce_is_seen(found):
    assert faults(CASES["large"], found, "maximum")
    left_out = [faults(CASES["both"], found, f"all_reduce {number}") for number in range(3)]
    assert all(left_out) if len(found) > 1 else not any(left_out)  # one rank has nothing to reduce


def test_the_gradient_takes_the_place_of_the_logits(run_ranks):
    (found,) = run_ranks(f"{JOB}:in_place", patches=PATCHES)
    assert found["same_memory"] and found["calls"] == 3 and not found["attribute_left"]
    assert "modified by an inplace operation" in found["second_backward"]
    assert "modified by an inplace operation" in found["entropy_after_log_probs"]  # no wrong gradient
    assert found["graph"] == [False, False] and found["same_if_strided"]


def loss_gradient(dtype, entropy_coeff):
    """Of the logits of `actor_update`, by verl's policy loss over the plain formula in float64."""
    from verl.trainer.ppo.core_algos import compute_policy_loss

    logits, ids = actor_batch(dtype)
    logits, width = logits.double().requires_grad_(), ids.shape[1] // 2
    every = logits[:, width - 1 : -1].log_softmax(dim=-1)  # the token before each of the response
    log_probs = every.gather(-1, ids[:, width:, None])[..., 0]
    advantages, ones = torch.linspace(-1, 1, width).expand(len(ids), -1), torch.ones(len(ids), width)
    loss, *_ = compute_policy_loss(-3.0 * ones, log_probs, advantages, ones, cliprange=0.2)
    (loss + entropy_coeff * (every.exp() * every).sum(dim=-1).mean()).backward()
    return logits.grad


@pytest.fixture(params=["pypi", pytest.param("a3", marks=pytest.mark.upstream)])
def actor_update(request, run_ranks):
    """actor_update(dtype, entropy_coeff, ranks): of every rank of this line; a3 without MindSpeed."""
    env, patches = {}, f"line={request.param},platform=cpu"
    if request.param == "a3":
        patches += ",-model.mindspeed_*"  # the model is not built
        env["PYTHONPATH"] = os.pathsep.join(map(str, request.getfixturevalue("a3_sources")("verl", "Megatron-LM")))

    return lambda *arguments, ranks: run_ranks(f"{JOB}:actor_update", *arguments, size=ranks, patches=patches, env=env)


@pytest.mark.parametrize("entropy_coeff", [0.0, 0.1])
def test_verls_actor_updates_with_ours(actor_update, entropy_coeff):
    ranks = actor_update(torch.float32, entropy_coeff, ranks=2)
    assert {rank["provider"] for rank in ranks} == {"verl_patches.model.log_prob"}
    found = torch.cat([rank["gradient"] for rank in ranks], dim=-1)
    torch.testing.assert_close(found.double(), loss_gradient(torch.float32, entropy_coeff), **FP32)


def test_without_the_rows_a_loss_with_entropy_fails(run_ranks):
    """On line pypi; MindSpeed's cross entropy leaves the logits as they are."""
    off = f"{PATCHES},-logprob.*in_chunks"
    (found,) = run_ranks(f"{JOB}:actor_update", torch.float32, 0.1, patches=off)
    assert "modified by an inplace operation" in found["error"]
