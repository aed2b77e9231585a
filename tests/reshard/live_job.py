"""What one rank says of its views of a real Megatron model, under the rows."""

from __future__ import annotations

from pathlib import Path

import torch
from verl.utils.megatron_utils import load_megatron_model_to_gpu, offload_megatron_model_to_cpu, unwrap_model

from tests.model.megatron_model import build_model, start_parallel
from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import build_inventory
from verl_patches.layout.parallel import parse_layout
from verl_patches.model.weights import named_weights
from verl_patches.reshard.train_tensors import still_valid, train_tensors

LIBRARY = "megatron-local"


def facts_of(chunks, inventory, layout, rank):
    """Whether the views follow the parameters, and when they stop being valid."""
    tensors = train_tensors(chunks, inventory, layout, rank, LIBRARY)
    before, valid = {name: tensor.tensor.clone() for name, tensor in tensors.items()}, [still_valid(tensors, chunks)]
    offload_megatron_model_to_cpu(chunks)
    valid.append(still_valid(tensors, chunks))
    offloaded_bytes = sum(t.tensor.untyped_storage().nbytes() for t in tensors.values())
    load_megatron_model_to_gpu(chunks)
    valid.append(still_valid(tensors, chunks))
    loaded = all(torch.equal(t.tensor, before[name]) for name, t in tensors.items())
    weights = [tensor for chunk in unwrap_model(chunks) for _, tensor in named_weights(chunk)]
    assert len(weights) < 256  # whole numbers that bf16 can tell apart
    with torch.no_grad():
        for number, weight in enumerate(weights, 1):
            weight.fill_(number)
    # every element of every parameter is seen in exactly one view
    counts = torch.zeros(len(weights) + 1, dtype=torch.int64)
    for tensor in tensors.values():
        counts += torch.bincount(tensor.read(tensor.region).flatten().long(), minlength=len(counts))
    weights[-1].data = weights[-1].data.clone()
    return {
        "valid": valid,
        "loaded": loaded,
        "offloaded": offloaded_bytes - sum(before[name].nbytes for name in before if name.endswith("correction_bias")),
        "seen": counts[1:].tolist() == [weight.numel() for weight in weights],
        "replaced": still_valid(tensors, chunks),
        "rebuilt": still_valid(train_tensors(chunks, inventory, layout, rank, LIBRARY), chunks),
    }


def refusal(call, *args):
    """The ConfigError's text, or what was returned instead."""
    try:
        return call(*args)
    except ConfigError as error:
        return str(error)


def job(model: Path, layouts: dict[str, dict]) -> dict:
    """Every layout: {text: {"overrides": {}, "refused": [other layouts]}}."""
    inventory, rank, found = build_inventory(model), torch.distributed.get_rank(), {}
    for text, case in layouts.items():
        layout = parse_layout(text)
        start_parallel(layout)
        overrides = case.get("overrides")
        chunks, *_ = build_model(model, torch.bfloat16, overrides, wrap_with_ddp=True, distributed_optimizer=True)
        refused = [
            refusal(train_tensors, chunks, inventory, parse_layout(other), rank, LIBRARY)
            for other in case.get("refused", ())
        ]
        found[text] = facts_of(chunks, inventory, layout, rank) | {"refused": refused}
    return found
