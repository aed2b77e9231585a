"""Run parity, updates and micro batches on a rank of line a3's tests, which mindspeed_start.py starts."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import torch
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from mindspeed_llm.tasks.models.transformer.multi_head_latent_attention import LinearNoTP
from verl import DataProto
from verl.utils.megatron_utils import unwrap_model

from tests.model.megatron_model import build_model
from tests.model.parity_job import answers, in_bf16, run
from verl_patches.memory.host_backed import single_optimizers
from verl_patches.model.mindspeed import model as mindspeed_model
from verl_patches.platform.npu import attention
from verl_patches.reshard.parameters import named_weights
from verl_patches.worker.context import context

RESPONSE = 16  # tokens


def build(model: Path, args, with_ddp: bool = True):
    """Build the model of this line as `build_model`."""
    torch.manual_seed(args.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    return build_model(model, args.params_dtype, wrap_with_ddp=with_ddp, line="a3")


def parity_job(folder: Path, config, args) -> dict:
    """Return the findings of parity_job.py, and the layers of this rank."""
    built = build(folder / "model", args)
    layers = [layer.layer_number for chunk in unwrap_model(built[0]) for layer in chunk.decoder.layers]
    return {**answers(built, folder, "a3"), "layers": layers}


def bf16_job(folder: Path, config, args) -> dict:
    """Return `in_bf16` of this line's model."""
    return in_bf16(build(folder / "model", args), folder)


def controls_job(folder: Path, config, args) -> dict:
    """Return correct logits, and logits with one fault each.

    The fault "columns" fills weight1 by its shape [H, e * 2F], a published mistake, instead of as view(e, H, 2F).
    """

    def by_columns(tensor):
        return torch.cat(list(tensor.view(args.num_experts, tensor.shape[0], -1)), dim=1)

    found = {}
    spoilt = {"nothing": ("router.weight", torch.clone), "bias": ("expert_bias", torch.zeros_like)}
    for name, (ending, change) in (spoilt | {"columns": ("weight1", by_columns)}).items():
        built = build(folder / "model", args, with_ddp=False)
        for parameter, tensor in named_weights(unwrap_model(built[0])[0]):
            if parameter.endswith(ending):
                tensor.data.copy_(change(tensor))
        found[name] = run(*built, torch.load(folder / "batch.pt"))
    return found


def family_controls_job(folder: Path, config, faults: dict[str, dict], args) -> dict:
    """Return logits of a model without q_lora_rank: correct ones, with one fault each, and by upstream's own path.

    faults: {name: arguments of the engine}. The fault "q_norm" keeps the norm of the query, with random weights.
    """
    built = build(folder / "model", args, with_ddp=False)
    batch = torch.load(folder / "batch.pt")
    found = {"nothing": run(*built, batch)}
    found["upstream"] = run(*_upstreams_query(built, folder, args), batch)
    for layer in unwrap_model(built[0])[0].decoder.layers:
        attention = layer.self_attention
        attention.q_layernorm = type(attention.k_layernorm)(args.hidden_size)
        attention.q_layernorm.weight.data.normal_(1, 0.1)
    found["q_norm"] = run(*built, batch)
    for name, changes in faults.items():
        before = {key: getattr(args, key) for key in changes}
        vars(args).update(changes)
        found[name] = run(*build(folder / "model", args, with_ddp=False), batch)
        vars(args).update(before)
    return found


def _upstreams_query(ours, folder: Path, args):
    """Build MindSpeed-LLM's own model without q_lora_rank, whose linear_qkv has the whole query, of `ours`' weights."""
    patched = mindspeed_model.InputAndLatent, args.q_lora_rank
    mindspeed_model.InputAndLatent, args.q_lora_rank = LinearNoTP, None
    torch.manual_seed(args.seed)
    built = build_model(folder / "model", args.params_dtype, load=False, line="a3")
    mindspeed_model.InputAndLatent, args.q_lora_rank = patched
    weights, group = dict(unwrap_model(ours[0])[0].state_dict()), mpu.get_tensor_model_parallel_group()
    for name in [name for name in weights if name.endswith("linear_qb.weight")]:
        query = weights.pop(name)
        parts = [torch.empty_like(query) for _ in range(mpu.get_tensor_model_parallel_world_size())]
        torch.distributed.all_gather(parts, query, group=group)
        name = name.replace("linear_qb", "linear_qkv")
        weights[name] = torch.cat([*parts, weights[name]])
    unwrap_model(built[0])[0].load_state_dict(weights)
    return built


