"""Test that step 1 of SFT and DPO is transformers' at layouts that split tensors, experts, stages; EP2: tests/loop."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import logsigmoid

from tests.model.mindspeed_start import LAYOUTS
from tests.model.objective_job import DPO_OVERRIDES, SHIFTS
from tests.model.parity import RESPONSE_START, SAMPLES
from tests.model.test_value import SIZES

pytestmark = pytest.mark.slow
A3 = {"pp2": "pp2_uneven", "tp2ep2": "tp2_extends_ep"}
BETA = 0.1


@pytest.fixture(scope="module", params=["pypi", pytest.param("a3", marks=pytest.mark.upstream)])
def found(request, reference, run_ranks):
    """Return {layout: each rank's findings}."""
    if request.param == "pypi":
        options = {"size": 2, "backend": "nccl", "patches": "line=pypi,platform=cpu"}
        cases = {name: SIZES[name] for name in A3}
        ranks = run_ranks("tests.model.objective_job:layouts_job", reference["folder"], cases, **options)
        return {name: [rank[name] for rank in ranks] for name in A3}
    run = request.getfixturevalue("run_a3")
    return {name: run("objective_job:a3_job", LAYOUTS[layout], more=DPO_OVERRIDES) for name, layout in A3.items()}


@pytest.fixture(scope="module")
def peer(reference, tiny_model):
    """Return peer(objective, shifts of the reference) -> (loss, gradient norm) by transformers' DeepSeek-V3."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, torch_dtype=torch.float32)
    ids, mask, _ = torch.load(reference["folder"] / "batch.pt")

    def first_step(objective, shifts=SHIFTS):
        sums, counts = [], mask[:, RESPONSE_START:].sum(1)
        for row, real, count in zip(ids, mask, counts, strict=True):
            every = model(row[real][None], use_cache=False).logits[0, -count - 1 : -1].log_softmax(-1)
            sums.append(every.gather(-1, row[real][-count:, None]).sum())
        rows = torch.arange(SAMPLES) % len(ids)
        log_probs = torch.stack(sums)[rows]
        if objective == "sft":
            loss = -log_probs.sum() / counts[rows].sum()
        else:
            ratios = log_probs - log_probs.detach() - shifts
            loss = -logsigmoid(BETA * (ratios[::2] - ratios[1::2])).mean()
        model.zero_grad()
        loss.backward()
        squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
        return loss.item(), math.sqrt(sum(map(float, squares)))

    return first_step


@pytest.mark.parametrize("objective", ["sft", "dpo"])
def test_the_first_step_is_that_of_transformers_at_every_layout(found, peer, objective):
    loss, norm = peer(objective)
    for layout, ranks in found.items():
        for rank in ranks:
            assert rank[objective] == (pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-5)), layout


def test_a_reference_that_is_the_policy_has_another_gradient(found, peer):
    """Check as a negative control that the gradient depends on the reference's log-probs."""
    _, norm = peer("dpo", torch.zeros(SAMPLES))
    assert all(rank["dpo"][1] != pytest.approx(norm, rel=1e-2) for ranks in found.values() for rank in ranks)
