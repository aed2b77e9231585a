"""Give a weight sync views of the HF tensors in this rank's live training parameters, without copies.

A view has the shape and orientation of its HF region and may be strided or transposed. Layout and model must agree on
the parts that each rank holds, which is checked when the views are made.

How a parameter holds HF tensors depends on the library. Its HF kinds (those of layout/inventory.py) are joined along HF
rows, and under TP each rank joins its own part of each: gated fc1 is [gate's part; up's part]. Shape letters: H hidden,
F this rank's part of an expert's intermediate size, e local experts.

    parameter                                  holds                              stacking                    libraries
    ...experts.local_experts.{expert}.fc1      routed gate, up of one expert      as HF, [2F, H]              megatron
    ...experts.weight1   shape [H, e * 2F]     routed gate, up of all local ones  view(e, H, 2F), each .t()   mindspeed
    ...experts.weight2   shape [e * F, H]      routed down of all local ones      view(e, F, H), each .t()    mindspeed
    ...self_attention.linear_qkv               q_a, kv_a (whole under TP)         as HF                       mindspeed
    every other one                            one kind, or gate and up           as HF                       all

Names are tabulated in layout/sharding.py and reshard/parameters.py. MindSpeed views weight1 and weight2 so
(mindspeed.core.transformer.moe.experts.groupedmlp_forward): the shape of weight1 does not show the order of its memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import Inventory, build_inventory, read_model_shape
from verl_patches.layout.parallel import ParallelLayout
from verl_patches.layout.sharding import Shard, local_parameters
from verl_patches.memory.live_memory import storage_id, view_id
from verl_patches.reshard.parameters import UNSTACKED, ParameterContents, named_weights, parse_name
from verl_patches.reshard.rank_errors import gather
from verl_patches.reshard.region import Region, region_view, shard_region

NativeTensors = Mapping[str, torch.Tensor]  # the library's parameter name -> tensor, of one model chunk


@dataclass(frozen=True, eq=False)
class TrainTensor:
    """Hold this rank's part of one HF tensor.

    `tensor`: a view of live memory with the region's own shape. `shape`: that of the complete HF tensor. The view is in
    `parameter` of model chunk `chunk`; `native`: that parameter when the view was made (see `views_match_memory`).
    """

    region: Region
    shape: tuple[int, ...]
    tensor: torch.Tensor
    chunk: int
    parameter: str
    native: torch.Tensor

    def read(self, region: Region) -> torch.Tensor:
        """Return the view of `region`; raises ConfigError if it does not lie inside this one."""
        view = region_view(self.tensor, self.region, region, self.shape)
        if view is None:
            raise ConfigError(
                f"reshard: the plan reads {region}, but this rank holds {self.region}: the plan was made for another "
                "layout. Make it again with the layout of this model"
            )
        return view


def train_tensors(
    chunks: Sequence[torch.nn.Module], inventory: Inventory, layout: ParallelLayout, rank: int, library: str
) -> dict[str, TrainTensor]:
    """Return {HF name: part that `rank` holds}, as views of `chunks`.

    `chunks`: the rank's GPTModels, wrapped or not, one for each virtual stage. `inventory` has training's dtypes.
    `library`: a key of layout.sharding.LIBRARIES. Needs Megatron's process groups. Raises ConfigError where layout and
    model disagree: another layer, expert or TP part, another shape or dtype, an unknown, missing or doubled parameter;
    the message names parameter, rank, expected and found.
    """
    _check_model(unwrap_chunks(chunks), inventory, layout, rank)
    return train_tensors_from_native(native_tensors(chunks), inventory, layout, rank, library)


def trained_inventory(chunks: Sequence[torch.nn.Module], hf_config: Any, value: bool = False) -> Inventory:
    """Return the inventory of `hf_config` in the dtype of `chunks`; `value`: of a value model (`build_inventory`)."""
    dtype = str(next(chunks[0].parameters()).dtype).removeprefix("torch.")
    return build_inventory(replace(read_model_shape(hf_config.to_dict()), torch_dtype=dtype), value)


def model_layout(chunks: Sequence[torch.nn.Module]) -> ParallelLayout:
    """Return the layout of a live model, by Megatron's process groups; collective over the ranks of a pipeline."""
    from megatron.core import parallel_state

    models = unwrap_chunks(chunks)
    layers = [layer for model in models for layer in model.decoder.layers]
    experts = [len(layer.mlp.local_expert_indices) for layer in layers if hasattr(layer.mlp, "local_expert_indices")]
    ep = models[0].config.num_moe_experts // experts[0] if experts else 1
    group = parallel_state.get_pipeline_model_parallel_group()
    stages = gather(([len(model.decoder.layers) for model in models], ep), group)
    return ParallelLayout(
        dist.get_world_size(),
        tp=parallel_state.get_tensor_model_parallel_world_size(),
        cp=parallel_state.get_context_parallel_world_size(),
        ep=max(stage_ep for _, stage_ep in stages),  # it is 1 on stages with dense layers only
        etp=parallel_state.get_expert_tensor_parallel_world_size(),
        pp=len(stages),
        vpp=len(models),
        layers_per_stage=tuple(counts[chunk] for chunk in range(len(models)) for counts, _ in stages),
    )


