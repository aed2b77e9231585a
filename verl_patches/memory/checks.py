"""Check that the rollout engine can free its memory between rollouts (sleep)."""

from __future__ import annotations

from collections.abc import Iterator

from verl_patches.errors import Check
from verl_patches.memory.schedule import uses_vllm_sleep
from verl_patches.spec import RunSpec


def sleep_checks(run: RunSpec) -> Iterator[Check]:
    """Check that the engine's sleep can free memory (memory/sleep_mode.py); runs without an engine have no check."""
    if run.samples:
        yield _sleep_check(run)


def _sleep_check(run: RunSpec) -> Check:
    name, recipe = "rollout memory", run.recipe
    own_sleep_off = "memory.sleep_mode" not in run.rows
    graphs = not run.verl.actor_rollout_ref.rollout.enforce_eager
    if recipe.platform == "cpu" and (own_sleep_off or graphs):
        expected = []
        if own_sleep_off:
            expected.append("recipe.patches without -memory.sleep_mode")
        if graphs:
            expected.append("actor_rollout_ref.rollout.enforce_eager=true (graphs keep the addresses they captured)")
        return Check(name, False, f"vLLM has no sleep mode on a CPU; expected {', '.join(expected)}")
    if graphs and not recipe.rollout.ascend.vllm_sleep_mode:
        rows = [row for row in ("memory.sleep_mode", "memory.graph_addresses") if row not in run.rows]
        cached = run.graphs.get("use_cached_graph")
        if rows or cached:
            found = f"row {', '.join(rows)} is off" if rows else "use_cached_graph is set, whose graphs no row changes"
            text = "expected true: graphs would read weights where they were before sleep"
            return Check(name, False, f"recipe.rollout.ascend.vllm_sleep_mode is false and {found}; {text}")
    no_pages = "no expandable segments, and on several nodes it may free nothing (docs/memory.md)"
    if own_sleep_off:
        text = f"row memory.sleep_mode is off: vLLM copies all weights to the host; {no_pages}"
        return Check(name, True, text, note=True)
    if uses_vllm_sleep(run.verl.actor_rollout_ref.rollout, recipe):
        text = f"freed by vLLM's sleep mode, which keeps the addresses that graphs captured; {no_pages}"
        return Check(name, True, text, note=True)
    return Check(name, True, "freed between rollouts, to torch's pool")
