"""vLLM's engine in this process, as a run's rollout builds it, with weights read straight from any folder of weights.

One process, one rank, no port: torch.distributed has a store of this process. Imported after the prelude.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from vllm import LLM, SamplingParams
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.sampling_params import RequestOutputKind

from verl_patches.config.compose import seats_of, vllm_arguments
from verl_patches.inference.model import Sampling
from verl_patches.weights.reader import TORCH_DTYPES, WeightReader
from verl_patches.weights.source import FP8, Source, open_source

_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


class SourceLoader(BaseModelLoader):
    """vLLM's model loader over the reader of all formats: HF in bf16 or FP8, shards, checkpoints."""

    def download_model(self, model_config: Any) -> None:
        """Nothing: the folder is here."""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Every weight by its HF name, through vLLM's own mapping."""
        model.load_weights(_tensors(open_source(model_config.model)))


def _tensors(source: Source) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor), FP8 decoded to bf16; bytes are compared with the digests of a manifest."""
    with WeightReader(source, sequential=True) as reader:
        for name, stored in source.tensors.items():
            dtype = torch.bfloat16 if stored.dtype == FP8 else TORCH_DTYPES[stored.dtype]
            value = torch.empty(stored.shape, dtype=dtype)
            rows = value.view(stored.shape[0], -1)
            for first, block in reader.blocks(stored):
                rows[first : first + len(block)] = block
            yield name, value


class Engine:
    """The engine of `config` with the weights of `source`; a request has at most `longest` tokens with its response."""

    def __init__(self, source: Source, config: DictConfig, longest: int):
        os.environ.update(_RANK)  # vLLM's external launcher reads them
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        rollout = config.actor_rollout_ref.rollout
        alone = {"data_parallel_size": 1, "enable_expert_parallel": False}
        given = {
            k: v for k, v in OmegaConf.to_container(OmegaConf.create(vllm_arguments(config))).items() if v is not None
        }
        self.seats = seats_of(config)
        self._numbers = itertools.count()
        self._engine = LLM(
            model=str(source.folder),
            load_format=SourceLoader,
            dtype=rollout.dtype,
            max_model_len=longest,
            max_num_batched_tokens=max(rollout.max_num_batched_tokens, longest),
            enforce_eager=rollout.enforce_eager,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            enable_chunked_prefill=rollout.enable_chunked_prefill,
            distributed_executor_backend="external_launcher",
            disable_log_stats=True,
            **{**given, **alone},
        ).llm_engine

    def run(self, prompts: Iterable[list[int]], sampling: Sampling, first: int = 0) -> Iterator[Any]:
        """vLLM's RequestOutput of each prompt, in order; prompts are taken as seats become free.

        first: number of the first prompt. The seed of prompt i is seed + i * n, so that a run that goes on, or one with
        other seats, draws as the whole one.
        """
        waiting, done = iter(prompts), {}
        sent = given = 0
        while True:
            while sent - given < 2 * self.seats and (tokens := next(waiting, None)) is not None:
                seed = sampling.seed + (first + sent) * sampling.n
                self._add(str(sent), tokens, sampling, seed, RequestOutputKind.FINAL_ONLY)
                sent += 1
            if given == sent:
                return
            done |= {int(output.request_id): output for output in self._engine.step() if output.finished}
            while given in done:
                yield done.pop(given)
                given += 1

    def stream(self, tokens: list[int], sampling: Sampling, turn: int = 0) -> Iterator[Any]:
        """vLLM's RequestOutput of one prompt after each step, with the text so far. turn: of the conversation."""
        self._add(f"turn {next(self._numbers)}", tokens, sampling, sampling.seed + turn, RequestOutputKind.CUMULATIVE)
        while self._engine.has_unfinished_requests():
            yield from self._engine.step()

    def _add(self, name: str, tokens: list[int], sampling: Sampling, seed: int, kind: RequestOutputKind) -> None:
        params = SamplingParams(**{**asdict(sampling), "seed": seed % 2**32}, output_kind=kind)
        self._engine.add_request(name, {"prompt_token_ids": tokens}, params)
