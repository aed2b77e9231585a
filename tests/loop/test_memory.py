"""Test our memory schedule in the real loop: moves are the table's, updates equal, the ledger's bytes as planned."""

import re
from dataclasses import replace

import pytest
from loop_runs import OFFLOAD, ROOT, hook, read_metrics

from tests.memory.test_schedule import step_moves
from verl_patches.layout.inventory import build_inventory, read_model_shape
from verl_patches.layout.parallel import parse_layout
from verl_patches.layout.sharding import local_parameters
from verl_patches.memory.schedule import SCHEDULE, residency, simulate
from verl_patches.plan.expected import Setting, group_bytes

pytestmark = pytest.mark.slow
LEDGER = "recipe.memory.ledger=strict"
OFFLOADED = ("--steps", "2", LEDGER, *OFFLOAD)
PROFILE = ("recipe.profile.steps=[2]", "recipe.profile.ranks=[1]", "recipe.profile.phases=[update]")
TINY = read_model_shape(ROOT / "configs/model/deepseekv3_tiny.json")
MODEL = build_inventory(replace(TINY, torch_dtype="float32"))
TRAINING = ("actor_params", "grads", "optimizer", "ref_params")


def assert_carried_out(run):
    """Assert that simulated and executed moves are equal; training weights are copied once in each direction."""
    first, second = (step["offload"] for step in run.steps)
    done = step_moves(SCHEDULE, (), TRAINING)
    assert second["sequences"] == [done]
    assert first["sequences"][0][:2] == ["load actor_params", "free actor_params"]  # nothing has written to them yet
    for way in ("load", "offload"):
        moved = second["moves"][f"{way} actor_params"]
        assert moved["count"] == 1 and moved["bytes"] > 0
    assert "free actor_params" not in second["moves"]
    assert second["moves"]["empty_cache"]["count"] == done.count("empty_cache")


def padding_bytes(setting, rank):
    """Return the most bytes by which Megatron's alignment of `rank`'s fp32 buffers may raise the ledger over the plan.

    It starts each parameter of a buffer at a multiple of 64 elements and ends it at one of 128 and dp
    (megatron/core/distributed/param_and_grad_buffer.py, _pad_start_of_param_if_needed, _pad_end_of_bucket_if_needed).
    """
    train = setting.train
    held = local_parameters(setting.inventory, train, rank, setting.train_library).shards.values()
    ends = 2 * 128 * train.dp * train.cp
    return 4 * (ends + sum(-shard.count % 64 for shard in held if shard.parameter.trainable))


def assert_as_planned(run, library):
    layouts = [parse_layout(run.summary["layout"][side]) for side in ("train", "rollout")]
    expected = residency(SCHEDULE)
    assert all("rollout_weights" not in expected[name] for name in ("sleep", "old_log_prob", "ref", "update"))
    memory = run.steps[1]["memory"]
    assert run.summary["exit"] == "ok" and all(s["memory"]["violations"]["count"] == 0 for s in run.steps)
    assert set(memory["phases"]) == {"reshard", "wake_kv", "rollout", "sleep", "old_log_prob", "ref", "update"}
    for name, found in memory["phases"].items():
        setting = Setting(MODEL, *layouts, library, absorbed_copies=library == "mindspeed")
        planned = group_bytes(setting, found["rank"])
        for group in ("rollout_weights", "ref_params"):  # one tensor a parameter: no alignment
            assert found["bytes"][group] == planned[group] * (group in expected[name]), (name, group)
        for group in ("actor_params", "grads", "optimizer"):
            there, bound = group in expected[name], padding_bytes(setting, found["rank"])
            seen = found["bytes"][group]
            spare = 2 * bound if group == "optimizer" else bound  # two moments a value
            assert abs(seen - planned[group]) <= spare if there else seen == 0, (name, group)
        assert (found["bytes"]["kv_cache"] > 0) == ("kv_cache" in expected[name])
        assert found["peak_bytes"] >= sum(found["bytes"].values()) and found["measured"]["rss"] > 1e8
    first = run.steps[0]["memory"]["phases"]["update"]["bytes"]
    assert first["optimizer"] == 0  # Adam's moments are made in the first step
    assert memory["peak_bytes"] == max(found["peak_bytes"] for found in memory["phases"].values())
    table = run.progress
    assert "held MB" in table and f"{memory['peak_bytes'] / 1e6:.3f}" in table


