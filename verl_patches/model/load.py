"""Load DeepSeek-V3 HF weights into Megatron model chunks: each rank reads its own slices, each parameter once.

verl 0.4.0 loads HF weights into Megatron for Llama and Qwen2 only (verl/models/weight_loader_registry.py), by building
the whole HF model on every rank. Here the model says which parameters it has and which layers and experts they are
(uneven pipelines and any expert placement included), the inventory says what HF calls them, and only their slices are
read.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from megatron.core import parallel_state

from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import Inventory, Parameter, build_inventory
from verl_patches.layout.sharding import AXES
from verl_patches.model.hf_tensors import HFTensors
from verl_patches.model.names import place

log = logging.getLogger(__name__)

ARCHITECTURE = "DeepseekV3ForCausalLM"


class Source(NamedTuple):
    """Where one Megatron tensor comes from: HF tensors to be joined along axis 0, and this rank's part of each."""

    parameters: tuple[Parameter, ...]
    axis: int | None
    part: int
    parts: int

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the joined tensors before they are split over ranks."""
        return sum(p.shape[0] for p in self.parameters), *self.parameters[0].shape[1:]


def load_weights(folder: str | Path, chunks: Sequence[torch.nn.Module]) -> int:
    """Fill the parameters and correction biases of `chunks` (GPTModel, wrapped or not) and return how many were set.

    Values are converted to each parameter's dtype; correction biases stay fp32, whatever a bf16 wrapper made of them.
    Needs Megatron's process groups. Raises ConfigError for tensors that are missing, unknown, of another shape, or fp8,
    and for parameters that no HF tensor is known for: the message names parameter, expected and found.
    """
    from verl.utils.megatron_utils import unwrap_model  # not above: the row is applied while that module is half built

    inventory = build_inventory(Path(folder))
    experts = _experts_by_layer(inventory)
    count = 0
    with HFTensors(folder) as tensors, torch.no_grad():
        tensors.check_names((p.name for p in inventory.parameters), inventory.model.num_hidden_layers)
        for chunk in unwrap_model(list(chunks)):
            _keep_bias_fp32(chunk)
            for name, target in named_weights(chunk):
                target.copy_(_read(tensors, name, source(chunk, name, inventory, experts), tuple(target.shape)))
                count += 1
    log.info("loaded %d tensors from %s", count, folder)
    return count


def named_weights(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of everything in a GPTModel chunk that a checkpoint holds: parameters and correction biases."""
    yield from chunk.named_parameters()
    for name, buffer in chunk.named_buffers():
        if name.endswith(".expert_bias"):
            yield name, buffer


def source(chunk: torch.nn.Module, name: str, inventory: Inventory, experts: dict | None = None) -> Source:
    """What the parameter `name` of a GPTModel chunk is made of on this rank. Raises ConfigError for an unknown name."""
    where = place(name)
    layer = expert = None
    if where.layer is not None:
        block = chunk.decoder.layers[where.layer]
        layer = block.layer_number - 1  # Megatron counts from 1, over the whole model
        expert = None if where.expert is None else block.mlp.local_expert_indices[where.expert]
    found = (experts or _experts_by_layer(inventory)).get((layer, expert), {})
    unknown = [kind for kind in where.kinds if kind not in found]
    if unknown:
        raise ConfigError(
            f"Megatron parameter {name!r} is {unknown[0]} of layer {layer}, expert {expert}, "
            "which config.json's model does not have: the Megatron model was built from another config"
        )
    if expert is not None:
        part = parallel_state.get_expert_tensor_parallel_rank()
        parts = parallel_state.get_expert_tensor_parallel_world_size()
    else:
        part = parallel_state.get_tensor_model_parallel_rank()
        parts = parallel_state.get_tensor_model_parallel_world_size()
    return Source(tuple(found[kind] for kind in where.kinds), AXES[where.kinds[0]], part, parts)


def _experts_by_layer(inventory: Inventory) -> dict[tuple[int | None, int | None], dict[str, Parameter]]:
    """(layer, expert) -> kind -> HF tensor."""
    found: dict[tuple[int | None, int | None], dict[str, Parameter]] = {}
    for parameter in inventory.parameters:
        found.setdefault((parameter.layer, parameter.expert), {})[parameter.kind] = parameter
    return found


def _read(tensors: HFTensors, name: str, origin: Source, expected: tuple[int, ...]) -> torch.Tensor:
    for parameter in origin.parameters:
        found = tensors.shape(parameter.name)
        if found != parameter.shape:
            raise ConfigError(
                f"{parameter.name}: expected shape {parameter.shape} (config.json), found {found} in {tensors.folder}"
            )
    axis = None if origin.whole_shape == expected else origin.axis  # None: one part, or a module that is not split
    pieces = [tensors.read(p.name, axis, origin.part, origin.parts) for p in origin.parameters]
    value = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    if tuple(value.shape) != expected:
        raise ConfigError(
            f"Megatron parameter {name!r}: expected shape {expected}, found {tuple(value.shape)} "
            f"for part {origin.part} of {origin.parts} of {', '.join(p.name for p in origin.parameters)}: "
            "TP or ETP differs from the model's"
        )
    return value


def _keep_bias_fp32(chunk: torch.nn.Module) -> None:
    """Undo what Float16Module did to the correction biases, before values are lost by it.

    Megatron does the same at each forward (moe/router.py:131), which is too late for a value that was loaded in bf16.
    """
    for module in chunk.modules():
        if hasattr(module, "_maintain_float32_expert_bias"):
            module._maintain_float32_expert_bias()


def load_deepseekv3(load_megatron_gptmodel_weights):
    """Row provider for verl's `load_megatron_gptmodel_weights`: DeepSeek-V3 by `load_weights`, the rest as before."""

    @functools.wraps(load_megatron_gptmodel_weights)
    def load(config, model_config, parallel_model, params_dtype, is_value_model=False, *args, **kwargs):
        if ARCHITECTURE not in (model_config.architectures or ()):
            return load_megatron_gptmodel_weights(
                config, model_config, parallel_model, params_dtype, is_value_model, *args, **kwargs
            )
        if is_value_model:
            raise ConfigError("DeepSeek-V3 cannot be a value model: set algorithm.adv_estimator=grpo")
        from verl.utils.fs import copy_to_local

        load_weights(copy_to_local(config.model.path), parallel_model)

    return load
