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
            expected.append("actor_rollout_ref.rollout.enforce_eager=true (graphs read captured addresses)")
        text = f"recipe.platform is cpu, where vLLM has no sleep mode; expected {' and '.join(expected)}"
        return Check(name, False, text)
    if graphs and not recipe.rollout.ascend.vllm_sleep_mode:
        rows = [row for row in ("memory.sleep_mode", "memory.graph_addresses") if row not in run.rows]
        cached = run.graphs.get("use_cached_graph")
        if rows or cached:
            found = "use_cached_graph is set, whose graphs no patch changes"
            if rows:
                found = f"{' and '.join(rows)} is off in recipe.patches"
            text = "captured graphs would read weights at their addresses before sleep"
            return Check(name, False, f"recipe.rollout.ascend.vllm_sleep_mode: expected true, as {found}: {text}")
    limits = "it cannot be used with expandable segments, and on several nodes it may free no memory (docs/the-step.md)"
    if own_sleep_off:
        text = f"patch memory.sleep_mode is off: vLLM's sleep mode copies all weights to the host; {limits}"
        return Check(name, True, text, note=True)
    if uses_vllm_sleep(run.verl.actor_rollout_ref.rollout, recipe):
        text = f"vLLM's sleep mode frees weights and KV cache and keeps the addresses that graphs captured; {limits}"
        return Check(name, True, text, note=True)
    return Check(name, True, "weights and KV cache are freed between rollouts, to torch's allocator")
