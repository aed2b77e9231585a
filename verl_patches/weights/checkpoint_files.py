"""Write and read a training checkpoint: every rank writes its own part, and any layout can read the whole.

    global_step_N/manifest.json       format: weights/manifest.py; facts: step, run, start, line of pins, data, settings
                  rank_R.safetensors  pieces of weights and optimizer states of rank R (TrainState)
                  rank_R.json         states of random generators, step counts, learning-rate schedule of rank R
                  trainer.json        position in the data, sampler, the trainer's generators, adaptive KL coefficient
                  config.json         of the trained model, with its dtype
                  tokenizer.json, ... files of the model's folder other than weights
                  critic/             of a run with a critic: its own manifest, ranks' files and config.json

manifest.json is written once all other files are complete; before, the folder is not a checkpoint
(trainer/checkpoint.py). safetensors with a manifest is used instead of torch.distributed.checkpoint because it is read
without the job, its process groups or pickle; because names and regions are those of the HF model, so export is a
conversion and another layout needs only regions; and because each tensor has a digest. torch.distributed.checkpoint has
Megatron's names, and its index is a pickle.

Ranks write parts of HF tensors, each part on one rank:

    role         dtype        of                                  stored as
    weight       the model's  parameters and correction biases    regions
    main         fp32         main copies of 16-bit parameters    flat ranges of regions
    exp_avg      fp32         Adam's first moment                 flat ranges of regions
    exp_avg_sq   fp32         Adam's second moment                flat ranges of regions

fp32 parameters have no main copy: the optimizer's shards are views of them. Ranks that hold the same weights divide the
tensors among them by size. A distributed optimizer cuts states by flat ranges of the rank's own parameters; states of
parameters that tensor parallelism does not cut are written by TP rank 0.

A native parameter may join several HF tensors (gate and up) or stack experts in another order of memory, so its flat
range [a, b) is translated into one flat range of each HF region in it: elements of a region lie in the parameter in the
region's own order, row by row or column by column (`Walk`), so those inside [a, b) are consecutive there too. Another
layout therefore needs only regions. TrainState reads no data: tensors may be offloaded (torch refuses even views of
them), so places in a tensor are plain numbers.
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import Inventory, Parameter
from verl_patches.layout.parallel import ParallelLayout
from verl_patches.layout.sharding import local_parameters
from verl_patches.memory.host_backed import single_optimizers
from verl_patches.memory.measure import MOMENTS
from verl_patches.reshard.rank_errors import RankError
from verl_patches.reshard.train_tensors import NativeTensors, TrainTensor, train_tensors_from_native
from verl_patches.weights.manifest import (
    WEIGHT_ROLE,
    TensorEntry,
    file_problems,
    in_data_order,
    rank_state_file,
    rank_tensor_file,
    read_manifest,
)
from verl_patches.weights.reader import DTYPE_NAMES, WeightReader, tensor_bytes
from verl_patches.weights.writer import write_bytes, write_tensors

MAIN_ROLE = "main"


class CheckpointError(RankError):
    """Report that a checkpoint cannot be written, or differs from what was written.

    The message names file, rank, expected and found.
    """

    task = "checkpoint"


# ---- what a rank holds


class Place(NamedTuple):
    """Locate elements of a contiguous tensor by arguments of `as_strided`; `offset` counts from its first element."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def tensor_view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the view of `tensor`."""
        return tensor.as_strided(self.shape, self.strides, tensor.storage_offset() + self.offset)


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """Describe a stored tensor: its entry, and the places of live tensor `base` whose elements are stored in order."""

    entry: TensorEntry
    base: torch.Tensor
    places: tuple[Place, ...]


