"""Search of layouts, changes that mend a refusal, and the presets: what is offered passes an ordinary plan."""

import pytest
from omegaconf import OmegaConf

from verl_patches.catalog import ROWS
from verl_patches.config.checks import Check
from verl_patches.config.compose import compose, model_shape_of
from verl_patches.errors import ConfigError
from verl_patches.planning import search as search_module
from verl_patches.planning.plan import build_plan, patch_table
from verl_patches.planning.remedies import remedies
from verl_patches.planning.search import (
    GRAPHS,
    as_overrides,
    balanced_layers,
    changed,
    rollout_keys,
    search,
    seats_keys,
    train_keys,
)
from verl_patches.planning.step_plan import Workload
from verl_patches.upstream.checkouts import trees_of

pytestmark = pytest.mark.slow  # plans of 16 to 384 ranks

BIG = "grpo_deepseekv3_256die_random_init"
ACTOR = "actor_rollout_ref.actor.megatron"
PRESETS = {"16": (16, 8), "64": (64, 32), "128": (128, 61), "384": (384, 61)}  # name: dies, layers
TREES = trees_of(None, None)


def rows_on(config):
    return [row["id"] for row in patch_table(config, ROWS) if row["on"]]


def plan_of(name, *overrides):
    return build_plan(compose(name, overrides), name, overrides, ROWS, TREES)


@pytest.fixture(scope="module")
def config():
    return compose(BIG)


@pytest.fixture(scope="module")
def rows(config):
    return rows_on(config)


def test_a_changed_config_is_the_one_that_is_composed_with_the_same_overrides(config):
    updates = {
        "trainer.nnodes": 8,
        **train_keys(1, 16, 8, balanced_layers(model_shape_of(config), 16)),
        **rollout_keys(4, 128),
        search_module.SEATS: 128,
        "recipe.train.swap_optimizer": False,
    }
    before = OmegaConf.to_yaml(config)
    assert changed(config, updates) == compose(BIG, as_overrides(updates))
    assert OmegaConf.to_yaml(config) == before
    assert changed(config, {"recipe.rollout.dp": 64}) != compose(BIG, ["recipe.rollout.dp=32"])


def test_balanced_layers_leave_room_for_the_head(config):
    model = model_shape_of(config)
    assert balanced_layers(model, 8) == [8, 8, 8, 8, 8, 8, 7, 6]
    assert all(sum(balanced_layers(model, stages)) == 61 for stages in range(1, 17))


# search


@pytest.fixture(scope="module")
def found(config, rows):
    return search(config, rows, 256, Workload(), top=4)


def test_what_is_listed_is_distinct_sorted_and_faster_than_the_config(found):
    assert len({(row["train"], row["rollout"]) for row in found}) == len(found) == 4
    seconds = [row["total_s"] for row in found]
    assert seconds == sorted(seconds) and seconds[0] <= plan_of(BIG)["step"]["total_s"]


def test_a_listed_layout_is_what_an_ordinary_plan_of_its_overrides_says(found):
    row = found[-1]
    plan = plan_of(BIG, *row["overrides"])
    assert plan["ok"] and plan["step"]["total_s"] == row["total_s"] and plan["train"]["layout"] == row["train"]
    assert plan["step"]["phases"] == row["phases"] and plan["memory"]["hbm_bytes"] >= row["peak_bytes"]


def test_graphs_of_a_listed_layout_go_up_to_its_requests(rows):
    name = "grpo_deepseekv3_256die_true_weight"
    config = compose(name)
    assert seats_keys(config, 16)[GRAPHS] == [8, 16] and GRAPHS not in seats_keys(compose(BIG), 16)
    row = search(config, rows, 128, Workload(), top=1)[0]
    assert f"{GRAPHS}=[8,16,32,64,128]" in row["overrides"]
    plan = plan_of(name, *row["overrides"])
    assert plan["ok"] and plan["step"]["total_s"] == row["total_s"]


