"""Host work of a decode step of vLLM V1 0.9.1 and vllm-ascend f20869ef that changes nothing, left out.

Wrappers for steps in which every running request gets one token. Whatever is not such a step, or such a request, is
upstream's own work. docs/profile.md has what a step costs with and without them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_HELD = "held_until_it_ends"  # of vLLM's Request: (token, ids, log-probs, rank) of each step that was not handed out


def at_the_end(update_from_output: Callable) -> Callable:
    """Row provider for Scheduler.update_from_output: tokens of a request are handed out once, with its last one.

    vLLM makes an EngineCoreOutput and a dict of log-probs for each request in each step, although LLM.generate asks for
    finished requests alone (RequestOutputKind.FINAL_ONLY). A token that does not end its request is appended to it here
    and held; upstream sees the requests that end. Its next output has all tokens that were held, as with speculative
    decoding. Only requests without text, guided decoding or images are held, and none where the attribute
    `outputs_each_step` of the scheduler is true.
    """

    @functools.wraps(update_from_output)
    def update(self: Any, scheduled: Any, made: Any) -> Any:
        running = self.running
        if _one_token_each(self, scheduled, made):
            ids, log_probs, ranks = made.logprobs or (None, None, None)
            left = []
            for request in running:
                index = made.req_id_to_index[request.request_id]
                (token,) = made.sampled_token_ids[index]
                held = _held(request)
                if held is None or _ends(request, token, self.max_model_len):
                    left.append(request)
                    continue
                request.append_output_token_ids(token)
                held.append((token,) if ids is None else (token, ids[index], log_probs[index], ranks[index]))
            self.running = left
        else:
            left = running
        by_id = {request.request_id: request for request in left if request.__dict__.get(_HELD)}
        outputs = update_from_output(self, scheduled, made)
        for each in outputs.values():
            for output in each.outputs:
                if (request := by_id.get(output.request_id)) is not None:
                    _with_held(output, request.__dict__[_HELD])
        if left is not running:
            ended = {id(request) for request in left} - {id(request) for request in self.running}
            self.running = [request for request in running if id(request) not in ended]
        return outputs

    return update


def _one_token_each(scheduler: Any, scheduled: Any, made: Any) -> bool:
    running = scheduler.running
    return (
        not (scheduled.scheduled_new_reqs or scheduled.scheduled_spec_decode_tokens or made.prompt_logprobs_dict)
        and made.spec_token_ids is None
        and not (scheduler.log_stats or scheduler.connector or getattr(scheduler, "outputs_each_step", False))
        and len(running) == len(scheduled.num_scheduled_tokens) == len(made.sampled_token_ids)
        and all(len(tokens) == 1 for tokens in made.sampled_token_ids)
    )


def _held(request: Any) -> list[tuple] | None:
    """What is held of a request; None where each step's output is asked for."""
    if _HELD not in request.__dict__:
        params = request.sampling_params
        at_once = params.output_kind.name != "FINAL_ONLY" or params.detokenize or params.prompt_logprobs is not None
        request.__dict__[_HELD] = None if at_once or request.use_structured_output or request.has_encoder_inputs else []
    return request.__dict__[_HELD]


def _ends(request: Any, token: int, max_model_len: int) -> bool:
    """Whether vLLM's check_stop (v1/core/sched/utils.py:6) would end the request with this token."""
    params = request.sampling_params
    return (
        request.num_tokens + 1 >= max_model_len
        or request.num_output_tokens + 1 >= request.max_tokens
        or (not params.ignore_eos and token == request.eos_token_id)
        or token in (params.stop_token_ids or ())
    )


def _with_held(output: Any, held: list[tuple]) -> None:
    tokens, *rows = ([*column] for column in zip(*held, strict=True))
    held.clear()
    output.new_token_ids = [*tokens, *output.new_token_ids]
    if rows:
        output.new_logprobs = type(output.new_logprobs)(
            *([*before, *now] for before, now in zip(rows, output.new_logprobs, strict=True))
        )


def log_probs_at_once(update: Callable) -> Callable:
    """Row provider for LogprobsProcessor._update_sample_logprobs: sampled tokens alone, in one loop."""
    from vllm.sequence import Logprob

    @functools.wraps(update)
    def update_all(self: Any, lists: Any) -> None:
        if self.num_logprobs or self.tokenizer is not None:
            return update(self, lists)
        total, made = self.cumulative_logprob, self.logprobs
        for (token, *_), (log_prob, *_), rank in zip(*lists, strict=True):
            total += log_prob
            made.append({token: Logprob(log_prob, rank)})
        self.cumulative_logprob = total

    return update_all


def in_its_last_block(allocate_slots: Callable) -> Callable:
    """Row provider for KVCacheManager.allocate_slots: a token with room in the request's last block needs nothing.

    vLLM asks five functions of its coordinator for each request in each step. With prefix caching they also cache a
    block that gets full, which is left to them.
    """
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    @functools.wraps(allocate_slots)
    def allocate(self: Any, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        if num_new_tokens == 1 and not args and not any(kwargs.values()):
            place, managers = request.num_computed_tokens % self.block_size, self.coordinator.single_type_managers
            fills = self.enable_caching and place + 1 == self.block_size
            if place and not fills and len(managers) == 1 and type(managers[0]) is FullAttentionManager:
                return KVCacheBlocks(([],))
        return allocate_slots(self, request, num_new_tokens, *args, **kwargs)

    return allocate


def states_of_a_decode(update_states: Callable) -> Callable:
    """Row provider for NPUModelRunner._update_states: the batch's arrays are written once a step, not once a request.

    Of a step without new, finished or resumed requests, in which each of the batch gets one token
    (model_runner_v1.py:515-570).
    """
    import numpy as np

    @functools.wraps(update_states)
    def update(self: Any, scheduled: Any) -> None:
        batch, cached = self.input_batch, scheduled.scheduled_cached_reqs
        places = batch.req_id_to_index
        if (
            scheduled.scheduled_new_reqs
            or scheduled.finished_req_ids
            or scheduled.free_encoder_input_ids
            or scheduled.scheduled_spec_decode_tokens
            or not len(cached) == len(places) == scheduled.total_num_scheduled_tokens
            or any(
                r.resumed_from_preemption
                or r.req_id not in places
                or self.requests[r.req_id].num_tokens != r.num_computed_tokens
                for r in cached
            )
        ):
            return update_states(self, scheduled)
        rows, at, tokens = [], [], []
        for request in cached:
            state, row, (token,) = self.requests[request.req_id], places[request.req_id], request.new_token_ids
            state.num_computed_tokens = request.num_computed_tokens
            state.output_token_ids.append(token)
            if any(request.new_block_ids):
                for held, new in zip(state.block_ids, request.new_block_ids, strict=True):
                    held.extend(new)
                batch.block_table.append_row(request.new_block_ids, row)
            rows.append(row)
            at.append(request.num_computed_tokens)
            tokens.append(token)
        ends = np.array(at) + 1
        batch.num_computed_tokens_cpu[rows] = at
        batch.token_ids_cpu[rows, at] = tokens
        batch.num_tokens_no_spec[rows] = batch.num_tokens[rows] = ends

    return update
