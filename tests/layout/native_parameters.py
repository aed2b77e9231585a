"""A library's own parameters of one rank: their names and shapes, and the HF shards that each is made of.

Megatron joins gate and up into `linear_fc1`; vLLM joins them into `gate_up_proj` and stacks all local experts into
`w13_weight` and `w2_weight`. Names follow megatron-core 0.12.2's local spec with SequentialMLP, and vLLM 0.9.1's
`deepseek_v2.py`; Megatron numbers layers and experts locally, vLLM numbers layers globally. Two libraries are
described because two can be compared with real models on a CPU (test_real_models.py).
"""

from __future__ import annotations

from typing import NamedTuple

from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import Inventory, Parameter
from verl_patches.layout.parallel import ParallelLayout
from verl_patches.layout.sharding import MEGATRON_NAMES, Shard, local_parameters

_VLLM_LAYER = "model.layers.{layer}."
# kinds that are not named here keep their HF name
_VLLM = {
    "dense_mlp_gate": _VLLM_LAYER + "mlp.gate_up_proj.weight",
    "dense_mlp_up": _VLLM_LAYER + "mlp.gate_up_proj.weight",
    "shared_expert_gate": _VLLM_LAYER + "mlp.shared_experts.gate_up_proj.weight",
    "shared_expert_up": _VLLM_LAYER + "mlp.shared_experts.gate_up_proj.weight",
    "routed_expert_gate": _VLLM_LAYER + "mlp.experts.w13_weight",
    "routed_expert_up": _VLLM_LAYER + "mlp.experts.w13_weight",
    "routed_expert_down": _VLLM_LAYER + "mlp.experts.w2_weight",
}
NATIVE_NAMES = {"megatron-local": MEGATRON_NAMES, "vllm": _VLLM}


class NativeTensor(NamedTuple):
    """One parameter (or buffer) of the library: its local shape and the shards it is made of, in order.

    Shards are joined along axis 0. With `stacked`, the tensor has a leading axis of local experts and the shards of
    each expert are joined along the next one.
    """

    shape: tuple[int, ...]
    dtype: str
    shards: tuple[Shard, ...]
    stacked: bool = False


def native_parameters(
    inventory: Inventory, layout: ParallelLayout, rank: int, library: str, chunk: int = 0
) -> dict[str, NativeTensor]:
    """The library's own name -> tensor for `rank`; `chunk` picks the virtual pipeline chunk (0..vpp-1) of that rank.

    Raises ConfigError for a library without a table here, and as `local_parameters`.
    """
    if library not in NATIVE_NAMES:
        raise ConfigError(f"native names: no table for {library!r}; expected one of {', '.join(NATIVE_NAMES)}")
    names = NATIVE_NAMES[library]
    position = _positions(inventory, layout, rank, library, chunk)
    first_expert = layout.local_experts(rank, inventory.model.n_routed_experts).start if library != "vllm" else 0
    joined: dict[str, list[Shard]] = {}
    for name, shard in local_parameters(inventory, layout, rank, library).shards.items():
        parameter = shard.parameter
        if not _in_chunk(parameter, position, layout, chunk):
            continue
        template = names.get(parameter.kind, name)
        native = template.format(layer=position.get(parameter.layer), expert=(parameter.expert or 0) - first_expert)
        joined.setdefault(native, []).append(shard)
    return {native: _join(shards, library) for native, shards in joined.items()}


def _positions(inventory: Inventory, layout: ParallelLayout, rank: int, library: str, chunk: int) -> dict[int, int]:
    stage = layout.coordinates(rank).pp
    if not 0 <= chunk < layout.vpp:
        raise ConfigError(f"native names: chunk must be in 0..{layout.vpp - 1}, found {chunk}")
    layers = layout.chunk_layers(inventory.model.num_hidden_layers)[chunk * layout.pp + stage]
    return {layer: layer if library == "vllm" else layer - layers.start for layer in layers}


def _in_chunk(parameter: Parameter, position: dict[int, int], layout: ParallelLayout, chunk: int) -> bool:
    if parameter.layer is not None:
        return parameter.layer in position
    return chunk == (0 if parameter.kind == "embedding" else layout.vpp - 1)


def _join(shards: list[Shard], library: str) -> NativeTensor:
    first = shards[0]
    if library == "vllm" and first.parameter.expert is not None:
        experts = len({s.parameter.expert for s in shards})
        rows = sum(s.shape[0] for s in shards) // experts
        return NativeTensor((experts, rows, *first.shape[1:]), first.dtype, tuple(shards), stacked=True)
    rows = sum(s.shape[0] for s in shards)
    return NativeTensor((rows, *first.shape[1:]), first.dtype, tuple(shards))
