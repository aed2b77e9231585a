"""Test the search of layouts: it lists all and only layouts that pass an ordinary plan, with the same figures."""

import json
import re

import pytest

from tests.family import MOONLIGHT
from tests.runs import composed
from verl_patches.catalog import ROWS
from verl_patches.errors import ConfigError
from verl_patches.layout.flops import balanced_layers
from verl_patches.plan import search as search_module
from verl_patches.plan.memory_plan import LAYERS_KEY, MARGIN_BYTES, recomputation
from verl_patches.plan.plan import build_plan
from verl_patches.plan.search import ANY_LAYOUT_KEYS, GRAPHS_KEY, as_overrides, rollout_keys, search, train_keys
from verl_patches.plan.step_plan import Workload
from verl_patches.rules import RULES, SIZE_RULES
from verl_patches.run.resolve import MODEL_LAYERS_KEY

pytestmark = pytest.mark.slow  # plans of 16 to 384 ranks

BIG, TRUE_WEIGHT, NODE = "deepseekv3_256die_random_init", "deepseekv3_256die_true_weight", "deepseekv3_16die"
K2 = "kimi_k2_192die"
ACTOR = "actor_rollout_ref.actor.megatron"
A2 = ("recipe.hardware=800t_a2", "recipe.hccl.expansion_mode=HOST")


def make_plan(name, *overrides):
    run = composed(name, overrides)
    return build_plan(run, RULES.checks(run), name, overrides, ROWS)


def listed(name, *overrides, dies, top=1):
    """Return the rows of a search as the command starts it, over a layout that fits any number of ranks."""
    return search(composed(name, [*overrides, *as_overrides(ANY_LAYOUT_KEYS)]), SIZE_RULES, dies, Workload(), top)


def test_balanced_layers_leave_room_for_the_head():
    model = composed(BIG).model
    assert balanced_layers(model, 8) == [8, 8, 8, 8, 8, 8, 7, 6]
    assert all(sum(balanced_layers(model, stages)) == 61 for stages in range(1, 17))


def test_what_is_listed_is_distinct_sorted_and_what_an_ordinary_plan_says():
    given = "level=tuned", f"{GRAPHS_KEY}=[8,16,32,64]"
    found = listed(TRUE_WEIGHT, *given, dies=256, top=4)
    assert len({(row["train"], row["rollout"]) for row in found}) == len(found) == 4
    seconds = [row["total_s"] for row in found]
    assert seconds == sorted(seconds) and seconds[0] <= make_plan(TRUE_WEIGHT, *given)["step"]["total_s"]
    row = found[0]
    overrides = given[0], *row["overrides"]
    plan, run = make_plan(TRUE_WEIGHT, *overrides), composed(TRUE_WEIGHT, overrides)
    assert plan["ok"] and plan["step"]["phases"] == row["phases"] and plan["train"]["layout"] == row["train"]
    assert recomputation(run)[0] == row["recompute_layers"] and f"{GRAPHS_KEY}=[8,16,32,64,128]" in row["overrides"]
    assert max(row["peak_bytes"] for row in found) <= plan["memory"]["hbm_bytes"] - MARGIN_BYTES


@pytest.mark.parametrize(
    ("override", "changes"),
    [
        (f"{ACTOR}.pipeline_model_parallel_size=7", f"{ACTOR}.pipeline_model_parallel_size="),  # ranks are not split so
        (f"{LAYERS_KEY}=0", f"{LAYERS_KEY}="),
        ("data.train_batch_size=500", "data.train_batch_size=512"),
    ],
)
def test_a_config_whose_own_layout_fails_is_searched_too(override, changes):
    """Search for configs whose override a plan refuses; with a listed layout the plan passes."""
    with pytest.raises(ConfigError):
        assert not make_plan(TRUE_WEIGHT, override)["ok"]
        raise ConfigError("the plan has a check that failed")
    (row,) = listed(TRUE_WEIGHT, override, dies=256)
    assert any(each.startswith(changes) for each in row["overrides"]), row["overrides"]
    assert make_plan(TRUE_WEIGHT, override, *row["overrides"])["ok"]


def test_a2_is_ordered_by_traffic_without_seconds_in_instances_that_its_exchange_of_experts_takes():
    rows = listed(TRUE_WEIGHT, *A2, dies=256, top=3)
    assert all(row["peak_bytes"] <= composed(TRUE_WEIGHT, A2).hardware.seen_bytes - MARGIN_BYTES for row in rows)
    sent = [row["sent_bytes"] for row in rows]
    assert sent == sorted(sent) and all(row["total_s"] is row["phases"] is None for row in rows)
    assert rows[0]["rollout"].startswith("4 x (DP") and rows[0]["rollout"].endswith("EP64)")
    plan = make_plan(TRUE_WEIGHT, *A2, *rows[0]["overrides"])
    assert plan["ok"] and plan["step"] is None and sum(plan["traffic"]["sent"].values()) == sent[0]
    assert "trainer.nnodes=32" in rows[0]["overrides"] and "trainer.n_gpus_per_node=8" in rows[0]["overrides"]


