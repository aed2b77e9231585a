"""Compute logits and gradients on a rank of the parity tests, with our patches applied."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from megatron.core import parallel_state as mpu
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from verl.models.mcore import get_mcore_forward_fn, get_mcore_weight_converter
from verl.utils.megatron_utils import per_tensor_generator, unwrap_model

from tests.model.megatron_model import build_model, start_parallel
from tests.model.parity import next_token_loss
from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import build_inventory
from verl_patches.layout.parallel import ParallelLayout
from verl_patches.layout.sharding import train_library
from verl_patches.reshard.parameters import named_weights
from verl_patches.reshard.train_tensors import model_layout, native_tensors, train_tensors_from_native

LAYER_NAMES = {"qkv_layer_name": "self_attention.linear_qkv.", "gate_proj_layer_name": "linear_fc1.weight"}


def run(chunks, config, hf_config, batch, packed=True, backward=False, micro_batches=None):
    """Return logits [B, S, V] by verl's forward, gathered over TP; None except on the last pipeline stage.

    micro_batches: rows of each, by default one of all rows. The loss is next_token_loss of the whole batch.
    """
    forward, sample_logits = get_mcore_forward_fn(hf_config), {}
    micro_batches = micro_batches or [list(range(len(batch[0])))]

    def tokens(mask):
        return (mask[:, 1:] & mask[:, :-1]).sum()

    def step(batches, model):
        rows, (ids, mask, position_ids) = next(batches)
        logits = forward(model, ids, mask, position_ids, sequence_parallel=config.sequence_parallel, pack_seqs=packed)
        return logits, partial(loss, rows, ids, mask)

    def loss(rows, ids, mask, logits):
        parts = [torch.empty_like(logits) for _ in range(mpu.get_tensor_model_parallel_world_size())]
        torch.distributed.all_gather(parts, logits.detach().contiguous(), group=mpu.get_tensor_model_parallel_group())
        parts[mpu.get_tensor_model_parallel_rank()] = logits
        whole = torch.cat(parts, dim=-1)
        sample_logits.update(zip(rows, whole.detach(), strict=True))
        # every TP rank sees the whole loss: Megatron's embedding and head expect the gradient of their own shard only
        return next_token_loss(whole, ids, mask) * tokens(mask) / tokens(batch[1]) * len(micro_batches), {}

    for chunk in chunks:
        get_model_config(chunk).finalize_model_grads_func = finalize_model_grads
    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter([(rows, [tensor[rows] for tensor in batch]) for rows in micro_batches]),
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(micro_batches),
        seq_length=batch[0].numel(),
        micro_batch_size=1,
        forward_only=not backward,
    )
    return torch.stack([sample_logits[row] for row in sorted(sample_logits)]) if sample_logits else None


def local_gradients(chunks, folder, line):
    """Return this rank's part of each gradient, (region, shape of the whole, tensor), for parity.whole_gradients."""
    layout, rank = model_layout(chunks), torch.distributed.get_rank()
    inventory = build_inventory(replace(build_inventory(folder).model, torch_dtype="float32"))
    native = [
        {name: getattr(tensor, "main_grad", tensor) for name, tensor in weights.items()}
        for weights in native_tensors(chunks)
    ]
    views = train_tensors_from_native(native, inventory, layout, rank, train_library(line))
    return [(v.region, v.shape, v.tensor.clone()) for v in views.values() if not v.parameter.endswith("expert_bias")]


def answers(built, folder: Path, line: str = "pypi") -> dict:
    """Return packed and padded logits, the weights that verl sends to the rollout (rank 0), and gradients."""
    chunks, config, hf_config = built
    batch = torch.load(folder / "batch.pt")
    found = {"packed": run(*built, batch), "padded": run(*built, batch, packed=False)}
    converter = get_mcore_weight_converter(hf_config, config.params_dtype)
    sent = {n: t.clone() for n, t in per_tensor_generator(chunks, hf_config, converter, config, LAYER_NAMES)}
    found["synced"] = sent if torch.distributed.get_rank() == 0 else None  # every rank yields all of it
    for chunk in chunks:
        chunk.zero_grad_buffer()
    run(*built, batch, backward=True)
    return {**found, "gradients": local_gradients(chunks, folder / "model", line)}


def layouts_job(folder: Path, layouts: dict[str, dict], answers=answers) -> dict:
    """Return `answers` at each layout; layouts: {name: sizes and `overrides`}."""
    found = {}
    for name, sizes in layouts.items():
        overrides = sizes.pop("overrides", {})
        start_parallel(ParallelLayout(torch.distributed.get_world_size(), **sizes))
        built = build_model(folder / "model", overrides=overrides, wrap_with_ddp=True)
        found[name] = answers(built, folder)
    return found


def controls_job(folder: Path, faults: dict[str, dict]) -> dict:
    """Return logits of the whole model, and with one fault each time; faults: {name: overrides}, "bias" has none."""
    model, batch = folder / "model", torch.load(folder / "batch.pt")
    start_parallel(ParallelLayout(torch.distributed.get_world_size()))
    found = {}
    for name, overrides in {"nothing": {}, **faults}.items():
        chunks, config, hf_config = build_model(model, overrides=overrides)
        if name == "bias":
            for tensor_name, tensor in named_weights(unwrap_model(chunks)[0]):
                if tensor_name.endswith("expert_bias"):
                    tensor.zero_()
        found[name] = run(chunks, config, hf_config, batch)
    return found


def bf16_job(folder: Path) -> dict:
    """Return `in_bf16` of a model at TP2 x EP2, and the error of TP without SP."""
    model = folder / "model"
    start_parallel(ParallelLayout(torch.distributed.get_world_size(), tp=2, ep=2, etp=1))
    found = in_bf16(build_model(model, dtype=torch.bfloat16, wrap_with_ddp=True), folder)
    start_parallel(ParallelLayout(torch.distributed.get_world_size(), tp=2))
    try:
        build_model(model, overrides={"sequence_parallel": False}, load=False)
        return {**found, "refused": ""}
    except ConfigError as error:
        return {**found, "refused": str(error)}


def in_bf16(built, folder: Path) -> dict:
    """Return a bf16 model's correction biases after loading and a step, its logits, and all other weights' dtypes."""
    chunk, batch = unwrap_model(built[0])[0], torch.load(folder / "batch.pt")

    def biases() -> dict[str, torch.Tensor]:
        return {name: t.clone() for name, t in named_weights(chunk) if name.endswith("expert_bias")}

    found = {"loaded": biases(), "logits": run(*built, batch, backward=True)}
    dtypes = {str(t.dtype) for name, t in named_weights(chunk) if not name.endswith("expert_bias")}
    return {**found, "after": biases(), "dtypes": dtypes}
