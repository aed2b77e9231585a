"""What one rank does in the parity tests of line a3; see mindspeed_start.py."""

from __future__ import annotations

import functools
import itertools
import sys
from pathlib import Path

import torch
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from transformers import AutoConfig
from verl.models.mcore import hf_to_mcore_config, init_mcore_model
from verl.utils.megatron_utils import get_model, unwrap_model

from tests.model.parity_job import answers, in_bf16, run
from verl_patches.errors import ConfigError
from verl_patches.model.weights import named_weights, split_up
from verl_patches.platform.npu import attention
from verl_patches.weights.load import load_weights

_loads = itertools.count()  # of this process; the same on every rank


def build(model: Path, args, with_ddp: bool = True):
    """(chunks, transformer config, HF config) of this rank, as verl's worker builds them, with their weights."""
    torch.manual_seed(args.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    hf_config = AutoConfig.from_pretrained(model)
    config = hf_to_mcore_config(hf_config, args.params_dtype)

    def provide(pre_process, post_process):
        return init_mcore_model(config, hf_config, pre_process, post_process)

    chunks = get_model(provide, wrap_with_ddp=with_ddp, use_distributed_optimizer=False)
    load_weights(model, chunks, "a3", key=f"load/{next(_loads)}")
    return chunks, config, hf_config


def parity_job(folder: Path, config, args) -> dict:
    """What parity_job.py finds of any model, and the layers of this rank."""
    built = build(folder / "model", args)
    layers = [layer.layer_number for chunk in unwrap_model(built[0]) for layer in chunk.decoder.layers]
    return {**answers(built, folder, "a3"), "layers": layers}


def bf16_job(folder: Path, config, args) -> dict:
    """`in_bf16` of this line's model."""
    return in_bf16(build(folder / "model", args), folder)


def controls_job(folder: Path, config, args) -> dict:
    """Logits with one thing wrong each."""
    batch = torch.load(folder / "batch.pt")
    chunks, config, hf_config = build(folder / "model", args, with_ddp=False)
    found = {"nothing": run(chunks, config, hf_config, batch)}
    weights = dict(named_weights(unwrap_model(chunks)[0]))
    for name, spoil in {"bias": _zero_bias, "columns": _split_columns}.items():
        saved = {n: t.clone() for n, t in weights.items()}
        spoil(weights, args)
        found[name] = run(chunks, config, hf_config, batch)
        with torch.no_grad():
            for n, t in weights.items():
                t.copy_(saved[n])
    return found


def _zero_bias(weights, args):
    for name, tensor in weights.items():
        if name.endswith("expert_bias"):
            tensor.zero_()


@torch.no_grad()
def _split_columns(weights, args):
    """weight1 filled as its shape [H, e * 2F] says, the published mistake, instead of as view(e, H, 2F)."""
    for name, tensor in weights.items():
        if name.endswith("weight1"):
            whole = split_up(tensor.clone(), args.num_experts)
            tensor.copy_(torch.cat([expert.t() for expert in whole], dim=1))


def attention_job(folder: Path, config, args) -> dict:
    """How often our model code waits for lengths, works out places and attends, after one forward and after a second.

    `refused`: what the attention says to a dropout and to lengths that are not those of the tokens.
    """
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
    return {"calls": found, "refused": _refused(chunks, config)}


def _refused(chunks, config) -> dict[str, str]:
    attention = unwrap_model(chunks)[0].decoder.layers[0].self_attention.core_attention
    x, lengths = torch.randn(6, 1, 2, 24), torch.tensor([0, 3, 5])
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=lengths, cu_seqlens_kv=lengths)
    calls = {
        "dropout": lambda: type(attention)(config, 1, AttnMaskType.causal, "self", attention_dropout=0.1),
        "ends": lambda: attention(x, x, x, None, packed_seq_params=params),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
        except ConfigError as error:
            said[name] = str(error)
    return said


def _count(holder, name: str) -> list:
    """A list that gets (file of the caller, arguments) of every call of holder.name from here on."""
    seen, original = [], getattr(holder, name)

    @functools.wraps(original)
    def counted(*args, **kwargs):
        seen.append((sys._getframe(1).f_code.co_filename, args))
        return original(*args, **kwargs)

    setattr(holder, name, counted)
    return seen


def start_worker(folder: Path, config, role: str = "actor_rollout"):
    """(verl's worker without a rollout, {name: tensor} of this rank's share of 4 prompts x 2 responses)."""
    from verl.workers.megatron_workers import ActorRolloutRefWorker

    class Trainer(ActorRolloutRefWorker):
        def _build_rollout(self, trust_remote_code=False):
            return None, None

    worker = Trainer(config, role)
    worker.init_model()
    ids, mask, position_ids = torch.load(folder / "batch.pt")
    width = 16
    mask, ids = torch.ones_like(mask), ids.clone()
    ids[:, 0] = torch.arange(6, 6 + len(ids))
    position_ids = mask.long().cumsum(-1) - 1
    tensors = {"input_ids": ids, "attention_mask": mask.long(), "position_ids": position_ids}
    tensors |= {"responses": ids[:, -width:], "advantages": torch.linspace(-1, 1, len(ids))[:, None].expand(-1, width)}
    rows = torch.arange(8) % len(ids)  # the mini batch: 4 prompts x 2 responses
    share = rows.chunk(mpu.get_data_parallel_world_size())[mpu.get_data_parallel_rank()]
    return worker, {name: t[share].contiguous() for name, t in tensors.items()}


def update_of(worker, tensors) -> tuple[torch.Tensor, dict]:
    """(log-probs before it, metrics) of one update by verl's actor, in micro batches of one."""
    from verl import DataProto

    data = DataProto.from_dict(dict(tensors))
    data.meta_info["micro_batch_size"] = 1
    log_probs, _ = worker.actor.compute_log_prob(data)
    data.batch["old_log_probs"], data.batch["ref_log_prob"] = log_probs, log_probs.clone()
    return log_probs, worker.actor.update_policy(worker.actor.make_minibatch_iterator(data))


def worker_job(folder: Path, config, args) -> dict:
    """Two updates by verl's own worker and actor (no rollout): log-probs before each, and the actor's metrics.

    `calls`: how often what a key of recipe.train switches on was called. `load`: of experts, with recipe.expert_load.
    """
    import fused_weight_gradient_mlp_cuda
    import mindspeed.ops.gmm
    from mindspeed.core.transformer.moe import grouped_mlp_with_comp_and_comm_overlap_all2all

    linear = _count(fused_weight_gradient_mlp_cuda, "wgrad_gemm_accum_fp32")
    grouped, attended = _count(mindspeed.ops.gmm, "npu_groupmatmul_add_fp32"), _count(attention, "fused_attention")
    overlapped = _count(grouped_mlp_with_comp_and_comm_overlap_all2all, "npu_groupmatmul_add_fp32")
    worker, tensors = start_worker(folder, config)
    log_probs, metrics = zip(*(update_of(worker, tensors) for _ in range(2)), strict=True)
    unpadded = sum(value.shape[-1] != key.shape[-1] for _, (_, key, value) in attended)
    calls = {"fused_linear_wgrad": len(linear), "unpadded_attention": unpadded}
    calls["fused_expert_wgrad"] = len(grouped) + len(overlapped)
    loads = {side: load and load.take() for side, load in worker.expert_loads.items()}
    found = {"log_probs": log_probs, "metrics": metrics, "load": loads, "calls": calls, "ids": tensors["input_ids"]}
    return {**found, "optimizer": type(worker.actor_optimizer).__name__}