def test_too_many_requests_are_mended_with_their_graphs():
    name, override = "grpo_deepseekv3_256die_true_weight", "actor_rollout_ref.rollout.max_num_batched_tokens=32"
    plan = plan_of(name, override)
    offered = remedies(compose(name, [override]), [Check(**c) for c in plan["checks"]])
    remedy = next(remedy["overrides"] for remedy in offered if remedy["check"] == "max_num_seqs")
    assert f"{GRAPHS}=[8,16,32]" in remedy and plan_of(name, override, *remedy)["ok"]


def test_an_illegal_or_too_large_layout_is_never_listed(config, rows, monkeypatch):
    """The control: candidates that the estimates should have pruned, in front of one that fits."""
    layers = [7, 7, 8, 8, 8, 8, 8, 7]
    good = {**train_keys(4, 8, 32, layers), **rollout_keys(2, 256)}
    bad = [
        {**good, **train_keys(4, 8, 24, layers)},  # no layout
        {**good, **train_keys(3, 8, 32, layers)},
        {**good, **train_keys(4, 8, 32, [8] * 8)},  # 64 layers
        {**good, f"{ACTOR}.sequence_parallel": False},  # refused by the engine, also as the reference differs
        {**good, "recipe.train.swap_optimizer": False},  # 89.65 GB
        {**good, **rollout_keys(1, 8)},  # weights of 32 experts a die and more
    ]
    monkeypatch.setattr(search_module, "_best_pairs", lambda *_: iter([*bad, good]))
    listed = search(config, rows, 256, Workload())
    assert [row["train"] for row in listed] == ["tp4 pp8 ep32 etp1 @256 layers=7,7,8,8,8,8,8,7"]
    monkeypatch.setattr(search_module, "_best_pairs", lambda *_: iter(bad))
    with pytest.raises(ConfigError, match="no layout of this model fits"):
        search(config, rows, 256, Workload())


@pytest.mark.parametrize(
    ("dies", "overrides", "message"),
    [
        (64, [], r"no layout of this model fits on 64 dies.*--dies 128 fits"),
        (100, [], "--dies is 100; expected a multiple of 16 from 16 to 1024"),
        (1024, [], "data.train_batch_size is 512; expected a multiple of 1024.*data.train_batch_size=1024"),
        (16, ["recipe.train.expert_split=etp"], "expected recipe.platform=npu and recipe.train.expert_split"),
    ],
)
def test_a_search_without_a_result_names_what_gives_one(rows, dies, overrides, message):
    with pytest.raises(ConfigError, match=message):
        search(compose(BIG, overrides), rows, dies, Workload())


def test_the_search_finds_a_layout_with_what_its_refusal_names(rows):
    batch = ["data.train_batch_size=1024", "actor_rollout_ref.actor.ppo_mini_batch_size=1024"]
    assert len(search(compose(BIG, batch), rows, 1024, Workload(), top=1)) == 1


@pytest.mark.parametrize(("gib", "listed"), [(512, False), (800, True)])  # the workers of a node pin 771.5 GB
def test_a_layout_that_pins_more_than_a_node_has_is_not_listed(config, rows, gib, listed):
    found = search_module._verified(config, rows, {"recipe.memory.host_gib": gib}, Workload())
    assert (found is not None) is listed


# refusals