def attention_job(folder: Path, config, args) -> list[dict[str, int]]:
    """Count how often our model code waits for lengths, computes places and attends, in one forward and in two."""
    model, batch = folder / "model", torch.load(folder / "batch.pt")
    chunks, config, hf_config = build(model, args, with_ddp=False)
    calls = {
        "tolist": _count(torch.Tensor, "tolist"),
        "repeat_interleave": _count(torch, "repeat_interleave"),
        "attention": _count(attention, "fused_attention"),
    }
    found = []
    for _ in range(2):
        run(chunks, config, hf_config, batch, backward=False)
        found.append({name: sum("model/mindspeed/" in file for file, _ in seen) for name, seen in calls.items()})
    return found


def _count(holder, name: str) -> list:
    """Return a list that gets (file of the caller, arguments) of each later call of holder.name."""
    seen, original = [], getattr(holder, name)

    @functools.wraps(original)
    def counted(*args, **kwargs):
        seen.append((sys._getframe(1).f_code.co_filename, args))
        return original(*args, **kwargs)

    setattr(holder, name, counted)
    return seen


def start_worker(folder: Path, config, role: str = "actor_rollout"):
    """Return verl's worker without a rollout, and {name: tensor} of this rank's share of 4 prompts x 2 responses."""
    from verl.workers.megatron_workers import ActorRolloutRefWorker

    class Trainer(ActorRolloutRefWorker):
        def _build_rollout(self, trust_remote_code=False):
            return None, None

    worker = Trainer(config, role)
    worker.init_model()
    ids, mask, position_ids = torch.load(folder / "batch.pt")
    mask, ids = torch.ones_like(mask), ids.clone()
    ids[:, 0] = torch.arange(6, 6 + len(ids))
    position_ids = mask.long().cumsum(-1) - 1
    tensors = {"input_ids": ids, "attention_mask": mask.long(), "position_ids": position_ids}
    advantages = torch.linspace(-1, 1, len(ids))[:, None].expand(-1, RESPONSE)
    tensors |= {"responses": ids[:, -RESPONSE:], "advantages": advantages}
    rows = torch.arange(8) % len(ids)  # the mini batch: 4 prompts x 2 responses
    share = rows.chunk(mpu.get_data_parallel_world_size())[mpu.get_data_parallel_rank()]
    return worker, {name: t[share].contiguous() for name, t in tensors.items()}


def run_update(worker, tensors) -> tuple[torch.Tensor, dict]:
    """Make one update by verl's actor in micro batches of one; return (log-probs before it, metrics)."""
    data = DataProto.from_dict(dict(tensors))
    data.meta_info["micro_batch_size"] = 1
    log_probs, _ = worker.actor.compute_log_prob(data)
    data.batch["old_log_probs"], data.batch["ref_log_prob"] = log_probs, log_probs.clone()
    return log_probs, worker.actor.update_policy(worker.actor.make_minibatch_iterator(data))


def worker_job(folder: Path, config, args) -> dict:
    """Make two updates by verl's own worker and actor; return log-probs before each, and the actor's metrics.

    `calls` counts the functions that keys of recipe.train switch on; `load` is the experts' with recipe.expert_load.
    """
    import fused_weight_gradient_mlp_cuda
    import mindspeed.ops.gmm
    from megatron.core import tensor_parallel
    from mindspeed.core.transformer.moe import grouped_mlp_with_comp_and_comm_overlap_all2all

    linear = _count(fused_weight_gradient_mlp_cuda, "wgrad_gemm_accum_fp32")
    grouped, attended = _count(mindspeed.ops.gmm, "npu_groupmatmul_add_fp32"), _count(attention, "fused_attention")
    overlapped = _count(grouped_mlp_with_comp_and_comm_overlap_all2all, "npu_groupmatmul_add_fp32")
    recomputed = _count(tensor_parallel, "checkpoint")
    worker, tensors = start_worker(folder, config)
    log_probs, metrics = zip(*(run_update(worker, tensors) for _ in range(2)), strict=True)
    unpadded = sum(value.shape[-1] != key.shape[-1] for _, (_, key, value) in attended)
    calls = {"gradient_accumulation_fusion": len(linear), "unpadded_attention": unpadded}
    calls["gemm_gradient_accumulation_fusion"] = len(grouped) + len(overlapped)
    calls["recomputed"] = len(recomputed)
    loads = worker.expert_load.take() if worker.expert_load else None
    found = {"log_probs": log_probs, "metrics": metrics, "load": loads, "calls": calls, "ids": tensors["input_ids"]}
    return {**found, "optimizer": type(worker.actor_optimizer).__name__}


# ---- updates of equal lengths, watched


