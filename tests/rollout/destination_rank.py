"""What the destination map's test runs in a real engine."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.rollout import engine_rank
from verl_patches.layout.inventory import build_inventory
from verl_patches.layout.parallel import rollout_layout
from verl_patches.reshard.destination import learn_destinations
from verl_patches.reshard.live_memory import post_load


def _values(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _differing(model, expected) -> list[str]:
    return [name for name, value in _values(model).items() if not torch.equal(value, expected[name])]


def learn_and_write(folder: Path, rollout: dict) -> dict:
    """Learn in an engine that serves, sleep and wake it, write other weights through the map, compare with loading."""
    llm = engine_rank.awake(folder, **rollout)
    model, rank = engine_rank.model_of(llm), torch.distributed.get_rank()
    inventory = build_inventory(folder)
    before = _values(model)
    destinations = learn_destinations(model, inventory, rank=rank)
    found = {"touched": _differing(model, before), "unmapped": destinations.unmapped}
    destinations.check_covers(model)
    layout = rollout_layout(1, 1, rollout["tensor_model_parallel_size"], expert_parallel=True)
    destinations.check_against_plan(inventory, layout, "vllm")
    llm.sleep(level=1)
    llm.wake_up(tags=["weights"])
    llm.wake_up(tags=["kv_cache"])
    found["valid"] = destinations.still_valid(model)

    tensors = {name: tensor.flip(0).contiguous() for name, tensor in engine_rank.hf_tensors(folder)}
    model.load_weights(tensors.items())
    expected = _values(model)
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    for name, places in destinations.tensors.items():
        for place in places:
            region = place.region
            place.tensor.copy_(tensors[name].narrow(region.axis, region.start, region.stop - region.start))
    for constant in destinations.constants:
        constant.target.fill_(constant.value)
    found["differ"] = _differing(model, expected)
    found["derived"] = post_load(model)
    attention = model.model.layers[0].self_attn.mla_attn.impl
    attention.W_UV = attention.W_UV.clone()
    found["derived_from_copies"] = post_load(model)
    return found
