"""Types and bounds of the keys of verl's configuration that a run depends on.

verl itself checks few of them, and late: in the workers, after Ray, Megatron and vLLM have started. A key that is not
listed here is passed on unchecked; one that is listed may be missing, as pinned versions of verl differ. Sections and
names are those of verl's ppo_megatron_trainer.yaml.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from verl_patches.errors import ConfigError
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
    value_faults,
)

RESUME_NEEDS = "trainer.resume_mode=resume_path needs trainer.resume_from_path=.../global_step_N"
# names that both pinned versions of verl know
Loss = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
Divergence = Literal["kl", "abs", "mse", "low_var_kl", "full"]
Advantage = Literal["gae", "grpo", "grpo_passk", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "rloo"]
Logger = Literal["console", "tensorboard", "wandb", "mlflow", "swanlab", "vemlp_wandb", "clearml"]
LoadFormat = Literal[
    "dummy", "dummy_megatron", "dummy_hf", "dummy_dtensor", "auto", "safetensors", "pt", "npcache", "fastsafetensors"
]
_GREEDY = (
    "greedy responses of one prompt are equal, so their advantages are 0; for greedy validation set "
    "actor_rollout_ref.rollout.val_kwargs.do_sample=false and leave val_kwargs.temperature at 0"
)


class Section(BaseModel):
    """A section of the configuration; keys that it does not list are not checked."""

    model_config = ConfigDict(strict=True, extra="ignore")


class CustomDataset(Section):
    """data.custom_cls"""

    path: Text | None
    name: Text | None


class Data(Section):
    """data"""

    custom_cls: CustomDataset
    reward_fn_key: Text

    train_files: Text | list[Text]
    val_files: Text | list[Text]
    prompt_key: Text
    max_prompt_length: Count
    max_response_length: Count
    train_batch_size: Count
    val_batch_size: Count | None = None
    shuffle: bool
    filter_overlong_prompts: bool
    filter_overlong_prompts_workers: Count | None = None
    seed: Seed | None = None
    truncation: Literal["left", "right", "middle", "error"]
    dataloader_num_workers: Natural | None = None


class Megatron(Section):
    """actor_rollout_ref.actor.megatron, .ref.megatron"""

    tensor_model_parallel_size: Count
    expert_model_parallel_size: Count
    expert_tensor_parallel_size: Count | None = None
    pipeline_model_parallel_size: Count
    virtual_pipeline_model_parallel_size: Count | None = None
    context_parallel_size: Count
    sequence_parallel: bool
    use_distributed_optimizer: bool
    use_dist_checkpointing: bool
    param_offload: bool
    seed: Seed
    override_transformer_config: dict[str, Any] | None = None
    grad_offload: bool | None = None
    optimizer_offload: bool | None = None


class Optimizer(Section):
    """actor_rollout_ref.actor.optim"""

    lr: Positive
    clip_grad: Positive | None = None
    lr_warmup_steps: Interval | None = None
    lr_warmup_steps_ratio: Share | None = None
    min_lr_ratio: Share | None = None
    total_training_steps: Interval
    weight_decay: NotNegative


class Actor(Section):
    """actor_rollout_ref.actor"""

    ppo_mini_batch_size: Count
    ppo_micro_batch_size: Count | None = None
    ppo_micro_batch_size_per_gpu: Count | None = None
    use_dynamic_bsz: bool
    ppo_max_token_len_per_gpu: Count | None = None
    clip_ratio: Positive
    clip_ratio_low: Positive | None = None
    clip_ratio_high: Positive | None = None
    clip_ratio_c: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    strategy: Literal["megatron"]
    loss_agg_mode: Loss
    kl_loss_type: Divergence
    entropy_coeff: NotNegative
    use_kl_loss: bool
    kl_loss_coef: NotNegative
    ppo_epochs: Count
    shuffle: bool
    load_weight: bool
    optim: Optimizer
    megatron: Megatron


class Reference(Section):
    """actor_rollout_ref.ref"""

    strategy: Literal["megatron"]

    log_prob_micro_batch_size: Count | None = None
    log_prob_micro_batch_size_per_gpu: Count | None = None
    load_weight: bool
    megatron: Megatron


class Scheduler(Section):
    """vllm-ascend's ascend_scheduler_config; recipe.rollout.ascend.scheduler enables it"""

    enable_chunked_prefill: bool | None = None
    max_num_batched_tokens: Count | None = None


class Additional(Section):
    """actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config: those that the recipe reads"""

    ascend_scheduler_config: Scheduler | None = None


class VllmArguments(Section):
    """actor_rollout_ref.rollout.engine_kwargs.vllm: those that the recipe reads"""

    max_num_seqs: Count | None = None
    enable_expert_parallel: bool | None = None
    data_parallel_size: Count | None = None
    additional_config: Additional | None = None


class EngineArguments(Section):
    """actor_rollout_ref.rollout.engine_kwargs"""

    vllm: VllmArguments | None = None


class Rollout(Section):
    """actor_rollout_ref.rollout"""

    name: Text
    mode: Text
    temperature: Annotated[Positive, Field(description=_GREEDY)]
    top_k: Annotated[int, Field(ge=-1)]
    top_p: Probability
    n: Count
    seed: Seed | None = None
    dtype: Text
    gpu_memory_utilization: Probability
    ignore_eos: bool
    enforce_eager: bool
    free_cache_engine: bool
    load_format: LoadFormat
    engine_kwargs: EngineArguments
    tensor_model_parallel_size: Count
    max_num_batched_tokens: Count
    max_model_len: Count | None = None
    max_num_seqs: Count
    log_prob_micro_batch_size: Count | None = None
    log_prob_micro_batch_size_per_gpu: Count | None = None
    enable_chunked_prefill: bool
    do_sample: bool