def update_job(folder: Path, config, bad_rank: int | None, args) -> dict:
    """Make two updates; with `bad_rank` a third, with NaN gradients of one parameter on that rank, and a fourth.

    Returns metrics and weights of each, and Adam's groups.
    """
    worker, tensors = start_worker(folder, config)
    chunk, optimizers = worker.actor_module[0], single_optimizers(worker.actor_optimizer)
    found = {"metrics": [], "weights": [], "biases": [], "skipped": []}
    tokens = _watch_biases()
    for number in range(2 if bad_rank is None else 4):
        hook = _spoil(chunk) if (number, bad_rank) == (2, args.rank) else None
        found["metrics"].append(run_update(worker, tensors)[1])
        found["skipped"].append(context().step_guards[-1].take_skips())
        found["weights"].append([param.detach().clone() for param in chunk.parameters()])
        found["biases"].append([bias.clone() for name, bias in chunk.named_buffers() if name.endswith("expert_bias")])
        if hook is not None:
            hook.remove()
    found["tokens"] = tokens
    groups = [group for one in optimizers for group in one.optimizer.param_groups]
    return {**found, "adam": [(*group["betas"], group["eps"]) for group in groups]}


def _watch_biases() -> list:
    """Record (tokens by expert on this rank, rate) of each update of the correction biases."""
    from mindspeed_llm.core.distributed import finalize_model_grads as module

    seen, original = [], module.get_updated_expert_bias

    def update(tokens, biases, rate):
        own = tokens.clone()
        result = original(tokens, biases, rate)
        seen.append(
            {"own": own, "all": tokens.clone(), "rate": rate, "before": biases.clone(), "after": result.clone()}
        )
        return result

    module.get_updated_expert_bias = update
    return seen


def _spoil(chunk):
    """Register a hook that turns the gradient of one layer's weight, and no other, into NaN."""
    last = chunk.module.decoder.layers[-1]
    return last.mlp.router.weight.register_hook(lambda grad: grad * float("nan"))


def reference_job(folder: Path, config, args) -> dict:
    """Return {size of the reference's micro batch: (its log-probs, its forward passes)}."""
    worker, tensors = start_worker(folder, config, role="ref")
    passes, found = [], {}
    worker.ref_module[0].register_forward_pre_hook(lambda *_: passes.append(1))
    for size in (1, 2, 8):
        worker.config.ref.log_prob_micro_batch_size_per_gpu = size
        passes.clear()
        output = worker.compute_ref_log_prob(DataProto.from_dict(dict(tensors)))
        found[size] = output.batch["ref_log_prob"], len(passes)
    return found


# ---- micro batches of unequal lengths


def batches_job(folder: Path, config, boundaries: bool, args) -> dict:
    """Make two updates; return log-probs and entropy before each, grad_norm, final weights and passes' input shapes.

    Without `boundaries` attention treats the packed sequences of a micro batch as one.
    """
    worker, tensors = start_worker(folder, config)
    tensors = _unequal(tensors)
    if not boundaries:
        original = mindspeed_model.packed_lengths
        mindspeed_model.packed_lengths = lambda seqlens: original(seqlens)._replace(ends=original(seqlens).ends[-1:])
    chunk, shapes = worker.actor_module[0], []
    chunk.register_forward_pre_hook(lambda _, args, given: shapes.append(given["input_ids"].shape), with_kwargs=True)
    found = {"log_probs": [], "entropy": [], "grad_norm": [], "shapes": [], "weights": []}
    for _ in range(2):
        data = DataProto.from_dict(dict(tensors))
        before = worker.compute_log_prob(DataProto.from_dict(dict(tensors))).batch
        data.batch["old_log_probs"] = before["old_log_probs"]
        data.batch["ref_log_prob"] = before["old_log_probs"] + 0.1 * torch.linspace(-1, 1, RESPONSE)
        found["log_probs"].append(before["old_log_probs"])
        found["entropy"].append(before["entropys"])
        found["shapes"].append([*map(tuple, shapes)])
        shapes.clear()
        data.meta_info["global_token_num"] = tensors["attention_mask"].sum(1).tolist()
        found["grad_norm"] += worker.update_actor(data).meta_info["metrics"]["actor/grad_norm"]
        found["shapes"].append([*map(tuple, shapes)])
        shapes.clear()
        found["weights"].append([param.detach().clone() for param in chunk.parameters()])
    samples = _first(len(tensors["input_ids"])) + torch.arange(len(tensors["input_ids"]))
    found["first_stage"] = mpu.is_pipeline_first_stage(ignore_virtual=True)  # verl packs what the embedding reads
    return {**found, "mask": tensors["attention_mask"][:, -RESPONSE:].bool(), "samples": samples}


def _first(count: int) -> int:
    """Return the number of this rank's first sample; each replica has `count`."""
    return mpu.get_data_parallel_rank() * count


def _unequal(tensors: dict) -> dict:
    """Return the samples of `start_worker` padded on both sides, by another amount for each sample of all ranks."""
    mask = tensors["attention_mask"].clone()
    for row in range(len(mask)):
        number = _first(len(mask)) + row
        mask[row, : 23 * number % 97] = 0
        mask[row, mask.shape[1] - 5 * number % 13 :] = 0
    return {**tensors, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
