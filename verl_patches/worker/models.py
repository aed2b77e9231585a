"""Load the weights of the models that verl builds in a worker, and gather them for verl's own weight sync.

verl builds reference and actor in one process, in this order on both lines (`RayPPOTrainer.init_workers`), with one
layout; each calls `load_megatron_gptmodel_weights`. The reference reads the folder; the actor copies its parameters,
which nothing writes, so that the copies equal a read bit for bit. Critic and reward models read their folders.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from verl_patches.current import Current
from verl_patches.layout.parallel import ParallelLayout
from verl_patches.memory.host_backed import single_optimizers
from verl_patches.memory.offload import parameters_loaded
from verl_patches.memory.schedule import CRITIC
from verl_patches.patching import engine
from verl_patches.patching.engine import is_on
from verl_patches.reshard.rank_errors import gather
from verl_patches.reshard.region import Region, region_view
from verl_patches.reshard.train_tensors import model_layout, train_tensors, trained_inventory
from verl_patches.spec import RUN, run_from_config
from verl_patches.weights.load import WAIT_S, copy_weights, load_weights, weights_difference
from verl_patches.worker.context import context
from verl_patches.worker.memory import TrainedModel, WorkerMemory
from verl_patches.worker.step_guard import StepGuard

log = logging.getLogger("verl_patches.weights")
ARCHITECTURE = "DeepseekV3ForCausalLM"
folder_reads: Current[int] = Current(0)  # how often this process has read a model's folder
# folder and chunks of the model whose parameters others copy
copy_source: Current[tuple[str, Sequence[torch.nn.Module]] | None] = Current(None)


def load_deepseekv3(load_megatron_gptmodel_weights: Callable) -> Callable:
    """Wrap verl's `load_megatron_gptmodel_weights`: load DeepSeek-V3 with this module, other models with verl."""

    @functools.wraps(load_megatron_gptmodel_weights)
    def load_gpt_weights(config, model_config, parallel_model, params_dtype, is_value_model=False, *args, **kwargs):
        if ARCHITECTURE not in (model_config.architectures or ()):
            return load_megatron_gptmodel_weights(
                config, model_config, parallel_model, params_dtype, is_value_model, *args, **kwargs
            )
        from verl.utils.fs import copy_to_local

        line, wait_s, layout = engine.current_engine().switches.line, WAIT_S, None
        if config.get(RUN) is not None:
            run = run_from_config(config)
            # a list of layers also where null splits them evenly
            layers = tuple(map(len, run.train.chunk_layers(model_config.num_hidden_layers)))
            wait_s, layout = run.recipe.timeouts.load_s, dataclasses.replace(run.train, layers_per_stage=layers)
        return load_model(copy_to_local(config.model.path), parallel_model, line, wait_s, layout, is_value_model)

    return load_gpt_weights


def load_model(
    folder: str,
    chunks: Sequence[torch.nn.Module],
    line: str,
    wait_s: float,
    layout: ParallelLayout | None = None,
    is_value: bool = False,
) -> int:
    """Fill `chunks` from a like model of this process that has read `folder` (`copy_source`), or else from the folder.

    Returns the bytes read.

    `is_value`: the chunks are of a value model, which is never copied.
    """
    from megatron.core.distributed import DistributedDataParallel

    rank = dist.get_rank()
    _show_log(rank)
    if copy_source.value is not None and not is_value:
        read_from, source = copy_source.value
        unlike = weights_difference(chunks, source) if read_from == folder else f"it has read {read_from}"
        if not unlike:
            with parameters_loaded(source):
                copy_weights(chunks, source)
            if rank == 0:
                log.info("weights: copied from the reference, 0 bytes read from %s", folder)
            return 0
        log.warning("weights: %s is read again, not copied from the reference: %s", folder, unlike)
    folder_reads.value += 1
    key = f"verl_patches/load/{folder_reads.value}"
    started = time.perf_counter()
    read_bytes = load_weights(folder, chunks, line, key, wait_s, layout)
    if rank == 0:
        seconds = time.perf_counter() - started
        log.info("weights: all ranks have read %s in %.1f s, this one %d bytes", folder, seconds, read_bytes)
    if not is_value and not any(isinstance(chunk, DistributedDataParallel) for chunk in chunks):  # it is not trained
        copy_source.value = folder, chunks
    return read_bytes


def prepare_training(trained: TrainedModel, memory: WorkerMemory) -> StepGuard | None:
    """Give a trained model its memory groups and its step guard, and offload it; return the guard."""
    guard = None
    for each in (*trained.chunks, *single_optimizers(trained.optimizer)):
        each.memory_groups = trained.groups
    if is_on("update.skip_bad_steps"):
        guard = StepGuard(trained.chunks, trained.optimizer, "critic " if trained.groups is CRITIC else "")
        context().step_guards.append(guard)
    memory.offload_model(trained.chunks, trained.optimizer, trained.groups)
    return guard


def _show_log(rank: int) -> None:
    """Show progress in the worker's output, where other loggers show only WARNING and above. Idempotent."""
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"%(asctime)s rank {rank}: %(message)s", "%H:%M:%S"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False


def deepseekv3_generator(per_tensor_generator: Callable) -> Callable:
    """Wrap verl's `per_tensor_generator` (line a3): use `gathered_weights` for DeepSeek-V3.

    verl's own needs expert tensor groups and configuration fields that core_r0.8.0 does not have, expects each expert
    to be a module of its own, and leaves out the correction bias.
    """

    @functools.wraps(per_tensor_generator)
    def generate(actor_module, model_config, *args, **kwargs):
        if ARCHITECTURE in (model_config.architectures or ()):
            return gathered_weights(actor_module, model_config)
        return per_tensor_generator(actor_module, model_config, *args, **kwargs)

    return generate


def weight_converters() -> dict[Any, Callable]:
    """Return the entry that verl looks up in MODEL_WEIGHT_CONVERTER_REGISTRY; `gathered_weights` does not use it."""
    from verl.models.mcore.registry import SupportedModel

    return {SupportedModel.DEEPSEEK_V3: lambda hf_config, mcore_config: None}


def gathered_weights(chunks: Sequence[torch.nn.Module], hf_config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (HF name, whole tensor) of every weight on every rank, in the training dtype. Collective over all ranks."""
    rank, layout = dist.get_rank(), model_layout(chunks)
    inventory = trained_inventory(chunks, hf_config)
    held = train_tensors(chunks, inventory, layout, rank, "mindspeed")
    holders: dict[str, dict[Region, int]] = {}
    for holder, regions in enumerate(gather([tensor.region for tensor in held.values()])):
        for region in regions:
            holders.setdefault(region.name, {}).setdefault(region, holder)
    device = next(chunks[0].parameters()).device
    for parameter in inventory.parameters:
        like = {"dtype": getattr(torch, parameter.dtype), "device": device}
        whole, complete = torch.empty(parameter.shape, **like), Region(parameter.name, 0, 0, parameter.shape[0])
        for region, holder in holders[parameter.name].items():
            part = torch.empty(region.shape_in(parameter.shape), **like)
            if holder == rank:
                part.copy_(held[parameter.name].tensor)
            dist.broadcast(part, holder)
            region_view(whole, complete, region, parameter.shape).copy_(part)
        yield parameter.name, whole
