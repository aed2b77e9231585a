"""Check the values of a configuration: verl's keys by the types of verl's own defaults, and the recipe section.

verl itself checks few of them, and late: in the workers, after Ray, Megatron and vLLM have started. KEY_TYPES has the
names whose values have bounds; verl uses a name alike in all of its sections. Any other key has the type of its default
in verl's ppo_megatron_trainer.yaml, and is not checked where that is null or another key's value.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from verl_patches.errors import ConfigError
from verl_patches.platform import as_npu
from verl_patches.recipe import recipe_keys
from verl_patches.values import (
    Count,
    Interval,
    Natural,
    NotNegative,
    Positive,
    Probability,
    Seed,
    Share,
    Text,
    leaves,
    unknown_key,
    value_faults,
)

# names that both pinned versions of verl know
Loss = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
Divergence = Literal["kl", "abs", "mse", "low_var_kl", "full"]
Advantage = Literal["gae", "grpo", "grpo_passk", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "rloo"]
Logger = Literal["console", "tensorboard", "wandb", "mlflow", "swanlab", "vemlp_wandb", "clearml"]
LoadFormat = Literal[
    "dummy", "dummy_megatron", "dummy_hf", "dummy_dtensor", "auto", "safetensors", "pt", "npcache", "fastsafetensors"
]
_DEFAULT_TYPES: dict[type, Any] = {str: Text, dict: dict[str, Any] | None, list: list[Any]}
_VLLM = "actor_rollout_ref.rollout.engine_kwargs.vllm"
_GREEDY = (
    "greedy responses of one prompt are equal, so their advantages are 0; for greedy validation set "
    "actor_rollout_ref.rollout.val_kwargs.do_sample=false and leave val_kwargs.temperature at 0"
)


# {last part of a key, or a whole key that verl's file does not name, or that has bounds of its own: type}
KEY_TYPES: dict[str, Any] = {
    # data
    "train_files": Text | list[Text],
    "val_files": Text | list[Text],
    "max_prompt_length": Count,
    "max_response_length": Count,
    "train_batch_size": Count,
    "val_batch_size": Count,
    "truncation": Literal["left", "right", "middle", "error"],
    "data.dataloader_num_workers": Natural | None,
    # files and names
    "path": Text,
    "name": Text,
    "external_lib": Text | None,
    "default_hdfs_dir": Text,
    "data.trust_remote_code": bool,  # line a3's verl reads it, and the model's, but does not name it in its file
    "actor_rollout_ref.model.trust_remote_code": bool,
    # sizes of batches and layouts
    "ppo_mini_batch_size": Count,
    "ppo_micro_batch_size": Count,
    "ppo_micro_batch_size_per_gpu": Count,
    "ppo_max_token_len_per_gpu": Count | None,
    "log_prob_micro_batch_size": Count,
    "log_prob_micro_batch_size_per_gpu": Count,
    "ppo_epochs": Count,
    "rollout_n": Count,
    "tensor_model_parallel_size": Count,
    "expert_model_parallel_size": Count,
    "expert_tensor_parallel_size": Count | None,
    "pipeline_model_parallel_size": Count,
    "virtual_pipeline_model_parallel_size": Count | None,
    "context_parallel_size": Count,
    "activations_checkpoint_num_layers": Natural | Literal["auto"] | list[Natural],
    "seed": Seed,
    "data.seed": Seed | None,
    "actor_rollout_ref.rollout.seed": Seed | None,
    # loss, optimizer, advantage
    "strategy": Literal["megatron"],  # verl compares the critic's with the actor's, also without a critic
    "clip_ratio": Positive,
    "clip_ratio_low": Positive | None,
    "clip_ratio_high": Positive | None,
    "clip_ratio_c": Annotated[float, Field(gt=1, allow_inf_nan=False)] | None,
    "cliprange_value": Positive,
    "loss_agg_mode": Loss,
    "kl_loss_type": Divergence,
    "kl_penalty": Divergence,
    "entropy_coeff": NotNegative,
    "kl_loss_coef": NotNegative,
    "kl_coef": NotNegative,
    "horizon": Positive,
    "target_kl": Positive,
    "type": Literal["fixed", "adaptive"],
    "gamma": Share,
    "lam": Share,
    "adv_estimator": Advantage,
    "lr": Positive,
    "clip_grad": Positive | None,
    "lr_warmup_steps": Interval | None,
    "lr_warmup_steps_ratio": Share | None,
    "min_lr_ratio": Share,
    "weight_decay": NotNegative,
    # rollout
    "temperature": Annotated[Positive, Field(description=_GREEDY)],
    "actor_rollout_ref.rollout.val_kwargs.temperature": NotNegative,
    "top_k": Annotated[int, Field(ge=-1)],
    "top_p": Probability,
    "n": Count,
    "gpu_memory_utilization": Probability,
    "load_format": LoadFormat,
    "max_num_batched_tokens": Count,
    "max_model_len": Count,
    "max_num_seqs": Count,
    f"{_VLLM}.max_num_seqs": Count | None,
    f"{_VLLM}.data_parallel_size": Count | None,
    f"{_VLLM}.additional_config.ascend_scheduler_config.max_num_batched_tokens": Count | None,
    # trainer
    "total_epochs": Count,
    "total_training_steps": Interval,
    "trainer.total_training_steps": Count | None,
    "logger": list[Logger] | Logger,
    "device": Literal["cuda", "npu", "cpu"],
    "nnodes": Count,
    "n_gpus_per_node": Count,
    "save_freq": Interval,
    "test_freq": Interval,
    "critic_warmup": Natural,
    "resume_mode": Literal["disable", "auto", "resume_path"],
    "resume_from_path": Text | Literal[False],
    "max_actor_ckpt_to_keep": Count,
    "reward_manager": Literal["naive", "prime", "batch", "dapo"],
    "custom_reward_function.reward_kwargs": dict[str, Any] | None,
    "num_cpus": Count,
}


def trains_critic(estimator: Any) -> bool:
    """Return whether verl's trainer has a critic with this algorithm.adv_estimator."""
    return estimator == "gae"


