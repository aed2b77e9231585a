"""Weights leave training as fp8 with block scales, as DeepSeek-V3's own checkpoint stores them.

A projection becomes two HF tensors: its weight in float8_e4m3fn, and `..._scale_inv`, fp32, one factor for each block
of 128 x 128 (fewer at the end of an axis): weight = fp8 * factor, factor = block's largest magnitude / 448. Projections
of attention and of every MLP are stored so; embedding, head, norms and router are not. The format is that of
README_WEIGHTS.md of deepseek-ai/DeepSeek-V3. Blocks never cross ranks, see `check_cuts`. Totals of an inventory with
block scales count the factors as weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import Inventory, Parameter
from verl_patches.layout.parallel import ParallelLayout
from verl_patches.layout.sharding import shards_of
from verl_patches.reshard.region import Region, region_of

if TYPE_CHECKING:
    import torch  # for plans torch is not needed, so it is imported where tensors are read

    from verl_patches.reshard.train_tensors import TrainTensor

BLOCK, LARGEST = 128, 448.0
WEIGHT_DTYPE, SCALE_DTYPE = "float8_e4m3fn", "float32"
SCALE = "_scale_inv"
_PARTS = frozenset({"attention", "dense_mlp", "shared_expert", "routed_expert"})
_NORMS = frozenset({"q_a_norm", "kv_a_norm"})


def is_quantised(parameter: Parameter) -> bool:
    """Whether DeepSeek-V3's fp8 checkpoint stores this HF tensor in fp8: every linear projection of a layer."""
    return parameter.part in _PARTS and parameter.kind not in _NORMS


def with_block_scales(inventory: Inventory) -> Inventory:
    """The same model with fp8 projections, each followed by its factors, of the same kind so that they are cut alike.

    This is the inventory to plan with; training's views are made with the plain one.
    """
    return dataclasses.replace(
        inventory,
        layers=tuple(tuple(_with_scales(layer)) for layer in inventory.layers),
        experts=tuple(tuple(tuple(_with_scales(expert)) for expert in layer) for layer in inventory.experts),
    )


def _with_scales(parameters: Iterable[Parameter]) -> Iterable[Parameter]:
    for parameter in parameters:
        if not is_quantised(parameter):
            yield parameter
            continue
        yield parameter._replace(dtype=WEIGHT_DTYPE)
        shape = tuple(-(-size // BLOCK) for size in parameter.shape)
        yield parameter._replace(name=parameter.name + SCALE, shape=shape, dtype=SCALE_DTYPE)


def check_cuts(inventory: Inventory, layout: ParallelLayout, library: str) -> None:
    """ConfigError if `library` under `layout` would cut a projection inside a block; for both sides of a plan."""
    for parameter in {p.kind: p for p in inventory.parameters if is_quantised(p)}.values():
        for shard in shards_of(inventory, layout, library, parameter):
            if not _in_blocks(region_of(shard), parameter.shape):
                raise ConfigError(
                    f"fp8 block scales: {library} under layout {layout} cuts {parameter.name} {parameter.shape} at "
                    f"{region_of(shard)}, expected cuts at multiples of {BLOCK}: choose another "
                    f"{'tp' if parameter.expert is None else 'etp'}, or sync without fp8"
                )


def quantised_tensors(
    tensors: Mapping[str, TrainTensor], inventory: Inventory
) -> dict[str, TrainTensor | QuantisedWeight | BlockScales]:
    """What this rank has of each tensor of `with_block_scales(inventory)`, computed from training's when it is read.

    Raises ConfigError for a training tensor whose region does not consist of whole blocks.
    """
    found: dict[str, TrainTensor | QuantisedWeight | BlockScales] = {}
    for name, tensor in tensors.items():
        if not is_quantised(inventory.by_name[name]):
            found[name] = tensor
            continue
        found[name] = QuantisedWeight(tensor.region, tensor)
        found[name + SCALE] = BlockScales(_blocks_of(tensor.region, tensor.shape), tensor)
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class QuantisedWeight:
    """The fp8 weight of one training tensor; `region` is of the HF weight. Each `read` computes it anew."""

    is_view: ClassVar[bool] = False
    region: Region
    source: TrainTensor

    def read(self, region: Region) -> torch.Tensor:
        """fp8 values of `region` as they are in training now; ConfigError unless it consists of whole blocks."""
        _blocks_of(region, self.source.shape)
        return quantise(self.source.read(region))[0]


@dataclasses.dataclass(frozen=True, eq=False)
class BlockScales:
    """The factors of one training tensor; `region` is of the HF tensor of factors. Each `read` computes them anew."""

    is_view: ClassVar[bool] = False
    region: Region
    source: TrainTensor

    def read(self, region: Region) -> torch.Tensor:
        """Factors of `region`, fp32, as training's weights ask for now."""
        start, stop = region.start * BLOCK, min(region.stop * BLOCK, self.source.shape[region.axis])
        return quantise(self.source.read(Region(region.name.removesuffix(SCALE), region.axis, start, stop)))[1]


def _in_blocks(region: Region, shape: tuple[int, ...]) -> bool:
    return region.start % BLOCK == 0 and (region.stop % BLOCK == 0 or region.stop == shape[region.axis])


def _blocks_of(region: Region, shape: tuple[int, ...]) -> Region:
    """The factors' region for a region of the weight of `shape`; ConfigError unless it consists of whole blocks."""
    if not _in_blocks(region, shape):
        raise ConfigError(
            f"fp8 block scales: {region} does not consist of whole blocks: expected multiples of {BLOCK}, or the end "
            f"{shape[region.axis]}: plan with layouts that check_cuts accepts, and split no block between buckets"
        )
    return Region(region.name + SCALE, region.axis, region.start // BLOCK, -(-region.stop // BLOCK))


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(fp8 [r, c], factors fp32 [ceil(r / 128), ceil(c / 128)]) of a weight [r, c] whose blocks begin at (0, 0)."""
    import torch

    rows, columns = weight.shape
    high, wide = -(-rows // BLOCK), -(-columns // BLOCK)
    padded = torch.zeros(high * BLOCK, wide * BLOCK, dtype=torch.float32, device=weight.device)
    padded[:rows, :columns] = weight
    blocks = padded.view(high, BLOCK, wide, BLOCK)
    factors = blocks.abs().amax(dim=(1, 3)) / LARGEST
    factors.clamp_(min=torch.finfo(torch.float32).tiny)  # a block of zeros stays zeros
    blocks /= factors[:, None, :, None]
    return padded[:rows, :columns].to(torch.float8_e4m3fn), factors
