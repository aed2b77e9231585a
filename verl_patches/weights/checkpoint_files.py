"""One checkpoint of a training run on disk: every rank writes what it alone holds, any layout reads it.

    global_step_N/manifest.json       format of weights/manifest.py; facts: step, run, start, line, data, recipe
                  rank_R.safetensors  pieces of weights and optimizer states of rank R (train_state.py)
                  rank_R.json         generators of random numbers, step counts, learning-rate schedule of rank R
                  trainer.json        position in the data, sampler, the trainer's generators, an adaptive KL
                  trainer.safetensors tensors of these (trainer/checkpoint.py)
                  config.json         of the trained model, with its dtype
                  tokenizer.json, ... files of the model's folder other than weights
                  critic/             of a run with a critic: its own manifest, ranks' files and config.json

manifest.json is written once all other files are complete; before, the folder is no checkpoint (trainer/checkpoint.py).
safetensors with a manifest rather than torch.distributed.checkpoint: it is read without the job, its process groups or
pickle; names and regions are those of the HF model, so export is a conversion and another layout needs only regions;
each file has a sha256. torch.distributed.checkpoint names what Megatron names, and its index is a pickle.
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl_patches.errors import RecipeError
from verl_patches.memory.measure import MOMENTS
from verl_patches.weights.manifest import file_problems, in_data_order, read_manifest, state_of_rank, tensors_of_rank
from verl_patches.weights.reader import WeightReader, tensor_bytes
from verl_patches.weights.train_state import OptimizerShard, StoredTensor, TrainState, optimizer_shards
from verl_patches.weights.writer import FileWriter


class CheckpointError(RecipeError):
    """A checkpoint cannot be written, or is not what was written: the message names file, rank, expected and found."""

    what = "checkpoint"


def write_rank(
    folder: str | Path,
    rank: int,
    pieces: Sequence[StoredTensor],
    contents: Callable[[StoredTensor], Iterable[torch.Tensor]],
    state: Mapping[str, Any],
) -> int:
    """Write both files of `rank` into a folder that `begin` made; returns their bytes.

    `contents`: a piece's places, on the host. At most the largest piece is copied at a time.
    """
    by_key = {piece.entry.key: piece for piece in pieces}
    entries = in_data_order([piece.entry for piece in pieces])
    with FileWriter(folder, tensors_of_rank(rank), entries) as file:
        for entry in entries:
            for tensor in contents(by_key[entry.key]):
                file.write(tensor_bytes(tensor))
        size = file.finish().size_bytes
    with FileWriter(folder, state_of_rank(rank)) as file:
        file.write(json.dumps(state).encode())
        return size + file.finish().size_bytes


def problems_of_share(folder: str | Path, rank: int, world_size: int) -> list[str]:
    """The faults of this rank's share of the files without tensors, whose bytes `load_state` does not compare."""
    files = [file for file in read_manifest(folder).files if not file.tensors]
    return [str(problem) for entry in files[rank::world_size] for problem in file_problems(folder, entry)]


def read_state(folder: str | Path, rank: int) -> dict[str, Any]:
    """What `state_of_rank` holds of a rank of the layout that wrote."""
    return json.loads((Path(folder) / state_of_rank(rank)).read_text())


@torch.no_grad()
def load_state(state: TrainState, reader: WeightReader) -> None:
    """Fill this rank's weights, main parameters and moments, which must be on the device; makes moments if needed."""
    for piece in state.weights():
        reader.copy(piece.entry.region, piece.places[0].of(piece.base))
    for shard in optimizer_shards(state.optimizer):
        if reader.has(MOMENTS[0]):
            shard = _with_moments(shard)
        for piece in state.of_shard(shard):
            elements, at = reader.state(piece.entry), 0
            for place in piece.places:
                view = place.of(piece.base)
                view.copy_(elements[at : at + view.numel()].view(view.shape))
                at += view.numel()


def _with_moments(shard: OptimizerShard) -> OptimizerShard:
    """`shard` with moments, which Adam makes in its first step."""
    if all(role in shard.states for role in MOMENTS):
        return shard
    made = {role: torch.zeros_like(shard.key, dtype=torch.float32) for role in MOMENTS}
    shard.optimizer.optimizer.state[shard.key].update(made)
    return replace(shard, states={**shard.states, **made})


# ---- generators of random numbers of a process, as JSON


def generators() -> dict[str, Any]:
    """The states of Python's, numpy's and torch's."""
    name, keys, *rest = np.random.get_state()
    return {"python": random.getstate(), "numpy": [name, keys.tolist(), *rest], "torch": text_of(torch.get_rng_state())}


def set_generators(states: Mapping[str, Any]) -> None:
    """Set the random generators to `states`, as `generators` returns them."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state_of(states["torch"]))


def text_of(state: torch.Tensor) -> str:
    """A generator's state as text."""
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def state_of(text: str) -> torch.Tensor:
    """What `text_of` made a text of."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


# ---- step counts


def step_counts(optimizer: Any) -> dict[str, Any]:
    """{state: count in Adam's states (torch), group: count in its groups (apex, MindSpeed)}; None for none."""
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
    """Set what `step_counts` found."""
    for shard in optimizer_shards(optimizer):
        inner, state = shard.optimizer.optimizer, counts["state"]
        if state is not None:
            device = "cpu" if state["on_cpu"] else shard.key.device
            dtype = getattr(torch, state["dtype"].removeprefix("torch."))
            inner.state[shard.key]["step"] = torch.tensor(state["count"], dtype=dtype, device=device)
        if counts["group"] is not None:
            for group in inner.param_groups:
                group["step"] = counts["group"]
