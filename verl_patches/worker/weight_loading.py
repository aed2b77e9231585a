"""DeepSeek-V3's weights for verl's workers: the first model of a process reads the folder, the other one copies it.

verl builds the reference and the actor in one process, in this order on both lines (`RayPPOTrainer.init_workers`), with
one layout, and each calls `load_megatron_gptmodel_weights`. The folder is read once, for the reference; the actor
copies the reference's parameters, which nothing ever writes. Bit for bit as if it had read them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from verl_patches.current import Current
from verl_patches.errors import ConfigError
from verl_patches.memory.offload import parameters_loaded
from verl_patches.weights.load import WAIT_S, Loaded, copy_weights, difference, load_weights

log = logging.getLogger("verl_patches.weights")  # its child in weights/load.py too
_ARCHITECTURE = "DeepseekV3ForCausalLM"
reads: Current[int] = Current(0)  # how often this process has read a model's folder
reference_weights: Current[tuple[str, Sequence[torch.nn.Module]]] = Current()  # the reference's folder and chunks


def load_deepseekv3(load_megatron_gptmodel_weights: Callable, line: str = "pypi") -> Callable:
    """Row provider for verl's `load_megatron_gptmodel_weights`: DeepSeek-V3 by this module, others by verl."""

    @functools.wraps(load_megatron_gptmodel_weights)
    def load_gpt_weights(config, model_config, parallel_model, params_dtype, is_value_model=False, *args, **kwargs):
        if _ARCHITECTURE not in (model_config.architectures or ()):
            return load_megatron_gptmodel_weights(
                config, model_config, parallel_model, params_dtype, is_value_model, *args, **kwargs
            )
        if is_value_model:
            raise ConfigError("DeepSeek-V3 cannot be a value model: set algorithm.adv_estimator=grpo")
        from verl.utils.fs import copy_to_local

        recipe = config.get("recipe")
        wait_s = WAIT_S if recipe is None else recipe.timeouts.load_s
        return load_model(copy_to_local(config.model.path), parallel_model, line, wait_s)

    return load_gpt_weights


def load_mindspeed(load_megatron_gptmodel_weights: Callable) -> Callable:
    """`load_deepseekv3` for MindSpeed-LLM's parameters."""
    return load_deepseekv3(load_megatron_gptmodel_weights, "a3")


def load_model(folder: str, chunks: Sequence[torch.nn.Module], line: str, wait_s: float) -> Loaded:
    """Fill `chunks` from the reference of this process, if it has read `folder` into equal parameters, else read it."""
    rank = dist.get_rank()
    _show_log(rank)
    if reference_weights.value is not None:
        read_from, reference = reference_weights.value
        unlike = difference(chunks, reference) if read_from == folder else f"the reference has read {read_from}"
        if not unlike:
            with parameters_loaded(reference):
                loaded = copy_weights(chunks, reference)
            if rank == 0:
                log.info("weights: %d tensors copied from the reference, 0 bytes read from %s", loaded.tensors, folder)
            return loaded
        log.warning("weights: %s is read again, not copied from the reference: %s", folder, unlike)
    reads.value += 1
    loaded = load_weights(folder, chunks, line, f"verl_patches/load/{reads.value}", wait_s)
    if _is_reference(chunks):
        reference_weights.value = folder, chunks
    return loaded


def _show_log(rank: int) -> None:
    """Show progress in the worker's output: nothing else there shows lines below WARNING. Idempotent."""
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"%(asctime)s rank {rank}: %(message)s", "%H:%M:%S"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False


def _is_reference(chunks: Sequence[torch.nn.Module]) -> bool:
    """Whether nothing trains these chunks: verl wraps what it trains in DDP."""
    from megatron.core.distributed import DistributedDataParallel

    return not any(isinstance(chunk, DistributedDataParallel) for chunk in chunks)