@pytest.mark.parametrize(
    ("override", "check"),
    [
        ("recipe.train.layers_per_stage=[8,8,8,8,8,8,8,7]", "layers"),
        (f"{ACTOR}.pipeline_model_parallel_size=7", "train layout"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=3", "rollout layout"),
        ("data.train_batch_size=500", "prompts"),
        ("recipe.hccl.buffer_mib=100", "HCCL buffer"),
        (f"{ACTOR}.sequence_parallel=false", "engine arguments"),
        ("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=7", "ref micro batch"),
        ("recipe.train.routing_replay=R3", "routing replay"),
    ],
)
def test_a_refusal_names_a_change_that_works(override, check):
    plan = plan_of(BIG, override)
    assert not plan["ok"] and check in {c["name"] for c in plan["checks"] if not c["ok"]}
    offered = remedies(compose(BIG, [override]), [Check(**c) for c in plan["checks"]])
    remedy = next(remedy["overrides"] for remedy in offered if remedy["check"] == check)
    mended = plan_of(BIG, override, *remedy)
    assert mended["ok"], [c for c in mended["checks"] if not c["ok"]]


def test_each_change_that_is_offered_mends_all_where_one_does():
    override = "data.train_batch_size=500"  # two checks fail
    plan = plan_of(BIG, override)
    offered = remedies(compose(BIG, [override]), [Check(**c) for c in plan["checks"]])
    assert {remedy["check"] for remedy in offered} == {"prompts", "mini batch", "on policy"}
    assert all(plan_of(BIG, override, *remedy["overrides"])["ok"] for remedy in offered)


def test_nothing_is_offered_where_nothing_is_refused(config):
    assert remedies(config, [Check("layers", True, "")]) == []


# presets


@pytest.mark.parametrize("name", PRESETS)
def test_presets_pass_the_plan(name):
    dies, layers = PRESETS[name]
    plan = plan_of(f"grpo_deepseekv3_{name}die")
    assert plan["ok"], [check for check in plan["checks"] if not check["ok"]]
    assert len(plan["train"]["ranks"]) == dies and sum(map(len, plan["train"]["layers"])) == layers
    assert plan["step"]["modelled"] and plan["step"]["total_s"] == pytest.approx(
        sum(phase["seconds"] for phase in plan["step"]["phases"]), abs=0.02
    )


def test_a_plan_has_the_bounds_of_the_watch_unless_it_is_off():
    text = plan_of(BIG)["step"]["watch"]
    assert "modelled: rollout" in text and text.endswith("of a rank that waits for another in a process group: 864 s")
    assert "watch" not in plan_of(BIG, "recipe.watch.action=off")["step"]


def test_a_plan_has_traffic_hosts_and_ports():
    plan = plan_of(BIG)
    sync = plan["traffic"]["weight_sync"]
    assert sync["received_mean_bytes"] == pytest.approx(24.95e9, rel=1e-3)  # as `reshard-plan`
    assert sync["sent_bytes"] == pytest.approx(32.87e9, rel=2e-3) and 60 <= sync["collectives"] <= 64
    assert plan["memory"]["host"]["node_bytes"] > 700e9
    assert plan["ports"]["all"] == [61000, 61143]
    assert set(plan["traffic"]["dispatch_bytes"]) == {"ref", "update"}


def test_the_settings_of_the_published_run_give_its_rows_through_a_config():
    published = (
        "recipe.tensor_cache.enabled=true",
        "recipe.patches=[-reshard.*,-memory.order*]",
        "recipe.rollout.ascend.vllm_sleep_mode=true",
        "recipe.rollout.ascend.prefix_caching=false",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.model.gradient_checkpointing_kwargs.activations_checkpoint_num_layers=4",
    )
    step = plan_of(BIG, *published)["step"]
    seconds = {phase["phase"]: phase["seconds"] for phase in step["phases"]}
    quoted = {"rollout": 318.27, "ref": 104.7, "update": 328.8, "reshard": 11.18, "offload": 24.45}
    assert all(seconds[phase] == pytest.approx(value, rel=0.03) for phase, value in quoted.items()), seconds
    assert step["total_s"] == pytest.approx(801.29, rel=0.05)


def test_a_cpu_config_has_a_plan_without_seconds():
    plan = plan_of("grpo_deepseekv3_tiny_cpu")
    assert plan["step"] is None and plan["ports"] is None


@pytest.mark.parametrize("values", [{"prompt_tokens": 0}, {"response_tokens": -1.0}, {"dp_sync": "mpi"}])
def test_a_workload_out_of_range_is_refused(values):
    with pytest.raises(ConfigError, match="expected"):
        Workload(**values)
