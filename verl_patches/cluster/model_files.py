"""The files that a composed configuration takes its model from: recipe.model_shape, and the model's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import ModelShape, read_model_shape
from verl_patches.layout.model_folder import read_config


def model_shape_of(config: DictConfig, configs_dir: Path) -> ModelShape:
    """Sizes of the model from recipe.model_shape (relative to the configs folder); ConfigError without that file."""
    return read_model_shape(_shape_file(config, configs_dir))


def hf_config_of(config: DictConfig, configs_dir: Path) -> dict[str, Any]:
    """The model's config.json with `override_config.model_config` over it, as training reads it in a worker.

    The file is that of the model's folder, where it exists here, else recipe.model_shape.
    """
    file = config_file(config)
    return {**read_config(file if file.is_file() else _shape_file(config, configs_dir)), **model_changes(config)}


def config_file(config: DictConfig) -> Path:
    """config.json in the model's folder; it need not exist here."""
    return Path(config.actor_rollout_ref.model.path) / "config.json"


def model_changes(config: DictConfig) -> dict[str, Any]:
    """verl's override_config.model_config."""
    return OmegaConf.to_container(config.actor_rollout_ref.model.override_config).get("model_config") or {}


def _shape_file(config: DictConfig, configs_dir: Path) -> Path:
    path = Path(configs_dir) / config.recipe.model_shape
    if not path.is_file():
        raise ConfigError(
            f"recipe.model_shape is {config.recipe.model_shape}: no such file in {configs_dir}; give an HF config.json"
        )
    return path


def reads_weights(config: DictConfig) -> bool:
    """Whether a framework reads the tensors of the model's folder: not with random init."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    return (actor.load_weight and not actor.megatron.use_dist_checkpointing) or not rollout.load_format.startswith(
        "dummy")  # fmt: skip
