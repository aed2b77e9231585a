"""Search of layouts and the presets: what is listed passes an ordinary plan."""

import json

import pytest

from tests.runs import composed
from verl_patches.catalog import ROWS
from verl_patches.config.resolve import CONFIGS_DIR, LayoutError, changed
from verl_patches.errors import ConfigError
from verl_patches.layout.flops import balanced_layers
from verl_patches.planning import search as search_module
from verl_patches.planning.calibration import FITTED
from verl_patches.planning.memory_plan import LAYERS, MARGIN_BYTES, followed_peaks, recomputation, with_recompute
from verl_patches.planning.plan import build_plan
from verl_patches.planning.search import (
    A3_SEEN_BYTES,
    GRAPHS,
    rollout_keys,
    search,
    seats_keys,
    train_keys,
    with_any_layout,
)
from verl_patches.planning.step_plan import ENGINE_RATIO, Workload
from verl_patches.rules import RULES, SIZES
from verl_patches.spec import Trees

pytestmark = pytest.mark.slow  # plans of 16 to 384 ranks

BIG, TRUE_WEIGHT = "deepseekv3_256die_random_init", "deepseekv3_256die_true_weight"
ACTOR = "actor_rollout_ref.actor.megatron"
PRESETS = {"16": (16, 8), "64": (64, 32), "128": (128, 61), "384": (384, 61)}  # name: dies, layers


def plan_of(name, *overrides, workload=Workload()):  # noqa: B008 frozen
    run = composed(name, overrides)
    return build_plan(run, RULES.checks(run), name, overrides, ROWS, workload)


@pytest.fixture(scope="module")
def run():
    return composed(BIG)


def test_balanced_layers_leave_room_for_the_head(run):
    model = run.model
    assert balanced_layers(model, 8) == [8, 8, 8, 8, 8, 8, 7, 6]
    assert all(sum(balanced_layers(model, stages)) == 61 for stages in range(1, 17))


# search


@pytest.fixture(scope="module")
def found(run):
    return search(run, SIZES, 256, Workload(), top=4)


def test_what_is_listed_is_distinct_sorted_and_what_an_ordinary_plan_says(found):
    assert len({(row["train"], row["rollout"]) for row in found}) == len(found) == 4
    seconds = [row["total_s"] for row in found]
    assert seconds == sorted(seconds) and seconds[0] <= plan_of(BIG)["step"]["total_s"]
    row = found[-1]
    plan = plan_of(BIG, *row["overrides"])
    assert plan["ok"] and plan["step"]["total_s"] == row["total_s"] and plan["train"]["layout"] == row["train"]
    assert plan["step"]["phases"] == row["phases"] and plan["memory"]["hbm_bytes"] >= row["peak_bytes"]


def test_graphs_of_a_listed_layout_go_up_to_its_requests(run):
    name = TRUE_WEIGHT
    graphs = composed(name)
    assert seats_keys(graphs, 16)[GRAPHS] == [8, 16] and GRAPHS not in seats_keys(run, 16)
    row = search(graphs, SIZES, 128, Workload(), top=1)[0]
    assert f"{GRAPHS}=[8,16,32,64,128]" in row["overrides"]
    plan = plan_of(name, *row["overrides"])
    assert plan["ok"] and plan["step"]["total_s"] == row["total_s"]


def test_a_listed_layout_recomputes_as_few_layers_as_fit():
    layouts = search(composed("deepseekv3_128die"), SIZES, 128, Workload(), top=4)
    assert {row["recompute_layers"] for row in layouts} != {61}
    for row in layouts[:2]:
        listed = composed("deepseekv3_128die", row["overrides"])
        assert recomputation(listed)[0] == row["recompute_layers"]
        assert followed_peaks(listed)["peak_bytes"] == row["peak_bytes"] <= A3_SEEN_BYTES
        if row["update_bytes"] > A3_SEEN_BYTES - MARGIN_BYTES:  # only where a whole stage is recomputed already
            assert row["recompute_layers"][0] == listed.recipe.train.layers_per_stage[0]
        assert with_recompute(changed(listed, {LAYERS: "auto"})) == listed


@pytest.mark.parametrize(
    ("overrides", "changes"),
    [
        (["actor_rollout_ref.rollout.gpu_memory_utilization=0.99"], "gpu_memory_utilization=0.9"),
        ([f"{LAYERS}=0"], f"{LAYERS}=["),
        (["data.train_batch_size=500"], "data.train_batch_size=512"),
    ],
)
def test_a_config_whose_own_layout_fails_is_searched_too(overrides, changes):
    """Each override fails a plan; with what the search lists for the same command it passes."""
    name = TRUE_WEIGHT
    assert not plan_of(name, *overrides)["ok"]
    row = search(composed(name, overrides), SIZES, 256, Workload(), top=1)[0]
    assert any(changes in override for override in row["overrides"]), row["overrides"]
    plan = plan_of(name, *overrides, *row["overrides"])
    assert plan["ok"], [check for check in plan["checks"] if not check["ok"]]


