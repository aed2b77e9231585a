"""What one rank does in the tests of routing replay: record, spoil the selection, replay; of a model of either line."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from megatron.core import parallel_state as mpu
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from verl.models.mcore import get_mcore_forward_fn
from verl.utils.megatron_utils import unwrap_model

from tests.model.parity_job import local_gradients
from verl_patches.errors import RecipeError
from verl_patches.model.weights import named_weights
from verl_patches.replay.routing_replay import RoutingReplay

RECORDED, REPLAYED = [[0], [1, 2]], [[2, 0], [1]]  # rows of micro batches: other packing, other order


def run(chunks, config, hf_config, batch, micro_batches, backward=False):
    """{row: logits [S, V]} of the last stage, TP shards gathered; the loss is parity.next_token_loss of the batch."""
    forward, kept, total = get_mcore_forward_fn(hf_config), {}, (batch[1][:, 1:] & batch[1][:, :-1]).sum()

    def step(batches, model):
        rows, (ids, mask, position_ids) = next(batches)
        logits = forward(model, ids, mask, position_ids, sequence_parallel=config.sequence_parallel)
        return logits, partial(loss, rows, ids, mask)

    def loss(rows, ids, mask, logits):
        parts = [torch.empty_like(logits) for _ in range(mpu.get_tensor_model_parallel_world_size())]
        torch.distributed.all_gather(parts, logits.detach().contiguous(), group=mpu.get_tensor_model_parallel_group())
        parts[mpu.get_tensor_model_parallel_rank()] = logits
        whole = torch.cat(parts, dim=-1)
        kept.update(zip(rows, whole.detach(), strict=True))
        wanted = mask[:, 1:] & mask[:, :-1]
        losses = torch.nn.functional.cross_entropy(whole[:, :-1][wanted], ids[:, 1:][wanted], reduction="sum")
        return losses / total * len(micro_batches), {}

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
    return torch.stack([kept[row] for row in sorted(kept)]) if kept else None


def answers(built, folder: Path, line: str = "pypi") -> dict:
    """Logits and gradients with replay under spoilt correction biases, which only the selection reads; and controls."""
    chunks, batch = built[0], torch.load(folder / "batch.pt")
    replay = RoutingReplay(chunks)
    with torch.no_grad(), replay.recording():
        run(*built, batch, RECORDED)
    for chunk in unwrap_model(chunks):
        for name, tensor in named_weights(chunk):
            if name.endswith("expert_bias"):
                tensor.copy_(tensor.flip(0))
    found = {"layers": replay.layers, "shapes": [tuple(s.shape) for s in replay.samples.values()]}
    with torch.no_grad():
        found["without"] = run(*built, batch, REPLAYED)
    for chunk in chunks:
        chunk.zero_grad_buffer()
    with replay.replaying():
        found["replayed"] = run(*built, batch, REPLAYED, backward=True)
    found |= {"gradients": local_gradients(chunks, folder / "model", line), "counts": replay.end_step()}
    if mpu.get_pipeline_model_parallel_world_size() == 1:  # the other stage would wait for this one
        try:
            with replay.replaying():
                run(*built, batch, REPLAYED)
        except RecipeError as error:
            found["dropped"] = str(error)
    return found


def layouts_job(folder: Path, layouts: dict[str, dict]) -> dict:
    """`answers` at every layout of line pypi: {name: sizes and `overrides`}."""
    from tests.model.megatron_model import build_model, start_parallel
    from verl_patches.layout.parallel import ParallelLayout

    found = {}
    for name, sizes in layouts.items():
        overrides = sizes.pop("overrides", {})
        start_parallel(ParallelLayout(torch.distributed.get_world_size(), **sizes))
        built = build_model(folder / "model", overrides=overrides, wrap_with_ddp=True)
        found[name] = answers(built, folder)
    return found


def mindspeed_job(folder: Path, args) -> dict:
    """`answers` of line a3's model."""
    from tests.model.mindspeed_job import build

    return answers(build(folder / "model", args), folder, "a3")