def assert_profiled(run):
    """Assert that one rank's update is traced; tests/trainer/test_profile.py reads traces."""
    files = ["step_2_rank_1_update.json.gz"]
    assert [step["profile"] for step in run.steps] == [None, {"files": files, "faults": []}]
    assert [file.name for file in (run.folder / "profile").iterdir()] == files


def assert_same_updates(run, expected):
    assert run.summary["exit"] == "ok" and all(s["memory"]["violations"]["count"] == 0 for s in run.steps)
    assert read_metrics(run, "grad_norm") == read_metrics(expected, "grad_norm")[:2]


def assert_bytes_as_simulated_and_no_new_host_memory(run):
    pinned = [step["usage"]["pinned_bytes"] for step in run.steps]
    assert pinned[0] == pinned[1] > 0
    moves = run.steps[1]["offload"]["moves"]
    assert "offload ref_params" not in moves and "free actor_params" not in moves  # they stay after old_log_prob
    assert moves["load optimizer"] == moves["offload optimizer"]
    sizes = run.steps[1]["memory"]["phases"]["update"]["bytes"]
    sizes = {**sizes, "ref_params": run.steps[1]["memory"]["phases"]["ref"]["bytes"]["ref_params"]}
    moments = simulate(SCHEDULE, sizes).values()
    for way, verb in (("to_device_bytes", "load"), ("to_host_bytes", "offload")):
        moved = sum(each["bytes"] for name, each in moves.items() if name.startswith(verb))
        # ranks' shares of the optimizer differ by a few hundred bytes
        assert moved / sum(getattr(moment, way) for moment in moments) == pytest.approx(1, abs=1e-3)


def test_everything_offloaded_changes_no_update_and_the_ledger_sees_what_the_plan_expects(line, start):
    """Test rows memory.ledger, reshard.direct and memory.order; on line a3 the cache comes after training weights."""
    run = start(*OFFLOADED, *PROFILE)
    assert_same_updates(run, start())
    assert_bytes_as_simulated_and_no_new_host_memory(run)
    assert_as_planned(run, {"pypi": "megatron-local", "a3": "mindspeed"}[line])
    assert_carried_out(run)
    assert_profiled(run)


@pytest.mark.nightly
def test_switched_back_a_run_follows_verls_order(smoke):
    """Run the negative control of row memory.order; it saves, and goes on with verl's own offload."""
    given = *OFFLOAD, "recipe.patches=[-memory.order,-memory.ledger]", "trainer.save_freq=1", "trainer.resume_mode=auto"
    run = smoke("--steps", "1", *given)
    assert run.steps[0]["offload"] is run.steps[0]["memory"] is None  # verl's functions move, and count nothing
    whole = smoke().steps
    assert run.steps[0]["grad_norm"] == whole[0]["grad_norm"]
    assert smoke("--steps", "2", *given, after=run).steps[1]["grad_norm"] == whole[1]["grad_norm"]


def test_gradients_left_behind_stop_a_strict_run_by_name(smoke):
    run = smoke(*OFFLOADED, hook("keep_gradients"), ok=False)
    assert run.code == 1 and not run.steps and re.match(r"rank \d \(pid \d+ on .*\) in step 1: ", run.summary["exit"])
    for words in ("RecipeError: memory ledger", "grads", "expected 0"):
        assert words in run.summary["exit"]


def test_without_offload_nothing_is_moved(smoke):
    """Run the negative control, which offloads nothing."""
    assert [step["offload"] for step in smoke().steps] == [None, None, None]
