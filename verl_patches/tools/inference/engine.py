"""Run vLLM's engine on the weights of any folder: in this process, or on the ranks of one rollout instance on Ray.

A configuration of one rank on a CPU or an emulated device needs no Ray. For several ranks, and on NPUs, verl's own
worker group places the workers like the trainer's; each reads its weights from the folder, which every node needs under
the same path. Ranks of a data-parallel group share experts, so they make their steps together; a rank without prompts
takes part with a dummy batch, as in a run (row platform.vllm_dp_lockstep). Import this file only after
verl_patches.prelude_patch, which patches what it imports.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import ray
import torch
import torch.distributed as dist
from verl.single_controller.base import Worker
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from vllm import LLM, SamplingParams
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from verl_patches.errors import ConfigError, RecipeError
from verl_patches.launch.launcher import short_temp_dir
from verl_patches.launch.ray_cluster import ray_options, require_nodes, reserve_left_out_nodes
from verl_patches.platform.loopback_store import loopback_store
from verl_patches.run.environment import RAY_FOLDER
from verl_patches.run.ray_nodes import error_line
from verl_patches.spec import RunSpec
from verl_patches.trainer import ray_start
from verl_patches.values import loading_errors
from verl_patches.weights.reader import WeightReader
from verl_patches.weights.source import Source, open_source


class Response(NamedTuple):
    """Hold the tokens of a response, and why it ended: stop or length."""

    tokens: list[int]
    finish: str


# (tokens of each prompt, its sampling) -> responses of each prompt
Generate = Callable[[Sequence[list[int]], Sequence[SamplingParams]], list[list[Response]]]


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
    with WeightReader(source, verify=True) as reader:
        for name in source.tensors:
            if name.rsplit(".", 2)[0] not in left_out:
                yield name, reader.read(name)


def prompt_params(sampling: Mapping[str, Any], count: int) -> list[SamplingParams]:
    """Return vLLM's SamplingParams of each of `count` prompts: prompt i has seed + i * n, on any number of ranks.

    Raise ConfigError for values that vLLM refuses.
    """
    with loading_errors("sampling: expected values that vLLM takes"):
        found = [SamplingParams(**sampling, detokenize=False) for _ in range(count)]
    for number, params in enumerate(found):
        params.seed = (params.seed + number * params.n) % 2**32
    return found


def token_budget(run: RunSpec, length: int) -> int:
    """Return max_num_batched_tokens of an engine for requests of `length` tokens.

    It is training's, which the memory plan counts, and at least `length` where the engine does not split prompts.
    """
    budget: int = run.verl.actor_rollout_ref.rollout.max_num_batched_tokens
    return budget if run.splits_prompts else max(budget, length)


def _build_engine(folder: Path, run: RunSpec, length: int) -> LLM:
    """Return the engine of this process, a rank of run.rollout; `length`: most tokens of a prompt and its response."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    rollout = run.verl.actor_rollout_ref.rollout
    options = {
        **run.engine,
        "model": str(folder),
        "load_format": SourceLoader,
        "trust_remote_code": run.recipe.trust_remote_code,
        "max_model_len": length,
        "max_num_batched_tokens": token_budget(run, length),
        "distributed_executor_backend": "external_launcher",
        "tensor_parallel_size": run.rollout.tp,
        "data_parallel_size": run.rollout.dp,
        "enable_expert_parallel": run.world_size > 1 and run.recipe.rollout.enable_expert_parallel,
        "seed": 0,
        "disable_log_stats": True,
    }
    for name in ("dtype", "enforce_eager", "gpu_memory_utilization", "enable_chunked_prefill"):
        options[name] = rollout[name]
    try:
        return LLM(**{name: value for name, value in options.items() if value is not None})
    except ValueError as error:  # such as a KV cache that is too small for `length`
        raise RecipeError(f"{folder}: vLLM's engine failed to start: {error}") from error


