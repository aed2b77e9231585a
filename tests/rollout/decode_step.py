"""Measure the host's work in decode steps of vLLM V1 with vllm-ascend on npu_emulated, with an empty model.

`measure` builds one engine with graphs (not traced), puts stand-ins for the model's forward and its logits in place,
and runs batches of sampled requests as verl does (log-probs of the sampled tokens, no text).
"""

from __future__ import annotations

import cProfile
import itertools
import pstats
import statistics
import time
from pathlib import Path
from typing import Any
from unittest import mock

from tests.emulation.emulated_engine import engine_model, engine_worker, make_prompts, record, without

WORDS = 16  # width of the logits, small because a device's kernels cost the host only their launch
SAMPLING = {"temperature": 0.9, "top_p": 0.9, "top_k": 8, "logprobs": 0, "detokenize": False, "ignore_eos": True}


def build_engine(model: str, batch: int) -> Any:
    """Build the engine of the 256-die configurations: graphs, Ascend's scheduler of V1, torch's own pool."""
    import torch
    from vllm import LLM

    from verl_patches.worker.memory import free_memory_device

    free_memory_device.value = torch.npu
    graphs = {"enabled": True, "graph_batch_sizes": [batch], "use_cached_graph": True}
    options = {"torchair_graph_config": graphs, "chunked_prefill_for_mla": True, "refresh": True}
    return LLM(
        model=model,
        max_model_len=1024,
        max_num_seqs=batch,
        max_num_batched_tokens=1024,
        dtype="float32",
        seed=0,
        gpu_memory_utilization=0.5,
        disable_log_stats=True,
        additional_config=options,
        enable_sleep_mode=False,
        skip_tokenizer_init=False,
        num_gpu_blocks_override=batch * 8,
    )


def without_model(llm: Any) -> None:
    """Make forward return zeros and the logits the same random ones in each step, as a device would return them."""
    import torch

    runner, model = engine_worker(llm).model_runner, engine_model(llm)
    runner.device = runner.input_batch.device = torch.device("cpu")
    hidden = torch.zeros(runner.max_num_tokens, model.config.hidden_size)
    logits = torch.randn(runner.max_num_tokens, WORDS, generator=torch.Generator().manual_seed(0))

    def forward(input_ids: Any, **_: Any) -> Any:
        return hidden[: len(input_ids)]

    runner._get_torchair_lazy_compiled_model = lambda size: forward
    model.forward = forward
    model.compute_logits = lambda states, _: logits[: len(states)].clone()


def decode(llm: Any, batch: int, tokens: int, profiler: cProfile.Profile | None = None) -> tuple[float, list]:
    """Return (mean CPU ms of a decode step, including the last one's outputs, (tokens, log-probs) of each request)."""
    import torch
    from vllm import SamplingParams

    engine, times = llm.llm_engine, []
    step = type(engine).step

    def timed() -> Any:
        mode = torch._C._pop_torch_function_stack()  # the emulation's mode
        start = time.process_time()
        if profiler is not None and len(times) > 2:
            profiler.enable()
        made = step(engine)
        if profiler is not None:
            profiler.disable()
        times.append(1e3 * (time.process_time() - start))
        torch._C._push_on_torch_function_stack(mode)
        return made

    torch.manual_seed(1)
    engine.step = timed
    asked = [{"prompt_token_ids": ids} for ids in make_prompts([8] * batch)]
    outputs = llm.generate(asked, SamplingParams(max_tokens=tokens, **SAMPLING), use_tqdm=False)
    del engine.step
    made = [output.outputs[0] for output in outputs]
    log_probs = [[s[t].logprob for s, t in zip(o.logprobs, o.token_ids, strict=True)] for o in made]
    return statistics.mean(times[1:]), [(list(o.token_ids), each) for o, each in zip(made, log_probs, strict=True)]


ROWS = ["rollout.outputs_at_the_end", "rollout.log_probs_at_once", "rollout.steps_alike"]


def main(model: str, batch: int, tokens: int, repeats: int = 3, profile: str | None = None) -> dict[str, Any]:
    """Return {"before", "after": CPU ms of a decode step, the median of repeats; "same": whether responses are equal}.

    "before" is without ROWS and with garbage collection unchanged. profile: a file for the profiler's tables of both.
    """
    import torch

    torch.set_num_threads(1)
    llm = build_engine(model, batch)
    without_model(llm)
    decode(llm, batch, 8)
    steps, answers = {"before": [], "after": []}, []
    for _ in range(repeats):
        with without(ROWS):
            times, made = decode(llm, batch, tokens)
        steps["before"].append(times)
        answers.append(made)
        times, made = decode(llm, batch, tokens)
        steps["after"].append(times)
        answers.append(made)
    if profile:
        with Path(profile).open("w") as out:
            for rows in (ROWS, []):
                profiler = cProfile.Profile()
                with without(rows):
                    decode(llm, batch, tokens, profiler)
                stats = pstats.Stats(profiler, stream=out)
                stats.sort_stats("tottime").print_stats(45)
                stats.sort_stats("cumtime").print_stats(70)
    found = {name: statistics.median(each) for name, each in steps.items()}
    return {**found, "same": all(made == answers[0] for made in answers)}