def test_a_config_whose_ranks_cannot_be_split_is_searched_too():
    """What is listed goes over the configuration as it was given."""
    given = [f"{ACTOR}.pipeline_model_parallel_size=16"]
    with pytest.raises(LayoutError) as refused:
        composed(TRUE_WEIGHT, given)
    config = refused.value.config
    row = search(with_any_layout(config, ROWS, Trees()), SIZES, 256, Workload(), top=1, composed=config)[0]
    assert any(override.startswith(f"{ACTOR}.pipeline_model_parallel_size=") for override in row["overrides"])
    assert plan_of(TRUE_WEIGHT, *given, *row["overrides"])["ok"]


def test_a_check_that_every_layout_fails_is_named_soon():
    tried = []

    def rule(run):
        tried.append(run)
        return []

    override = "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=7"
    with pytest.raises(search_module.NoLayout, match="ref micro batch: .* is not a multiple of 7") as refused:
        search(composed(BIG, [override]), [rule, *SIZES], 256, Workload())
    assert refused.value.dies is None and len(tried) == 8


def test_an_illegal_or_too_large_layout_is_never_listed(run, monkeypatch):
    """The control: candidates that the estimates should have pruned, in front of one that fits."""
    layers = [7, 7, 8, 8, 8, 8, 8, 7]
    good = {**train_keys(4, 8, 32, layers), **rollout_keys(2, 256)}
    bad = [
        {**good, **train_keys(4, 8, 24, layers)},  # no layout
        {**good, **train_keys(3, 8, 32, layers)},
        {**good, **train_keys(4, 8, 32, [8] * 8)},  # 64 layers
        {**good, f"{ACTOR}.sequence_parallel": False},  # refused by the engine, also as the reference differs
        {**good, "recipe.train.swap_optimizer": False},  # 89.65 GB in rollout
        {**good, **rollout_keys(1, 8)},  # weights of 32 experts a die and more
    ]
    monkeypatch.setattr(search_module, "_best_pairs", lambda *_: [*bad, good])
    listed = search(run, SIZES, 256, Workload())
    assert [row["train"] for row in listed] == ["tp4 pp8 ep32 etp1 @256 layers=7,7,8,8,8,8,8,7"]
    monkeypatch.setattr(search_module, "_best_pairs", lambda *_: bad)
    with pytest.raises(ConfigError, match="none of 6 layouts for 256 dies passes a plan"):
        search(run, SIZES, 256, Workload())


@pytest.mark.parametrize(
    ("dies", "overrides", "message"),
    [
        (64, [], r"no layout of this model fits on 64 dies.*--dies 128 fits"),
        (100, [], "--dies is 100; expected a multiple of 16 from 16 to 1024"),
        (16, ["recipe.train.expert_split=etp"], "expected recipe.platform=npu and recipe.train.expert_split"),
    ],
)
def test_a_search_without_a_result_names_what_gives_one(dies, overrides, message):
    with pytest.raises(ConfigError, match=message):
        search(composed(BIG, overrides), SIZES, dies, Workload())


@pytest.mark.parametrize(("gib", "listed"), [(512, False), (800, True)])  # the workers of a node pin 771.5 GB
def test_a_layout_that_pins_more_than_a_node_has_is_not_listed(run, gib, listed):
    wanted = search_module._Search(run, SIZES, Workload(), run.verl)
    found = search_module._verified(wanted, {"recipe.memory.host_gib": gib})
    assert isinstance(found, dict) is listed


# presets


@pytest.mark.parametrize("name", PRESETS)
def test_presets_pass_the_plan(name):
    dies, layers = PRESETS[name]
    plan = plan_of(f"deepseekv3_{name}die")
    assert plan["ok"], [check for check in plan["checks"] if not check["ok"]]
    assert len(plan["train"]["ranks"]) == dies and sum(map(len, plan["train"]["layers"])) == layers
    seconds = [phase["seconds"] for phase in plan["step"]["phases"]]
    assert plan["step"]["modelled"] and plan["step"]["total_s"] == pytest.approx(sum(seconds), abs=0.02)


