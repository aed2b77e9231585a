"""The table: what each key of verl's configuration and `recipe:` becomes for the training engine of line a3.

Keys are relative to `actor_rollout_ref`, which is what verl's workers see; `recipe` is mirrored there. engine_arguments
reads it. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Get = Callable[[str], Any]
_A, _O, _R, _M = "actor.megatron.", "actor.optim.", "recipe.train.", "model.gradient_checkpointing_kwargs."
SECTIONS = ("actor.megatron", "actor.optim", "ref.megatron", "model.gradient_checkpointing_kwargs", "recipe.train")


class Refusal(NamedTuple):
    """What a conversion returns in place of arguments: the reason."""

    why: str


class Key(NamedTuple):
    """One row: how `key` is treated; `to` is an argument, or function(value, get) -> arguments or Refusal.

    how: value (`to` VALUE), switch (`to` if true), convert, verl (its own), ours (no argument, our own rows read it),
    with (another key's conversion reads it), same (as the actor's), only (`to` is the tuple of values that change
    nothing; others are refused with `why`).
    """

    key: str
    how: str
    to: Any
    why: str
    default: Any = None


def _experts(ep: int, get: Get) -> list[str] | Refusal:
    tp = get("actor.megatron.tensor_model_parallel_size")
    etp = number(get("actor.megatron.expert_tensor_parallel_size"))
    if get("recipe.train.expert_split") == "tp_extend_ep":
        if etp not in (None, 1):
            return Refusal(f"tp_extend_ep keeps experts whole: expert_tensor_parallel_size is 1, not {etp}")
        if ep % tp:
            return Refusal(f"with expert_split=tp_extend_ep it counts TP x EP ranks, a multiple of TP {tp}")
        return ["--expert-model-parallel-size", str(ep // tp), *(["--moe-tp-extend-ep"] if tp > 1 else [])]
    if etp not in (None, tp):
        return Refusal(f"Megatron core_r0.8.0 cuts each expert by TP {tp}, not by expert_tensor_parallel_size {etp}; "
                       "whole experts over TP x EP ranks are recipe.train.expert_split=tp_extend_ep")
    return ["--expert-model-parallel-size", str(ep)]


def _layers(counts: list[int] | None, get: Get) -> list[str] | Refusal:
    if not counts or get("actor.megatron.pipeline_model_parallel_size") == 1:
        return []
    return ["--num-layer-list", ",".join(map(str, counts))]


def _sequence_parallel(on: bool, get: Get) -> list[str] | Refusal:
    tp = get("actor.megatron.tensor_model_parallel_size")
    if tp > 1 and not on:
        return Refusal("without it MindSpeed-LLM's MLA loses part of the rotary key's gradient under TP, and its "
                       "router takes each token TP times")
    return ["--sequence-parallel"] if tp > 1 else []


def _recompute(on: bool, get: Get) -> list[str] | Refusal:
    if not on:
        return []
    values = {f"--recompute-{name.replace('_', '-')}": get(f"{_M}activations_checkpoint_{name}")
              for name in ("granularity", "method", "num_layers")}
    if not values["--recompute-granularity"]:
        return Refusal("activations_checkpoint_granularity must say full or selective")
    return [word for argument, value in values.items() if value is not None for word in (argument, str(value))]


def _fused_linear_wgrad(on: bool, get: Get) -> list[str]:
    # on by default in Megatron, where it is apex's kernel; MindSpeed's adaptor puts npu_matmul_add_fp32 in its place
    return [] if on else ["--no-gradient-accumulation-fusion"]


def _swap(on: bool, get: Get) -> list[str] | Refusal:
    if on and get("recipe.dtype") == "fp32":
        return Refusal("MindSpeed makes no states for fp32 weights in its swap (swap_optimizer.py:562): use bf16")
    if on and get("actor.megatron.optimizer_offload"):
        return Refusal("the states are on the host already, and verl's optimizer_offload looks for them on the device: "
                       "set actor.megatron.optimizer_offload=false")
    if on and not get("actor.megatron.use_distributed_optimizer"):
        return Refusal("MindSpeed's swap is a distributed optimizer: set actor.megatron.use_distributed_optimizer=true")
    return ["--swap-optimizer"] if on else []


def _schedule(style: str, get: Get) -> list[str] | Refusal:
    steps, lr = get("actor.optim.total_training_steps"), float(get("actor.optim.lr"))
    ratio, warmup = get("actor.optim.lr_warmup_steps_ratio") or 0.0, number(get("actor.optim.lr_warmup_steps"))
    warmup = warmup if warmup is not None and warmup >= 0 else int(ratio * max(steps, 0))
    if steps > 0 and warmup >= steps:
        return Refusal(f"{warmup} warm-up steps leave nothing of {steps}")
    total = str(max(steps, warmup + 1))  # -1 until verl's trainer knows it
    minimum = lr * (get("actor.optim.min_lr_ratio") or 0.0)
    return ["--lr-decay-style", style, "--lr-warmup-iters", str(warmup), "--min-lr", repr(minimum),
            "--train-iters", total, "--lr-decay-iters", total]


def _dtype(dtype: str, get: Get) -> list[str] | Refusal:
    # validators take grouped GEMM in bf16 only (megatron/training/arguments.py:421): engine start lowers it to fp32
    # after them. MindSpeed frees what it takes for an fp32 copy, which is the tensor itself in fp32 (router.py:441).
    return ["--bf16", *(["--router-gating-in-fp32"] if dtype == "bf16" else [])]


def _length(responses: int, get: Get) -> list[str] | Refusal:
    return ["--seq-length", str(responses + get("rollout.prompt_length"))]


def number(value: Any) -> Any:
    return None if value in (None, "None") else value  # verl's file says None where it means null


_PHASES = "verl moves it between phases (verl/workers/megatron_workers.py)"
_DDP = "verl builds DDP without overlap and never waits for it (verl/utils/megatron_utils.py:127)"
_FUSED = "MindSpeed's fused kernel; null is on"
_DCP = "Megatron's checkpoint of 0.8.0 does not know MindSpeed's stacked experts"
_IN_RECIPE = "MindSpeed-LLM reads arguments, not this; use recipe.train and gradient_checkpointing_kwargs"

TABLE: tuple[Key, ...] = (
    Key(_A + "tensor_model_parallel_size", "value", "--tensor-model-parallel-size", "TP"),
    Key(_A + "pipeline_model_parallel_size", "value", "--pipeline-model-parallel-size", "PP"),
    Key(_A + "virtual_pipeline_model_parallel_size", "only", (None, 1),
        "MindSpeed-LLM takes either a layer list or virtual stages, and weight names know no virtual stages here"),
    Key(_A + "context_parallel_size", "only", (1,),
        "the attention of packed sequences is not split over ranks here; use TP and PP"),
    Key(_A + "expert_model_parallel_size", "convert", _experts,
        "here it counts the ranks that experts are split over; MindSpeed's EP leaves out TP where TP extends it"),
    Key(_A + "expert_tensor_parallel_size", "with", _A + "expert_model_parallel_size", ""),
    Key(_A + "sequence_parallel", "convert", _sequence_parallel, "meaningless at TP 1, needed above"),
    Key(_A + "use_distributed_optimizer", "switch", "--use-distributed-optimizer", "optimizer states split over DP"),
    Key(_A + "param_offload", "verl", None, _PHASES),
    Key(_A + "grad_offload", "same", _A + "param_offload",
        "verl 54c9b736 moves gradients with parameters (megatron_workers.py:117 is never read)"),
    Key(_A + "optimizer_offload", "verl", None, _PHASES),
    Key(_A + "use_dist_checkpointing", "only", (False,), _DCP),
    Key(_A + "dist_checkpointing_path", "only", (None,), _DCP),
    Key(_A + "seed", "value", "--seed", "weights that are not loaded"),
    Key(_A + "override_transformer_config", "only", (None, {}), _IN_RECIPE),
    Key(_O + "lr", "value", "--lr", "learning rate"),
    Key(_O + "clip_grad", "value", "--clip-grad", "gradient norm limit"),
    Key(_O + "weight_decay", "value", "--weight-decay", ""),
    Key(_O + "warmup_style", "convert", _schedule, "Megatron's scheduler; verl has none for Megatron at this commit"),
    Key(_O + "lr_warmup_steps", "with", _O + "warmup_style", "negative: lr_warmup_steps_ratio of the total"),
    Key(_O + "lr_warmup_steps_ratio", "with", _O + "warmup_style", ""),
    Key(_O + "min_lr_ratio", "with", _O + "warmup_style", "of lr"),
    Key(_O + "total_training_steps", "with", _O + "warmup_style", "verl's trainer fills it in"),
    Key("model.enable_gradient_checkpointing", "convert", _recompute, "recompute activations"),
    Key(_M + "activations_checkpoint_granularity", "with", "model.enable_gradient_checkpointing", ""),
    Key(_M + "activations_checkpoint_method", "with", "model.enable_gradient_checkpointing", ""),
    Key(_M + "activations_checkpoint_num_layers", "with", "model.enable_gradient_checkpointing", "of each stage"),
    Key("recipe.dtype", "convert", _dtype, "dtype of weights; fp32 is set after the validators, which ask for bf16"),
    Key("rollout.response_length", "convert", _length, "prompt + response; must not exceed the model's positions"),
    Key("rollout.prompt_length", "with", "rollout.response_length", ""),
    Key(_R + "layers_per_stage", "convert", _layers, "uneven PP; null splits evenly"),
    Key(_R + "expert_split", "with", _A + "expert_model_parallel_size", ""),
    Key(_R + "skip_old_log_prob", "ours", None, "the update's own log-probs are the old ones", False),
    Key(_R + "swap_optimizer", "convert", _swap, "optimizer states live on the host"),
    Key(_R + "swap_optimizer_times", "value", "--swap-optimizer-times", "pieces that states are swapped in", 16),
    Key(_R + "grouped_gemm", "only", (None, True),
        "weights go by MindSpeed's stacked experts (weight1, weight2), which the grouped GEMM has; one module an "
        "expert has other names (model/mindspeed/names.py)"),
    Key(_R + "fused_rmsnorm", "switch", "--use-fused-rmsnorm", _FUSED, True),
    Key(_R + "fused_swiglu", "switch", "--use-fused-swiglu", _FUSED, True),
    Key(_R + "fused_rope", "switch", "--use-fused-rotary-pos-emb", _FUSED, True),
    Key(_R + "fused_permute", "switch", "--use-fused-moe-token-permute-and-unpermute", _FUSED, True),
    Key(_R + "fused_linear_wgrad", "convert", _fused_linear_wgrad,
        "linear layers add their weight gradients to fp32 main_grad in the product's kernel (npu_matmul_add_fp32)",
        False),
    Key(_R + "fused_expert_wgrad", "switch", "--gemm-gradient-accumulation-fusion",
        "the same for grouped experts (npu_groupmatmul_add_fp32)", False),
    Key(_R + "unpadded_attention", "switch", "--mla-fa-without-pad",
        "values keep v_head_dim; otherwise query, key and value are padded to a multiple of 128, 256 at 671B", False),
    Key(_R + "alltoall_overlap", "switch", "--moe-alltoall-overlap-comm", "expert exchange beside computation", False),
    Key(_R + "grad_overlap", "only", (None, False), _DDP),
    Key(_R + "param_overlap", "only", (None, False), _DDP),
    Key(_R + "collective_timeout_minutes", "value", "--distributed-timeout-minutes",
        "of torch.distributed and of every group; verl's worker sets none at this commit", 30),
    Key("nccl_timeout", "only", (None,),
        "verl does not read it at this commit; use recipe.train.collective_timeout_minutes"),
    Key(_R + "router_bias_update_rate", "value", "--moe-router-bias-update-rate",
        "0 leaves the model's correction bias alone", 0.0),
    Key(_R + "balanced_routing", "switch", "--fix-router", "equally many tokens an expert: speed runs only", False),
    Key(_R + "adam_beta1", "value", "--adam-beta1", "", 0.9),
    Key(_R + "adam_beta2", "value", "--adam-beta2", "", 0.999),
    Key(_R + "adam_eps", "value", "--adam-eps", "", 1e-8),
    *(Key(f"ref.megatron.{name}", "same", f"{_A}{name}", "actor and reference share one process and its arguments")
      for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
                   "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size",
                   "sequence_parallel", "seed", "override_transformer_config")),
    Key("ref.megatron.param_offload", "verl", None, _PHASES),
    Key("ref.megatron.use_distributed_optimizer", "verl", None, "the reference has no optimizer"),
    Key("ref.megatron.use_dist_checkpointing", "only", (False,), _DCP),
    Key("ref.megatron.dist_checkpointing_path", "only", (None,), _DCP),
)  # fmt: skip
FIXED = (
    (("--micro-batch-size", "1"), "verl cuts the micro batches"),
    (("--variable-seq-lengths",), "packed sequences: each micro batch has its own length"),
    (("--moe-token-dispatcher-type", "alltoall", "--moe-permutation-async-comm"),
     "without the second MindSpeed leaves Megatron's dispatcher in place, which does not know moe_tp_extend_ep"),
    (("--moe-grouped-gemm",), "experts are stacked in weight1 and weight2"),
    (("--distributed-backend", "nccl"), "torch_npu turns it into hccl, platform cpu into gloo"),
)  # fmt: skip
