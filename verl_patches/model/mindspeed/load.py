"""Load DeepSeek-V3 HF weights into MindSpeed-LLM's model: each rank reads its own slices, each parameter once.

As model/load.py does for megatron-core 0.12.2; what differs are names, stacked experts and which tensors TP cuts.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from megatron.core import parallel_state

from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import Inventory, Parameter, build_inventory
from verl_patches.layout.sharding import AXES, LIBRARIES
from verl_patches.model.hf_tensors import HFTensors
from verl_patches.model.load import ARCHITECTURE, Source, named_weights
from verl_patches.model.mindspeed import experts
from verl_patches.model.mindspeed.absent import expert_tensor_parallel_rank, expert_tensor_parallel_world_size
from verl_patches.model.mindspeed.names import is_expert_stack, place

log = logging.getLogger(__name__)


class Origin(NamedTuple):
    """What one parameter of this rank is made of: one Source, or with `stacked` one for each local expert, in order."""

    sources: tuple[Source, ...]
    stacked: bool


def load_weights(folder: str | Path, chunks: Sequence[torch.nn.Module]) -> int:
    """Fill the parameters and correction biases of `chunks` (GPTModel, wrapped or not) and return how many were set.

    Values are converted to each parameter's dtype; correction biases are fp32 (router_bias.py). Needs Megatron's
    process groups. Raises ConfigError for tensors that are missing, unknown, of another shape, or fp8, by name.
    """
    from verl.utils.megatron_utils import unwrap_model  # not above: a row is applied while that module is half built

    inventory = build_inventory(Path(folder))
    count = 0
    with HFTensors(folder) as tensors, torch.no_grad():
        tensors.check_names((p.name for p in inventory.parameters), inventory.model.num_hidden_layers)
        for chunk in unwrap_model(list(chunks)):
            for name, target in named_weights(chunk):
                target.copy_(_read(tensors, name, origin(chunk, name, inventory), tuple(target.shape)))
                count += 1
    log.info("loaded %d tensors from %s", count, folder)
    return count


def origin(chunk: torch.nn.Module, name: str, inventory: Inventory) -> Origin:
    """What parameter or bias `name` of a GPTModel chunk is made of on this rank; ConfigError for an unknown name."""
    where = place(name)
    if where.layer is None:
        found = {p.kind: p for p in inventory.outer}
        return Origin((_source(where.kinds, found, name, _tensor_parallel()),), False)
    block = chunk.decoder.layers[where.layer]
    layer = block.layer_number - 1  # Megatron counts from 1, over the whole model
    if not is_expert_stack(where.kinds):
        found = {p.kind: p for p in inventory.layers[layer]}
        return Origin((_source(where.kinds, found, name, _tensor_parallel()),), False)
    per_expert = ({p.kind: p for p in inventory.experts[layer][e]} for e in block.mlp.local_expert_indices)
    split = expert_tensor_parallel_rank(), expert_tensor_parallel_world_size()
    return Origin(tuple(_source(where.kinds, found, name, split) for found in per_expert), True)


def _tensor_parallel() -> tuple[int, int]:
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()


def _source(kinds: tuple[str, ...], found: dict[str, Parameter], name: str, split: tuple[int, int]) -> Source:
    missing = [kind for kind in kinds if kind not in found]
    if missing:
        raise ConfigError(
            f"MindSpeed parameter {name!r} is {missing[0]}, which config.json's model does not have there: "
            "the model was built from another config"
        )
    axis = None if kinds[0] in LIBRARIES["mindspeed"].whole else AXES[kinds[0]]
    return Source(tuple(found[kind] for kind in kinds), axis, *split)


def _read(tensors: HFTensors, name: str, made_of: Origin, expected: tuple[int, ...]) -> torch.Tensor:
    joined = [_read_source(tensors, source) for source in made_of.sources]
    if made_of.stacked:
        pack = experts.stack_down if made_of.sources[0].axis == 1 else experts.stack_up
        value = pack(joined)
    else:
        value = joined[0]
    if tuple(value.shape) != expected:
        source = made_of.sources[0]
        raise ConfigError(
            f"MindSpeed parameter {name!r}: expected shape {expected}, found {tuple(value.shape)} "
            f"for part {source.part} of {source.parts} of {', '.join(p.name for p in source.parameters)}: "
            "the model was built for another layout"
        )
    return value


def _read_source(tensors: HFTensors, source: Source) -> torch.Tensor:
    for parameter in source.parameters:
        found = tensors.shape(parameter.name)
        if found != parameter.shape:
            raise ConfigError(
                f"{parameter.name}: expected shape {parameter.shape} (config.json), found {found} in {tensors.folder}"
            )
    return torch.cat([tensors.read(p.name, source.axis, source.part, source.parts) for p in source.parameters])


def load_deepseekv3(load_megatron_gptmodel_weights):
    """Row provider for verl's `load_megatron_gptmodel_weights`: DeepSeek-V3 by `load_weights`, the rest as before."""

    @functools.wraps(load_megatron_gptmodel_weights)
    def load(config, model_config, parallel_model, params_dtype, is_value_model=False, *args, **kwargs):
        if ARCHITECTURE not in (model_config.architectures or ()):
            return load_megatron_gptmodel_weights(
                config, model_config, parallel_model, params_dtype, is_value_model, *args, **kwargs
            )
        from verl.utils.fs import copy_to_local

        return load_weights(copy_to_local(config.model.path), parallel_model)

    return load
