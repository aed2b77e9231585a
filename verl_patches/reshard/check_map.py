"""Proof that rollout memory is mapped as the engine itself would: what it holds is loaded once more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from verl_patches.reshard.checksum import checksum
from verl_patches.reshard.overlap import part_of
from verl_patches.reshard.region import Region
from verl_patches.reshard.views import Destination


def check_map(
    load_weights: Callable[[Iterator[tuple[str, torch.Tensor]]], Any],
    live: Mapping[str, torch.Tensor],
    destinations: Mapping[str, Sequence[Destination]],
    shapes: Mapping[str, Sequence[int]],
    rank: int,
) -> list[str]:
    """Load with the engine's own load_weights what its memory holds by `destinations`: nothing may change.

    `live`: the engine's parameters by name. Returns a sentence for each that changed: its place in the map is wrong (or
    its values were equal to another's). For engines whose load_weights still works on them; memory is then as it was
    only where the map is right. Parts that this rank does not hold are loaded as zeros, which it ignores.
    """

    def values() -> Iterator[tuple[str, torch.Tensor]]:
        for name, parts in destinations.items():
            whole = torch.zeros(tuple(shapes[name]), dtype=parts[0].tensor.dtype, device=parts[0].tensor.device)
            for part in parts:
                part_of(whole, Region(name, 0, 0, shapes[name][0]), part.region, shapes[name]).copy_(part.tensor)
            yield name, whole

    with torch.no_grad():
        before = {name: _of_parameter(tensor) for name, tensor in live.items()}
        load_weights(values())
        changed = [name for name, tensor in live.items() if _of_parameter(tensor) != before[name]]
    return [f"{name} on rank {rank}: expected to stay as it is when loaded again, found it changed: its map is wrong"
            for name in changed]  # fmt: skip


def _of_parameter(tensor: torch.Tensor) -> int:
    flat = tensor.detach().reshape(-1)
    return int(checksum(flat, Region("", 0, 0, len(flat)), (len(flat),)))
