"""What the data-parallel tests run on each rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from tests.rollout import engine_rank


def generate(folder: str, rollout: dict, rounds: list[list[dict]]) -> dict:
    """Rounds of generation one after the other, and where this rank stands: groups and experts.

    `rounds[i][d]` is round i of DP rank d.
    """
    from vllm.distributed import get_dp_group, get_ep_group, get_tp_group

    llm = engine_rank.awake(folder, **rollout)
    model = engine_rank.model_of(llm)
    if rollout.get("load_format") == "dummy":  # as verl's sharding manager: every rank is given every tensor
        model.load_weights(tensors(folder))
        llm.weights_written(last=False)
    passes = _count_passes(llm.llm_engine.model_executor.driver_worker.worker)
    groups = {"dp": get_dp_group().ranks, "tp": get_tp_group().ranks, "ep": get_ep_group().ranks}
    expert_map = model.model.layers[1].mlp.experts.expert_map
    place = torch.distributed.get_rank() // rollout["tensor_model_parallel_size"]
    found = [_round(llm, one[place], passes) for one in rounds]
    return {"rounds": found, "groups": groups, "experts": torch.nonzero(expert_map >= 0).flatten().tolist()}


def _round(llm, spec: dict, passes: dict[str, int]) -> dict:
    """One call of generate, perhaps with something taken away; tokens, log-probs and forward passes, or an error."""
    from vllm import LLM
    from vllm.distributed import get_ep_group

    from verl_patches.platform.cpu import vllm_worker

    passes.update(all=0, own=0)
    communicator, run_engine = get_ep_group().device_communicator, LLM._run_engine
    manager = communicator.all2all_manager
    vllm_worker.STALL_S = spec.get("stall_s", 60)
    try:
        if spec.get("without") == "exchange":
            communicator.all2all_manager = None
        if spec.get("without") == "platform.vllm_dp_lockstep":
            LLM._run_engine = run_engine.__wrapped__
        return {**generate_with(llm, spec["requests"]), "passes": dict(passes)}
    except RuntimeError as error:
        return {"error": str(error)}
    finally:
        communicator.all2all_manager, LLM._run_engine = manager, run_engine


def generate_with(llm, requests: list) -> dict:
    """{tokens, logprobs}: greedy continuations of [prompt, length] requests; with none, only the other ranks' steps."""
    from vllm import SamplingParams

    if not requests:
        llm._run_engine(use_tqdm=False)
        return {"tokens": [], "logprobs": []}
    params = [SamplingParams(temperature=0.0, logprobs=0, max_tokens=length, ignore_eos=True) for _, length in requests]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in requests], params, use_tqdm=False)
    done = [output.outputs[0] for output in outputs]
    pairs = [list(zip(one.token_ids, one.logprobs, strict=True)) for one in done]
    return {
        "tokens": [list(one.token_ids) for one in done],
        "logprobs": [[step[token].logprob for token, step in pair] for pair in pairs],
    }


def tensors(folder: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every (name, tensor) of an HF folder."""
    from safetensors.torch import load_file

    for file in sorted(Path(folder).glob("*.safetensors")):
        yield from load_file(file).items()


def _count_passes(worker) -> dict[str, int]:
    """Forward passes of this rank from now on: all, and those for sequences of its own."""
    counts = {"all": 0, "own": 0}
    run, step = worker.model_runner.execute_model, worker.execute_model

    def execute_model(*args, **kwargs):
        counts["all"] += 1
        return run(*args, **kwargs)

    def execute_own(*args, **kwargs):
        counts["own"] += 1
        return step(*args, **kwargs)

    worker.model_runner.execute_model, worker.execute_model = execute_model, execute_own
    return counts
