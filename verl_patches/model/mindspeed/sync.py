"""All weights of a MindSpeed-LLM DeepSeek-V3 by HF name, gathered over PP, TP and EP: what verl hands to vLLM.

In place of verl's `per_tensor_generator` (verl/utils/megatron_utils.py:723), which asks Megatron for expert tensor
groups and its configuration for fields that core_r0.8.0 does not have, takes experts for single modules, and leaves
out the correction bias. The order of collectives is the same on every rank: stage by stage, in the order of the
stage's parameters, one local expert at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from verl_patches.layout.inventory import Inventory, Parameter, build_inventory
from verl_patches.layout.sharding import AXES, LIBRARIES
from verl_patches.model.load import named_weights
from verl_patches.model.mindspeed import experts
from verl_patches.model.mindspeed.absent import expert_tensor_parallel_world_size
from verl_patches.model.mindspeed.names import is_expert_stack, place

Weights = Iterator[tuple[str, torch.Tensor]]


class HfNames:
    """What verl calls the weight converter of a model, and makes of both configs; it knows the model's HF tensors."""

    def __init__(self, hf_config: Any, mcore_config: Any):
        self.inventory: Inventory = build_inventory(hf_config.to_dict())


class Held(NamedTuple):
    """One tensor of a stage as every rank knows it: kinds that it joins, layer of the whole model, shape, dtype."""

    kinds: tuple[str, ...]
    layer: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype


def weights_for_rollout(chunks: Sequence[torch.nn.Module], inventory: Inventory) -> Weights:
    """HF name and whole tensor of every weight, on every rank; collective over all of Megatron's groups.

    A tensor is good until the next one is asked for. Values and dtypes are those of training.
    """
    from verl.utils.megatron_utils import unwrap_model

    mine = [entry for chunk in unwrap_model(list(chunks)) for entry in _held(chunk)]
    group = parallel_state.get_pipeline_model_parallel_group()
    stages: list[list[Held]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(stages, [held for held, _ in mine], group=group)
    for stage, entries in enumerate(stages):
        here = stage == dist.get_rank(group)
        for number, held in enumerate(entries):
            tensor = mine[number][1] if here else torch.empty(held.shape, dtype=held.dtype, device=mine[0][1].device)
            dist.broadcast(tensor, dist.get_global_rank(group, stage), group=group)
            yield from (_experts if is_expert_stack(held.kinds) else _dense)(held, tensor, inventory)


def _held(chunk: torch.nn.Module) -> Iterator[tuple[Held, torch.Tensor]]:
    for name, tensor in named_weights(chunk):
        where = place(name)
        layer = None if where.layer is None else chunk.decoder.layers[where.layer].layer_number - 1
        yield Held(where.kinds, layer, tuple(tensor.shape), tensor.dtype), tensor.detach()


def _dense(held: Held, tensor: torch.Tensor, inventory: Inventory) -> Weights:
    of_layer = inventory.outer if held.layer is None else inventory.layers[held.layer]
    wanted = [next(p for p in of_layer if p.kind == kind) for kind in held.kinds]
    axis = None if held.kinds[0] in LIBRARIES["mindspeed"].whole else AXES[held.kinds[0]]
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [tensor] if axis is None else _all_gather(tensor, group)
    yield from _named(wanted, parts, axis or 0)


def _experts(held: Held, tensor: torch.Tensor, inventory: Inventory) -> Weights:
    group = parallel_state.get_tensor_and_expert_parallel_group()  # ranks in the order ep, then tp
    cuts = expert_tensor_parallel_world_size()
    of_layer = inventory.experts[held.layer]
    local = len(of_layer) // (dist.get_world_size(group) // cuts)
    down = held.kinds[0] == "routed_expert_down"
    stack = (experts.split_down if down else experts.split_up)(tensor, local)
    for number, expert in enumerate(stack):
        gathered = _all_gather(expert.contiguous(), group)
        for holder, first in enumerate(range(0, len(gathered), cuts)):
            wanted = [p for p in of_layer[holder * local + number] if p.kind in held.kinds]
            yield from _named(wanted, gathered[first : first + cuts], 1 if down else 0)


def _named(wanted: Sequence[Parameter], parts: Sequence[torch.Tensor], axis: int) -> Weights:
    """Each wanted HF tensor, from the parts of all ranks; in each part they are joined along axis 0."""
    rows = [p.shape[0] // (len(parts) if axis == 0 else 1) for p in wanted]
    pieces = zip(*(part.split(rows) for part in parts), strict=True)
    for parameter, piece in zip(wanted, pieces, strict=True):
        yield parameter.name, torch.cat(piece, dim=axis) if len(piece) > 1 else piece[0]


def _all_gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    if dist.get_world_size(group) == 1:
        return [tensor]
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts


def weight_converters() -> dict[Any, Any]:
    """Row provider: the entry for verl's MODEL_WEIGHT_CONVERTER_REGISTRY."""
    from verl.models.mcore.registry import SupportedModel

    return {SupportedModel.DEEPSEEK_V3: HfNames}


def generator_by_our_names(per_tensor_generator):
    """Row provider for verl's `per_tensor_generator`: ours for a model with our converter, verl's for others."""

    @functools.wraps(per_tensor_generator)
    def generate(actor_module, model_config, weight_converter, *args, **kwargs):
        if isinstance(weight_converter, HfNames):
            return weights_for_rollout(actor_module, weight_converter.inventory)
        return per_tensor_generator(actor_module, model_config, weight_converter, *args, **kwargs)

    return generate