def test_the_first_layers_of_a_model_are_planned_as_a_model_of_only_these(tmp_path):
    config = json.loads((CONFIGS_DIR / "model" / "deepseekv3_671b.json").read_text()) | {"num_hidden_layers": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    cut, stages = plan_of(BIG, "recipe.num_hidden_layers=16"), "[4,2,2,2,2,2,1,1]"
    short = plan_of(BIG, f"recipe.model_shape={tmp_path / 'config.json'}", f"recipe.train.layers_per_stage={stages}")
    assert cut["ok"] and short["ok"] and plan_of(BIG)["step"]["total_s"] > 2 * cut["step"]["total_s"]
    for part in ("train", "rollout", "memory", "step", "traffic"):
        assert cut[part] == short[part] != plan_of(BIG)[part] or part == "rollout"


def test_a_plan_has_traffic_hosts_ports_and_the_watchs_bounds():
    plan = plan_of(BIG)
    sync = plan["traffic"]["weight_sync"]
    assert sync["received_mean_bytes"] == pytest.approx(24.95e9, rel=1e-3)  # as `reshard-plan`
    assert sync["sent_bytes"] == pytest.approx(32.87e9, rel=2e-3) and 60 <= sync["collectives"] <= 64
    assert plan["ports"]["all"] == [61000, 61143]
    sent, columns = plan["traffic"]["dispatch_bytes"], plan["traffic"]["dispatch_columns"]
    assert sent == {stage: sum(columns[stage].values()) for stage in ("generate", "place", "update")}
    assert sum(sent.values()) == pytest.approx(512 * 16 * 3072 * 3, rel=0.01)  # responses of full length
    assert sum(plan_of(TRUE_WEIGHT)["traffic"]["dispatch_bytes"].values()) < 0.03e9  # 995 tokens in the mean
    whole = plan_of(BIG, "recipe.tensor_cache.enabled=false")["traffic"]
    assert set(whole["dispatch_bytes"]) == {"ref", "update"} and whole["dispatch_columns"] == {}
    assert "modelled: rollout" in plan["step"]["watch"]
    assert "watch" not in plan_of(BIG, "recipe.watch.action=off")["step"]


def test_the_settings_of_the_published_run_give_its_rows_through_a_config():
    switches = "-reshard.*,-memory.order,-memory.ledger,-rollout.outputs_at_the_end,-rollout.steps_alike"
    published = (
        "recipe.tensor_cache.enabled=true",
        f"recipe.patches=[{switches},-rollout.ascend_dp_sync]",
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
    one_sync = plan_of(BIG, *published, f"recipe.patches=[{switches}]")["step"]  # of 3 ms a decode step
    assert step["total_s"] - one_sync["total_s"] == pytest.approx(0.003 * 3072, rel=0.01)
    less_host = plan_of(BIG, *published, "recipe.patches=[-reshard.*,-memory.order,-memory.ledger]")["step"]
    assert one_sync["total_s"] - less_host["total_s"] == pytest.approx(
        (1 - ENGINE_RATIO) * FITTED.engine_step_s * 3072, rel=0.01
    )
    apart = {phase["phase"]: phase["seconds"] for phase in less_host["phases"]}["rollout"] * 0.136  # not in total_s
    assert less_host["assumed"]["not_counted_s"] == pytest.approx(apart, rel=0.001)
    of_ascend = plan_of(BIG, *published, "recipe.rollout.ascend.scheduler=ascend")["step"]  # it schedules by itself
    assert less_host["assumed"]["engine_ratio"] == ENGINE_RATIO and of_ascend["assumed"]["engine_ratio"] == 1


LONGER = Workload(response_tokens=1650.0)  # 1588 tokens in the mean after the cut


@pytest.mark.parametrize(("name", "workload", "most_s"), [(BIG, Workload(), 740), (TRUE_WEIGHT, LONGER, 520)])
def test_a_256_die_step_is_within_its_bound_and_each_phase_leaves_the_margin(name, workload, most_s):
    """Controls: the bound rests on the assumed gain of the decode rows, and on recomputing few layers."""
    plan = plan_of(name, workload=workload)
    step, memory = plan["step"], plan["memory"]
    assert step["total_s"] == pytest.approx(sum(phase["seconds"] for phase in step["phases"]), abs=0.02)
    assert step["total_s"] <= most_s and step["assumed"]["engine_ratio"] == ENGINE_RATIO
    (followed,) = (order for order in memory["orders"] if order["order"] == memory["followed"])
    assert {phase["phase"] for phase in followed["phases"]} >= {"reshard", "rollout", "ref", "update"}
    for phase in followed["phases"]:
        assert phase["peak_bytes"] == sum(phase["bytes"].values()) <= memory["hbm_bytes"] - MARGIN_BYTES
    for override in ("recipe.patches=[-rollout.steps_alike]", f"{LAYERS}=8"):
        assert plan_of(name, override, workload=workload)["step"]["total_s"] > most_s


def test_a_plan_says_where_less_than_the_margin_is_left():
    """Control: auto leaves it."""
    of = {}
    for name, number in (("less", "[1,1,2,1,0,0,0,0]"), ("auto", "auto")):
        (of[name],) = (check for check in plan_of(BIG, f"{LAYERS}={number}")["checks"] if check["name"] == "memory")
    assert of["less"]["ok"] and of["less"]["note"] and "LESS THAN 5 GB" in of["less"]["detail"]
    assert of["auto"]["ok"] and not of["auto"]["note"] and "LESS" not in of["auto"]["detail"]


@pytest.mark.parametrize("values", [{"prompt_tokens": 0}, {"response_tokens": -1.0}, {"dp_sync": "mpi"}])
def test_a_workload_out_of_range_is_refused(values):
    with pytest.raises(ConfigError, match="expected"):
        Workload(**values)
