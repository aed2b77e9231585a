"""What `generate`, `chat` and `eval` need: one instance of a run's rollout, without training beside it."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_patches.config import hccl
from verl_patches.config.compose import rollout_library
from verl_patches.config.recipe import VLLM_DTYPES
from verl_patches.errors import Check, ConfigError
from verl_patches.layout.inventory import ModelShape
from verl_patches.layout.parallel import rollout_layout_of
from verl_patches.planning.expected import served_bytes
from verl_patches.planning.memory_plan import die_bytes, inventory_of
from verl_patches.platform.npu.machine import HARDWARE


def instance_of(config: DictConfig) -> DictConfig:
    """`config` on the nodes of one rollout instance, whatever its run trains; ConfigError where they are not whole."""
    tp, dp = config.actor_rollout_ref.rollout.tensor_model_parallel_size, config.recipe.rollout.dp
    dies = min(tp * dp, config.trainer.n_gpus_per_node)
    if tp * dp % dies:
        raise ConfigError(
            f"a rollout instance has {tp * dp} ranks (tp {tp} x recipe.rollout.dp {dp}), expected whole nodes of "
            f"trainer.n_gpus_per_node={dies} dies: change one of them"
        )
    recipe = {"rollout": {"instances": 1}, "objective": {"name": "rl"}}  # a run on fixed data has no rollout
    one = OmegaConf.merge(config, {"trainer": {"nnodes": tp * dp // dies, "n_gpus_per_node": dies}, "recipe": recipe})
    rollout_layout_of(one)
    return one


def instance_checks(config: DictConfig, model: ModelShape) -> list[Check]:
    """Whether NPUs run the instance that `instance_of` made, with weights of this model, as far as it is modelled."""
    need, share = _on_a_die(config, model)
    said = f"modelled: a die needs {need / 1e9:.2f} GB of vLLM's {share / 1e9:.2f}"
    if need > share:
        said += f" for its part of the rollout instance {rollout_layout_of(config)} and the KV of one longest response"
        said += f"; {serving_text(serving_plan(config, model))}"
    return [*hccl.checks(config, model), Check("memory", need <= share, said)]


def serving_plan(config: DictConfig, model: ModelShape) -> dict[str, Any]:
    """{nodes, dies, dp, die_bytes, share_bytes}: the fewest nodes that hold an instance with recipe.rollout.dp=`dp`.

    die_bytes: weights on the fullest die with the KV of one longest response; share_bytes: of gpu_memory_utilization.
    The rollout's tp is that of `config`. Without such nodes the last three are None, as `nodes` is.
    """
    dies, tp = HARDWARE[config.recipe.hardware].node_dies, config.actor_rollout_ref.rollout.tensor_model_parallel_size
    found = {"dies": dies, "dtype": config.recipe.dtype}
    experts = model.n_routed_experts
    for ranks in (number for number in range(dies, experts + 1, dies) if not (experts % number or number % tp)):
        recipe = {"rollout": {"dp": ranks // tp, "expert_parallel": True}}
        tried = instance_of(OmegaConf.merge(config, {"trainer": {"n_gpus_per_node": dies}, "recipe": recipe}))
        need, share = _on_a_die(tried, model)
        if need <= share and hccl.check_machine(tried, model).ok:
            return {**found, "nodes": ranks // dies, "dp": ranks // tp, "die_bytes": need, "share_bytes": share}
    return {**found, **dict.fromkeys(("nodes", "dp", "die_bytes", "share_bytes"))}


def serving_text(plan: dict[str, Any]) -> str:
    """A `serving_plan` in a sentence."""
    if plan["nodes"] is None:
        return f"no number of nodes of {plan['dies']} dies holds the weights in {plan['dtype']} (modelled)"
    held = f"{plan['die_bytes'] / 1e9:.2f} GB of vLLM's {plan['share_bytes'] / 1e9:.2f} on a die (modelled)"
    nodes = f"{plan['nodes']} node(s) of {plan['dies']} dies hold the weights in {plan['dtype']}"
    return f"{nodes}: {held}, with recipe.rollout.dp={plan['dp']}"


def _on_a_die(config: DictConfig, model: ModelShape) -> tuple[int, int]:
    """(bytes of weights and of the KV of one longest response on the fullest die, vLLM's share of it)."""
    layout, inventory = rollout_layout_of(config), inventory_of(model, VLLM_DTYPES[config.recipe.dtype])
    weights = sum(served_bytes(inventory, layout, layout.world_size - 1, rollout_library(config)))
    longest = config.data.max_prompt_length + config.data.max_response_length
    share = config.actor_rollout_ref.rollout.gpu_memory_utilization * die_bytes(config)
    return weights + longest * inventory.model.kv_bytes, int(share)