def uneven(model: str) -> dict[str, Any]:
    """Return whether responses are equal with ROWS, without all and without each, if requests end at different steps.

    There are 12 sampled requests of 1 to 29 tokens, of which some end by a token, in batches of at most 8 and with too
    few KV blocks for all; `freed` and `alike`: blocks freed and steps that were not scheduled, with all rows.
    `preempted`, `by vLLM`: requests preempted, as we and as vLLM count them. `text`: requests with text, which is
    returned in each step. `some log-probs`: every third request has them. `one prompt`: two responses of each of four
    prompts, which share blocks, after aborted requests. `control`: with a fault.
    """
    import torch
    from vllm import LLM, SamplingParams
    from vllm.v1.engine import EngineCoreEventType
    from vllm.v1.request import Request

    from verl_patches.rollout import decode_host
    from verl_patches.rollout.engine import PreemptionCounter

    limits = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 512}
    llm = LLM(model=model, dtype="float32", seed=0, enforce_eager=True, additional_config={"refresh": True}, **limits)
    engine, scheduler = llm.llm_engine, llm.llm_engine.engine_core.engine_core.scheduler
    preempted, cache = PreemptionCounter(engine), scheduler.kv_cache_manager
    freed, pool = record(cache, "free", lambda *_: 1), cache.block_pool
    pool.get_new_blocks(pool.get_num_free_blocks() - 9)  # leave 9 blocks of 128 tokens
    steps = record(engine_worker(llm).model_runner, "execute_model", lambda _, scheduled: scheduled)

    def answers(rows: list[str], asked: Any, params: list) -> list:
        torch.manual_seed(1)
        with without(rows):
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in asked], params, use_tqdm=False)
        return [
            (list(o.token_ids), o.cumulative_logprob, o.finish_reason, o.stop_reason, o.logprobs)
            for output in outputs
            for o in output.outputs
        ]

    def twelve(rows: list[str], **options: Any) -> list:
        sampling = {**SAMPLING, "ignore_eos": False, "stop_token_ids": list(range(3, 12)), **options}
        params = [SamplingParams(max_tokens=1 + 7 * n % 30, **sampling) for n in range(12)]
        if options.get("logprobs", 0) is None:
            for each in params[::3]:
                each.logprobs = 0
        return answers(rows, make_prompts([116 + n for n in range(12)]), params)

    def shared(rows: list[str]) -> list:
        (start,) = make_prompts([130])
        params = [SamplingParams(n=2, min_tokens=5, max_tokens=10 + n, seed=n, **SAMPLING) for n in range(4)]
        with without(rows):
            for n in range(6):
                engine.add_request(str(n), {"prompt_token_ids": start}, SamplingParams(max_tokens=40, **SAMPLING))
            for _ in range(4):
                engine.step()
            engine.abort_request([str(n) for n in range(5)])
            engine.step()
            engine.abort_request(["5"])
        return answers(rows, [start] * 3 + make_prompts([20]), params)

    expected = twelve(ROWS)
    found = {row: twelve([row]) == expected for row in ROWS}
    freed.clear(), steps.clear()
    found |= {"all": twelve([]) == expected, "freed": len(freed)}
    found |= {"alike": sum(before is now for before, now in itertools.pairwise(steps))}
    preempted.take()
    scheduler.log_stats, scheduler.make_stats = True, lambda *_: None  # vLLM notes its preemptions, and no other figure
    events = record(Request, "record_event", lambda _, request, event, *time: event)
    twelve([])
    scheduler.log_stats = False
    found |= {"preempted": preempted.take(), "by vLLM": events.count(EngineCoreEventType.PREEMPTED)}
    found |= {"text": twelve([], detokenize=True) == twelve(ROWS, detokenize=True)}
    found |= {"some log-probs": twelve([], logprobs=None) == twelve(ROWS, logprobs=None)}
    shared(ROWS)  # from here on its first block is cached
    found |= {"one prompt": shared([]) == shared(ROWS), "reasons": sorted({reason for _, _, reason, *_ in expected})}
    with mock.patch.object(decode_host, "_prepend_held_tokens", lambda output, held: held.clear()):
        try:
            found["control"] = twelve([]) == expected
        except Exception:  # fewer log-probs than tokens
            found["control"] = False
    return found
