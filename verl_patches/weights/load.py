"""Fill Megatron model chunks with weights: from a folder of any kind (source.py), or from another model of the process.

verl 0.4.0 loads HF weights into Megatron for Llama and Qwen2 only (verl/models/weight_loader_registry.py), by building
the whole HF model on every rank. Here each parameter says which regions of which HF tensors it holds
(model/weights.py, model/mindspeed/weights.py), and only these are read, into the parameter itself, in the order in
which they lie in the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from verl_patches.layout.inventory import Inventory
from verl_patches.model import weights as megatron
from verl_patches.model.weights import Part, keep_bias_fp32, named_weights
from verl_patches.reshard.region import Region
from verl_patches.weights.load_progress import LoadProgress
from verl_patches.weights.regions import RegionReader
from verl_patches.weights.source import open_source

# (GPTModel chunk, parameter's name, its tensor, inventory) -> what it holds
PartsOf = Callable[[torch.nn.Module, str, torch.Tensor, Inventory], list[Part]]
WAIT_S = 3600.0  # without recipe.timeouts.load_s


class Loaded(NamedTuple):
    """What a rank loaded: parameters and biases that were set, and bytes read."""

    tensors: int
    read_bytes: int


def load_weights(
    folder: str | Path,
    chunks: Sequence[torch.nn.Module],
    parts_of: PartsOf = megatron.parts_of,
    key: str = "verl_patches/load",
    wait_s: float = WAIT_S,
) -> Loaded:
    """Fill the parameters and correction biases of `chunks` (GPTModel, wrapped or not) from `folder`.

    Values are converted to each parameter's dtype; correction biases stay fp32, whatever a bf16 wrapper made of them.
    Needs Megatron's process groups. Every rank of torch.distributed must call it, with the same `key`, which no other
    load has used: it returns once all have loaded, and raises RecipeError after `wait_s` (load_progress.py). Raises
    ConfigError as `open_source` does, and for a parameter that is not of config.json's model.
    """
    progress = None
    try:
        source = open_source(folder)
        found = _regions(chunks, source.inventory, parts_of)
        with RegionReader(source) as reader, torch.no_grad():
            found.sort(key=lambda item: reader.position(item[0]))
            progress = _progress(str(folder), sum(reader.read_bytes(region) for region, _ in found), key)
            reader.progress = progress.add
            for region, view in found:
                reader.copy(region, view)
    except Exception as error:
        (progress or _progress(str(folder), 0, key)).fail(error)
        raise
    progress.wait(wait_s)
    return Loaded(sum(1 for _ in _weights_of(chunks)), progress.read_bytes)


def difference(chunks: Sequence[torch.nn.Module], others: Sequence[torch.nn.Module]) -> str:
    """Why the weights of `others` cannot be copied to `chunks`, as text; empty where they can."""
    ours, theirs = (_facts(model) for model in (chunks, others))
    for name in ours | theirs:
        if ours.get(name) != theirs.get(name):
            return f"{name} is {ours.get(name, 'not there')}, {theirs.get(name, 'not there')} in the other model"
    return ""


@torch.no_grad()
def copy_weights(chunks: Sequence[torch.nn.Module], others: Sequence[torch.nn.Module]) -> Loaded:
    """Fill `chunks` with the weights of `others`, of the same parameters (`difference`), which are on any device."""
    count = 0
    for (_, target), (_, value) in zip(_weights_of(chunks), _weights_of(others), strict=True):
        target.copy_(value)
        count += 1
    return Loaded(count, 0)


def _facts(chunks: Sequence[torch.nn.Module]) -> dict[str, str]:
    return {name: f"{tensor.dtype} {tuple(tensor.shape)}" for name, tensor in _weights_of(chunks)}


def _weights_of(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name with the chunk's number, tensor) of everything that is loaded; correction biases in fp32."""
    for number, chunk in enumerate(_unwrapped(chunks)):
        keep_bias_fp32(chunk)
        yield from ((f"{number}:{name}", tensor) for name, tensor in named_weights(chunk))


def _regions(
    chunks: Sequence[torch.nn.Module], inventory: Inventory, parts_of: PartsOf
) -> list[tuple[Region, torch.Tensor]]:
    """Each region that `chunks` hold, with the view of the live parameter that it is in."""
    found = []
    for chunk in _unwrapped(chunks):
        keep_bias_fp32(chunk)
        for name, tensor in named_weights(chunk):
            for part in parts_of(chunk, name, tensor, inventory):
                found.append((Region(part.parameter.name, part.axis, part.start, part.stop), part.view))
    return found


def _unwrapped(chunks: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    from verl.utils.megatron_utils import unwrap_model  # not above: the row is applied while that module is half built

    return unwrap_model(list(chunks))


def _progress(what: str, total_bytes: int, key: str) -> LoadProgress:
    if not dist.is_initialized():
        return LoadProgress(what, total_bytes)
    store = dist.distributed_c10d._get_default_store()
    return LoadProgress(what, total_bytes, store, key, dist.get_rank(), dist.get_world_size())