def verl_types(base: Mapping[str, Any]) -> dict[str, Any]:
    """Return {key: type} by KEY_TYPES and the defaults in `base`, verl's own file; null is allowed where it is one."""
    types = {key: kind for key, kind in KEY_TYPES.items() if "." in key}
    for key, default in leaves(base):
        is_reference = isinstance(default, str) and default.startswith("${")
        kind = KEY_TYPES.get(key.rpartition(".")[2])
        if kind is not None:
            types.setdefault(key, kind if default is not None else kind | None)
        elif default is not None and not is_reference:
            types[key] = _DEFAULT_TYPES.get(type(default), type(default))
    return types


def check_verl_values(config: Mapping[str, Any], base: Mapping[str, Any]) -> None:
    """Refuse a configuration that lacks keys of `base`, verl's own file, or has values of a wrong type or size.

    If it has no such faults, it is refused where a key needs another key that is not set.
    """
    if not (faults := _deleted_key_faults(config, base)):
        types = verl_types(base)
        if not trains_critic(config["algorithm"]["adv_estimator"]):  # the critic's keys repeat the actor's
            types = {key: types[key] for key in types if not key.startswith("critic.") or key == "critic.strategy"}
        given = dict(leaves(config, ends=types.__contains__))
        faults = value_faults(types, given) or list(_missing_key_faults(config))
    if faults:
        raise ConfigError("Invalid configuration:\n  " + "\n  ".join(faults))


def _deleted_key_faults(config: Mapping[str, Any], base: Mapping[str, Any]) -> list[str]:
    """Return a fault for keys of verl's config that an override has removed: by ~key, or by a value for a section."""
    required = [key for key, _ in leaves(base) if not key.startswith(f"{_VLLM}.")]  # that section may be null
    held = {above for key, _ in leaves(config) for above in itertools.accumulate(key.split("."), "{}.{}".format)}
    if not (gone := [key for key in required if key not in held]):
        return []
    todo = "remove the override ~KEY, or the one that replaces its section"
    return [f"{', '.join(gone[:3])} is missing; expected all keys of verl's config: {todo}"]


def _missing_key_faults(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys that need another one, whose absence verl would notice only after the start."""
    actor = config["actor_rollout_ref"]["actor"]
    if actor["shuffle"] and actor["data_loader_seed"] is None:
        yield "actor_rollout_ref.actor.shuffle is true, which needs actor_rollout_ref.actor.data_loader_seed=N"
    if config["data"]["custom_cls"]["path"] and not config["data"]["custom_cls"]["name"]:
        yield "data.custom_cls.path is given, which needs data.custom_cls.name"


_ASCEND_PREFIX = "recipe.rollout.ascend."
_NPU_KEYS = ("recipe.hccl.", _ASCEND_PREFIX, "recipe.rollout.balanced_routing")
_GRAPH_KEYS = {
    f"{_ASCEND_PREFIX}{name}"
    for name in ("graph_batch_sizes", "multistream_mla", "multistream_moe", "view_optimize", "kv_nz")
}


def check_recipe(section: Mapping[str, Any]) -> None:
    """Refuse a key that is not in the schema (and name the nearest one), and a value that is not allowed."""
    known = dict(recipe_keys())
    given = dict(leaves(section, "recipe.", known.__contains__))
    faults = [unknown_key(key, known) for key in given if key not in known]
    faults += value_faults({key: item.kind for key, item in known.items()}, given)
    faults = faults or _contradictions(given)
    if faults:
        raise ConfigError("recipe: " + "\n        ".join(faults))


def _contradictions(given: Mapping[str, Any]) -> list[str]:
    """Return the faults of keys that need others, or would have no effect or a wrong one, whatever the layout."""
    faults = []
    line, platform = given.get("recipe.line"), given.get("recipe.platform")
    if platform == "npu_emulated" and line != "a3":
        faults.append(f"recipe.platform=npu_emulated needs recipe.line=a3, found {line}")
    if given.get("recipe.train.balanced_routing") and line != "a3":
        faults.append(f"recipe.train.balanced_routing is MindSpeed-LLM's: it needs recipe.line=a3, found {line}")
    for key, item in recipe_keys():
        value = given.get(key, item.default)
        if value != item.default and key.startswith(_NPU_KEYS) and platform is not None and not as_npu(platform):
            faults.append(f"{key} is for NPUs: it needs recipe.platform=npu, found {platform}")
        if value != item.default and key in _GRAPH_KEYS and not given.get(f"{_ASCEND_PREFIX}graphs"):
            faults.append(f"{key} is {value}: it has an effect in graph mode only; set {_ASCEND_PREFIX}graphs=true")
    if given.get(f"{_ASCEND_PREFIX}kv_nz"):
        faults.append(
            f"{_ASCEND_PREFIX}kv_nz is True; expected false: vllm-ascend at the pin writes new prompts to the KV "
            "cache twice, the second time in the other format (vllm_ascend.attention.mla_v1.AscendMLAImpl.forward; "
            "vllm-ascend PR 3066)"
        )
    return faults
