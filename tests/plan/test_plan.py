"""Test a plan: its figures, bytes on disks, the presets, and its exit."""

import json
import math
import shlex

import pytest
from typer.testing import CliRunner

from tests.runs import composed
from verl_patches.__main__ import app
from verl_patches.catalog import ROWS
from verl_patches.plan.memory_plan import LAYERS_KEY, MARGIN_BYTES
from verl_patches.plan.plan import build_plan
from verl_patches.plan.step_plan import Workload
from verl_patches.rules import RULES
from verl_patches.run.resolve import CONFIGS_DIR

pytestmark = pytest.mark.slow  # plans of 16 to 384 ranks

BIG, TRUE_WEIGHT, NODE = "deepseekv3_256die_random_init", "deepseekv3_256die_true_weight", "deepseekv3_16die"
PRESETS = {  # name: dies, layers
    **{f"deepseekv3_{dies}die": (dies, layers) for dies, layers in ((16, 8), (64, 32), (128, 61), (384, 61))},
    "deepseekv3_256die_16k": (256, 61),
    **{f"moonlight_{dies}die": (dies, 27) for dies in (8, 16, 32)},
    "moonlight_32die_8k": (32, 27),
    **{f"kimi_k2_{dies}die": (dies, 61) for dies in (192, 256)},
}


def make_plan(name, *overrides, workload=Workload()):  # noqa: B008 frozen
    run = composed(name, overrides)
    return build_plan(run, RULES.checks(run), name, overrides, ROWS, workload)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_pass_the_plan(name):
    dies, layers = PRESETS[name]
    plan = make_plan(name)
    assert plan["ok"], [check for check in plan["checks"] if not check["ok"]]
    assert f"@{dies}" in plan["train"]["layout"] and sum(map(len, plan["train"]["layers"])) == layers
    assert all("LESS THAN" not in check["detail"] for check in plan["checks"])  # 5 GB are left
    if plan["step"] is None:  # A2 has no seconds
        assert composed(name).recipe.hardware == "800t_a2"
        return
    seconds = [phase["seconds"] for phase in plan["step"]["phases"]]
    assert plan["step"]["modelled"] and plan["step"]["total_s"] == pytest.approx(sum(seconds), abs=0.02)


@pytest.mark.parametrize("name", [name for name in PRESETS if not name.startswith("deepseekv3")])
def test_presets_of_the_family_pass_the_plan_for_sft_too(name):
    assert make_plan(name, "algo=sft")["ok"] and composed(name).recipe.trust_remote_code


def test_responses_beyond_the_models_positions_are_refused():
    long = "data.max_response_length=16384"
    (fault,) = (check for check in make_plan("moonlight_32die_8k", long)["checks"] if not check["ok"])
    assert fault["name"] == "lengths" and "17408 tokens; expected at most the model's 8192" in fault["detail"]


def test_context_parallelism_halves_the_tokens_of_a_rank():
    """Compare the activations of an update with all layers recomputed at CP1 and CP2."""
    found = []
    for cp in (1, 2):
        key = "actor_rollout_ref.actor.megatron.context_parallel_size"
        plan = make_plan("deepseekv3_256die_16k", f"{key}={cp}", f"{LAYERS_KEY}=8")
        (update,) = (phase["bytes"] for phase in plan["memory"]["phases"] if phase["phase"] == "update")
        found.append(update["kept_activations"] + update["working_activations"])
    assert found[0] == pytest.approx(2 * found[1], rel=0.01)


@pytest.mark.parametrize("level", ["safe", "tuned"])
@pytest.mark.parametrize("name", [NODE, BIG, TRUE_WEIGHT])
def test_other_levels_pass_the_plan_too(name, level):
    """Check also that each level is modelled to be faster than the one before."""
    plan, reference = make_plan(name, f"level={level}"), make_plan(name)
    assert plan["ok"], [check for check in plan["checks"] if not check["ok"]]
    assert (plan["step"]["total_s"] < reference["step"]["total_s"]) == (level == "tuned")


def test_a_plan_has_traffic_and_ports():
    plan = make_plan(BIG)
    sync = plan["traffic"]["weight_sync"]
    assert sync["sent_bytes"] == pytest.approx(32.87e9, rel=2e-3) and 60 <= sync["collectives"] <= 64
    assert plan["ports"]["all"] == [61000, 61143]
    sent = plan["traffic"]["dispatch_bytes"]
    assert sent.keys() == {"generate", "place", "update"}
    assert sum(sent.values()) == pytest.approx(512 * 16 * 3072 * 3, rel=0.01)  # responses of full length
    assert sum(make_plan(TRUE_WEIGHT)["traffic"]["dispatch_bytes"].values()) < 0.03e9  # 995 tokens in the mean
    whole = make_plan(BIG, "recipe.tensor_cache.enabled=false")["traffic"]
    assert set(whole["dispatch_bytes"]) == {"ref", "update"}


