"""Resolve a composed configuration to its `RunSpec` (spec.py); no other file derives facts of a run from it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import first_layers, read_model_shape
from verl_patches.layout.model_folder import read_config
from verl_patches.layout.parallel import ParallelLayout, rollout_layout
from verl_patches.patching.spec import PatchSpec
from verl_patches.patching.switches import Switches
from verl_patches.platform import NO_DEVICE
from verl_patches.recipe import Recipe, recipe_from
from verl_patches.rewards.parts import reward_parts
from verl_patches.run.engine_options import rewrite_engine_options
from verl_patches.run.features import feature_states, needed_rows
from verl_patches.run.verl_values import trains_critic
from verl_patches.shared_files import expand_home
from verl_patches.spec import RunSpec, Trees
from verl_patches.upstream.pins import CONFIGS_DIR

MODEL_LAYERS_KEY = "recipe.num_hidden_layers"
LAYER_COUNT_KEYS = (  # where training reads it, and vLLM (rollout/engine.py)
    "actor_rollout_ref.model.override_config.model_config.num_hidden_layers",
    "critic.model.override_config.model_config.num_hidden_layers",
    "actor_rollout_ref.rollout.engine_kwargs.vllm.hf_overrides.num_hidden_layers",
)
TRAIN_LAYOUT, ROLLOUT_LAYOUT = "train layout", "rollout layout"


class LayoutError(ConfigError):
    """Raised where the ranks cannot be split as configured.

    side: TRAIN_LAYOUT or ROLLOUT_LAYOUT; config: the configuration.
    """

    def __init__(self, side: str, reason: str, config: DictConfig):
        super().__init__(f"{side}: {reason}")
        self.side, self.reason, self.config = side, reason, config


def resolve(
    config: DictConfig,
    catalogue: Iterable[PatchSpec],
    given: Collection[str] = (),
    trees: Trees = Trees(),  # noqa: B008 frozen
    shape_file: Path | None = None,
    applied: Collection[str] | None = None,
) -> RunSpec:
    """Return the facts of a run of `config`, a composed configuration, which becomes read-only.

    catalogue: rows of all lines; the rows that the run needs are on. given: keys that the command line sets.
    trees: checkouts that the run imports. shape_file: a config.json, or its folder, whose model sizes replace those of
    recipe.model_shape. applied: ids of the rows that the import alone has already applied.
    Raises LayoutError where a layout cannot be built, and ConfigError for invalid rewards, switches or model files.
    """
    recipe, rows = recipe_from(OmegaConf.to_container(config.recipe)), tuple(catalogue)
    switches = Switches(recipe.line, recipe.platform, tuple(recipe.patches), recipe.drift)
    switches.check_against({row.id: row for row in rows})
    facts = _config_facts(config, recipe, model_shape_file(recipe) if shape_file is None else shape_file)
    on = frozenset(applied or ())
    run = RunSpec(**facts, switches=switches, rows=on, given_keys=frozenset(given), trees=trees)
    if applied is not None:
        return run
    features = {name for name, is_on in feature_states(run).items() if is_on}
    return replace(run, rows=needed_rows(rows, features, switches, recipe.level))


def changed_run(run: RunSpec, updates: Mapping[str, Any]) -> RunSpec:
    """Return the facts of `run` with other values of keys that switch no row, as if it had been composed with them.

    Keys that the configs derive from a changed key change with it. Errors are those of `resolve`.
    """
    config = change_config(run.verl, updates)
    recipe = recipe_from(OmegaConf.to_container(config.recipe))
    return replace(run, **_config_facts(config, recipe, model_shape_file(recipe)))


def change_config(config: DictConfig, updates: Mapping[str, Any]) -> DictConfig:
    """Return a copy of a composed configuration with other values, and with those that follow from them."""
    config = config.copy()
    OmegaConf.set_readonly(config, False)
    for key, value in updates.items():
        for name in (key, *_derived_keys(key)):
            OmegaConf.update(config, name, value, force_add=True)
    rewrite_engine_options(config)
    return config


def _derived_keys(key: str) -> Iterator[str]:
    """Yield the keys that the configs set from `key`."""
    section, _, name = key.rpartition(".")
    if section == "actor_rollout_ref.actor.megatron" and name.endswith("_parallel_size"):
        yield f"actor_rollout_ref.ref.megatron.{name}"
        yield f"critic.megatron.{name}"
        yield f"reward_model.megatron.{name}"
    if section == "actor_rollout_ref.actor" and name.startswith("ppo_"):
        yield f"critic.{name}"
    if key == "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu":
        yield "reward_model.micro_batch_size_per_gpu"
    if key.startswith("actor_rollout_ref.model.") and "checkpoint" in key:
        yield key.replace("actor_rollout_ref.", "critic.")
    if key == MODEL_LAYERS_KEY:
        yield from LAYER_COUNT_KEYS
    if key == "recipe.rollout.data_parallel_size":
        yield "actor_rollout_ref.rollout.engine_kwargs.vllm.data_parallel_size"


def _config_facts(config: DictConfig, recipe: Recipe, shape_file: Path) -> dict[str, Any]:
    """Return the fields of RunSpec that follow from the configuration alone; the configuration becomes read-only."""
    OmegaConf.set_readonly(config, True)
    section = config.actor_rollout_ref
    shape, reach = read_model_shape(shape_file), read_config(shape_file).get("max_position_embeddings")
    if not isinstance(reach, int):
        raise ConfigError(f"{shape_file}: expected max_position_embeddings, a whole number, found {reach!r}")
    model_file = Path(section.model.path, "config.json")
    hf_config = {**read_config(model_file if model_file.exists() else shape_file), **model_changes(section.model)}
    nodes, per_node = config.trainer.nnodes, config.trainer.n_gpus_per_node
    world, layouts = nodes * per_node, {}
    ranks = f"ranks are trainer.nnodes {nodes} x trainer.n_gpus_per_node {per_node} = {world}"
    if recipe.platform in NO_DEVICE:
        ranks += "; layout=NAME (configs/layout) and rollout=NAME set fitting sizes and ranks"
    for side, build in ((TRAIN_LAYOUT, _train_layout), (ROLLOUT_LAYOUT, _rollout_layout)):
        try:
            layouts[side] = build(section, recipe, world)
        except ConfigError as error:
            raise LayoutError(side, f"{error} ({ranks})", config) from None
    return {
        "recipe": recipe,
        "model": first_layers(shape, recipe.num_hidden_layers),
        "max_positions": reach,
        "hf_config": MappingProxyType(hf_config),
        "train": layouts[TRAIN_LAYOUT],
        "rollout": layouts[ROLLOUT_LAYOUT],
        "engine": MappingProxyType(OmegaConf.to_container(section.rollout.engine_kwargs).get("vllm") or {}),
        "rewards": reward_parts(config),
        "has_critic": trains_critic(config.algorithm.adv_estimator),
        "verl": config,
    }


def model_shape_file(recipe: Recipe) -> Path:
    """Return the HF config.json that recipe.model_shape names; raise ConfigError where it does not exist."""
    path = CONFIGS_DIR / expand_home(recipe.model_shape)
    if not path.is_file():
        raise ConfigError(
            f"recipe.model_shape is {recipe.model_shape}: no such file in {CONFIGS_DIR}; give an HF config.json"
        )
    return path


def model_changes(model: DictConfig) -> Mapping[str, Any]:
    """Return override_config.model_config of verl's section `model`, which overrides the model's config.json."""
    return OmegaConf.to_container(model.override_config).get("model_config") or {}


def _train_layout(section: DictConfig, recipe: Recipe, world: int) -> ParallelLayout:
    """Return the layout that actor, reference and critic share, as verl initializes Megatron once in a process."""
    megatron, layers = section.actor.megatron, recipe.train.layers_per_stage
    return ParallelLayout(
        world_size=world,
        tp=megatron.tensor_model_parallel_size,
        cp=megatron.context_parallel_size,
        ep=megatron.expert_model_parallel_size,
        etp=megatron.expert_tensor_parallel_size,
        pp=megatron.pipeline_model_parallel_size,
        vpp=megatron.virtual_pipeline_model_parallel_size or 1,
        layers_per_stage=tuple(layers) if layers else None,
    )


def _rollout_layout(section: DictConfig, recipe: Recipe, world: int) -> ParallelLayout:
    """Return the layout of vLLM's instances: recipe.rollout.instances x dp x tp ranks."""
    rollout, tp = recipe.rollout, section.rollout.tensor_model_parallel_size
    ranks = tp * rollout.data_parallel_size
    instances = rollout.instances or max(1, world // ranks)
    if instances * ranks != world:
        given = "recipe.rollout.instances, " if rollout.instances else ""
        raise ConfigError(
            f"{instances} instance(s) x dp {rollout.data_parallel_size} x tp {tp} = {instances * ranks} ranks, "
            f"expected all {world}; change {given}recipe.rollout.data_parallel_size or "
            "actor_rollout_ref.rollout.tensor_model_parallel_size"
        )
    if rollout.data_parallel_size > 1 and not rollout.enable_expert_parallel:
        raise ConfigError(
            f"recipe.rollout.data_parallel_size={rollout.data_parallel_size} splits experts over the ranks of an "
            "instance, which needs recipe.rollout.enable_expert_parallel=true, found false; set it, or "
            "recipe.rollout.data_parallel_size=1 for replicas that share no experts"
        )
    return rollout_layout(instances, rollout.data_parallel_size, tp, expert_parallel=rollout.enable_expert_parallel)
