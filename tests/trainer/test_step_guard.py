"""Test steps with NaN or infinite gradients: left out on all ranks, counted and named."""

import math
import os
from types import SimpleNamespace

import pytest
import torch

from verl_patches.worker.step_guard import parameter_names, take_all_skips

NAN, INF = float("nan"), float("inf")
STEPS = [None, (1, "dense1", NAN), None, (0, "expert", INF), (1, "dense3", -INF), None]


@pytest.fixture(scope="module", params=["pypi", "a3"])
def ranks(request, run_ranks, a3_sources):
    """Return the findings of two ranks, [kind of optimizer] -> [rank]."""
    env, off = None, ""
    if request.param == "a3":
        env = {"PYTHONPATH": os.pathsep.join(map(str, a3_sources("verl", "Megatron-LM")))}
        off = ",-update.engine_start"  # without MindSpeed
    patches = f"line={request.param},platform=cpu{off}"
    found = run_ranks("tests.trainer.step_guard_job:found", 2, STEPS, size=2, patches=patches, env=env)
    return {kind: [rank[kind] for rank in found] for kind in found[0]}


@pytest.mark.slow
def test_bad_steps_are_left_out_on_all_ranks_and_good_ones_are_megatrons(ranks):
    for rank in (rank for kind in ranks.values() for rank in kind):
        assert [step["moved"] for step in rank["steps"]] == [bad is None for bad in STEPS]
        assert [math.isfinite(step["norm"]) for step in rank["steps"]] == [bad is None for bad in STEPS]
        assert [step["skipped"] for step in rank["steps"]] == [0, 1, 0, 1, 1, 0]
        assert [step["in_a_row"] for step in rank["steps"]] == [0, 1, 0, 1, 2, 0]
        assert all(step["done"] for step in rank["steps"]) and rank["equal"]
        assert (rank["within a step"]["skipped"], rank["within a step"]["in_a_row"]) == (3, 3)
        assert rank["spoilt without the guard"]  # negative control


@pytest.mark.slow
def test_the_rank_and_the_parameter_are_named(ranks):
    for kind in ranks.values():
        for number, bad in enumerate(STEPS):
            faults = [rank["steps"][number]["fault"] for rank in kind]
            expected = [None, None]
            if bad is not None:
                expected[bad[0]] = {"parameters": 1, "nearest": bad[1]}
            assert faults == expected


@pytest.mark.slow
def test_without_clipping_the_guard_asks_for_the_norm_itself(run_ranks):
    found = run_ranks(
        "tests.trainer.step_guard_job:found", 1, [None, (0, "dense0", NAN)], 0.0, patches="line=pypi,platform=cpu"
    )
    assert [[step["moved"] for step in kind["steps"]] for kind in found[0].values()] == [[True, False]] * 4


def test_layers_are_named_by_their_place_in_the_whole_model():
    layer, model, decoder, chunk = (torch.nn.Module() for _ in range(4))
    layer.layer_number, layer.mlp = 6, torch.nn.Linear(2, 2, bias=False)
    chunk.module, model.decoder, decoder.layers = torch.nn.Module(), decoder, torch.nn.ModuleList([layer])
    chunk.module.module, model.output_layer = model, torch.nn.Linear(2, 2, bias=False)
    assert list(parameter_names(chunk).values()) == ["decoder.layers.5.mlp.weight", "output_layer.weight"]


def test_the_guards_of_a_process_report_together():
    def guard(skipped, nearest):
        fault = nearest and {"parameters": 1, "nearest": nearest}
        taken = {"skipped": skipped, "in_a_row": skipped, "stage": 1, "fault": fault}
        return SimpleNamespace(take_skips=lambda: taken)

    critic, actor = guard(2, "critic decoder.w"), guard(1, "decoder.w")
    found = {"skipped": 3, "in_a_row": 2, "stage": 1, "fault": {"parameters": 1, "nearest": "critic decoder.w"}}
    assert take_all_skips([critic, actor]) == found and take_all_skips([]) is None
    assert take_all_skips([guard(0, None), actor]) == actor.take_skips()
