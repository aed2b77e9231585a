"""Test the destination map of vLLM's own DeepSeek-V3, rank by rank (vllm_ranks.py); tests/loop has whole engines.

test_destination.py has loaders that no map can follow.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from verl_patches.layout.inventory import build_inventory
from verl_patches.layout.parallel import rollout_layout

pytestmark = pytest.mark.slow

TINY = json.loads((Path(__file__).parents[2] / "configs" / "model" / "deepseekv3_tiny.json").read_text())
WIDE = TINY | {"n_routed_experts": 256, "n_group": 8}


def _case(config=TINY, instances=1, dp=1, tp=1, expert_parallel=True, ranks=None, planned=None):
    sizes = {"instances": instances, "dp": dp, "tp": tp, "expert_parallel": expert_parallel}
    ranks = ranks or list(range(instances * dp * tp))
    return {"config": config, "ranks": ranks, "planned": planned or {}, **sizes}


RIGHT = {
    "tp1": _case(),
    "tp2": _case(tp=2, expert_parallel=False),
    "tp2 ep": _case(tp=2),
    "dp2 ep": _case(dp=2),
    "2 x dp2 tp2 ep": _case(instances=2, dp=2, tp=2, ranks=[0, 3, 6]),
    "dp2 tp2 without ep": _case(dp=2, tp=2, expert_parallel=False),
    "no q_lora tp2": _case(TINY | {"q_lora_rank": None}, tp=2),
    "two shared tp2": _case(TINY | {"n_shared_experts": 2}, tp=2),
    "padded words tp4": _case(TINY | {"vocab_size": 400}, tp=4),
    "ep3": _case(dp=3),
    "2 x dp64 tp2 ep": _case(WIDE, instances=2, dp=64, tp=2, ranks=[131]),
}
OTHER = {
    "planned for tp2": _case(dp=2, ranks=[1], planned={"dp": 1, "tp": 2}),
    "planned for vllm-ascend": _case(tp=2, ranks=[0], planned={"library": "vllm-ascend"}),
}
CASES = RIGHT | OTHER


@pytest.fixture(scope="module")
def learnt(run_ranks):
    env = {"VERL_PATCHES": "line=pypi,platform=cpu"}
    return run_ranks("tests.reshard.vllm_ranks:learn_cases", CASES, env=env, backend=None)[0]


@pytest.mark.parametrize("name", RIGHT)
def test_written_through_the_map_is_what_load_weights_writes(name, learnt):
    assert [row["rank"] for row in learnt[name]] == CASES[name]["ranks"]
    for row in learnt[name]:
        assert row["touched"] == row["differ"] == row["plan"] == row["dtypes"] == []
        assert row["mapped"] > 0


@pytest.mark.parametrize("name", RIGHT)
def test_groups_and_instances_are_vllms(name, learnt):
    case = CASES[name]
    layout = rollout_layout(*(case[size] for size in ("instances", "dp", "tp", "expert_parallel")))
    for row in learnt[name]:
        rank, groups = row["rank"], row["groups"]
        for group, ours in {"tp": "tp", "dp": "instance-dp", "ep": "ep"}.items():
            if group != "ep" or case["expert_parallel"]:
                assert groups[group] in layout.groups(ours) and rank in groups[group], group
        assert set(groups["ep"]) <= set(layout.groups("instance")[layout.coordinates(rank).edp])


def test_another_plan_is_noticed(learnt):
    assert "model.embed_tokens.weight" in learnt["planned for tp2"][0]["plan"]
    unlike = learnt["planned for vllm-ascend"][0]["plan"]
    assert unlike and all(".shared_experts." in name for name in unlike)


def test_counts_of_mapped_tensors(learnt):
    """Check the counts: vLLM gives the last of three ranks the rest of 16 experts, one more in each of three layers."""
    assert learnt["tp1"][0]["mapped"] == len(build_inventory(TINY).parameters)
    first, second, last = (row["mapped"] for row in learnt["ep3"])
    assert first == second == last - 3 * 3


def test_padding_is_a_constant(learnt):
    """Check a vocabulary of 400, padded to 448, 112 a rank: the last has 64 and 48 zero rows in embedding and head."""
    rows = learnt["padded words tp4"]
    assert [row["constants"] for row in rows] == [[]] * 3 + [[[0, [48, TINY["hidden_size"]]]] * 2]


def test_a_transposed_expert_would_be_seen(learnt):
    for row in learnt["tp1"]:
        assert [name.endswith("mlp.experts.w13_weight") for name in row["transposed"]] == [True]
