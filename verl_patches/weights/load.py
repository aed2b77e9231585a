"""Load weights into Megatron model chunks from a folder of any kind (source.py), or copy them from another model.

verl 0.4.0 loads HF weights into Megatron for Llama and Qwen2 only (verl/models/weight_loader_registry.py), by building
the whole HF model on every rank. Here each rank reads only the regions that it trains, into the views of its parameters
that a weight sync reads too (reshard/train_tensors.py), in the order in which they lie in the files.

Ranks read at different speeds (disks, caches, the embedding's stage). If one is much later than the others, their first
collective after loading ends in a timeout that does not name it. So each rank notes in torch.distributed's store that
it has loaded, and waits there for the others, as long as any of them reads bytes (`wait_for_ranks`). Its heartbeat
shows its progress.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from verl_patches.errors import ConfigError, RecipeError
from verl_patches.heartbeat.heartbeat import current_heartbeat
from verl_patches.layout.inventory import SCORE, SCORE_BIAS, Inventory, build_inventory
from verl_patches.layout.parallel import ParallelLayout
from verl_patches.layout.phases import LOADED
from verl_patches.layout.sharding import train_library
from verl_patches.reshard.parameters import keep_bias_fp32, named_weights
from verl_patches.reshard.region import Region
from verl_patches.reshard.train_tensors import model_layout, train_tensors, unwrap_chunks
from verl_patches.weights.reader import WeightReader
from verl_patches.weights.source import open_source

POLL_S = 0.2
TELL_S = 1.0  # a rank tells those that wait for it at most this often that it reads
WAIT_S = 3600.0  # the default; recipe.timeouts.load_s sets it in a run


def load_weights(
    folder: str | Path,
    chunks: Sequence[torch.nn.Module],
    line: str = "pypi",
    key: str = "verl_patches/load",
    wait_s: float = WAIT_S,
    layout: ParallelLayout | None = None,
) -> int:
    """Fill parameters and correction biases of `chunks` (GPTModel, wrapped or not) from `folder`; return bytes read.

    `line`: "a3" for MindSpeed-LLM's parameters, else Megatron's. `layout`: that of `chunks`, with layers_per_stage;
    None takes it from `model_layout`, a collective whose timeout names no rank. Values are converted to each
    parameter's dtype; correction biases stay fp32 although a bf16 wrapper casts them. A value model takes its head from
    a folder that has one, otherwise it is drawn (`draw_head`). Needs Megatron's process groups. Every rank of
    torch.distributed must call it, with the same `key`, which no other load has used: it returns once all have loaded,
    and raises RecipeError as `wait_for_ranks` does after `wait_s`. Raises ConfigError as `open_source` does, and for a
    parameter that is not of config.json's model.
    """
    for chunk in unwrap_chunks(chunks):
        keep_bias_fp32(chunk)
    layout = layout or model_layout(chunks)
    source = open_source(folder)
    regions = _regions(chunks, source.inventory, layout, line)
    with WeightReader(source, read_counter(key)) as reader, torch.no_grad():
        for region, view in regions:
            if region.name not in source.tensors:
                draw_head(region.name, view, folder)
        regions = [each for each in regions if each[0].name in source.tensors]
        for region, view in sorted(regions, key=lambda item: reader.position(item[0])):
            reader.copy(region, view)
    wait_for_ranks(str(folder), key, wait_s)
    return reader.read_bytes


def read_counter(key: str) -> Callable[[int], None]:
    """Return a function that counts bytes read for the heartbeat, and for the ranks that wait for the load `key`."""
    told = -math.inf

    def count(size: int) -> None:
        nonlocal told
        current_heartbeat().count_bytes(size)
        if dist.is_initialized() and time.monotonic() - told >= TELL_S:
            told = time.monotonic()
            dist.distributed_c10d._get_default_store().add(f"{key}/reads", 1)

    return count


def wait_for_ranks(what: str, key: str, limit_s: float) -> None:
    """Wait until every rank of torch.distributed has called this with `key`, which no other load has used.

    Raise RecipeError that names the late ranks if none has read a byte for `limit_s`. Only operations of the store that
    return at once are used: its own wait blocks every other thread of the process that uses the store, such as the
    watchdog of a process group.
    """
    if not dist.is_initialized():
        return
    store, before, grown_at = dist.distributed_c10d._get_default_store(), -1, 0.0
    keys = [f"{key}/rank/{rank}" for rank in range(dist.get_world_size())]
    store.set(keys[dist.get_rank()], "")
    store.add(f"{key}/arrived", 1)
    current_heartbeat().begin_phase(LOADED)
    while store.add(f"{key}/arrived", 0) < len(keys):  # one key, however many ranks wait
        if (reads := store.add(f"{key}/reads", 0)) != before:
            before, grown_at = reads, time.monotonic()
        elif time.monotonic() - grown_at > limit_s:
            late = [str(rank) for rank, each in enumerate(keys) if not store.check([each])]
            raise RecipeError(
                f"{what}: rank {dist.get_rank()} has loaded it, and for {limit_s:.0f} s none of rank {', '.join(late)} "
                "has read a byte; check their nodes' disks, or raise recipe.timeouts.load_s"
            )
        time.sleep(POLL_S)
    current_heartbeat().begin_phase("")


def weights_difference(chunks: Sequence[torch.nn.Module], others: Sequence[torch.nn.Module]) -> str:
    """Return why weights of `others` cannot be copied to `chunks`, or "" if they can."""
    ours, theirs = (
        {name: f"{tensor.dtype} {tuple(tensor.shape)}" for name, tensor in _named_tensors(model)}
        for model in (chunks, others)
    )
    for name in ours | theirs:
        if ours.get(name) != theirs.get(name):
            return f"{name} is {ours.get(name, 'absent')}, and {theirs.get(name, 'absent')} in the other model"
    return ""


@torch.no_grad()
def copy_weights(chunks: Sequence[torch.nn.Module], others: Sequence[torch.nn.Module]) -> None:
    """Copy to `chunks` the weights of `others`, on any device; `weights_difference` must be empty for the two."""
    for (_, target), (_, value) in zip(_named_tensors(chunks), _named_tensors(others), strict=True):
        target.copy_(value)


def _named_tensors(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name with the chunk's number, tensor) of all that is loaded; correction biases are in fp32."""
    for number, chunk in enumerate(unwrap_chunks(chunks)):
        keep_bias_fp32(chunk)
        for name, tensor in named_weights(chunk):
            yield f"{number}:{name}", tensor


