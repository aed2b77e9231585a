"""Both layouts of a configuration: verl's sections plus what `recipe:` adds to them."""

from __future__ import annotations

from typing import Any

from verl_patches.errors import ConfigError
from verl_patches.layout.parallel import ParallelLayout, rollout_layout


def world_size(config: Any) -> int:
    """Ranks of the run: one a die."""
    return config.trainer.nnodes * config.trainer.n_gpus_per_node


def train_layout_of(config: Any) -> ParallelLayout:
    """The layout of actor and reference in a composed configuration; ConfigError if there is none."""
    return train_layout_in(config.actor_rollout_ref, config.recipe, world_size(config))


def rollout_layout_of(config: Any) -> ParallelLayout:
    """The layout of the vLLM instances in a composed configuration; ConfigError if it does not fit."""
    return rollout_layout_in(config.actor_rollout_ref, config.recipe, world_size(config))


def train_layout_in(section: Any, recipe: Any, world: int) -> ParallelLayout:
    """The layout of actor and reference: `section` is verl's actor_rollout_ref, which is all that a worker has."""
    actor = section.actor.megatron
    return ParallelLayout(
        world_size=world,
        tp=actor.tensor_model_parallel_size,
        cp=actor.context_parallel_size,
        ep=actor.expert_model_parallel_size,
        etp=actor.expert_tensor_parallel_size,
        pp=actor.pipeline_model_parallel_size,
        vpp=actor.virtual_pipeline_model_parallel_size or 1,
        layers_per_stage=tuple(recipe.train.layers_per_stage) if recipe.train.layers_per_stage else None,
    )


def rollout_layout_in(section: Any, recipe: Any, world: int) -> ParallelLayout:
    """The layout of the vLLM instances: `section` is verl's actor_rollout_ref, which is all that a worker has."""
    rollout, tp = recipe.rollout, section.rollout.tensor_model_parallel_size
    ranks = tp * rollout.dp
    instances = rollout.instances or max(1, world // ranks)
    if instances * ranks != world:
        given = "recipe.rollout.instances" if rollout.instances else "as many instances as fit"
        raise ConfigError(
            f"rollout layout: {instances} instance(s) x dp {rollout.dp} x tp {tp} = {instances * ranks} ranks, "
            f"expected all {world} (trainer.nnodes x n_gpus_per_node); change {given}, recipe.rollout.dp or "
            "actor_rollout_ref.rollout.tensor_model_parallel_size"
        )
    if rollout.dp > 1 and not rollout.expert_parallel:
        raise ConfigError(
            f"rollout layout: recipe.rollout.dp={rollout.dp} shares experts inside an instance, which needs "
            "recipe.rollout.expert_parallel=true; replicas that share nothing are instances (dp=1)"
        )
    return rollout_layout(instances, rollout.dp, tp, expert_parallel=rollout.expert_parallel)
