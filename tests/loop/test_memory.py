"""Our schedule in the real loop: its moves are the table's, the ledger saw what it expects, who is left is named."""

from pathlib import Path

import pytest

from verl_patches.layout.inventory import build_inventory
from verl_patches.layout.parallel import parse_layout
from verl_patches.memory.expected import Setting, group_bytes, in_dtype, padding_bytes
from verl_patches.memory.schedule import SCHEDULE, make_schedule, moves_of_a_step, residency, staying

pytestmark = [pytest.mark.slow, pytest.mark.full]
ACTOR, REF = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.ref.megatron"
OFFLOAD = (*(f"{ACTOR}.{what}_offload=true" for what in ("param", "grad", "optimizer")), f"{REF}.param_offload=true")
STRICT = ("--steps", "2", "recipe.memory.ledger=strict", *OFFLOAD)
MODEL = in_dtype(build_inventory(Path(__file__).resolve().parents[2] / "configs/model/deepseekv3_tiny.json"), "float32")
STAYS = staying(param_offload=True, optimizer_offload=True, ref_offload=True, one_memory=True, own_sleep_mode=True)
TRAINING = ("actor_params", "grads", "optimizer", "ref_params")
LATER = {"free ref_params": "", "free grads": "free grads, free ref_params"}  # the reference stays for the update
ONE_CHANGED = make_schedule(
    "one changed",
    *(
        (p.name, ", ".join(map(str, p.enter)), ", ".join(LATER.get(str(move), str(move)) for move in p.leave))
        for p in SCHEDULE.phases
    ),
)


def assert_carried_out(run):
    """Simulated and executed are one table; training weights are copied once a direction."""
    first, second = (step["offload"] for step in run.steps)
    done = moves_of_a_step(SCHEDULE, STAYS, TRAINING)
    assert second["sequences"] == [done]
    assert first["sequences"][0][:2] == ["load actor_params", "free actor_params"]  # nothing has written to them yet
    assert moves_of_a_step(ONE_CHANGED, STAYS, TRAINING) not in second["sequences"]  # negative control
    for way in ("load", "offload"):
        moved = second["moves"][f"{way} actor_params"]
        assert moved["count"] == 1 and moved["copied_bytes"] == moved["bytes"] > 0
    assert "free actor_params" not in second["moves"]
    assert second["moves"]["empty_cache"]["count"] == done.count("empty_cache")


def assert_as_planned(run, library):
    layouts = [parse_layout(run.summary["layout"][side]) for side in ("train", "rollout")]
    expected = residency(SCHEDULE, STAYS)
    assert all("rollout_weights" not in expected[name] for name in ("sleep", "old_log_prob", "ref", "update"))
    memory = run.steps[1]["memory"]
    assert run.summary["exit"] == "ok" and all(s["memory"]["violations"]["count"] == 0 for s in run.steps)
    assert set(memory["phases"]) == {"reshard", "wake_kv", "rollout", "sleep", "old_log_prob", "ref", "update"}
    for name, found in memory["phases"].items():
        planned = group_bytes(
            MODEL, *layouts, found["rank"], Setting(library, kv_bytes=1, absorbed_copies=library == "mindspeed")
        )
        for group in ("rollout_weights", "ref_params"):  # one tensor a parameter: no alignment
            assert found["bytes"][group] == planned[group] * (group in expected[name]), (name, group)
        for group in ("actor_params", "grads", "optimizer"):
            there, bound = group in expected[name], padding_bytes(MODEL, layouts[0], found["rank"], library, 4)
            seen = found["bytes"][group]
            spare = 2 * bound if group == "optimizer" else bound  # two moments a value
            assert abs(seen - planned[group]) <= spare if there else seen == 0, (name, group)
        assert (found["bytes"]["kv_cache"] > 0) == ("kv_cache" in expected[name])
        assert found["peak_bytes"] >= sum(found["bytes"].values()) and found["measured"]["rss"] > 1e8
    first = run.steps[0]["memory"]["phases"]["update"]["bytes"]
    assert first["optimizer"] == 0  # Adam's moments are made in the first step
    assert memory["peak_bytes"] == max(found["peak_bytes"] for found in memory["phases"].values())
    table = (run.folder / "progress.log").read_text()
    assert "held MB" in table and f"{memory['peak_bytes'] / 1e6:.3f}" in table
    assert (run.folder / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_what_the_ledger_saw_is_what_the_plan_expects(smoke):
    """Rows memory.ledger and memory.order."""
    run = smoke(*STRICT)
    assert_as_planned(run, "megatron-local")
    assert_carried_out(run)


@pytest.mark.upstream
def test_on_line_a3_the_cache_comes_after_training_weights_have_gone(a3):
    """Rows memory.ledger, reshard.direct and memory.order."""
    run = a3(*STRICT)
    assert_as_planned(run, "mindspeed")
    assert_carried_out(run)


def test_switched_back_a_run_follows_verls_order(smoke):
    """Negative control of row memory.order."""
    run = smoke("--steps", "1", *OFFLOAD, "recipe.memory.ledger=strict", "recipe.patches=[-memory.order]")
    phases = run.steps[0]["memory"]["phases"]
    assert phases["reshard"]["bytes"]["grads"] > 0 == phases["ref"]["bytes"]["actor_params"]
    assert run.steps[0]["offload"] is None  # verl's functions move, and count nothing


def test_gradients_left_behind_stop_a_strict_run_by_name(smoke):
    run = smoke(*STRICT, "recipe.worker_process_setup_hook=left_gradients.keep", ok=False)
    said = run.summary["exit"]
    assert run.code == 1 and not run.steps
    assert all(word in said for word in ("MemoryLedgerError", "grads", "expected 0", "update (free)")), said