def _regions(
    chunks: Sequence[torch.nn.Module], inventory: Inventory, layout: ParallelLayout, line: str
) -> list[tuple[Region, torch.Tensor]]:
    """Return each region that `chunks` hold, with its view in the live parameter.

    A model of fewer layers than the folder's takes the folder's first layers.
    """
    assert layout.layers_per_stage is not None  # load_weights requires it
    layers, folder_layers = sum(layout.layers_per_stage), inventory.model.num_hidden_layers
    if layers > folder_layers:
        raise ConfigError(
            f"weights: expected a model of at most {folder_layers} layers, as in the folder, found {layers}; lower "
            "recipe.num_hidden_layers"
        )
    dtype = str(next(chunks[0].parameters()).dtype).removeprefix("torch.")
    value = any("output_layer.score" in name for chunk in chunks for name, _ in chunk.named_parameters())
    model_inventory = build_inventory(replace(inventory.model, torch_dtype=dtype, num_hidden_layers=layers), value)
    held = train_tensors(chunks, model_inventory, layout, dist.get_rank(), train_library(line))
    return [(each.region, each.tensor) for each in held.values()]


def draw_head(name: str, target: torch.Tensor, folder: str | Path) -> None:
    """Fill tensor `name` of a value head, which `folder` lacks: weight N(0, 1 / (H + 1)), as TRL draws it, and bias 0.

    The values are equal on all ranks and in all runs. Raises ConfigError for another tensor.
    """
    if name not in (SCORE, SCORE_BIAS):
        raise ConfigError(
            f"weights: {folder}: expected a causal LM with {name}, found a value model; give another folder"
        )
    target.zero_()
    if name == SCORE:
        drawn = torch.randn(target.shape, generator=torch.Generator().manual_seed(0))
        target.copy_(drawn / math.sqrt(target.shape[-1] + 1))
