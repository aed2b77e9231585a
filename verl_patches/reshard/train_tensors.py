"""The HF tensors that this rank trains, as views of the live parameters: where a weight sync reads.

Nothing is copied. A view has the shape and orientation of its HF region and may be strided or transposed. Layout and
model must agree on who holds what, which is checked when the views are made.

How a parameter holds HF tensors depends on the library. Its HF kinds (those of layout/inventory.py) are joined along HF
rows, and under TP each rank joins its own part of each: gated fc1 is [gate's part; up's part]. Shape letters: H hidden,
F this rank's part of an expert's intermediate size, e local experts.

    parameter                                  holds                                how                     libraries
    ...experts.local_experts.{expert}.fc1      routed gate, up of one expert        as HF, [2F, H]          megatron-*
    ...experts.linear_fc1.weight{expert}       the same by Transformer Engine       as HF, [2F, H]          megatron-*
    ...experts.weight1   shape [H, e * 2F]     routed gate, up of all local ones    view(e, H, 2F), each .t()   all
    ...experts.weight2   shape [e * F, H]      routed down of all local ones        view(e, F, H), each .t()    all
    ...self_attention.linear_qkv               q_a, kv_a (all of both under TP)     as HF                   mindspeed
    every other one                            one kind, or gate and up             as HF                   all

Sources: names are tabulated in layout/sharding.py, model/weights.py and model/mindspeed/weights.py. weight1 and weight2
are megatron-core's GroupedMLP: its forward in 0.12.2 (transformer/moe/experts.py:249) views them so, and so does
MindSpeed (core/transformer/moe/experts.py, groupedmlp_forward): weight1's shape does not say what is in its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import Inventory
from verl_patches.layout.parallel import ParallelLayout
from verl_patches.layout.sharding import Shard, local_parameters
from verl_patches.model import weights as megatron
from verl_patches.model.mindspeed import weights as mindspeed
from verl_patches.reshard.live_memory import view_id
from verl_patches.reshard.region import Region, part_of, region_of

Native = Mapping[str, torch.Tensor]  # parameter's own name -> tensor, of one model chunk
PLAIN, UP_STACK, DOWN_STACK = "as HF", "[H, e * 2F] used as view(e, H, 2F)", "[e * F, H] used as view(e, F, H)"
_STACKS = {".mlp.experts.weight1": UP_STACK, ".mlp.experts.weight2": DOWN_STACK}
# library of layout/sharding.py -> what its parameters are, by name
_PLACES: dict[str, Callable[[str], megatron.ParsedName]] = {
    "megatron-local": megatron.parse_name, "megatron-te": megatron.parse_name, "mindspeed": mindspeed.parse_name,
}  # fmt: skip


class Storage(NamedTuple):
    """What one parameter holds: kinds joined along rows, local layer, local expert (None: none, or all), and how."""

    kinds: tuple[str, ...]
    layer: int | None
    expert: int | None
    how: str

    @property
    def stacked(self) -> bool:
        """Whether it holds all experts of the rank."""
        return self.how != PLAIN

    def shape(self, joined: Sequence[int], count: int) -> tuple[int, ...]:
        """The parameter's own shape, given that of its joined HF tensors (of one expert, if stacked)."""
        if self.how == PLAIN:
            return tuple(joined)
        rows, columns = joined
        return (columns, count * rows) if self.how == UP_STACK else (count * columns, rows)

    def joined(self, tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
        """Views of the parameter in HF orientation: of each of `count` local experts in order, else the one there is.

        Expects the parameter's own shape (see `shape`).
        """
        if self.how == PLAIN:
            return [tensor]
        return (mindspeed.split_up if self.how == UP_STACK else mindspeed.split_down)(tensor, count)


def storage_of(name: str, library: str) -> Storage:
    """What the parameter or buffer `name` of a GPTModel chunk is; wrapper prefixes ("module.") are allowed.

    Raises ConfigError for a name that no DeepSeek-V3 parameter of `library` has, and for a library not in this table.
    """
    if library not in _PLACES:
        raise ConfigError(f"reshard: no training storage known for {library!r}; expected one of {', '.join(_PLACES)}")
    how = next((how for end, how in _STACKS.items() if name.endswith(end)), PLAIN)
    place = (mindspeed.parse_name if how != PLAIN else _PLACES[library])(name)  # one GroupedMLP, whatever the library
    return Storage(*place, how)


@dataclass(frozen=True, eq=False)
class TrainTensor:
    """What this rank holds of one HF tensor.

    `tensor`: a view of live memory with the region's own shape. `shape`: the whole HF tensor's. `parameter` of model
    chunk `chunk` is what it is a view of, `native` that parameter as it was (see `are_views_of`).
    """

    region: Region
    shape: tuple[int, ...]
    tensor: torch.Tensor
    chunk: int
    parameter: str
    native: torch.Tensor

    def read(self, region: Region) -> torch.Tensor:
        """The view of `region`, which must lie inside this one (ConfigError)."""
        view = part_of(self.tensor, self.region, region, self.shape)
        if view is None:
            raise ConfigError(
                f"reshard: {region} is needed where {self.region} is held: the plan is not of this rank's layout; "
                "plan again"
            )
        return view


def train_tensors(
    chunks: Sequence[torch.nn.Module], inventory: Inventory, layout: ParallelLayout, rank: int, library: str
) -> dict[str, TrainTensor]:
    """HF name -> what `rank` holds, as views of `chunks`: its GPTModels, wrapped or not, one for each virtual stage.

    `inventory` in training's dtypes. `library`: a key of layout.sharding.LIBRARIES. Needs Megatron's process groups.
    Raises ConfigError where layout and model disagree: another layer, expert or TP part, another shape or dtype, an
    unknown, missing or doubled parameter; the message names parameter, rank, expected and found.
    """
    _check_place(_unwrapped(chunks), inventory, layout, rank)
    return views_of(_native(chunks), inventory, layout, rank, library)


def still_valid(tensors: Mapping[str, TrainTensor], chunks: Sequence[torch.nn.Module]) -> bool:
    """Whether `tensors` still are views of what `chunks` train; if not, make them again. Cheap: no data is read."""
    return are_views_of(tensors, _native(chunks))


def views_of(
    native: Sequence[Native], inventory: Inventory, layout: ParallelLayout, rank: int, library: str
) -> dict[str, TrainTensor]:
    """As `train_tensors`, from the library's own names and tensors of each model chunk; needs no Megatron."""
    if len(native) != layout.vpp:
        raise ConfigError(f"reshard: rank {rank} has {len(native)} model chunks, layout {layout} has {layout.vpp}")
    shards = local_parameters(inventory, layout, rank, library).shards
    experts = layout.local_experts(rank, inventory.model.n_routed_experts)
    found: dict[str, TrainTensor] = {}
    for number, tensors in enumerate(native):
        chunk = _Chunk(inventory, shards, _layers(inventory, layout, rank, number), experts, rank)
        for name, tensor in tensors.items():
            tensor = tensor.detach()
            for shard, view in chunk.views(name, tensor, storage_of(name, library)):
                hf = shard.parameter
                if hf.name in found:
                    raise ConfigError(f"reshard: rank {rank} has {hf.name} in {found[hf.name].parameter} and in {name}")
                found[hf.name] = TrainTensor(region_of(shard), hf.shape, view, number, name, tensor)
    missing = [name for name in shards if name not in found]
    if missing:
        raise ConfigError(
            f"reshard: rank {rank} should train {len(missing)} HF tensors, as {missing[0]}, that none of its "
            f"{sum(map(len, native))} parameters holds: layout {layout} or the model's config is not this model's"
        )
    return {name: found[name] for name in shards}


def are_views_of(tensors: Mapping[str, TrainTensor], native: Sequence[Native]) -> bool:
    """Whether `tensors` are views of the memory of `native` as it is now.

    Offload that resizes a storage (verl's, for DDP buffers) keeps views right; a parameter with other memory
    (`param.data = ...`) does not. Views keep the memory that they were made of alive.
    """
    return all(
        t.parameter in native[t.chunk] and view_id(t.native) == view_id(native[t.chunk][t.parameter])
        for t in tensors.values()
    )


class _Chunk(NamedTuple):
    """One model chunk as the layout describes it: its layers, the rank's experts and all the rank's shards."""

    inventory: Inventory
    shards: Mapping[str, Shard]
    layers: range
    experts: range
    rank: int

    def views(self, name: str, tensor: torch.Tensor, storage: Storage) -> Iterator[tuple[Shard, torch.Tensor]]:
        """Each shard that the parameter `name` holds, and its view."""
        stack = [self._held(name, storage, expert) for expert in self._experts(storage)]
        self._check(name, tensor, storage, stack)
        for shards, view in zip(stack, storage.joined(tensor, len(stack)), strict=True):
            yield from zip(shards, view.split([shard.shape[0] for shard in shards]), strict=True)

    def _experts(self, storage: Storage) -> Sequence[int | None]:
        if storage.stacked:
            return self.experts
        return [None if storage.expert is None else _at(self.experts, storage.expert)]

    def _held(self, name: str, storage: Storage, expert: int | None) -> list[Shard]:
        layer = None if storage.layer is None else _at(self.layers, storage.layer)
        held = self.inventory.at(layer, expert)
        names = [held[kind].name if kind in held else kind for kind in storage.kinds]
        absent = [each for each in names if each not in self.shards]
        if absent:
            raise ConfigError(
                f"reshard: {name!r} on rank {self.rank} is {absent[0]} of layer {layer}, expert {expert}, which its "
                "layout does not give it: the model was built with another config or layout"
            )
        return [self.shards[each] for each in names]

    def _check(self, name: str, tensor: torch.Tensor, storage: Storage, stack: list[list[Shard]]) -> None:
        shards = stack[0]
        joined = (sum(shard.shape[0] for shard in shards), *shards[0].shape[1:])
        expected = storage.shape(joined, len(stack)), shards[0].dtype
        found = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        if expected != found:
            regions = ", ".join(str(region_of(shard)) for shard in shards)
            if storage.stacked:
                regions += f" and {len(stack) - 1} more experts"
            raise ConfigError(
                f"reshard: {name!r} on rank {self.rank}: expected {expected[1]} {expected[0]}, which holds {regions}, "
                f"found {found[1]} {found[0]}: model and layout are not of one configuration"
            )


def _at(ids: range, number: int) -> int:
    return ids[number] if number < len(ids) else ids.stop + number - len(ids)  # not held: refused by its name


def _layers(inventory: Inventory, layout: ParallelLayout, rank: int, chunk: int) -> range:
    stage = layout.coordinates(rank).pp
    return layout.chunk_layers(inventory.model.num_hidden_layers)[chunk * layout.pp + stage]


def _unwrapped(chunks: Sequence[torch.nn.Module]) -> list[Any]:
    from verl.utils.megatron_utils import unwrap_model  # not above: views_of needs no Megatron

    return unwrap_model(list(chunks))


def _native(chunks: Sequence[torch.nn.Module]) -> list[Native]:
    from verl_patches.model.weights import named_weights

    return [dict(named_weights(chunk)) for chunk in _unwrapped(chunks)]


def _check_place(models: list[Any], inventory: Inventory, layout: ParallelLayout, rank: int) -> None:
    """ConfigError unless the live model has the layers, experts and TP parts that the layout gives `rank`."""
    from megatron.core import parallel_state

    at = layout.coordinates(rank)
    experts = list(layout.local_experts(rank, inventory.model.n_routed_experts))
    tp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    etp = parallel_state.get_expert_tensor_parallel_rank(), parallel_state.get_expert_tensor_parallel_world_size()
    facts = [("(TP rank, TP)", (at.tp, layout.tp), tp), ("(expert TP rank, expert TP)", (at.etp, layout.etp), etp)]
    for number, model in enumerate(models[: layout.vpp]):
        layers = [layer.layer_number - 1 for layer in model.decoder.layers]  # Megatron counts from 1
        facts.append((f"layers of model chunk {number}", list(_layers(inventory, layout, rank, number)), layers))
        facts += [
            (f"experts of layer {layer.layer_number - 1}", experts, list(layer.mlp.local_expert_indices))
            for layer in model.decoder.layers
            if hasattr(layer.mlp, "local_expert_indices")
        ]
    for what, expected, found in facts:
        if expected != found:
            raise ConfigError(
                f"reshard: {what} on rank {rank}: expected {expected} by layout {layout}, found {found} in the model"
            )
