"""Check that the rollout engine can free its memory between rollouts (sleep)."""

from __future__ import annotations

from collections.abc import Iterator

from verl_patches.errors import Check, either
from verl_patches.spec import RunSpec


def sleep_checks(run: RunSpec) -> Iterator[Check]:
    """Check that the engine's sleep can free memory (memory/sleep_mode.py); runs without an engine have no check."""
    if not run.samples:
        return
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
        yield Check(name, False, text)
    elif own_sleep_off:
        limits = "cannot be used with expandable segments, and may free no memory on several nodes (docs/the-step.md)"
        text = f"patch memory.sleep_mode is off: vLLM's sleep mode copies all weights to the host; it {limits}"
        yield Check(name, True, text, note=True)
    else:
        fault = ""
        if graphs and "memory.graph_addresses" not in run.rows:
            fault = "patch memory.graph_addresses is off"
        elif graphs and run.graphs.get("use_cached_graph"):
            fault = "use_cached_graph is set, whose graphs no patch changes"
        text = "captured graphs would read weights at their addresses before sleep"
        text = f"{fault}: {text}; change this, or switch patch memory.sleep_mode off"
        yield either(name, not fault, "weights and KV cache are freed between rollouts, to torch's allocator", text)
