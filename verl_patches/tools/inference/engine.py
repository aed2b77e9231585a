"""Build vLLM's engine in this process, as a run's rollout does, with weights read from any folder of weights.

A single rank has no port, as torch.distributed's store is in this process. Several ranks each have a process of their
own (ranks.py). Import this file only after verl_patches.prelude_patch, which patches what it imports.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from vllm import LLM, SamplingParams
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.sampling_params import RequestOutputKind

from verl_patches.errors import RecipeError
from verl_patches.spec import RunSpec
from verl_patches.values import loading_errors
from verl_patches.weights.reader import WeightReader
from verl_patches.weights.source import Source, open_source

_LAUNCHER_VARIABLES = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
SINGLE_RANK = {"tensor_parallel_size": 1, "data_parallel_size": 1, "enable_expert_parallel": False}


class Request(NamedTuple):
    """Hold a prompt as vLLM takes it."""

    name: str
    tokens: list[int]
    params: SamplingParams


class SourceLoader(BaseModelLoader):
    """Load weights into vLLM with the reader of all formats: HF in bf16 or FP8, Megatron's, checkpoints."""

    def download_model(self, model_config: Any) -> None:
        """Do nothing, as the folder is on this machine."""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Load all weights by their HF names, through vLLM's own mapping, except experts that other ranks hold."""
        model.load_weights(_read_tensors(open_source(model_config.model), remote_experts(model)))


def remote_experts(model: torch.nn.Module) -> set[str]:
    """Return the HF names of the experts, such as model.layers.3.mlp.experts.7, that vLLM has mapped to other ranks."""
    maps = {name: getattr(module, "expert_map", None) for name, module in model.named_modules()}
    held = {name: places.tolist() for name, places in maps.items() if places is not None}
    return {f"{name}.{expert}" for name, places in held.items() for expert, at in enumerate(places) if at < 0}


def _read_tensors(source: Source, left_out: Collection[str] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole tensor), FP8 decoded to bf16 and checked against a manifest's digests, but not `left_out`."""
    with WeightReader(source, sequential=True, verify=True) as reader:
        for name in source.tensors:
            if name.rsplit(".", 2)[0] not in left_out:
                yield name, reader.read(name)


def sampling_params(sampling: Mapping[str, Any]) -> SamplingParams:
    """Return vLLM's SamplingParams of these names; raise ConfigError for values that vLLM refuses."""
    with loading_errors("sampling: expected values that vLLM takes"):
        return SamplingParams(**sampling)


def token_budget(run: RunSpec, length: int) -> int:
    """Return max_num_batched_tokens of an engine for requests of `length` tokens.

    It is training's, which the memory plan counts, and at least `length` where the engine does not split prompts.
    """
    budget: int = run.verl.actor_rollout_ref.rollout.max_num_batched_tokens
    return budget if run.splits_prompts else max(budget, length)


class Engine:
    """Hold the engine of a run with the weights of `folder`; length: most tokens of a prompt and its response.

    parallel: vLLM's arguments for the layout of which this process is a rank.
    """

    def __init__(self, folder: Path, run: RunSpec, length: int, parallel: Mapping[str, Any] = SINGLE_RANK):
        gc.collect()  # frees an earlier engine, which has reference cycles
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        if not dist.is_initialized():
            os.environ.update(_LAUNCHER_VARIABLES)
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        rollout = run.verl.actor_rollout_ref.rollout
        given = {**run.engine, **parallel}
        try:
            self._llm = LLM(
                model=str(folder),
                load_format=SourceLoader,
                dtype=rollout.dtype,
                trust_remote_code=run.recipe.trust_remote_code,
                max_model_len=length,
                max_num_batched_tokens=token_budget(run, length),
                enforce_eager=rollout.enforce_eager,
                gpu_memory_utilization=rollout.gpu_memory_utilization,
                enable_chunked_prefill=rollout.enable_chunked_prefill,
                distributed_executor_backend="external_launcher",
                seed=0,
                disable_log_stats=True,
                **{name: value for name, value in given.items() if value is not None},
            )
        except ValueError as error:  # such as a KV cache that is too small for `length`
            raise RecipeError(f"{folder}: vLLM's engine failed to start: {error}") from error

    def run(self, prompts: list[list[int]], params: SamplingParams, first: int) -> Iterator[Any]:
        """Yield vLLM's RequestOutput of each prompt [tokens] from number `first` on, in order.

        Prompt i has seed + i * n, so that a resumed call draws the same as an uninterrupted one.
        """
        requests = [
            _request(number, tokens, params, number * params.n, RequestOutputKind.FINAL_ONLY)
            for number, tokens in enumerate(prompts[first:], first)
        ]
        done, number = {}, first
        for output in self.outputs(requests):
            if output.finished:
                done[int(output.request_id)] = output
            while number in done:
                yield done.pop(number)
                number += 1

    def stream(self, tokens: list[int], params: SamplingParams, turn: int) -> Iterator[Any]:
        """Yield vLLM's RequestOutput of one prompt after each step, with all of its text so far."""
        yield from self.outputs([_request(turn, tokens, params, turn, RequestOutputKind.CUMULATIVE)])

    def outputs(self, requests: Sequence[Request]) -> Iterator[Any]:
        """Yield vLLM's outputs as they come, until each rank has made its own; collective over the ranks."""
        engine = self._llm.llm_engine
        for name, tokens, params in requests:
            engine.add_request(name, {"prompt_token_ids": tokens}, params)
        while engine.has_unfinished_requests():
            yield from engine.step()
        self._llm._run_engine(use_tqdm=False)  # a rank of V0 that has ended takes part in the others' steps


def _request(name: int, tokens: list[int], params: SamplingParams, more: int, kind: RequestOutputKind) -> Request:
    own = params.clone()
    own.seed, own.output_kind = (own.seed + more) % 2**32, kind
    return Request(str(name), tokens, own)
