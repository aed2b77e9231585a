"""DeepSeek-V3 weights in MindSpeed-LLM's model: parameter names, stacked experts, loading, gathering for vLLM.

Facts (MindSpeed-LLM 2.0.0): multi_head_latent_attention.py makes `linear_qkv` of q's and kv's down projections, rows of
q first, and names the up projections linear_qb and linear_kvb and the norms q_layernorm and k_layernorm. Everything
else but experts has the name that megatron-core 0.12.2 gives it.

Experts are Megatron's GroupedMLP: weight1 [H, e * 2F] (gate and up) and weight2 [e * F, H] (down) of all local experts.
MindSpeed reads weight1 as `view(e, H, 2F)` (mindspeed/core/transformer/moe/experts.py, groupedmlp_forward), which is
another order of the same memory than the shape says: an expert is a slice of the view, never a slice of columns. Shape
letters: H hidden, F this rank's part of an expert's intermediate size, e local experts.

As in model/weights.py, Megatron is imported inside functions.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import Inventory, Parameter, build_inventory
from verl_patches.layout.sharding import AXES, LIBRARIES, MEGATRON_NAMES
from verl_patches.model import weights as megatron
from verl_patches.model.mindspeed.compat import expert_tensor_parallel_world_size
from verl_patches.model.weights import ParsedName, named_weights

_LAYER = "decoder.layers.{layer}."
_ATTENTION = _LAYER + "self_attention."
_EXPERTS_UP, _EXPERTS_DOWN = _LAYER + "mlp.experts.weight1", _LAYER + "mlp.experts.weight2"
_DIFFERENT = {
    "q_a_proj": _ATTENTION + "linear_qkv.weight",
    "kv_a_proj": _ATTENTION + "linear_qkv.weight",
    "q_b_proj": _ATTENTION + "linear_qb.weight",
    "kv_a_norm": _ATTENTION + "k_layernorm.weight",
    "kv_b_proj": _ATTENTION + "linear_kvb.weight",
    "routed_expert_gate": _EXPERTS_UP,
    "routed_expert_up": _EXPERTS_UP,
    "routed_expert_down": _EXPERTS_DOWN,
}
# kind -> name in one pipeline stage, {layer} counted from the stage's first; q_proj: no low-rank q here (arguments.py)
NAMES = {kind: name for kind, name in {**MEGATRON_NAMES, **_DIFFERENT}.items() if kind != "q_proj"}


# ---- parameter names and stacked experts


def parse_name(name: str) -> ParsedName:
    """What the parameter or buffer `name` of a stage is: kinds in the order they are joined, and its layer.

    Wrapper prefixes ("module.") are allowed; `expert` is always None. Raises ConfigError for an unknown name.
    """
    found = megatron.match_name(megatron.without_wrappers(name), _patterns())
    if found is None:
        raise ConfigError(
            f"MindSpeed parameter {name!r} is not one of DeepSeek-V3's: expected names as {NAMES['q_b_proj']}; "
            "mla_mm_split, multi-token prediction and SequentialMLP give others and are not supported here"
        )
    return found


@functools.cache
def _patterns() -> megatron.NamePatterns:
    return megatron.name_patterns(NAMES)


def is_expert_stack(kinds: tuple[str, ...]) -> bool:
    """Whether a parameter of these kinds holds all local experts."""
    return kinds[0].startswith("routed_expert")


def split_up(weight1: torch.Tensor, count: int) -> list[torch.Tensor]:
    """[2F, H] of each of `count` experts in weight1 [H, e * 2F], rows of gate first and then of up, as views."""
    return [expert.t() for expert in weight1.view(count, weight1.shape[0], -1)]


def split_down(weight2: torch.Tensor, count: int) -> list[torch.Tensor]:
    """[H, F] of each of `count` experts in weight2 [e * F, H], as views."""
    return [expert.t() for expert in weight2.view(count, -1, weight2.shape[1])]


def _axis(kinds: tuple[str, ...]) -> int | None:
    """The HF axis that TP splits; None for tensors that are whole on every rank."""
    return None if kinds[0] in LIBRARIES["mindspeed"].whole else AXES[kinds[0]]


# ---- gathering whole tensors for vLLM, in place of verl's per_tensor_generator (verl/utils/megatron_utils.py:723)

Weights = Iterator[tuple[str, torch.Tensor]]


class WeightConverter:
    """This model's weight converter for verl, which makes it of both configs: it holds the model's HF tensors."""

    def __init__(self, hf_config: Any, mcore_config: Any):
        self.inventory: Inventory = build_inventory(hf_config.to_dict())


class StageTensor(NamedTuple):
    """One tensor of a stage as every rank knows it: kinds that it joins, layer of the whole model, shape, dtype."""

    kinds: tuple[str, ...]
    layer: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype


def gathered_weights(chunks: Sequence[torch.nn.Module], inventory: Inventory) -> Weights:
    """HF name and whole tensor of every weight, on every rank; collective over all of Megatron's groups.

    A tensor is valid until the next one is requested. Values and dtypes are those of training. The order of collectives
    is the same on every rank: stage by stage, in the order of the stage's parameters, one local expert at a time.
    """
    from megatron.core import parallel_state
    from verl.utils.megatron_utils import unwrap_model

    local = [entry for chunk in unwrap_model(list(chunks)) for entry in _stage_tensors(chunk)]
    group = parallel_state.get_pipeline_model_parallel_group()
    stages: list[list[StageTensor]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(stages, [entry for entry, _ in local], group=group)
    for stage, entries in enumerate(stages):
        here = stage == dist.get_rank(group)
        for number, entry in enumerate(entries):
            tensor = (
                local[number][1] if here else torch.empty(entry.shape, dtype=entry.dtype, device=local[0][1].device)
            )
            dist.broadcast(tensor, dist.get_global_rank(group, stage), group=group)
            if is_expert_stack(entry.kinds):
                yield from _gather_experts(entry, tensor, inventory)
            else:
                yield from _gather_dense(entry, tensor, inventory)


def _stage_tensors(chunk: torch.nn.Module) -> Iterator[tuple[StageTensor, torch.Tensor]]:
    for name, tensor in named_weights(chunk):
        parsed = parse_name(name)
        layer = None if parsed.layer is None else chunk.decoder.layers[parsed.layer].layer_number - 1
        yield StageTensor(parsed.kinds, layer, tuple(tensor.shape), tensor.dtype), tensor.detach()


def _gather_dense(entry: StageTensor, tensor: torch.Tensor, inventory: Inventory) -> Weights:
    from megatron.core import parallel_state

    held = inventory.at(entry.layer, None)
    wanted = [held[kind] for kind in entry.kinds]
    axis = _axis(entry.kinds)
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [tensor] if axis is None else _all_gather(tensor, group)
    yield from _hf_tensors(wanted, parts, axis or 0)


def _gather_experts(entry: StageTensor, tensor: torch.Tensor, inventory: Inventory) -> Weights:
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_and_expert_parallel_group()  # ranks in the order ep, then tp
    parts = expert_tensor_parallel_world_size()
    of_layer = inventory.experts[entry.layer]
    local = len(of_layer) // (dist.get_world_size(group) // parts)
    down = entry.kinds[0] == "routed_expert_down"
    experts = split_down(tensor, local) if down else split_up(tensor, local)
    for number, expert in enumerate(experts):
        gathered = _all_gather(expert.contiguous(), group)
        for holder, first in enumerate(range(0, len(gathered), parts)):
            wanted = [p for p in of_layer[holder * local + number] if p.kind in entry.kinds]
            yield from _hf_tensors(wanted, gathered[first : first + parts], 1 if down else 0)


def _hf_tensors(wanted: Sequence[Parameter], parts: Sequence[torch.Tensor], axis: int) -> Weights:
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

    return {SupportedModel.DEEPSEEK_V3: WeightConverter}


def deepseekv3_generator(per_tensor_generator):
    """Row provider for verl's `per_tensor_generator`: `gathered_weights` for a model with our converter.

    verl's needs expert tensor groups and configuration fields that core_r0.8.0 does not have, takes experts for single
    modules, and leaves out the correction bias.
    """

    @functools.wraps(per_tensor_generator)
    def generate(actor_module, model_config, weight_converter, *args, **kwargs):
        if isinstance(weight_converter, WeightConverter):
            return gathered_weights(actor_module, weight_converter.inventory)
        return per_tensor_generator(actor_module, model_config, weight_converter, *args, **kwargs)

    return generate
