"""Skip host work in decode steps of vLLM V1 0.9.1 and vllm-ascend f20869ef that does not change their result.

The wrappers handle steps in which every running request gets one token, and leave other steps and requests to upstream.
docs/operate.md has the cost of a step with and without them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

LAST_SCHEDULE = "reusable_schedule"  # attribute of vLLM's Scheduler: its last output, if a next step may reuse it
_HELD_TOKENS = "held_tokens"  # attribute of vLLM's Request: (token, ids, log-probs, rank) of each step held back


def defer_outputs(update_from_output: Callable) -> Callable:
    """Wrap Scheduler.update_from_output so that a request's tokens are all returned with its last one.

    vLLM makes an EngineCoreOutput and a dict of log-probs for each request in each step, although LLM.generate asks for
    finished requests alone (RequestOutputKind.FINAL_ONLY). Here a token that does not end its request is appended to
    it and held back, and upstream's function sees only the requests that end. A request's next output has all tokens
    that were held back, as with speculative decoding. Requests with text output, guided decoding or images are left to
    upstream. All tokens are returned in a step in which the scheduler's attribute `outputs_each_step` is true.
    """

    @functools.wraps(update_from_output)
    def update(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        running, result = self.running, model_runner_output
        if _is_one_token_step(self, scheduler_output, result):
            rows: tuple[Any, Any, Any] = result.logprobs or (None, None, None)
            ids, log_probs, ranks = rows
            left = []
            for request in running:
                index = result.req_id_to_index[request.request_id]
                (token,) = result.sampled_token_ids[index]
                held = _held_tokens(request)
                if held is None or _ends_request(request, token, self.max_model_len):
                    left.append(request)
                    continue
                request.append_output_token_ids(token)
                alone = ids is None or request.sampling_params.logprobs is None  # a step has ids if any wants them
                held.append((token,) if alone else (token, ids[index], log_probs[index], ranks[index]))
            self.running = left
        else:
            left = running
        by_id = {request.request_id: request for request in left if request.__dict__.get(_HELD_TOKENS)}
        outputs = update_from_output(self, scheduler_output, result)
        for each in outputs.values():
            for output in each.outputs:
                if (request := by_id.get(output.request_id)) is not None:
                    _prepend_held_tokens(output, request.__dict__[_HELD_TOKENS])
        if left is not running:
            ended = {id(request) for request in left} - {id(request) for request in self.running}
            self.running = [request for request in running if id(request) not in ended]
        return outputs

    return update


def _is_one_token_step(scheduler: Any, scheduled: Any, result: Any) -> bool:
    running = scheduler.running
    return (
        not (scheduled.scheduled_new_reqs or scheduled.scheduled_spec_decode_tokens or result.prompt_logprobs_dict)
        and result.spec_token_ids is None
        and not (scheduler.log_stats or scheduler.connector or getattr(scheduler, "outputs_each_step", False))
        and len(running) == len(scheduled.num_scheduled_tokens) == len(result.sampled_token_ids)
        and all(len(tokens) == 1 for tokens in result.sampled_token_ids)
    )


def _held_tokens(request: Any) -> list[tuple] | None:
    """Return the tokens held back for a request, None where its output must be returned in each step."""
    if _HELD_TOKENS not in request.__dict__:
        params = request.sampling_params
        at_once = params.output_kind.name != "FINAL_ONLY" or params.detokenize or params.prompt_logprobs is not None
        at_once = at_once or request.use_structured_output or request.has_encoder_inputs
        request.__dict__[_HELD_TOKENS] = None if at_once else []
    return request.__dict__[_HELD_TOKENS]


def _ends_request(request: Any, token: int, max_model_len: int) -> bool:
    """Return whether `vllm.v1.core.sched.utils.check_stop` would end the request with this token."""
    params = request.sampling_params
    return (
        request.num_tokens + 1 >= max_model_len
        or request.num_output_tokens + 1 >= request.max_tokens
        or (not params.ignore_eos and token == request.eos_token_id)
        or token in (params.stop_token_ids or ())
    )


def _prepend_held_tokens(output: Any, held: list[tuple]) -> None:
    tokens, *rows = ([*column] for column in zip(*held, strict=True))
    held.clear()
    output.new_token_ids = [*tokens, *output.new_token_ids]
    if rows:
        output.new_logprobs = type(output.new_logprobs)(
            *([*before, *now] for before, now in zip(rows, output.new_logprobs, strict=True))
        )


def add_log_probs(update: Callable) -> Callable:
    """Wrap LogprobsProcessor._update_sample_logprobs: if only sampled tokens have log-probs, a plain loop adds them."""
    from vllm.sequence import Logprob

    @functools.wraps(update)
    def update_all(self: Any, logprobs_lists: Any) -> None:
        if self.num_logprobs or self.tokenizer is not None:
            return update(self, logprobs_lists)
        total, result = self.cumulative_logprob, self.logprobs
        for (token, *_), (log_prob, *_), rank in zip(*logprobs_lists, strict=True):
            total += log_prob
            result.append({token: Logprob(log_prob, rank)})
        self.cumulative_logprob = total

    return update_all


def reuse_schedule(schedule: Callable) -> Callable:
    """Wrap Scheduler.schedule so that a step of the same requests reuses the last output with the new tokens.

    vLLM makes 15 calls for each request in each step. vLLM still schedules a step in which requests wait, have ended,
    cannot get a block, or do not get exactly one token each.
    """

    @functools.wraps(schedule)
    def next_step(self: Any) -> Any:
        last, running, cache = self.__dict__.get(LAST_SCHEDULE), self.running, self.kv_cache_manager
        if (
            last is None
            or self.waiting
            or self.finished_req_ids
            or len(running) != len(last.num_scheduled_tokens)
            or len(running) > cache.block_pool.get_num_free_blocks()
            or self.encoder_cache_manager.freed
            or not all(r.num_tokens == r.num_computed_tokens + 1 < self.max_model_len for r in running)
        ):
            result = schedule(self)
            self.__dict__[LAST_SCHEDULE] = result if _is_reusable(self, result) else None
            return result
        for request, data in zip(running, last.scheduled_cached_reqs, strict=True):
            computed = request.num_computed_tokens
            self._cached_reqs_data[data.req_id].popleft()  # update_from_output puts the same object back
            place = computed % cache.block_size
            # vLLM allocates a block with its first token, and caches it with its last
            at_end = place == 0 or (cache.enable_caching and place + 1 == cache.block_size)
            data.new_block_ids = cache.allocate_slots(request, 1).get_block_ids() if at_end else ([],)
            data.new_token_ids, data.num_computed_tokens = [request.all_token_ids[computed]], computed
            request.num_computed_tokens = computed + 1
        last.finished_req_ids = self.finished_req_ids = set()
        return last

    return next_step


def _is_reusable(scheduler: Any, result: Any) -> bool:
    """Return whether `result` schedules each running request, in their order, for one token, and nothing else."""
    cached = result.scheduled_cached_reqs
    return (
        not (result.scheduled_new_reqs or result.scheduled_spec_decode_tokens or result.scheduled_encoder_inputs)
        and result.grammar_bitmask is None
        and scheduler.connector is None
        and len(scheduler.kv_cache_config.kv_cache_groups) == 1
        and len(cached) == result.total_num_scheduled_tokens == len(scheduler.running)
        and not any(data.resumed_from_preemption for data in cached)
        and all(data.req_id == request.request_id for data, request in zip(cached, scheduler.running, strict=True))
    )
