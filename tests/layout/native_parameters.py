"""Pack HF tensors by hand as a training library holds them: its own names, joined and stacked, by rank and chunk.

test_real_models.py compares the result with real Megatron models. Megatron numbers layers and experts on each rank, and
joins gate and up into `linear_fc1`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from verl_patches.layout.inventory import Inventory, Parameter
from verl_patches.layout.parallel import ParallelLayout
from verl_patches.layout.sharding import MEGATRON_NAMES, local_parameters
from verl_patches.reshard.parameters import MINDSPEED_NAMES
from verl_patches.reshard.region import Region, shard_region

GATE, UP = "routed_expert_gate", "routed_expert_up"
# storage of parameters -> library that cuts them, name of each kind's parameter
STORAGES = {"local": ("megatron-local", MEGATRON_NAMES), "mindspeed": ("mindspeed", MINDSPEED_NAMES)}
Stack = Callable[[list[torch.Tensor]], torch.Tensor]


def part(whole: torch.Tensor, region: Region) -> torch.Tensor:
    """Return the region of the parameter's HF tensor."""
    return whole.narrow(region.axis, region.start, region.rows)


def pack(
    tensors: Mapping[str, torch.Tensor],
    inventory: Inventory,
    layout: ParallelLayout,
    rank: int,
    storage: str,
    stack_up: Stack | None = None,
) -> list[dict[str, torch.Tensor]]:
    """Return the part of the HF `tensors` on `rank`, by native name, for each chunk; device meta makes shapes only.

    stack_up replaces the library's stack of all local experts' gate and up.
    """
    library, names = STORAGES[storage]
    shards = local_parameters(inventory, layout, rank, library).shards.values()
    first = layout.local_experts(rank, inventory.model.n_routed_experts).start
    all_layers = layout.chunk_layers(inventory.model.num_hidden_layers)
    chunks = []
    for number in range(layout.vpp):
        layers = all_layers[number * layout.pp + layout.coordinates(rank).pp]
        joined: dict[str, dict[int | None, list[torch.Tensor]]] = {}
        for shard in shards:
            p = shard.parameter
            if not _in_chunk(p, number, layers, layout):
                continue
            name = names[p.kind].format(layer=(p.layer or 0) - layers.start, expert=(p.expert or 0) - first)
            joined.setdefault(name, {}).setdefault(p.expert, []).append(part(tensors[p.name], shard_region(shard)))
        pieces_by_name = {
            name: [torch.cat(pieces) for pieces in pieces_by_expert.values()]
            for name, pieces_by_expert in joined.items()
        }
        chunks.append({name: _stack(name, pieces, stack_up) for name, pieces in pieces_by_name.items()})
    return chunks


def _in_chunk(parameter: Parameter, number: int, layers: range, layout: ParallelLayout) -> bool:
    if parameter.layer is not None:
        return parameter.layer in layers
    return number == (0 if parameter.kind == "embedding" else layout.vpp - 1)


def _stack(name: str, pieces: list[torch.Tensor], stack_up: Stack | None) -> torch.Tensor:
    """Stack the experts' transposed matrices one after the other in memory, in GroupedMLP's shape."""
    if not name.endswith((".experts.weight1", ".experts.weight2")):
        assert len(pieces) == 1, name
        return pieces[0].clone()
    up = name.endswith("weight1")
    if up and stack_up is not None:
        return stack_up(pieces)
    flat = torch.cat([piece.t().flatten() for piece in pieces])
    return flat.view(pieces[0].shape[1], -1) if up else flat.view(-1, pieces[0].shape[0])  # [H, e * 2F], [e * F, H]