class Walk(NamedTuple):
    """Describe how the elements of one HF region follow each other in its native parameter.

    Element k of the region, row by row (column by column if `columns`), is at `offset + k // width * step + k % width`.
    """

    offset: int
    width: int
    step: int
    size: int
    columns: bool

    def elements_before(self, at: int) -> int:
        """Return how many elements of the region lie before element `at` of the parameter."""
        line, place = divmod(max(0, at - self.offset), self.step)
        return min(self.size, line * self.width + min(place, self.width))

    def places(self, start: int, stop: int, first: int) -> tuple[Place, ...]:
        """Return places of the region's elements [start, stop) in a tensor from the parameter's element `first` on."""
        if self.step == self.width:
            return (Place((stop - start,), (1,), self.offset + start - first),)
        begin = min(stop, -(-start // self.width) * self.width)  # begin and end of the whole lines
        end = max(begin, stop // self.width * self.width)
        found = []
        for low, high in ((start, begin), (begin, end), (end, stop)):
            if low < high:
                lines = max(1, (high - low) // self.width)
                at = self.offset + low // self.width * self.step + low % self.width - first
                found.append(Place((lines, (high - low) // lines), (self.step, 1), at))
        return tuple(found)


def region_walk(held: TrainTensor) -> Walk:
    """Return the walk of a held tensor through its native parameter."""
    view, offset = held.tensor, held.tensor.storage_offset()  # the parameter begins at 0, as _meta_tensors makes it
    if view.dim() == 1:
        return Walk(offset, view.numel(), view.numel(), view.numel(), False)
    rows, columns = view.shape
    if view.stride(1) == 1 or columns == 1:
        return Walk(offset, columns, view.stride(0) if rows > 1 else columns, view.numel(), False)
    return Walk(offset, rows, view.stride(1), view.numel(), True)


@dataclass(frozen=True, eq=False)
class OptimizerShard:
    """Hold the part of one native parameter that this rank's optimizer steps: elements [start, stop), by role.

    `key`: the key of the inner optimizer's state. `states`: 1-D tensors [stop - start] of the roles that exist.
    """

    parameter: torch.Tensor
    start: int
    stop: int
    key: torch.Tensor
    optimizer: Any
    states: Mapping[str, torch.Tensor]


def optimizer_shards(optimizer: Any) -> Iterator[OptimizerShard]:
    """Yield the shards of Megatron's distributed optimizer or of a chain of them; others raise ConfigError."""
    for one in single_optimizers(optimizer):
        if not hasattr(one, "model_param_gbuf_map"):
            raise ConfigError(
                f"checkpoint: expected Megatron's DistributedOptimizer, found {type(one).__name__}; "
                "set actor_rollout_ref.actor.megatron.use_distributed_optimizer=true"
            )
        pairs = (
            (one.model_float16_groups, one.shard_fp32_from_float16_groups, True),
            (one.model_fp32_groups, one.shard_fp32_groups, False),
        )
        for models, mains, has_main in pairs:
            for groups in zip(models, mains, strict=True):
                for model, main in zip(*groups, strict=True):
                    held = one._get_model_param_range_map(model)["param"]
                    states = _optimizer_states(one, main, has_main)
                    yield OptimizerShard(model, held.start, held.end, main, one, states)


def _optimizer_states(one: Any, main: torch.Tensor, has_main: bool) -> dict[str, torch.Tensor]:
    swapped = getattr(type(one), "param_to_cpu_states_map", {}).get(main)  # on the host, by MindSpeed's swap
    if swapped is not None:
        return {MAIN_ROLE: swapped["param"], **{role: swapped[role] for role in MOMENTS}}
    state = one.optimizer.state.get(main, {})
    return {**({MAIN_ROLE: main} if has_main else {}), **{role: state[role] for role in MOMENTS if role in state}}


class TrainState:
    """Hold the training state of `rank` in `layout`: parameters of each model chunk, and Megatron's optimizer.

    `native`: the parameters that the optimizer has, by name (`native_tensors` of reshard/train_tensors.py). `inventory`
    has training's dtypes; `library`: a key of layout.sharding.LIBRARIES. Raises ConfigError where layout and model
    disagree.
    """

    def __init__(
        self,
        native: Sequence[NativeTensors],
        optimizer: Any,
        inventory: Inventory,
        layout: ParallelLayout,
        rank: int,
        library: str,
    ):
        self.inventory, self.layout, self.rank, self.library = inventory, layout, rank, library
        self.optimizer, self._native = optimizer, native
        self.tensors = train_tensors_from_native(
            [_meta_tensors(each) for each in native], inventory, layout, rank, library
        )
        shards = local_parameters(inventory, layout, rank, library).shards
        self._uncut_names = {name for name, shard in shards.items() if shard.axis is None}
        self._by_parameter: dict[int, list[TrainTensor]] = {}
        for held in self.tensors.values():
            self._by_parameter.setdefault(id(native[held.chunk][held.parameter]), []).append(held)

    def pieces_to_write(self) -> list[StoredTensor]:
        """Return the pieces that this rank writes; all ranks together write every byte once."""
        held = [tensor.region.name for tensor in self.tensors.values()]
        written = written_weights(held, self._uncut_names, self.inventory, self.layout, self.rank)
        found = [self._weight_piece(self.tensors[name]) for name in written]
        skipped = set() if self.layout.coordinates(self.rank).tp == 0 else self._uncut_names
        for shard in optimizer_shards(self.optimizer):
            found += [piece for piece in self.shard_pieces(shard) if piece.entry.region.name not in skipped]
        return found

    def weight_pieces(self) -> list[StoredTensor]:
        """Return all weights that this rank holds."""
        return [self._weight_piece(held) for held in self.tensors.values()]

    def shard_pieces(self, shard: OptimizerShard) -> Iterator[StoredTensor]:
        """Yield the pieces of one shard's states."""
        for held in self._by_parameter[id(shard.parameter)]:
            walk = region_walk(held)
            start, stop = walk.elements_before(shard.start), walk.elements_before(shard.stop)
            if start >= stop:
                continue
            for role, tensor in shard.states.items():
                entry = TensorEntry(
                    f"{role}/{held.region}",
                    DTYPE_NAMES[tensor.dtype],
                    (stop - start,),
                    held.region,
                    held.shape,
                    role,
                    flat=start,
                    columns=walk.columns,
                )
                yield StoredTensor(entry, tensor.detach(), walk.places(start, stop, shard.start))

    def _weight_piece(self, held: TrainTensor) -> StoredTensor:
        view, base = held.tensor, self._native[held.chunk][held.parameter].detach()
        key, shape = f"{WEIGHT_ROLE}/{held.region}", tuple(view.shape)
        entry = TensorEntry(key, DTYPE_NAMES[view.dtype], shape, held.region, held.shape)
        return StoredTensor(entry, base, (Place(shape, view.stride(), view.storage_offset()),))


def _meta_tensors(native: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in native.items()}


def written_weights(
    names: Sequence[str], uncut: set[str], inventory: Inventory, layout: ParallelLayout, rank: int
) -> list[str]:
    """Return those of the tensors `names` of `rank` that it writes; all ranks that hold a tensor agree on its writer.

    `uncut`: names of tensors that tensor parallelism does not cut.
    """
    at, shared = layout.coordinates(rank), dict[tuple[str, ...], list[Parameter]]()
    for parameter in map(inventory.by_name.__getitem__, names):
        shared.setdefault(_cut_axes(parameter, uncut), []).append(parameter)
    found = []
    for axes, parameters in shared.items():
        place = attrgetter(*axes)
        replicas = [r for r in range(layout.world_size) if place(layout.coordinates(r)) == place(at)]
        ordered = sorted(parameters, key=lambda p: (-p.count, p.name))
        found += [each.name for each in ordered[replicas.index(rank) :: len(replicas)]]
    return found


def _cut_axes(parameter: Parameter, uncut: set[str]) -> tuple[str, ...]:
    """Return the axes of a layout along which ranks hold different parts of `parameter`."""
    if parameter.expert is not None:
        return "pp", "etp", "ep"
    return ("pp",) if parameter.name in uncut else ("pp", "tp")


# ---- files


def write_rank(
    folder: str | Path,
    rank: int,
    pieces: Sequence[StoredTensor],
    contents: Callable[[StoredTensor], Iterable[torch.Tensor]],
    state: Mapping[str, Any],
) -> int:
    """Write both files of `rank` and return their bytes.

    `contents` returns the tensors at a piece's places, on the host. At most one piece is copied at a time.
    """
    by_key = {piece.entry.key: piece for piece in pieces}
    entries = in_data_order([piece.entry for piece in pieces])

    def buffers(entry: TensorEntry) -> Iterator[memoryview]:
        return map(tensor_bytes, contents(by_key[entry.key]))

    tensors = write_tensors(folder, rank_tensor_file(rank), entries, buffers)
    return tensors.size_bytes + write_bytes(folder, rank_state_file(rank), json.dumps(state).encode()).size_bytes


def share_problems(folder: str | Path, rank: int, world_size: int) -> list[str]:
    """Compare this rank's share of files without tensors (`load_state` reads others) to the manifest; return faults."""
    files = [file for file in read_manifest(folder).files if not file.tensors]
    return [problem for entry in files[rank::world_size] for problem in file_problems(folder, entry)]


def read_rank_state(folder: str | Path, rank: int) -> dict[str, Any]:
    """Return the contents of the file `rank_state_file` of a rank in the layout that wrote the checkpoint."""
    return json.loads((Path(folder) / rank_state_file(rank)).read_text())


@torch.no_grad()
def load_state(state: TrainState, reader: WeightReader) -> None:
    """Fill this rank's weights, main parameters and moments, which must be on the device; make moments if needed."""
    for piece in state.weight_pieces():
        reader.copy(piece.entry.region, piece.places[0].tensor_view(piece.base))
    for shard in optimizer_shards(state.optimizer):
        if any(role == MOMENTS[0] for role, _ in reader.source.states):
            shard = _with_moments(shard)
        for piece in state.shard_pieces(shard):
            elements, at = reader.read_state(piece.entry), 0
            for place in piece.places:
                view = place.tensor_view(piece.base)
                view.copy_(elements[at : at + view.numel()].view(view.shape))
                at += view.numel()


def _with_moments(shard: OptimizerShard) -> OptimizerShard:
    """Return `shard` with moments, which Adam makes in its first step."""
    if all(role in shard.states for role in MOMENTS):
        return shard
    made = {role: torch.zeros_like(shard.key, dtype=torch.float32) for role in MOMENTS}
    shard.optimizer.optimizer.state[shard.key].update(made)
    return replace(shard, states={**shard.states, **made})


# ---- generators of random numbers of a process, as JSON


def generator_states() -> dict[str, Any]:
    """Return the states of the random generators of Python, numpy and torch."""
    legacy: Any = np.random.get_state()  # Any: numpy's types are those of legacy=False
    name, keys, *rest = legacy
    return {
        "python": random.getstate(),
        "numpy": [name, keys.tolist(), *rest],
        "torch": encode_generator(torch.get_rng_state()),
    }


def set_generator_states(states: Mapping[str, Any]) -> None:
    """Set the random generators to `states`, as `generator_states` returns them."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(decode_generator(states["torch"]))


def encode_generator(state: torch.Tensor) -> str:
    """Return a generator's state as text."""
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def decode_generator(text: str) -> torch.Tensor:
    """Return the generator's state of a text made by `encode_generator`."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


# ---- step counts


def step_counts(optimizer: Any) -> dict[str, Any]:
    """Return Adam's step count: `state` in its states (torch's Adam), `group` in its groups (apex, MindSpeed).

    The one that Adam does not have is None.
    """
    counts: dict[str, Any] = {"state": None, "group": None}
    for shard in optimizer_shards(optimizer):
        inner = shard.optimizer.optimizer
        step = inner.state.get(shard.key, {}).get("step")
        if step is not None:
            counts["state"] = {"count": float(step), "dtype": str(step.dtype), "on_cpu": step.device.type == "cpu"}
        steps = [group["step"] for group in inner.param_groups if "step" in group]
        counts["group"] = int(steps[0]) if steps else counts["group"]
    return counts


def set_step_counts(optimizer: Any, counts: Mapping[str, Any]) -> None:
    """Set the step counts that `step_counts` returned."""
    for shard in optimizer_shards(optimizer):
        inner, state = shard.optimizer.optimizer, counts["state"]
        if state is not None:
            device = "cpu" if state["on_cpu"] else shard.key.device
            dtype = getattr(torch, state["dtype"].removeprefix("torch."))
            inner.state[shard.key]["step"] = torch.tensor(state["count"], dtype=dtype, device=device)
        if counts["group"] is not None:
            for group in inner.param_groups:
                group["step"] = counts["group"]
