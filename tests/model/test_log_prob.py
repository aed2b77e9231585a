"""Test model/log_prob.py, as verl's actor calls it, against the plain formula in float64, at TP 1 and 2."""

import os

import pytest
import torch

from tests.model.log_prob_job import CASES

PATCHES = "line=pypi,platform=cpu"
JOB = "tests.model.log_prob_job"
# fp32 results: 1e-6 absolute or relative (near 12 nats one fp32 step is 1e-6); a bf16 gradient is rounded once
FP32, BF16 = {"rtol": 1e-6, "atol": 1e-6}, {"rtol": 2**-8, "atol": 1e-6}


@pytest.fixture(
    scope="module", params=[("pypi", 1), ("pypi", 2), pytest.param(("a3", 2), marks=pytest.mark.upstream)], ids=str
)
def found(request, run_ranks):
    """Return each rank's findings; line a3 is without MindSpeed."""
    line, size = request.param
    if line == "pypi":
        return run_ranks(f"{JOB}:answers", size=size, patches=PATCHES)
    sources = request.getfixturevalue("a3_sources")("verl", "Megatron-LM")
    patches, env = "line=a3,platform=cpu,-model.mindspeed_*", {"PYTHONPATH": os.pathsep.join(map(str, sources))}
    return run_ranks(f"{JOB}:answers", size=size, patches=patches, env=env)


def faults(case, ranks, name):
    """Return the names of results that differ from the formula's on one of the ranks."""
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
    assert "modified by an inplace operation" in found["entropy_after_log_probs"]  # an error, not a wrong gradient
    assert found["graph"] == [False, False] and found["same_if_strided"]


def test_without_the_rows_a_loss_with_entropy_fails(run_ranks):
    """Check on line pypi; MindSpeed's cross entropy leaves the logits as they are."""
    (error,) = run_ranks(f"{JOB}:both_in_the_loss", patches=f"{PATCHES},-logprob.*in_chunks")
    assert "modified by an inplace operation" in error