def views_are_valid(tensors: Mapping[str, TrainTensor], chunks: Sequence[torch.nn.Module]) -> bool:
    """Return whether `tensors` still are views of what `chunks` train; if not, make them again. Reads no data."""
    return views_match_memory(tensors, native_tensors(chunks))


def train_tensors_from_native(
    native: Sequence[NativeTensors], inventory: Inventory, layout: ParallelLayout, rank: int, library: str
) -> dict[str, TrainTensor]:
    """Return the same as `train_tensors`, from names and tensors of each model chunk, without Megatron."""
    if len(native) != layout.vpp:
        raise ConfigError(f"reshard: rank {rank} has {len(native)} model chunks; expected {layout.vpp} ({layout})")
    shards = local_parameters(inventory, layout, rank, library).shards
    by_place = {(s.parameter.kind, s.parameter.layer, s.parameter.expert): s for s in shards.values()}
    experts = layout.local_experts(rank, inventory.model.n_routed_experts)
    tensors: dict[str, TrainTensor] = {}
    for chunk, parameters in enumerate(native):
        layers = _chunk_layers(inventory, layout, rank, chunk)
        for name, parameter in parameters.items():
            contents, parameter = parse_name(name, library), parameter.detach()
            layer = _global_id(layers, contents.layer)
            kinds = [kind for kind in contents.kinds if kind in inventory.kinds]
            held_experts: Sequence[int | None] = experts
            if contents.stacking == UNSTACKED:
                held_experts = [_global_id(experts, contents.expert)]
            stack = [
                [_shard_at(by_place, (kind, layer, expert), name, rank) for kind in kinds] for expert in held_experts
            ]
            _check_shape(name, parameter, contents, stack, rank)
            for shard, part in _shard_views(contents, parameter, stack):
                hf = shard.parameter
                if hf.name in tensors:
                    first = tensors[hf.name].parameter
                    raise ConfigError(f"reshard: rank {rank}: both {first} and {name} hold {hf.name}, expected one")
                tensors[hf.name] = TrainTensor(shard_region(shard), hf.shape, part, chunk, name, parameter)
    missing = [name for name in shards if name not in tensors]
    if missing:
        raise ConfigError(
            f"reshard: rank {rank} lacks {len(missing)} HF tensors of layout {layout}, for example {missing[0]}: none "
            f"of its {sum(map(len, native))} parameters holds them. Compare layout and HF config with the model"
        )
    return {name: tensors[name] for name in shards}


def views_match_memory(tensors: Mapping[str, TrainTensor], native: Sequence[NativeTensors]) -> bool:
    """Return whether `tensors` are views of the present memory of `native`.

    Offload that resizes a storage (verl's, for DDP buffers) leaves views valid; giving a parameter other memory
    (`param.data = ...`) does not. The views keep their storages allocated.
    """
    return all(
        t.parameter in native[t.chunk] and view_id(t.native) == view_id(native[t.chunk][t.parameter])
        for t in tensors.values()
    )


