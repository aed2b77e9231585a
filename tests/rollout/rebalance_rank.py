"""Run one emulated engine for several rounds of generation on a data-parallel rank of the rebalance tests."""

from __future__ import annotations

import functools
from typing import Any

from tests.emulation.emulated_engine import LIMITS, engine_worker, record, response_tokens, without
from tests.emulation.emulated_engine import make_prompts as random_prompts
from verl_patches.errors import RecipeError


def build(model: str, dp: int, tp: int, **options: Any) -> Any:
    """Build the engine of this rank as verl does."""
    from vllm import LLM

    parallel = {"tensor_parallel_size": tp, "data_parallel_size": dp, "enable_expert_parallel": True}
    launcher = {"distributed_executor_backend": "external_launcher", "additional_config": {"refresh": True}}
    return LLM(model=model, **{**LIMITS, "max_num_batched_tokens": 512, **parallel, **launcher, **options})


def make_prompts(place: int, spec: dict) -> tuple[list, list]:
    """Return the prompts of a DP rank and their parameters: two of three seeded, with a penalty and top-k."""
    from vllm import SamplingParams

    lengths = spec["lengths"][place]
    params = []
    for at in range(len(lengths)):
        plain = {"max_tokens": spec["tokens"][place][at], "logprobs": at % 2, "ignore_eos": True, "detokenize": False}
        seeded = {"temperature": 1.0, "seed": 100 * place + at, "top_k": 50, "repetition_penalty": 1.1}
        params.append(SamplingParams(**plain, **(seeded if at % 3 else {"temperature": 0.0})))
    ids = random_prompts([length + 7 * place for length in lengths])
    return [{"prompt_token_ids": each} for each in ids], params


def generate(llm: Any, place: int, spec: dict) -> dict:
    """Generate and return tokens and log-probs of each request in order, or the error."""
    prompts, params = make_prompts(place, spec)
    try:
        outputs = llm.generate(prompts, params, use_tqdm=False) if prompts else llm._run_engine(use_tqdm=False)
    except RecipeError as error:
        return {"error": str(error)}
    of_prompts = [output.prompt_token_ids for output in outputs] == [each["prompt_token_ids"] for each in prompts]
    samples, responses = [output.outputs[0] for output in outputs], [response_tokens(output)[0] for output in outputs]
    found = {"tokens": [r[0] for r in responses], "log_probs": [r[1] for r in responses], "in order": of_prompts}
    return found | {"reasons": [s.finish_reason for s in samples], "widths": [len(s.logprobs[0]) for s in samples]}


def to_and_fro(rebalance: Any, state: Any, *args: Any) -> Any:
    """Replace the planner: each rank with two or more movable requests gives the first one to the next rank."""
    moves = []
    for rank, row in enumerate(state.lengths):
        movable = [at for at, tokens in enumerate(row) if tokens > 0]
        if len(movable) > 1:
            moves.append(rebalance.RequestMove(rank, (rank + 1) % len(state.lengths), (movable[0],)))
    blocks = sum(-(-int(state.lengths[m.donor][m.requests[0]]) // 128) for m in moves)
    return rebalance.MovePlan(tuple(moves), 8, 8, blocks)


def begun(group: Any) -> int:
    """Return the number of collectives that this process has begun in a group."""
    (device,) = group._device_types
    return group._get_backend(device)._get_sequence_number_for_group()


def rounds(model: str, dp: int, tp: int, specs: list[dict], options: dict) -> list[dict]:
    """Run a round for each spec: lengths and tokens of each DP rank's prompts; every, plan, spoil; `without`.

    plan and spoil are functions of this file, `without` lists patches whose originals are put in place meanwhile. A
    round's result has `steps`, the forward passes of this rank with dummy ones, and `syncs`, collectives over its DP
    group.
    """
    import torch

    from verl_patches.rollout import rebalance, rebalance_engine

    llm = build(model, dp, tp, **options)
    engine, place = llm.llm_engine, torch.distributed.get_rank() // tp
    free, found = engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks, []
    original = engine.engine_core.get_output
    planner = rebalance_engine.plan_moves
    passes = [
        record(engine_worker(llm).model_runner, name, lambda *args, **_: None)
        for name in ("_process_reqs", "_dummy_run")
    ]
    for spec in specs:
        engine.reset_prefix_cache()
        before = free()
        engine.engine_core.get_output, engine.rebalancer = original, None
        rebalance_engine.plan_moves = (
            functools.partial(to_and_fro, rebalance) if spec.get("plan") == "to and fro" else planner
        )
        if "every" in spec:
            rebalance_engine.Rebalancer(engine, spec["every"], rebalance.MoveCost(1, 10**6, fixed_s=0))
            if "spoil" in spec:
                globals()[spec["spoil"]](engine.rebalancer, place)
        counted = sum(map(len, passes)), begun(engine.dp_group)
        with without(spec.get("without", [])):
            got = generate(llm, place, spec)
        got |= {"steps": sum(map(len, passes)) - counted[0], "syncs": begun(engine.dp_group) - counted[1]}
        if engine.rebalancer is not None:
            got |= {
                "moved": engine.rebalancer.moved_count,
                "left over": bool(engine.rebalancer.foreign_tokens) or free() != before,
            }
        if "error" in got:
            _forget_requests(engine)
        found.append(got)
    return found


def _forget_requests(engine: Any) -> None:
    """Remove the requests that an error left; a run would have ended."""
    from vllm.v1.request import RequestStatus

    scheduler = engine.engine_core.engine_core.scheduler
    vars(scheduler.kv_cache_manager).pop("allocate_slots", None)
    engine.output_processor.abort_requests(list(engine.output_processor.request_states))
    scheduler.finish_requests(list(scheduler.requests), RequestStatus.FINISHED_ABORTED)


def drop_a_block(rebalancer: Any, place: int) -> None:
    """Lose what arrives in the first block of each request, as a negative control."""
    exchange = rebalancer._exchange_blocks

    def spoilt(moves: Any, arrivals: Any) -> None:
        exchange(moves, arrivals)
        for moved, request in arrivals:
            for cache in rebalancer._kv_caches():
                cache[rebalancer._kv_blocks(request, moved.computed)[0]] = 0

    rebalancer._exchange_blocks = spoilt


def lose_the_generator(rebalancer: Any, place: int) -> None:
    """Restart the random numbers of a moved request, as a negative control."""
    import torch

    insert = rebalancer._insert_request

    def spoilt(moved: Any, request: Any) -> None:
        if moved.generator:
            moved.generator = torch.Generator().manual_seed(moved.params.seed).get_state().numpy().tobytes()
        insert(moved, request)

    rebalancer._insert_request = spoilt


def fail_to_receive(rebalancer: Any, place: int) -> None:
    """Leave the receiver no blocks."""
    if place == 1:
        rebalancer.scheduler.kv_cache_manager.allocate_slots = lambda *args, **kwargs: None


def fail_to_pack(rebalancer: Any, place: int) -> None:
    """Make a donor fail."""
    if place == 0:
        rebalancer._moved_request = lambda request: 1 / 0


def fail_to_read(rebalancer: Any, place: int) -> None:
    """Make a rank fail before the first collective."""
    if place == 1:
        rebalancer._fill_row = lambda row: 1 / 0
