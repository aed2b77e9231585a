"""Plan `generate`, `chat` and `eval`, which need one instance of a run's rollout without training beside it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig

from verl_patches.errors import Check, ConfigError
from verl_patches.layout.parallel import ParallelLayout, rollout_layout
from verl_patches.plan.expected import served_bytes
from verl_patches.plan.memory_plan import cached_inventory, engine_share
from verl_patches.rollout.checks import ascend_checks
from verl_patches.run import hccl
from verl_patches.run.resolve import change_config
from verl_patches.spec import RunSpec

_MEGATRON = "actor_rollout_ref.actor.megatron"
_TRAIN_SIZES = {
    f"{_MEGATRON}.{name}_parallel_size": 1
    for name in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
}


def instance_config(config: DictConfig) -> DictConfig:
    """Return a composed configuration changed to one rollout instance on as many nodes as that needs.

    The layout of the training and the number of nodes are replaced, so they need not fit the instance's ranks.
    Raise ConfigError where an instance does not fill its nodes.
    """
    tp, dp = config.actor_rollout_ref.rollout.tensor_model_parallel_size, config.recipe.rollout.data_parallel_size
    dies = min(tp * dp, config.trainer.n_gpus_per_node)
    if tp * dp % dies:
        raise ConfigError(
            f"a rollout instance has {tp * dp} ranks (tp {tp} x recipe.rollout.data_parallel_size {dp}), expected "
            f"whole nodes of trainer.n_gpus_per_node={dies} dies: change one of them"
        )
    sizes = {"trainer.nnodes": tp * dp // dies, "trainer.n_gpus_per_node": dies, "recipe.rollout.instances": 1}
    others = {"recipe.train.layers_per_stage": None, f"{_MEGATRON}.virtual_pipeline_model_parallel_size": None}
    return change_config(config, _TRAIN_SIZES | sizes | others | {"recipe.objective.name": "rl"})  # also of fixed data


def _single_instance(run: RunSpec, dp: int, dies: int, split: bool) -> RunSpec:
    """Return `run` as one instance of `dp` x tp ranks on nodes of `dies`; experts are split over ranks, or cut."""
    layout = rollout_layout(1, dp, run.rollout.tp, expert_parallel=split)
    rollout = replace(run.recipe.rollout, data_parallel_size=dp, instances=1, enable_expert_parallel=split)
    recipe = replace(run.recipe, rollout=rollout, objective=replace(run.recipe.objective, name="rl"))
    nodes = {"trainer.nnodes": layout.world_size // dies, "trainer.n_gpus_per_node": dies}
    return replace(run.with_verl(nodes), recipe=recipe, train=ParallelLayout(layout.world_size), rollout=layout)


def instance_checks(run: RunSpec) -> list[Check]:
    """Check that NPUs can run the instance of `instance_config` with this model's weights, as far as modelled."""
    need, share = _die_bytes(run)
    text = f"modelled: a die needs {need / 1e9:.2f} GB of vLLM's {share / 1e9:.2f}"
    if need > share:
        text += f" for its part of the rollout instance {run.rollout} and the KV of one longest response"
        text += f"; {serving_text(serving_plan(run))}"
    return [*hccl.hccl_checks(run), *ascend_checks(run), Check("memory", need <= share, text)]


def serving_plan(run: RunSpec) -> dict[str, Any]:
    """Return {nodes, dies, dtype, dp, change_split, die_bytes, share_bytes} of the instance with the fewest nodes.

    dies: of a node. dp: its recipe.rollout.data_parallel_size. change_split: whether
    recipe.rollout.enable_expert_parallel, false in the run, must be true. die_bytes: weights on the fullest die with
    the KV of one longest response; share_bytes: `engine_share` for them. The rollout's tp is that of the run; one
    that does not split experts is tried as it is, then with experts split over whole nodes. If no number of nodes
    suffices, nodes and the last four are None.
    """
    dies, tp = run.hardware.node_dies, run.rollout.tp
    found = {"dies": dies, "dtype": run.recipe.dtype}
    experts = run.model.n_routed_experts
    sizes = [(ranks, True) for ranks in range(dies, experts + 1, dies) if not (experts % ranks or ranks % tp)]
    is_split = run.recipe.rollout.enable_expert_parallel
    if not is_split and tp <= dies:
        sizes.insert(0, (tp, False))
    for ranks, split in sizes:
        tried = _single_instance(run, ranks // tp, min(dies, ranks), split)
        need, share = _die_bytes(tried)
        if need <= share and hccl.check_machine(tried).ok:
            found |= {"nodes": math.ceil(ranks / dies), "dp": ranks // tp, "change_split": split and not is_split}
            return found | {"die_bytes": need, "share_bytes": share}
    return found | dict.fromkeys(("nodes", "dp", "change_split", "die_bytes", "share_bytes"))


def serving_text(plan: dict[str, Any]) -> str:
    """Return a `serving_plan` as a sentence."""
    if plan["nodes"] is None:
        return f"no number of nodes of {plan['dies']} dies holds the weights in {plan['dtype']} (modelled)"
    memory = f"{plan['die_bytes'] / 1e9:.2f} GB of vLLM's {plan['share_bytes'] / 1e9:.2f} on a die (modelled)"
    nodes = f"{plan['nodes']} node(s) of {plan['dies']} dies hold the weights in {plan['dtype']}"
    split = " recipe.rollout.enable_expert_parallel=true" if plan["change_split"] else ""
    return f"{nodes}: {memory}, with recipe.rollout.data_parallel_size={plan['dp']}{split}"


def _die_bytes(run: RunSpec) -> tuple[int, int]:
    """Return (bytes of weights and one longest response's KV on the fullest die, those that vLLM's share leaves)."""
    layout, inventory = run.rollout, cached_inventory(run.trained_model)
    weights = sum(served_bytes(inventory, layout, layout.world_size - 1, run.rollout_library))
    tokens = run.verl.actor_rollout_ref.rollout.max_num_batched_tokens
    if not run.splits_prompts:
        tokens = max(tokens, run.longest_tokens)
    share = engine_share(run, layout, tokens, "rollout")
    return weights + run.longest_tokens * inventory.model.kv_bytes, share