def test_an_illegal_or_too_large_layout_is_never_listed(monkeypatch):
    """Check with a control: candidates that plan worse than they cost, in front of one that fits."""
    run, layers = composed(BIG), [7, 7, 8, 8, 8, 8, 8, 7]
    good = train_keys(4, 8, 32, layers)
    bad = [
        train_keys(4, 8, 24, layers),  # no layout
        train_keys(4, 8, 32, [8] * 8),  # 64 layers
        {**good, f"{ACTOR}.sequence_parallel": False},  # refused by the engine, also as the reference differs
        {**good, "recipe.train.swap_optimizer": False},  # 89.65 GB in rollout
    ]
    monkeypatch.setattr(search_module, "_rollout_sides", lambda *_: [(0.0, rollout_keys(2, 256))])
    monkeypatch.setattr(search_module, "_train_sides", lambda *_: list(enumerate([*bad, good])))
    (row,) = search(run, SIZE_RULES, 256, Workload())
    assert row["train"] == "tp4 pp8 ep32 etp1 @256 layers=7,7,8,8,8,8,8,7"
    monkeypatch.setattr(search_module, "_train_sides", lambda *_: list(enumerate(bad)))
    with pytest.raises(ConfigError, match="no layout for 256 dies passes a plan; most are refused by "):
        search(run, SIZE_RULES, 256, Workload())


def test_several_instances_are_proposed_where_no_power_of_two_holds_the_weights(monkeypatch):
    """Search Kimi-K2 on 192 dies; with the control, the cheapest pair alone, which a weight sync's memory refuses."""
    rows = listed(K2, "level=tuned", dies=192, top=12)
    row = next(row for row in rows if row["rollout"] == "3 x (DP8 TP8 EP64)")
    assert make_plan(K2, "level=tuned", *row["overrides"])["ok"]
    monkeypatch.setattr(search_module, "_MOST_PAIRS", 1)
    with pytest.raises(ConfigError, match="memory: .*reshard: die"):
        listed(K2, "level=tuned", dies=192)


def test_a_search_without_a_result_names_the_reason():
    message = "no layout for 16 dies .* memory: .*; use more dies, or fewer layers .recipe.num_hidden_layers"
    with pytest.raises(ConfigError, match=message):
        search(composed(BIG, ["level=tuned"]), SIZE_RULES, 16, Workload())


@pytest.mark.parametrize(("gib", "fits"), [(512, False), (1024, True)])  # pinned and processes: 943 GB of 95 %
def test_a_layout_that_pins_more_than_a_node_has_is_not_listed(gib, fits):
    run = composed(BIG, [f"recipe.memory.host_gib={gib}"])
    try:
        assert search_module._plan_candidate(run, SIZE_RULES, Workload(), {}) and fits
    except ConfigError as error:
        assert "host memory" in str(error) and not fits


def test_a_model_that_mc2_does_not_take_is_searched_without_expert_parallelism(tmp_path):
    """Check Moonlight on a node of A3: with expert parallelism the search says what to set, and nothing is listed."""
    shape = tmp_path / "moonlight.json"
    shape.write_text(json.dumps(MOONLIGHT))
    moonlight = f"recipe.model_shape={shape}", f"{MODEL_LAYERS_KEY}=27"
    with pytest.raises(ConfigError, match="hidden size is 2048, MC2 allows 7168: set .*") as refused:
        listed(NODE, *moonlight, dies=16)
    advice = re.findall(r"recipe\.[\w.]+=\w+", str(refused.value))
    assert make_plan(NODE, *moonlight, "recipe.train.layers_per_stage=[14,13]", *advice)["ok"]
    (row,) = listed(NODE, *moonlight, "recipe.rollout.enable_expert_parallel=false", dies=16)
    assert row["rollout"] == "16 x (DP1 TP1 EP1)" and "recipe.rollout.data_parallel_size=1" in row["overrides"]


def test_instances_that_do_not_split_experts_fill_the_dies():
    for nodes in (1, 3):
        run = composed("moonlight_8die", [f"trainer.nnodes={nodes}", *as_overrides(ANY_LAYOUT_KEYS)])
        sides = search_module._rollout_sides(run, Workload(), [])
        found = [size for _, keys in sides for key, size in keys.items() if key.endswith("tensor_model_parallel_size")]
        assert found == [1, 2, 4, 8]
    (row,) = listed("moonlight_8die", dies=8)
    assert make_plan("moonlight_8die", *row["overrides"])["ok"]
