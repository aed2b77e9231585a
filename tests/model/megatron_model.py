"""Build the Megatron DeepSeek-V3 of this rank by verl's own path, outside a worker: for tests and tools."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from transformers import AutoConfig
from verl.models.mcore import hf_to_mcore_config, init_mcore_model
from verl.utils.megatron_utils import get_model

from verl_patches.layout.parallel import ParallelLayout
from verl_patches.weights.load import load_weights

_loads = itertools.count()  # the layout of this process; the same on every rank


def start_parallel(layout: ParallelLayout, seed: int = 42) -> None:
    """Make Megatron's process groups for `layout`, as verl's ActorRolloutRefWorker does; drop earlier ones.

    Needs an initialised torch.distributed of `layout.world_size` ranks; seeds Megatron's random number tracker.
    """
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def build_model(
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    overrides: dict[str, Any] | None = None,
    load: bool = True,
    wrap_with_ddp: bool = False,
    distributed_optimizer: bool = False,
    line: str = "pypi",
):
    """Return (chunks, transformer config, HF config) of this rank for a HF folder, with weights unless not `load`.

    Follows `verl.workers.megatron_workers.ActorRolloutRefWorker._build_model_optimizer`: config converter, model
    initializer, wrappers.
    `overrides` are fields of Megatron's MLATransformerConfig, verl's `override_transformer_config`. Needs
    `start_parallel`, on line a3 the engine's start. With `distributed_optimizer`, as in verl's worker, a DDP-wrapped
    model's gradients are whole on no rank.
    """
    hf_config = AutoConfig.from_pretrained(folder)
    config = hf_to_mcore_config(hf_config, dtype, **(overrides or {}))

    def provide(pre_process, post_process):
        return init_mcore_model(config, hf_config, pre_process, post_process, freeze_moe_router=False)

    chunks = get_model(provide, wrap_with_ddp=wrap_with_ddp, use_distributed_optimizer=distributed_optimizer)
    if load:
        load_weights(folder, chunks, line, key=f"load/{next(_loads)}")
    return chunks, config, hf_config


def converted(folder: Path, cases: list[tuple[dict, dict]]) -> list[dict | str]:
    """Return fields of verl's config for (changes of the HF config, overrides), or the error."""
    parallel_state.initialize_model_parallel()
    found: list[dict | str] = []
    for changes, overrides in cases:
        hf_config = AutoConfig.from_pretrained(folder)
        for key, value in changes.items():
            setattr(hf_config, key, value)
        try:
            fields = vars(hf_to_mcore_config(hf_config, torch.bfloat16, **overrides))
            found.append({k: v for k, v in fields.items() if isinstance(v, (int, float, str, list, type(None)))})
        except ValueError as error:
            found.append(str(error))
    return found