def _generate(llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[list[Response]]:
    """Return the responses of this rank's prompts; collective over the ranks, also for one without prompts."""
    if not prompts:
        llm._run_engine(use_tqdm=False)
        return []
    given = [{"prompt_token_ids": tokens} for tokens in prompts]
    outputs = llm.generate(given, list(params), use_tqdm=len(prompts) > 1)
    return [[Response(list(each.token_ids), each.finish_reason) for each in output.outputs] for output in outputs]


class EngineWorker(Worker):
    """Run the engine of one rank."""

    def build(self, folder: Path, run: RunSpec, length: int) -> None:
        """Build the engine; collective over all ranks of the instance."""
        with loopback_store():
            dist.init_process_group("gloo")
        self.engine = _build_engine(folder, run, length)

    def generate(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[list[Response]]:
        """Return the responses of a replica's prompts."""
        return _generate(self.engine, prompts, params)


@contextmanager
def start_engine(folder: Path, run: RunSpec, length: int) -> Iterator[Generate]:
    """Yield a function that generates with the weights of a folder, as long as the block lasts.

    `length`: most tokens of a prompt and its response. Several ranks join recipe.ray_address, or start their own Ray on
    this machine. Raise ConfigError where nodes are missing; where other jobs have their dies, it waits.
    """
    if run.platform == "npu" or run.world_size > 1:
        with _start_ranks(folder, run, length) as generate:
            yield generate
        return
    gc.collect()  # frees an earlier engine, which has reference cycles
    if not dist.is_initialized():
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    llm = _build_engine(folder, run, length)
    yield lambda prompts, params: _generate(llm, prompts, params)


@contextmanager
def _start_ranks(folder: Path, run: RunSpec, length: int) -> Iterator[Generate]:
    """Yield `start_engine`'s function for engines on Ray; replica d of R has prompts d, d + R, ..."""
    require_nodes(run)
    trainer, tp, replicas = run.verl.trainer, run.rollout.tp, run.rollout.dp
    options = {**ray_options(run), "engine": None, "log_to_driver": False}  # no Megatron here
    with ExitStack() as stack:
        if "_temp_dir" in options:
            options["_temp_dir"] = str(stack.enter_context(short_temp_dir()) / RAY_FOLDER)
        sigterm_handler = signal.getsignal(signal.SIGTERM)
        ray_start.start_ray(**options)
        signal.signal(signal.SIGTERM, sigterm_handler)  # replaces Ray's own handler
        stack.callback(ray.shutdown)
        reserve_left_out_nodes(run)
        pool = RayResourcePool([trainer.n_gpus_per_node] * trainer.nnodes, use_gpu=True, max_colocate_count=1)
        kind = RayClassWithInitArgs(ray.remote(EngineWorker))
        with _rank_errors():
            group = ray_start.run_unless_start_fails(lambda: RayWorkerGroup(pool, kind, device_name=trainer.device))
            workers = group._workers
            ray.get([worker.build.remote(folder.absolute(), run, length) for worker in workers])

        def generate(prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[list[Response]]:
            shares = [(prompts[replica::replicas], params[replica::replicas]) for replica in range(replicas)]
            with _rank_errors():
                made = ray.get([worker.generate.remote(*shares[rank // tp]) for rank, worker in enumerate(workers)])
            return [made[number % replicas * tp][number // replicas] for number in range(len(prompts))]

        yield generate


@contextmanager
def _rank_errors() -> Iterator[None]:
    """Raise an error of a rank unchanged if it is one of ours, else as a RecipeError of one sentence."""
    try:
        yield
    except (ray.exceptions.RayError, RuntimeError) as error:  # RuntimeError: a rank could not start
        cause = getattr(error, "cause", None)
        if isinstance(cause, (ConfigError, RecipeError)):
            raise cause from error
        raise RecipeError(f"a rank of the rollout failed: {repr(cause) if cause else error_line(error)}") from error
