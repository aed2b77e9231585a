"""Plan `generate`, `chat` and `eval`, which need one instance of a run's rollout without training beside it."""

from __future__ import annotations

from omegaconf import DictConfig

from verl_patches.errors import Check, ConfigError, either
from verl_patches.layout.inventory import build_inventory
from verl_patches.plan.expected import served_bytes
from verl_patches.plan.memory_plan import engine_share
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


def instance_checks(run: RunSpec) -> list[Check]:
    """Check that NPUs can run the instance of `instance_config` with this model's weights, as far as modelled."""
    layout, inventory = run.rollout, build_inventory(run.trained_model)
    weights = sum(served_bytes(inventory, layout, layout.world_size - 1, run.rollout_library))
    tokens = run.verl.actor_rollout_ref.rollout.max_num_batched_tokens
    if not run.splits_prompts:
        tokens = max(tokens, run.longest_tokens)
    share = engine_share(run, layout, tokens, "rollout")
    need = weights + run.longest_tokens * inventory.model.kv_bytes
    text = f"modelled: a die needs {need / 1e9:.2f} GB of vLLM's {share / 1e9:.2f}"
    fault = (
        f"{text} for its part of the rollout instance {layout} and the KV of one longest response; raise "
        "recipe.rollout.data_parallel_size, with recipe.rollout.enable_expert_parallel=true, to use more dies"
    )
    return [*hccl.hccl_checks(run), *ascend_checks(run), either("memory", need <= share, text, fault)]
