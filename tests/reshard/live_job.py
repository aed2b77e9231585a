"""What one rank says of its views of a real model, under the rows."""

from __future__ import annotations

from pathlib import Path

import torch
from verl.utils.megatron_utils import load_megatron_model_to_gpu, offload_megatron_model_to_cpu, unwrap_model

from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import build_inventory
from verl_patches.layout.parallel import parse_layout
from verl_patches.model.weights import named_weights
from verl_patches.reshard.train_tensors import still_valid, train_tensors


def facts_of(chunks, inventory, layout, library, offload):
    """Regions and values of the views, whether they follow the parameters, and when they stop being valid."""
    rank = torch.distributed.get_rank()
    tensors = train_tensors(chunks, inventory, layout, rank, library)
    before = {name: tensor.tensor.clone() for name, tensor in tensors.items()}
    found = {"regions": {n: t.region for n, t in tensors.items()}, "values": before}
    found["valid"] = [still_valid(tensors, chunks)]
    if offload:
        offload_megatron_model_to_cpu(chunks)
        found["valid"].append(still_valid(tensors, chunks))
        found["offloaded_bytes"] = sum(t.tensor.untyped_storage().nbytes() for t in tensors.values())
        load_megatron_model_to_gpu(chunks)
        found["valid"].append(still_valid(tensors, chunks))
        found["loaded"] = all(torch.equal(t.tensor, before[name]) for name, t in tensors.items())
    weights = [tensor for chunk in unwrap_model(chunks) for _, tensor in named_weights(chunk)]
    assert len(weights) < 256  # whole numbers that bf16 can tell apart
    with torch.no_grad():
        for number, weight in enumerate(weights, 1):
            weight.fill_(number)
    # every element of every parameter is seen in exactly one view
    counts = torch.zeros(len(weights) + 1, dtype=torch.int64)
    for tensor in tensors.values():
        values = tensor.read(tensor.region).flatten().long()
        counts += torch.bincount(values, minlength=len(counts))
    found["seen"] = counts[1:].tolist() == [weight.numel() for weight in weights]
    weights[-1].data = weights[-1].data.clone()
    found["replaced"] = still_valid(tensors, chunks)
    found["rebuilt"] = still_valid(train_tensors(chunks, inventory, layout, rank, library), chunks)
    return found


def refusal(call, *args):
    """The ConfigError's text, or what was returned instead."""
    try:
        return call(*args)
    except ConfigError as error:
        return str(error)


def megatron_job(model: Path, layouts: dict[str, dict]) -> dict:
    """Every layout: {name: {"layout": text, "overrides": {}, "refused": [other layouts]}}."""
    from tests.model.megatron_model import build_model, start_parallel

    inventory, rank = build_inventory(model), torch.distributed.get_rank()
    found = {}
    for name, case in layouts.items():
        layout = parse_layout(case["layout"])
        start_parallel(layout)
        chunks, _, _ = build_model(
            model, torch.bfloat16, case.get("overrides"), wrap_with_ddp=True, distributed_optimizer=True
        )
        wrong = {
            text: refusal(train_tensors, chunks, inventory, parse_layout(text), rank, "megatron-local")
            for text in case.get("refused", ())
        }
        found[name] = facts_of(chunks, inventory, layout, "megatron-local", offload=True) | {"refused": wrong}
    return found


def mindspeed_job(model: Path, text: str, args) -> dict:
    """The one layout that `text` is; see tests/model/mindspeed_start.py."""
    from tests.model.mindspeed_job import build

    chunks, _, _ = build(model, args)
    layout = parse_layout(text)
    inventory, rank = build_inventory(model), torch.distributed.get_rank()
    wrong = refusal(train_tensors, chunks, inventory, layout, rank, "megatron-local")
    return facts_of(chunks, inventory, layout, "mindspeed", offload=False) | {"refused": wrong}
