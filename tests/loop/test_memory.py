"""The ledger in the real loop: what it saw is what the plan expects, and a tenant left behind is named."""

from pathlib import Path

import pytest

from verl_patches.layout.inventory import build_inventory
from verl_patches.layout.parallel import parse_layout
from verl_patches.memory.expected import Setting, in_dtype, padding_bytes, tenant_bytes
from verl_patches.memory.phases import order_followed, residency, staying

pytestmark = [pytest.mark.slow, pytest.mark.full]
ACTOR, REF = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.ref.megatron"
OFFLOAD = (*(f"{ACTOR}.{what}_offload=true" for what in ("param", "grad", "optimizer")), f"{REF}.param_offload=true")
STRICT = ("--steps", "2", "recipe.memory.ledger=strict", *OFFLOAD)
MODEL = in_dtype(build_inventory(Path(__file__).resolve().parents[2] / "configs/model/deepseekv3_tiny.json"), "float32")
MOVES = staying(param_offload=True, optimizer_offload=True, ref_offload=True, one_memory=True, our_moves=True)
MOVES -= {"rollout_weights"}  # row memory.rollout_life


def assert_as_planned(run, line, library):
    layouts = [parse_layout(run.summary["layout"][side]) for side in ("train", "rollout")]
    order = order_followed(line, direct_sync=True, skip_old_log_prob=False, our_moves=True)
    expected = residency(order, MOVES)
    assert all("rollout_weights" not in expected[name] for name in ("sleep", "old_log_prob", "ref", "update"))
    memory = run.steps[1]["memory"]
    assert run.summary["exit"] == "ok" and all(s["memory"]["violations"]["count"] == 0 for s in run.steps)
    assert set(memory["phases"]) == {"reshard", "wake_kv", "rollout", "sleep", "old_log_prob", "ref", "update"}
    for name, found in memory["phases"].items():
        planned = tenant_bytes(MODEL, *layouts, found["rank"], Setting(library, kv_bytes=1))
        for tenant in ("rollout_weights", "ref_params"):  # one tensor a parameter: no alignment
            assert found["bytes"][tenant] == planned[tenant] * (tenant in expected[name]), (name, tenant)
        for tenant in ("actor_params", "grads", "optimizer"):
            there, bound = tenant in expected[name], padding_bytes(MODEL, layouts[0], found["rank"], library, 4)
            seen = found["bytes"][tenant]
            spare = 2 * bound if tenant == "optimizer" else bound  # two moments a value
            assert abs(seen - planned[tenant]) <= spare if there else seen == 0, (name, tenant)
        assert (found["bytes"]["kv_cache"] > 0) == ("kv_cache" in expected[name])
        assert found["peak_bytes"] >= sum(found["bytes"].values()) and found["measured"]["rss"] > 1e8
    first = run.steps[0]["memory"]["phases"]["update"]["bytes"]
    assert first["optimizer"] == 0  # Adam's moments are made in the first step
    assert memory["peak_bytes"] == max(found["peak_bytes"] for found in memory["phases"].values())
    table = (run.folder / "progress.log").read_text()
    assert "held MB" in table and f"{memory['peak_bytes'] / 1e6:.3f}" in table
    assert (run.folder / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_what_the_ledger_saw_is_what_the_plan_expects(smoke):
    """Rows memory.ledger, memory.ledger_wake, memory.ledger_rollout, memory.ledger_sleep, memory.ledger_log_prob,
    memory.ledger_update and memory.take_memory."""
    assert_as_planned(smoke(*STRICT), "pypi", "megatron-local")


@pytest.mark.upstream
def test_on_line_a3_the_cache_comes_after_training_weights_have_gone(a3):
    """Rows memory.ledger_update_a3 and reshard.direct_and_wake."""
    assert_as_planned(a3(*STRICT), "a3", "mindspeed")


def test_without_its_row_a_phase_is_not_seen(smoke):
    """Negative control for the rows: memory.ledger_sleep off."""
    run = smoke("--steps", "1", "recipe.patches=[-memory.ledger_sleep]")
    phases = run.steps[0]["memory"]["phases"]
    assert "sleep" not in phases and "rollout" in phases


def test_gradients_left_behind_stop_a_strict_run_by_name(smoke):
    run = smoke(*STRICT, "recipe.worker_process_setup_hook=left_gradients.keep", ok=False)
    said = run.summary["exit"]
    assert run.code == 1 and not run.steps
    assert all(word in said for word in ("MemoryLedgerError", "grads", "expected 0", "reshard (free)")), said


def test_left_gradients_are_reported_and_the_run_goes_on(smoke):
    verls = "recipe.patches=[-memory.load_model,-memory.offload_model]"  # ours refuse memory that somebody resized
    run = smoke("--steps", "1", *OFFLOAD, verls, "recipe.worker_process_setup_hook=left_gradients.keep")
    violations = run.steps[0]["memory"]["violations"]
    assert violations["count"] and {v["tenant"] for v in violations["first"]} == {"grads"}
    assert "memory ledger:" in (run.folder / "progress.log").read_text()