class ModelOverride(Section):
    """actor_rollout_ref.model.override_config"""

    model_config_: dict[str, Any] | None = Field(None, alias="model_config")


class Model(Section):
    """actor_rollout_ref.model"""

    path: Text
    override_config: ModelOverride
    external_lib: Text | None
    enable_gradient_checkpointing: bool
    trust_remote_code: bool


class ActorRolloutRef(Section):
    """actor_rollout_ref"""

    model: Model
    actor: Actor
    ref: Reference
    rollout: Rollout


class KlControl(Section):
    """algorithm.kl_ctrl"""

    type: Literal["fixed", "adaptive"]
    kl_coef: NotNegative
    horizon: Positive
    target_kl: Positive


class Algorithm(Section):
    """algorithm"""

    kl_ctrl: KlControl

    gamma: Share
    lam: Share
    adv_estimator: Advantage
    kl_penalty: Divergence
    norm_adv_by_std_in_grpo: bool | None = None
    use_kl_in_reward: bool


class Trainer(Section):
    """trainer"""

    balance_batch: bool
    total_epochs: Count
    total_training_steps: Count | None = None
    project_name: Text
    experiment_name: Text
    logger: list[Logger] | Logger
    device: Literal["cuda", "npu", "cpu"]
    nnodes: Count
    n_gpus_per_node: Count
    save_freq: Interval
    test_freq: Interval
    val_before_train: bool
    critic_warmup: Natural
    resume_mode: Literal["disable", "auto", "resume_path"]
    resume_from_path: Text | Literal[False] | None = None
    default_local_dir: Text
    default_hdfs_dir: Text | None = None
    max_actor_ckpt_to_keep: Count | None = None


class RewardFunction(Section):
    """custom_reward_function"""

    path: Text | None
    name: Text
    reward_kwargs: dict[str, Any] | None = None


class OverlongBuffer(Section):
    """reward_model.reward_kwargs.overlong_buffer_cfg"""

    enable: bool
    len: Count
    penalty_factor: NotNegative
    log: bool


class RewardKwargs(Section):
    """reward_model.reward_kwargs, keyword arguments of the reward manager: those of dapo"""

    max_resp_len: Count | None = None
    overlong_buffer_cfg: OverlongBuffer | None = None


class RewardModel(Section):
    """reward_model"""

    enable: bool
    launch_reward_fn_async: bool
    reward_manager: Literal["naive", "prime", "batch", "dapo"]
    reward_kwargs: RewardKwargs | None = None


class Critic(Section):
    """critic"""

    strategy: Literal["megatron"]  # verl compares it with the actor's, although there is no critic


class RayInit(Section):
    """ray_init"""

    num_cpus: Count | None = None


class VerlConfig(Section):
    """verl's configuration."""

    data: Data
    actor_rollout_ref: ActorRolloutRef
    algorithm: Algorithm
    trainer: Trainer
    custom_reward_function: RewardFunction
    critic: Critic
    reward_model: RewardModel
    ray_init: RayInit


def check_verl_values(config: Mapping[str, Any]) -> None:
    """ConfigError that names each key of verl's configuration with a wrong type or size."""
    if faults := value_faults(VerlConfig, config, may_lack=True):
        raise ConfigError("Invalid configuration:\n  " + "\n  ".join(faults))


def check_needs(config: Mapping[str, Any]) -> None:
    """ConfigError that names each key that needs another, in a configuration whose keys have their types."""
    if faults := list(_lacking(config)):
        raise ConfigError("Invalid configuration:\n  " + "\n  ".join(faults))


def _lacking(config: Mapping[str, Any]) -> Iterator[str]:
    """Keys that need another one, which verl would miss only after the start."""
    trainer, reward, actor = config["trainer"], config["reward_model"], config["actor_rollout_ref"]["actor"]
    if trainer["resume_mode"] == "resume_path" and not trainer["resume_from_path"]:
        yield RESUME_NEEDS
    if actor["shuffle"] and actor["data_loader_seed"] is None:
        yield "actor_rollout_ref.actor.shuffle is true, which needs actor_rollout_ref.actor.data_loader_seed=N"
    if config["data"]["custom_cls"]["path"] and not config["data"]["custom_cls"]["name"]:
        yield "data.custom_cls.path is given, which needs data.custom_cls.name"
    manager, given = reward["reward_manager"], reward.get("reward_kwargs") or {}
    buffer, key = given.get("overlong_buffer_cfg") or {}, "reward_model.reward_kwargs"
    if manager == "dapo":
        lacking = [f"overlong_buffer_cfg.{name}" for name in OverlongBuffer.model_fields if name not in buffer]
        lacking += [] if given.get("max_resp_len") else ["max_resp_len"]
        if lacking:
            yield f"reward_model.reward_manager is dapo, which needs {', '.join(f'{key}.{name}' for name in lacking)}"
    elif manager != "batch" and given:
        yield f"{key} holds {', '.join(given)}; expected none, as reward manager {manager} takes no arguments: set dapo"