def test_the_settings_of_the_published_run_give_its_rows_through_a_config():
    """Check level reference with the published recomputation and offload, for which the recipe has its own code."""
    switches = "-reshard.*,-memory.order,-memory.ledger,-memory.sleep_mode"
    share = "actor_rollout_ref.rollout.gpu_memory_utilization=0.9"  # whose KV cache holds all 64 sequences of a replica
    published = (f"{LAYERS_KEY}=4", share)
    step = make_plan(BIG, *published, f"recipe.patches=[{switches}]")["step"]
    seconds = {phase["phase"]: phase["seconds"] for phase in step["phases"]}
    quoted = {"rollout": 318.27, "ref": 104.7, "update": 328.8, "reshard": 11.18, "offload": 24.45}
    assert all(seconds[phase] == pytest.approx(value, rel=0.04) for phase, value in quoted.items()), seconds
    assert step["total_s"] == pytest.approx(801.29, rel=0.05)
    switches += ",+rollout.ascend_dp_sync,+rollout.ascend_dp_metadata"
    one_sync = make_plan(BIG, *published, f"recipe.patches=[{switches}]")["step"]  # one sync takes 3 ms a decode step
    assert step["total_s"] - one_sync["total_s"] == pytest.approx(0.003 * 3072, rel=0.01)


LONGER_RESPONSES = Workload(response_tokens=1650.0)  # 1588 tokens in the mean after the cut


@pytest.mark.parametrize(("name", "workload"), [(BIG, Workload()), (TRUE_WEIGHT, LONGER_RESPONSES)])
def test_each_phase_of_a_256_die_step_leaves_the_margin_and_more_recomputed_layers_take_longer(name, workload):
    plan = make_plan(name, "level=tuned", workload=workload)
    step, memory = plan["step"], plan["memory"]
    assert step["total_s"] == pytest.approx(sum(phase["seconds"] for phase in step["phases"]), abs=0.02)
    assert {phase["phase"] for phase in memory["phases"]} >= {"reshard", "rollout", "ref", "update"}
    for phase in memory["phases"]:
        assert phase["peak_bytes"] == sum(phase["bytes"].values()) <= memory["hbm_bytes"] - MARGIN_BYTES
    assert make_plan(name, "level=tuned", f"{LAYERS_KEY}=8", workload=workload)["step"]["total_s"] > step["total_s"]


def test_a_plan_says_where_less_than_the_margin_is_left():
    """Check the warning; the control: auto leaves the margin."""
    of = {}
    for name, number in (("less", "[1,1,2,1,0,0,0,0]"), ("auto", "auto")):
        checks = make_plan(BIG, "level=tuned", f"{LAYERS_KEY}={number}")["checks"]
        (of[name],) = (check for check in checks if check["name"] == "memory")
    assert of["less"]["ok"] and of["less"]["note"] and "LESS THAN 5 GB" in of["less"]["detail"]
    assert of["auto"]["ok"] and not of["auto"]["note"] and "LESS" not in of["auto"]["detail"]


# disks


def disk(name, *overrides, gb_s=10.0):
    plan = make_plan(name, *overrides, workload=Workload(disk_gb_s=gb_s))
    return {each["part"]: each for each in plan["disk"]["parts"]}


