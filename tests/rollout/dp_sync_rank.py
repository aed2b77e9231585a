"""Run one emulated engine for several rounds of generation on a data-parallel rank."""

from __future__ import annotations

from typing import Any

from tests.emulation.emulated_engine import LIMITS, engine_worker, make_prompts, record, response_tokens, without


def build(model: str, dp: int, tp: int, **options: Any) -> Any:
    """Build the engine of this rank as verl does."""
    from vllm import LLM

    parallel = {"tensor_parallel_size": tp, "data_parallel_size": dp, "enable_expert_parallel": True}
    launcher = {"distributed_executor_backend": "external_launcher", "additional_config": {"refresh": True}}
    return LLM(model=model, **{**LIMITS, "max_num_batched_tokens": 512, **parallel, **launcher, **options})


def generate(llm: Any, lengths: list[int], tokens: list[int]) -> list:
    """Return (tokens, log-probs) of the responses to prompts of `lengths`; without any, join others' steps."""
    from vllm import SamplingParams

    if not lengths:
        llm._run_engine(use_tqdm=False)
        return []
    prompts = [{"prompt_token_ids": ids} for ids in make_prompts(lengths)]
    greedy = {"temperature": 0.0, "logprobs": 0, "ignore_eos": True, "detokenize": False}
    params = [SamplingParams(max_tokens=most, **greedy) for most in tokens]
    return [response_tokens(output)[0] for output in llm.generate(prompts, params, use_tqdm=False)]


def begun(group: Any) -> int:
    """Return the number of collectives that this process has begun in a group."""
    (device,) = group._device_types
    return group._get_backend(device)._get_sequence_number_for_group()


def rounds(model: str, dp: int, tp: int, specs: list[dict], options: dict) -> list[dict]:
    """Run a round for each spec: lengths and tokens of each DP rank's prompts; `without`, patches undone meanwhile.

    A round's result has `responses`, `steps`, the forward passes of this rank with dummy ones, and `syncs`, collectives
    over its DP group.
    """
    import torch

    llm = build(model, dp, tp, **options)
    engine, place = llm.llm_engine, torch.distributed.get_rank() // tp
    runner, found = engine_worker(llm).model_runner, []
    passes = [record(runner, name, lambda *args, **_: None) for name in ("_process_reqs", "_dummy_run")]
    for spec in specs:
        engine.reset_prefix_cache()
        counted = sum(map(len, passes)), begun(engine.dp_group)
        with without(spec.get("without", [])):
            responses = generate(llm, spec["lengths"][place], spec["tokens"][place])
        steps, syncs = sum(map(len, passes)) - counted[0], begun(engine.dp_group) - counted[1]
        found.append({"responses": responses, "steps": steps, "syncs": syncs})
    return found
