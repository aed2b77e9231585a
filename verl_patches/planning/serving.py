"""What `generate`, `chat` and `eval` need: one instance of a run's rollout, without training beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from verl_patches.config import hccl
from verl_patches.errors import Check, ConfigError
from verl_patches.layout.parallel import ParallelLayout, rollout_layout
from verl_patches.planning.expected import served_bytes
from verl_patches.planning.memory_plan import die_bytes, inventory_of
from verl_patches.spec import RunSpec


def instance_of(run: RunSpec) -> RunSpec:
    """Return `run` on the nodes of one rollout instance, whatever it trains; ConfigError where they are not whole."""
    tp, dp = run.rollout.tp, run.recipe.rollout.dp
    dies = min(tp * dp, run.verl.trainer.n_gpus_per_node)
    if tp * dp % dies:
        raise ConfigError(
            f"a rollout instance has {tp * dp} ranks (tp {tp} x recipe.rollout.dp {dp}), expected whole nodes of "
            f"trainer.n_gpus_per_node={dies} dies: change one of them"
        )
    return _alone(run, dp, dies, run.recipe.rollout.expert_parallel)


def _alone(run: RunSpec, dp: int, dies: int, expert_parallel: bool) -> RunSpec:
    """Return `run` as one instance on nodes of `dies` that samples and trains nothing beside it."""
    layout = rollout_layout(1, dp, run.rollout.tp, expert_parallel)
    rollout = replace(run.recipe.rollout, dp=dp, instances=1, expert_parallel=expert_parallel)
    recipe = replace(run.recipe, rollout=rollout, objective=replace(run.recipe.objective, name="rl"))
    nodes = {"trainer.nnodes": layout.world_size // dies, "trainer.n_gpus_per_node": dies}
    alone = ParallelLayout(layout.world_size)
    return replace(run.with_verl(nodes), recipe=recipe, train=alone, rollout=layout)


def instance_checks(run: RunSpec) -> list[Check]:
    """Whether NPUs run the instance that `instance_of` made, with weights of this model, as far as it is modelled."""
    need, share = _on_a_die(run)
    said = f"modelled: a die needs {need / 1e9:.2f} GB of vLLM's {share / 1e9:.2f}"
    if need > share:
        said += f" for its part of the rollout instance {run.rollout} and the KV of one longest response"
        said += f"; {serving_text(serving_plan(run))}"
    return [*hccl.hccl_checks(run), Check("memory", need <= share, said)]


def serving_plan(run: RunSpec) -> dict[str, Any]:
    """{nodes, dies, dp, die_bytes, share_bytes}: the fewest nodes that hold an instance with recipe.rollout.dp=`dp`.

    die_bytes: weights on the fullest die with the KV of one longest response; share_bytes: of gpu_memory_utilization.
    The rollout's tp is that of the run. Without such nodes the last three are None, as `nodes` is.
    """
    dies, tp = run.hardware.node_dies, run.rollout.tp
    found = {"dies": dies, "dtype": run.recipe.dtype}
    experts = run.model.n_routed_experts
    for ranks in (number for number in range(dies, experts + 1, dies) if not (experts % number or number % tp)):
        tried = _alone(run, ranks // tp, dies, True)
        need, share = _on_a_die(tried)
        if need <= share and hccl.check_machine(tried).ok:
            return {**found, "nodes": ranks // dies, "dp": ranks // tp, "die_bytes": need, "share_bytes": share}
    return {**found, **dict.fromkeys(("nodes", "dp", "die_bytes", "share_bytes"))}


def serving_text(plan: dict[str, Any]) -> str:
    """A `serving_plan` in a sentence."""
    if plan["nodes"] is None:
        return f"no number of nodes of {plan['dies']} dies holds the weights in {plan['dtype']} (modelled)"
    held = f"{plan['die_bytes'] / 1e9:.2f} GB of vLLM's {plan['share_bytes'] / 1e9:.2f} on a die (modelled)"
    nodes = f"{plan['nodes']} node(s) of {plan['dies']} dies hold the weights in {plan['dtype']}"
    return f"{nodes}: {held}, with recipe.rollout.dp={plan['dp']}"


def _on_a_die(run: RunSpec) -> tuple[int, int]:
    """(bytes of weights and of the KV of one longest response on the fullest die, vLLM's share of it)."""
    layout, inventory = run.rollout, inventory_of(run.trained_model)
    weights = sum(served_bytes(inventory, layout, layout.world_size - 1, run.rollout_library))
    share = run.verl.actor_rollout_ref.rollout.gpu_memory_utilization * die_bytes(run)
    return weights + run.longest_tokens * inventory.model.kv_bytes, int(share)