def test_a_start_reads_the_weights_of_all_ranks_and_a_save_writes_each_once(tmp_path):
    """Check 1.63 TB in bf16 (docs/weights.md), half of it in FP8; random init reads none."""
    save = "trainer.save_freq=10"
    found, faster = disk(TRUE_WEIGHT, save), disk(TRUE_WEIGHT, save, gb_s=20.0)
    assert found["first start"]["seconds"] == pytest.approx(163, abs=1) == 2 * faster["first start"]["seconds"]
    assert found["save"]["bytes"] == pytest.approx(14 * 671e9, rel=1e-3)  # weights, main weights and two moments
    assert found["load"]["bytes"] == pytest.approx(12 * 671e9 + found["first start"]["bytes"], rel=1e-3)
    assert disk(BIG) == {} and disk(BIG, save).keys() == {"save", "load"}
    shape = json.loads((CONFIGS_DIR / "model" / "deepseekv3_671b.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**shape, "quantization_config": {"quant_method": "fp8"}}))
    for override, times in ((f"actor_rollout_ref.model.path={tmp_path}", 0.5), ("algo=ppo", 2)):
        assert disk(TRUE_WEIGHT, override)["first start"]["bytes"] == times * found["first start"]["bytes"]


@pytest.mark.parametrize(("override", "gb_s", "key"), [
    ("recipe.timeouts.load_s=60", 1.0, "recipe.timeouts.load_s"),  # 256 ranks x 256 MiB take 69 s
    ("recipe.timeouts.load_s=70", 1.0, ""),
    ("recipe.watch.action=off", 1.0, "recipe.timeouts.quiet_s"),  # 9.4 TB take 9,394 s, above 7200
    ("recipe.watch.action=stop", 1.0, ""),
    ("recipe.watch.action=off", 2.0, ""),
])  # fmt: skip
def test_a_disk_is_refused_on_which_every_restart_would_end(override, gb_s, key):
    plan = make_plan(BIG, "trainer.save_freq=10", override, workload=Workload(disk_gb_s=gb_s))
    (check,) = (check for check in plan["checks"] if check["name"] == "disk rate")
    assert check["ok"] == (not key) and key in check["detail"], check
    assert f"save {9394 / gb_s:.0f} s, load" in check["detail"] and "the update after a save waits" in check["detail"]
    assert "disk rate" not in [check["name"] for check in make_plan(BIG)["checks"]]  # it reads and saves nothing


# verdict and next commands


def command(*words):
    return CliRunner().invoke(app, list(words))


@pytest.mark.parametrize(("override", "dies"), [("trainer.nnodes=3", "48"), ("trainer.n_gpus_per_node=1", "16")])
def test_a_refused_layout_names_a_search_below_the_verdict(override, dies):
    done = command("plan", TRUE_WEIGHT, override)
    search = shlex.join(["python", "-m", "verl_patches", "plan", TRUE_WEIGHT, override, "--search", "--dies", dies])
    assert done.exit_code == 1 and done.stdout.splitlines()[1].startswith("does not fit: ")
    assert search in " ".join(done.stdout.replace("\\\n", "").split())


def test_no_search_is_named_that_would_be_refused():
    """Check the suggestion; tests/plan/test_search.py checks the search's refusal."""
    done = command("plan", TRUE_WEIGHT, "recipe.train.expert_split=etp", "trainer.nnodes=3")
    assert done.exit_code == 1 and "--search" not in done.output


def test_no_search_is_named_where_no_layout_would_help():
    plan = make_plan(TRUE_WEIGHT, "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=7")
    assert not plan["ok"] and plan["next"] == []
    assert plan["verdict"].endswith("; next: change the settings that it names")


def test_the_verdict_says_where_host_memory_is_not_compared():
    plan, short = make_plan(NODE), make_plan(NODE, "recipe.memory.host_gib=64")
    assert plan["verdict"].startswith("fits: all ") and "HOST MEMORY NOT COMPARED" in plan["verdict"]
    assert "NOT COMPARED" not in make_plan(NODE, "recipe.memory.host_gib=4096")["verdict"]
    assert [check["name"] for check in short["checks"] if not check["ok"]] == ["host memory"]


def test_host_memory_has_room_for_what_is_pinned_processes_and_the_object_store_below_rays_limit():
    def check(gib):
        (found,) = (c for c in make_plan(NODE, f"recipe.memory.host_gib={gib}")["checks"] if c["name"] == "host memory")
        return found

    need = make_plan(NODE)["memory"]["host"]
    assert need["node_bytes"] == need["pinned_bytes"] + 16 * (10 << 30) + 200 * 10**9
    least, most = ((need["node_bytes"] - less) / 0.95 / 2**30 for less in (need["object_store_bytes"], 0))
    assert not check(math.floor(least))["ok"]
    tight, enough = check(math.ceil(least)), check(math.ceil(most))
    assert tight["ok"] and tight["note"] and "start Ray with --object-store-memory=" in tight["detail"]
    assert enough["ok"] and not enough["note"]


def test_a_kv_cache_that_cannot_hold_one_response_is_refused_and_a_likely_preemption_is_a_note():
    def check(*overrides):
        (found,) = (c for c in make_plan(TRUE_WEIGHT, "level=tuned", *overrides)["checks"] if c["name"] == "KV cache")
        return found["ok"], found["note"], found["detail"]

    share = "actor_rollout_ref.rollout.gpu_memory_utilization"
    ok, note, text = check()
    assert ok and not note and text.endswith("max_num_seqs=52 excludes it")
    assert not check(f"{share}=0.57")[0]
    ok, note, text = check(f"{share}=0.62")
    assert ok and note and "preemption likely" in text
