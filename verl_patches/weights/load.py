"""Fill Megatron model chunks with weights: from a folder of any kind (source.py), or from another model of the process.

verl 0.4.0 loads HF weights into Megatron for Llama and Qwen2 only (verl/models/weight_loader_registry.py), by building
the whole HF model on every rank. Here each rank reads only the regions that it trains, into the views of its parameters
that a weight sync reads too (reshard/train_tensors.py), in the order in which they lie in the files.

Ranks read at different speeds (disks, caches, the embedding's stage), and the first collective after loading would end
in a connect or collective timeout that names no rank. So each rank publishes its progress in torch.distributed's store
and waits there, with a limit of its own, before the next collective. Keys of one load, below `key`:

    total, read, begun, arrived    counters over all ranks: bytes to read, bytes read, ranks
    rank/N                         "BYTES_READ BYTES_TO_READ HOST" of rank N
    failed                         the first error of a rank, for all others

Only operations that return at once are used (add, set, check; get of a key that is there): a store's own wait blocks
every other thread of the process that uses the store, such as the watchdog of a process group.
"""

from __future__ import annotations

import logging
import math
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from verl_patches.errors import ConfigError, RecipeError
from verl_patches.layout.inventory import SCORE, SCORE_BIAS, Inventory, build_inventory
from verl_patches.layout.parallel import ParallelLayout
from verl_patches.model.weights import keep_bias_fp32, named_weights
from verl_patches.reshard.region import Region
from verl_patches.reshard.train_tensors import layout_of_model, library_of, train_tensors, unwrapped
from verl_patches.weights.reader import WeightReader
from verl_patches.weights.source import open_source

log = logging.getLogger(__name__)
LOG_S, PUBLISH_S, POLL_S = 10.0, 2.0, 1.0
_GIB = 1 << 30
_SHOWN = 8  # ranks that a message names
_HEAD = "output_layer."  # in the names of the head's parameters