def _shard_views(
    contents: ParameterContents, parameter: torch.Tensor, stack: Sequence[Sequence[Shard]]
) -> Iterator[tuple[Shard, torch.Tensor]]:
    """Yield (shard, view) of each HF tensor in `parameter`; `stack`: shards joined in each local expert, or once."""
    for held, view in zip(stack, contents.hf_views(parameter, len(stack)), strict=True):
        # MindSpeed's torch.Tensor.view copies a tensor that is not contiguous (mindspeed/megatron_adaptor.py)
        assert storage_id(view) == storage_id(parameter), contents
        yield from zip(held, view.split([shard.shape[0] for shard in held]), strict=True)


def _global_id(ids: range, number: int | None) -> int | None:
    """Return the layer or expert at local `number`, or where there is none an id that `_shard_at` will refuse."""
    if number is None:
        return None
    return ids[number] if number < len(ids) else ids.stop + number - len(ids)


def _shard_at(by_place: Mapping[tuple, Shard], place: tuple, name: str, rank: int) -> Shard:
    """Return the shard of the HF tensor at `place`, which is (kind, layer, expert); ConfigError if there is none."""
    if place not in by_place:
        raise ConfigError(
            f"reshard: parameter {name!r} on rank {rank} holds {place[0]} of layer {place[1]}, expert {place[2]}, "
            "which the layout puts on another rank: the model was built with another config or layout. Compare them"
        )
    return by_place[place]


def _check_shape(
    name: str, parameter: torch.Tensor, contents: ParameterContents, stack: list[list[Shard]], rank: int
) -> None:
    shards = stack[0]
    hf_shape = (sum(shard.shape[0] for shard in shards), *shards[0].shape[1:])
    expected = f"{shards[0].dtype} {contents.shape(hf_shape, len(stack))}"
    found = f"{str(parameter.dtype).removeprefix('torch.')} {tuple(parameter.shape)}"
    if expected != found:
        regions = ", ".join(str(shard_region(shard)) for shard in shards)
        more = f" and {len(stack) - 1} more experts" if len(stack) > 1 else ""
        raise ConfigError(
            f"reshard: {name!r} on rank {rank}: expected {expected}, which holds {regions}{more}, "
            f"found {found}: the model was built with another config, dtype or layout. Compare them"
        )


def _chunk_layers(inventory: Inventory, layout: ParallelLayout, rank: int, chunk: int) -> range:
    stage = layout.coordinates(rank).pp
    return layout.chunk_layers(inventory.model.num_hidden_layers)[chunk * layout.pp + stage]


def unwrap_chunks(chunks: Sequence[torch.nn.Module]) -> list[Any]:
    """Return the model chunks without Megatron's wrappers (DDP, Float16Module)."""
    from verl.utils.megatron_utils import unwrap_model  # not at the top: patches are applied while it is half imported

    return unwrap_model(list(chunks))


def native_tensors(chunks: Sequence[torch.nn.Module]) -> list[NativeTensors]:
    """Return the live parameters and correction biases of each of `chunks`, wrapped or not."""
    return [dict(named_weights(chunk)) for chunk in unwrap_chunks(chunks)]


def _check_model(models: list[Any], inventory: Inventory, layout: ParallelLayout, rank: int) -> None:
    """Raise ConfigError unless the live model has the layers, experts and TP parts that the layout gives `rank`."""
    from megatron.core import parallel_state

    at = layout.coordinates(rank)
    experts = list(layout.local_experts(rank, inventory.model.n_routed_experts))
    tp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    etp = parallel_state.get_expert_tensor_parallel_rank(), parallel_state.get_expert_tensor_parallel_world_size()
    facts: list[tuple[str, Any, Any]] = [("(TP rank, TP)", (at.tp, layout.tp), tp)]
    facts.append(("(expert TP rank, expert TP)", (at.etp, layout.etp), etp))
    for chunk, model in enumerate(models[: layout.vpp]):
        layers = {layer.layer_number - 1: layer.mlp for layer in model.decoder.layers}  # Megatron counts from 1
        expected_layers = list(_chunk_layers(inventory, layout, rank, chunk))
        facts.append((f"layers of model chunk {chunk}", expected_layers, list(layers)))
        for layer, mlp in layers.items():
            if hasattr(mlp, "local_expert_indices"):
                facts.append((f"experts of layer {layer}", experts, list(mlp.local_expert_indices)))
    for fact, expected, found in facts:
        if expected != found:
            raise ConfigError(
                f"reshard: {fact} on rank {rank}: expected {expected} by layout {layout}, found {found} in the model"
            )
