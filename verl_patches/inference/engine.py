"""vLLM's engine in this process, as a run's rollout builds it, with weights read from any folder of weights.

One rank and no port: torch.distributed's store is in this process. Imported after the prelude.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from vllm import LLM, SamplingParams
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.sampling_params import RequestOutputKind

from verl_patches.config.compose import vllm_arguments
from verl_patches.data.sources import load
from verl_patches.errors import RecipeError
from verl_patches.weights.reader import WeightReader
from verl_patches.weights.source import Source, open_source

_LAUNCHER = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
_ALONE = {"data_parallel_size": 1, "enable_expert_parallel": False}


class SourceLoader(BaseModelLoader):
    """vLLM's model loader over the reader of all formats: HF in bf16 or FP8, shards, checkpoints."""

    def download_model(self, model_config: Any) -> None:
        """The folder is here."""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """All weights by their HF names, through vLLM's own mapping."""
        model.load_weights(_tensors(open_source(model_config.model)))


def _tensors(source: Source) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor), FP8 decoded to bf16; bytes are compared with a manifest's digests."""
    with WeightReader(source, sequential=True) as reader:
        for name, stored in source.tensors.items():
            yield name, torch.cat([rows for _, rows in reader.blocks(stored)]).view(stored.shape)


def sampling_params(sampling: Mapping[str, Any]) -> SamplingParams:
    """vLLM's SamplingParams of these names; ConfigError for values that it refuses."""
    with load("sampling: expected values that vLLM takes"):
        return SamplingParams(**sampling)


class Engine:
    """The engine of `config` with the weights of `source`; length: tokens of a prompt and its response, at most."""

    def __init__(self, source: Source, config: DictConfig, length: int):
        gc.collect()  # an engine before this one has cycles
        os.environ.update(_LAUNCHER)
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        rollout = config.actor_rollout_ref.rollout
        given = {**OmegaConf.to_container(OmegaConf.create(vllm_arguments(config))), **_ALONE}
        try:
            self._engine = LLM(
                model=str(source.folder),
                load_format=SourceLoader,
                dtype=rollout.dtype,
                max_model_len=length,
                max_num_batched_tokens=max(rollout.max_num_batched_tokens, length),
                enforce_eager=rollout.enforce_eager,
                gpu_memory_utilization=rollout.gpu_memory_utilization,
                enable_chunked_prefill=rollout.enable_chunked_prefill,
                distributed_executor_backend="external_launcher",
                seed=0,
                disable_log_stats=True,
                **{name: value for name, value in given.items() if value is not None},
            ).llm_engine
        except ValueError as error:  # such as a KV cache that is too small for `length`
            raise RecipeError(f"{source.folder}: vLLM's engine does not start: {error}") from error

    def run(self, prompts: list[list[int]], params: SamplingParams, first: int) -> Iterator[Any]:
        """vLLM's RequestOutput of each prompt [tokens] from number `first` on, in order.

        Prompt i has seed + i * n, so a run that goes on draws as an uninterrupted one.
        """
        for number, tokens in enumerate(prompts[first:], first):
            self._add(number, tokens, params, number * params.n, RequestOutputKind.FINAL_ONLY)
        done = {}
        for number in range(first, len(prompts)):
            while number not in done:
                done |= {int(output.request_id): output for output in self._engine.step() if output.finished}
            yield done.pop(number)

    def stream(self, tokens: list[int], params: SamplingParams, turn: int) -> Iterator[Any]:
        """vLLM's RequestOutput of one prompt after each step, with all of its text so far."""
        self._add(turn, tokens, params, turn, RequestOutputKind.CUMULATIVE)
        while self._engine.has_unfinished_requests():
            yield from self._engine.step()

    def _add(self, name: int, tokens: list[int], params: SamplingParams, more: int, kind: RequestOutputKind) -> None:
        own = params.clone()
        own.seed, own.output_kind = (own.seed + more) % 2**32, kind
        self._engine.add_request(str(name), {"prompt_token_ids": tokens}, own)