class LoadProgress:
    """Progress of one rank with `total_bytes` to read from `what`; it begins now.

    store: torch.distributed's; None outside of it, where there is one rank. key: of this load, equal on every rank.
    """

    def __init__(
        self, what: str, total_bytes: int, store: Any = None, key: str = "load", rank: int = 0, ranks: int = 1
    ):
        self.what, self.total_bytes, self.rank, self.ranks = what, total_bytes, rank, ranks
        self.read_bytes, self._published = 0, 0
        self._store, self._key = store or dist.HashStore(), key
        self._begun = self._logged = self._published_at = time.monotonic()
        self._store.add(f"{key}/total", total_bytes)
        self._store.add(f"{key}/begun", 1)
        self._publish()

    def add(self, size_bytes: int) -> None:
        """Bytes that were read since the last call."""
        self.read_bytes += size_bytes
        now = time.monotonic()
        if now - self._published_at >= PUBLISH_S:
            self._published_at = now
            self._publish()
            self._log(now)

    def fail(self, error: BaseException) -> None:
        """This rank cannot load: the others end their wait with its error."""
        self._store.set(f"{self._key}/failed", f"rank {self.rank}: {type(error).__name__}: {error}")

    def wait(self, limit_s: float) -> None:
        """Return once every rank is here; logs the total on rank 0.

        RecipeError after `limit_s`, with the ranks that have not arrived and how far each is, and at once where a rank
        has failed.
        """
        self._publish()
        self._store.add(f"{self._key}/arrived", 1)
        started, pause = time.monotonic(), 0.005
        while self._count("arrived") < self.ranks:
            if self._store.check([f"{self._key}/failed"]):
                raise RecipeError(f"weights: {self.what}: {self._get('failed')}")
            now = time.monotonic()
            if now - started > limit_s:
                raise RecipeError(self._late_ranks(limit_s))
            self._log(now)
            time.sleep(pause)
            pause = min(2 * pause, POLL_S)
        self._log_total(time.monotonic() - self._begun, time.monotonic() - started)

    def _publish(self) -> None:
        self._store.add(f"{self._key}/read", self.read_bytes - self._published)
        self._published = self.read_bytes
        text = f"{self.read_bytes} {self.total_bytes} {socket.gethostname()}"
        self._store.set(f"{self._key}/rank/{self.rank}", text)

    def _count(self, name: str) -> int:
        return self._store.add(f"{self._key}/{name}", 0)

    def _get(self, name: str) -> str:
        return self._store.get(f"{self._key}/{name}").decode()

    def _log(self, now: float) -> None:
        if self.rank or now - self._logged < LOG_S:
            return
        self._logged = now
        read, total, begun = self._count("read"), self._count("total"), self._count("begun")
        rate = read / (now - self._begun)
        left = f"about {(total - read) / rate:.0f} s left" if rate else "nothing read yet"
        log.info(
            "weights: %.2f of %.2f GiB read by %d of %d ranks, %.2f GiB/s, %s; %d ranks are done",
            read / _GIB,
            total / _GIB,
            begun,
            self.ranks,
            rate / _GIB,
            left,
            self._count("arrived"),
        )

    def _log_total(self, seconds: float, waited_s: float) -> None:
        if self.rank == 0:
            read = self._count("read")
            log.info(
                "weights: %.3f GiB (%d bytes) read by %d ranks from %s in %.1f s, %.2f GiB/s; rank 0 waited %.1f s",
                read / _GIB,
                read,
                self.ranks,
                self.what,
                seconds,
                read / _GIB / max(seconds, 1e-9),
                waited_s,
            )

    def _late_ranks(self, limit_s: float) -> str:
        late = []
        for rank in range(self.ranks):
            if not self._store.check([f"{self._key}/rank/{rank}"]):
                late.append(f"rank {rank} has not begun to read")
                continue
            read, total, host = self._get(f"rank/{rank}").split(" ", 2)
            if read != total:
                share = f"{int(read) / _GIB:.2f} of {int(total) / _GIB:.2f} GiB ({read} of {total} bytes)"
                late.append(f"rank {rank} on {host} has read {share}")
        shown = "; ".join([*late[:_SHOWN], *([f"and {len(late) - _SHOWN} more"] if len(late) > _SHOWN else [])])
        return (
            f"weights: rank {self.rank} has loaded {self.what} and waited {limit_s:.0f} s; "
            f"{self._count('arrived')} of {self.ranks} ranks have arrived. {shown or 'All have read everything'}. "
            "Look at these nodes' disks and logs, or raise recipe.timeouts.load_s"
        )


WAIT_S = 3600.0  # without recipe.timeouts.load_s


class Loaded(NamedTuple):
    """What a rank loaded: parameters and biases that were set, and bytes read."""

    tensors: int
    read_bytes: int


def load_weights(
    folder: str | Path,
    chunks: Sequence[torch.nn.Module],
    line: str = "pypi",
    key: str = "verl_patches/load",
    wait_s: float = WAIT_S,
    layout: ParallelLayout | None = None,
    head: bool = False,
) -> Loaded:
    """Fill the parameters and correction biases of `chunks` (GPTModel, wrapped or not) from `folder`.

    `line`: "a3" for MindSpeed-LLM's parameters, else Megatron's. `layout`: of `chunks`, with layers_per_stage; None:
    the ranks of a pipeline ask each other (`layout_of_model`), a collective whose time-out names no rank. Values are
    converted to each parameter's dtype; correction biases stay fp32, whatever a bf16 wrapper made of them. A value
    model takes its head from a folder that has one, else it is drawn (`draw_head`). `head`: only the head is loaded.
    Needs Megatron's process groups. Every rank of torch.distributed must call it, with the same `key`, which no other
    load has used: it returns once all have loaded, and raises RecipeError after `wait_s` (`LoadProgress`). Raises
    ConfigError as `open_source` does, and for a parameter that is not of config.json's model.
    """
    progress = None
    try:
        for chunk in unwrapped(chunks):
            keep_bias_fp32(chunk)
        layout = layout or layout_of_model(chunks)  # collective: before what can fail on one rank alone
        source = open_source(folder)
        regions = _regions(chunks, source.inventory, layout, line, head)
        with WeightReader(source) as reader, torch.no_grad():
            for region, view in regions:
                if region.name not in source.tensors:
                    draw_head(region.name, view, folder)
            regions = [each for each in regions if each[0].name in source.tensors]
            regions.sort(key=lambda item: reader.position(item[0]))
            progress = load_progress(str(folder), sum(reader.read_bytes(region) for region, _ in regions), key)
            reader.progress = progress.add
            for region, view in regions:
                reader.copy(region, view)
    except Exception as error:
        (progress or load_progress(str(folder), 0, key)).fail(error)
        raise
    progress.wait(wait_s)
    return Loaded(sum(1 for _ in _weights_of(chunks)), progress.read_bytes)


def difference(chunks: Sequence[torch.nn.Module], others: Sequence[torch.nn.Module], head: bool = True) -> str:
    """Why the weights of `others` cannot be copied to `chunks`, as text; empty where they can. `head`: heads too."""
    ours, theirs = (dict(_facts(model, head)) for model in (chunks, others))
    for name in ours | theirs:
        if ours.get(name) != theirs.get(name):
            return f"{name} is {ours.get(name, 'not there')}, {theirs.get(name, 'not there')} in the other model"
    return ""


@torch.no_grad()
def copy_weights(chunks: Sequence[torch.nn.Module], others: Sequence[torch.nn.Module], head: bool = True) -> Loaded:
    """Fill `chunks` with the weights of `others`, of the same parameters (`difference`), which are on any device."""
    count = 0
    for (_, target), (_, value) in zip(_weights_of(chunks, head), _weights_of(others, head), strict=True):
        target.copy_(value)
        count += 1
    return Loaded(count, 0)


def _facts(chunks: Sequence[torch.nn.Module], head: bool) -> Iterator[tuple[str, str]]:
    return ((name, f"{tensor.dtype} {tuple(tensor.shape)}") for name, tensor in _weights_of(chunks, head))


def _weights_of(chunks: Sequence[torch.nn.Module], head: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """(name with the chunk's number, tensor) of everything that is loaded; correction biases in fp32."""
    for number, chunk in enumerate(unwrapped(chunks)):
        keep_bias_fp32(chunk)
        for name, tensor in named_weights(chunk):
            if head or not name.startswith(_HEAD):
                yield f"{number}:{name}", tensor


def _regions(
    chunks: Sequence[torch.nn.Module], inventory: Inventory, layout: ParallelLayout, line: str, head: bool
) -> list[tuple[Region, torch.Tensor]]:
    """Each region that `chunks` hold, with the view of the live parameter that it is in; `head`: of the head alone.

    A model of fewer layers than the folder's takes the first ones.
    """
    layers, of_folder = sum(layout.layers_per_stage), inventory.model.num_hidden_layers
    if layers > of_folder:
        raise ConfigError(f"weights: the model has {layers} layers, expected at most the folder's {of_folder}")
    dtype = str(next(chunks[0].parameters()).dtype).removeprefix("torch.")
    value = any(f"{_HEAD}score" in name for chunk in chunks for name, _ in chunk.named_parameters())
    of_model = build_inventory(replace(inventory.model, torch_dtype=dtype, num_hidden_layers=layers), value)
    held = train_tensors(chunks, of_model, layout, dist.get_rank(), library_of(chunks, line))
    return [(each.region, each.tensor) for each in held.values() if not head or _HEAD in each.parameter]


def draw_head(name: str, target: torch.Tensor, folder: str | Path) -> None:
    """Fill tensor `name` of a value head, which `folder` lacks: weight N(0, 1 / (H + 1)), as TRL draws it, and bias 0.

    Equal on all ranks and in all runs. ConfigError for another tensor.
    """
    if name not in (SCORE, SCORE_BIAS):
        raise ConfigError(f"weights: {folder} has no {name}: it is of a value model, expected a causal LM's")
    target.zero_()
    if name == SCORE:
        drawn = torch.randn(target.shape, generator=torch.Generator().manual_seed(0))
        target.copy_(drawn / math.sqrt(target.shape[-1] + 1))


def load_progress(what: str, total_bytes: int, key: str) -> LoadProgress:
    """The progress of this rank in torch.distributed's store; without it, of one rank."""
    if not dist.is_initialized():
        return LoadProgress(what, total_bytes)
    store = dist.distributed_c10d._get_default_store()
    return LoadProgress(what, total_bytes, store, key, dist.get_rank(), dist.get_world_size())
