"""Move running requests, with their KV blocks, between the data-parallel (DP) engines of one vLLM V1 instance.

Every `every` engine steps all ranks of the instance exchange requests, at the same step, as they decode in lock step:
1. One all-gather of a row of fixed size a rank: the lengths of its requests, its free KV blocks, whether it failed.
2. All compute the same plan (rebalance.py).
3. Bytes (rebalance_wire.py): tokens and log-probs that were generated for requests of other ranks, and moving requests.
4. KV blocks, one all-to-all for each tensor of the cache.
Where 1 finds nothing to move or to return, the exchange ends. The ranks of a tensor-parallel group hold the same
requests; each exchanges with the ranks of its own DP group.

A request has its entry in the output processor of its origin, the rank that verl gave it to, with the tokens and
log-probs so far; that rank returns the request as if it had generated all of it. The request's random generator moves
with it. Requests without a seed draw from their rank's generator, so they get other samples of the same distribution.

An error on a rank is raised on all of them before the next collective (reshard/rank_errors.py).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from verl_patches.errors import ConfigError
from verl_patches.reshard.rank_errors import RankError, catch_errors, raise_on_any_rank
from verl_patches.rollout.decode_host import LAST_SCHEDULE
from verl_patches.rollout.rebalance import (
    FIXED_REQUEST,
    NO_REQUEST,
    InstanceState,
    MoveCost,
    MovePlan,
    RequestMove,
    plan_moves,
)
from verl_patches.rollout.rebalance_wire import MovedRequest, RequestTokens, pack_segment, unpack_segment

_FAILED, _PREFILLS, _FREE, _FOREIGN, _LENGTHS = range(5)  # columns of a row; all columns from _LENGTHS on are lengths
COUNTS = ("requests", "bytes", "seconds")


class RebalanceError(RankError):
    """Report that requests cannot be moved between data-parallel ranks; the message names rank and reason."""

    task = "rollout rebalance"


def step_with_rebalance(step: Callable) -> Callable:
    """Wrap LLMEngine.step so that an engine with a `rebalancer` exchanges requests before every N-th step."""

    @functools.wraps(step)
    def step_or_exchange(self: Any) -> list[Any]:
        rebalancer = self.__dict__.get("rebalancer")
        return step(self) if rebalancer is None else rebalancer.step(step)

    return step_or_exchange


def unfinished_with_rebalance(has_unfinished_requests: Callable) -> Callable:
    """Wrap LLMEngine.has_unfinished_requests to count the requests that a rank holds now, not those given to it."""

    @functools.wraps(has_unfinished_requests)
    def has_unfinished(self: Any) -> bool:
        rebalancer = self.__dict__.get("rebalancer")
        return has_unfinished_requests(self) if rebalancer is None else rebalancer.has_unfinished()

    return has_unfinished


class Rebalancer:
    """Exchange requests of one rank's LLMEngine, to which it is attached as `rebalancer`.

    every: engine steps between exchanges. cost: the cost of moves, by default that of this engine's KV blocks.
    Raises ConfigError for an engine that it cannot work with.
    """

    def __init__(self, engine: Any, every: int, cost: MoveCost | None = None):
        from vllm.distributed.parallel_state import get_dp_group, get_ep_group

        _check_engine(engine)
        core, config = engine.engine_core.engine_core, engine.vllm_config
        self.engine, self.scheduler, self.every = engine, core.scheduler, every
        self.runner = core.model_executor.driver_worker.worker.model_runner
        self.instance, self.dp = get_ep_group().cpu_group, get_dp_group()  # vLLM's EP group is DP x TP
        self.tp, self.rank = config.parallel_config.tensor_parallel_size, self.dp.rank_in_group
        self.block_size, self.most = config.cache_config.block_size, config.scheduler_config.max_num_seqs
        graphs = self.runner.torchair_graph_enabled
        self.tiers = sorted(self.runner.torchair_graph_batch_sizes) if graphs else list(range(1, self.most + 1))
        self.cost = cost or MoveCost(sum(map(_block_bytes, self._kv_caches())), every)
        # {local id of a request of another rank: its tokens that are not sent back yet}
        self.foreign_tokens: dict[str, RequestTokens] = {}
        self.steps, self.moved_count, self.only_returns, self.has_moved_requests = 0, 0, False, False
        self._counts: dict[str, float] = dict.fromkeys(COUNTS, 0)
        engine.engine_core.get_output = self._take_foreign_outputs(engine.engine_core.get_output)
        engine.rebalancer = self

    # -- the engine's loop ---------------------------------------------------------------------------------------------

    def has_unfinished(self) -> bool:
        """Return whether any rank of the DP group must continue, if only for the last exchange of results."""
        from vllm.config import ParallelConfig

        holds = self._holds_requests()
        if self._is_exchange(self.steps + 1):  # that exchange may bring requests to a rank that has none now
            unfinished = ParallelConfig.has_unfinished_dp(self.engine.dp_group, holds)
        else:
            unfinished = self.engine.has_unfinished_requests_dp(holds)
        if unfinished:
            return True
        self.only_returns = self.has_moved_requests  # equal on all ranks; the next `step` is then an exchange alone
        return self.only_returns

    def step(self, upstream: Callable[[Any], list[Any]]) -> list[Any]:
        """Run one engine step, after an exchange where one is due, and return this rank's requests that have ended."""
        self.steps += 1
        if self.only_returns:
            self.only_returns = False
            return self._timed_exchange()
        outputs = []
        if self._is_exchange(self.steps):
            outputs = self._timed_exchange()
            self.engine.should_execute_dummy_batch = not self._holds_requests()
        self.scheduler.outputs_each_step = self._is_exchange(self.steps + 1)  # all are returned before a move
        return outputs + upstream(self.engine)

    def take_counts(self) -> dict[str, float]:
        """Return requests and bytes of KV that this rank has sent, and seconds of all exchanges, since the last call.

        In a tensor-parallel group only the first rank counts the requests.
        """
        counts, self._counts = self._counts, dict.fromkeys(COUNTS, 0)
        return counts

    def _is_exchange(self, step: int) -> bool:
        return step % self.every == 0

    def _holds_requests(self) -> bool:
        return self.scheduler.get_num_unfinished_requests() > 0

    def _take_foreign_outputs(self, get_output: Callable) -> Callable:
        @functools.wraps(get_output)
        def own_outputs() -> Any:
            outputs = get_output()
            for output in outputs.outputs:
                if output.request_id in self.foreign_tokens:
                    self.foreign_tokens[output.request_id].add(output)
            outputs.outputs = [output for output in outputs.outputs if output.request_id not in self.foreign_tokens]
            return outputs

        return own_outputs

    # -- an exchange ---------------------------------------------------------------------------------------------------

    def _timed_exchange(self) -> list[Any]:
        begin = time.perf_counter()
        try:
            return self._exchange()
        finally:
            self._counts["seconds"] += time.perf_counter() - begin

    def _exchange(self) -> list[Any]:
        """Exchange requests (collective), and return the requests of this rank that have ended elsewhere."""
        rows = self._gather_rows()
        plan = self._plan_moves(rows)
        # true while requests may run on other ranks; once all have ended, one more exchange finds nothing
        self.has_moved_requests = bool(rows[:, _FOREIGN].any()) or bool(plan.moves)
        if not self.has_moved_requests:
            return []
        segments: list[bytes] = []
        self._run_or_raise(lambda: segments.extend(self._pack(plan.moves)), "moving requests cannot be packed")
        received: list[bytes] = self._exchange_segments(segments)
        outputs: list[Any] = []
        arrivals: list[tuple[MovedRequest, Any]] = []
        expected = [
            int(rows[m.donor, _LENGTHS + at]) for m in plan.moves if m.receiver == self.rank for at in m.requests
        ]
        unpack = functools.partial(self._unpack, received, expected, outputs, arrivals)
        self._run_or_raise(unpack, "moving requests cannot be received")
        if plan.moves:
            self._exchange_blocks(plan.moves, arrivals)
            self._run_or_raise(lambda: self._reschedule(plan.moves, arrivals), "moved requests cannot be scheduled")
            self.moved_count += sum(len(move.requests) for move in plan.moves)
        return outputs

    def _run_or_raise(self, work: Callable[[], None], todo: str) -> None:
        raise_on_any_rank(catch_errors(work), self.instance, "cpu", todo, RebalanceError)

    def _gather_rows(self) -> np.ndarray:
        """Return the rows of all DP ranks, [DP, columns]."""
        row = torch.zeros(_LENGTHS + self.most, dtype=torch.int64)
        problems = catch_errors(lambda: self._fill_row(row.numpy()))
        row[_FAILED] = len(problems)
        gathered = [torch.empty_like(row) for _ in range(dist.get_world_size(self.instance))]
        dist.all_gather(gathered, row, group=self.instance)
        rows = torch.stack(gathered).numpy().reshape(-1, self.tp, len(row))  # [DP, TP, columns]
        if rows[..., _FAILED].any():
            todo = "the state of the scheduler cannot be read"
            raise_on_any_rank(problems, self.instance, "cpu", todo, RebalanceError)
        if (unequal := (rows != rows[:, :1]).any((1, 2))).any():
            raise RebalanceError(
                f"{RebalanceError.task}: the tensor-parallel ranks of DP rank {int(unequal.argmax())} hold different "
                "requests; expected the same ones; look for prompts or engine arguments that differ between them"
            )
        return rows[:, 0]

    def _fill_row(self, row: np.ndarray) -> None:
        requests = [*self.scheduler.running, *self.scheduler.waiting]
        waits = bool(self.scheduler.waiting)
        row[_PREFILLS] = waits or any(r.num_computed_tokens < r.num_tokens - 1 for r in requests)
        row[_FREE] = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        row[_FOREIGN] = len(self.foreign_tokens)
        row[_LENGTHS:] = NO_REQUEST
        if not row[_PREFILLS]:  # with prefills nothing moves, and there may be more requests than columns
            row[_LENGTHS : _LENGTHS + len(requests)] = [
                r.num_computed_tokens if _is_movable(r) else FIXED_REQUEST for r in requests
            ]

    def _plan_moves(self, rows: np.ndarray) -> MovePlan:
        if rows[:, _PREFILLS].any():  # the prefills, not the tier, decide how long a step lasts
            return MovePlan((), 0, 0)
        state = InstanceState(rows[:, _LENGTHS:], rows[:, _FREE])
        return plan_moves(state, self.tiers, self.block_size, self.every, self.cost)

    def _pack(self, moves: Sequence[RequestMove]) -> list[bytes]:
        """Return the segment for each DP rank: tokens generated here for its requests, and requests that move there."""
        leaving = {move.receiver: self._requests_to_move(move) for move in moves if move.donor == self.rank}
        segments = []
        for rank in range(self.dp.world_size):
            results = [result for result in self.foreign_tokens.values() if result.origin == rank and result.tokens]
            segments.append(pack_segment(results, [self._moved_request(request) for request in leaving.get(rank, ())]))
        self.foreign_tokens = {
            id: RequestTokens(result.id, result.origin, result.columns)
            for id, result in self.foreign_tokens.items()
            if result.finish is None
        }
        return segments

    def _requests_to_move(self, move: RequestMove) -> list[Any]:
        return [self.scheduler.running[at] for at in move.requests]

    def _moved_request(self, request: Any) -> MovedRequest:
        foreign, state = self.foreign_tokens.get(request.request_id), self.runner.requests[request.request_id]
        generator = b"" if state.generator is None else state.generator.get_state().numpy().tobytes()
        return MovedRequest(
            id=request.request_id if foreign is None else foreign.id,
            origin=self.rank if foreign is None else foreign.origin,
            prompt=list(request.prompt_token_ids),
            output=list(request.output_token_ids),
            params=request.sampling_params,
            generator=generator,
            computed=request.num_computed_tokens,
            eos=request.eos_token_id,
            cached=request.num_cached_tokens,
        )

    def _exchange_segments(self, segments: list[bytes]) -> list[bytes]:
        """Return the segment from each DP rank."""
        sizes = torch.tensor([len(segment) for segment in segments], dtype=torch.int64)
        sizes_in = torch.empty_like(sizes)
        dist.all_to_all_single(sizes_in, sizes, group=self.dp.cpu_group)
        data = torch.frombuffer(bytearray(b"".join(segments)), dtype=torch.uint8)
        received = torch.empty(int(sizes_in.sum()), dtype=torch.uint8)
        dist.all_to_all_single(received, data, sizes_in.tolist(), sizes.tolist(), group=self.dp.cpu_group)
        return [part.numpy().tobytes() for part in received.split(sizes_in.tolist())]

    def _unpack(
        self, received: list[bytes], expected: list[int], outputs: list[Any], arrivals: list[tuple[MovedRequest, Any]]
    ) -> None:
        """Give results to the output processor, and KV blocks to requests, which have `expected` tokens in KV."""
        segments = [unpack_segment(segment) for segment in received]
        results = [result for results_of_one, _ in segments for result in results_of_one]
        moved = [each for _, results_of_one in segments for each in results_of_one]
        if [each.computed for each in moved] != expected:
            found = [each.computed for each in moved]
            raise RebalanceError(f"received requests of {found} tokens in KV; expected {expected}, as planned")
        processed = self.engine.output_processor.process_outputs([result.output() for result in results])
        outputs += processed.request_outputs
        for each in moved:
            request = self._make_request(each)
            if self.scheduler.kv_cache_manager.allocate_slots(request, each.computed, delay_cache_blocks=True) is None:
                free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
                raise RebalanceError(f"request {each.id} of {each.computed} tokens does not fit into {free} KV blocks")
            arrivals.append((each, request))

    def _make_request(self, moved: MovedRequest) -> Any:
        from vllm.v1.request import Request

        id = moved.id if moved.origin == self.rank else f"{moved.origin}:{moved.id}"
        request = Request(id, moved.prompt, None, None, None, moved.params, moved.eos)
        request.append_output_token_ids(moved.output)
        return request

    # -- KV blocks, scheduler and model runner -------------------------------------------------------------------------

    def _kv_caches(self) -> list[torch.Tensor]:
        """Return the KV cache's tensors [blocks, ...] of all layers."""
        tensors: list[torch.Tensor] = []
        for cache in self.runner.kv_caches:
            tensors += cache if isinstance(cache, (tuple, list)) else [cache]
        return tensors

    def _kv_blocks(self, request: Any, computed: int) -> list[int]:
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        return blocks[: -(-computed // self.block_size)]

    def _exchange_blocks(self, moves: Sequence[RequestMove], arrivals: Sequence[tuple[MovedRequest, Any]]) -> None:
        """Exchange the KV blocks of `moves` in the order of their requests; arrivals are in the order of donors."""
        sent, received = [0] * self.dp.world_size, [0] * self.dp.world_size
        leaving, coming, arriving = [], [], iter(arrivals)
        for move in moves:  # in order of donors, then receivers
            if move.donor == self.rank:
                for request in self._requests_to_move(move):
                    blocks = self._kv_blocks(request, request.num_computed_tokens)
                    leaving += blocks
                    sent[move.receiver] += len(blocks)
            if move.receiver == self.rank:
                for moved, request in [next(arriving) for _ in move.requests]:
                    blocks = self._kv_blocks(request, moved.computed)
                    coming += blocks
                    received[move.donor] += len(blocks)
        device = self.runner.device
        leaving_at, coming_at = (torch.tensor(blocks, dtype=torch.int64, device=device) for blocks in (leaving, coming))
        for cache in self._kv_caches():
            into = cache.new_empty((len(coming), *cache.shape[1:]))
            dist.all_to_all_single(into, cache[leaving_at], received, sent, group=self.dp.device_group)
            cache[coming_at] = into
            self._counts["bytes"] += len(leaving) * _block_bytes(cache)

    def _reschedule(self, moves: Sequence[RequestMove], arrivals: Sequence[tuple[MovedRequest, Any]]) -> None:
        leaving = [request for move in moves if move.donor == self.rank for request in self._requests_to_move(move)]
        vars(self.scheduler).pop(LAST_SCHEDULE, None)
        if leaving:
            self._remove_requests(leaving)
            if dist.get_rank(self.instance) % self.tp == 0:
                self._counts["requests"] += len(leaving)
        for moved, request in arrivals:
            self._insert_request(moved, request)

    def _remove_requests(self, requests: Sequence[Any]) -> None:
        """Remove requests from scheduler and model runner without a trace, and free their KV blocks."""
        from vllm.v1.request import RequestStatus

        batch, places = self.runner.input_batch, []
        for request in requests:
            id = request.request_id
            self.scheduler.finish_requests(id, RequestStatus.FINISHED_ABORTED)
            self.scheduler.finished_req_ids.discard(id)  # the runner's state goes below; the request may return here
            self.runner.requests.pop(id)
            place = batch.remove_request(id)
            if place is not None:
                places.append(place)
            self.foreign_tokens.pop(id, None)
        batch.condense(sorted(places, reverse=True))
        batch.refresh_sampling_metadata()

    def _insert_request(self, moved: MovedRequest, request: Any) -> None:
        """Add a moved request as a running one; the model runner adds its state to its batch at the next step."""
        from vllm.v1.request import RequestStatus
        from vllm.v1.worker.gpu_input_batch import CachedRequestState

        generator, id = None, request.request_id
        if moved.generator:
            generator = torch.Generator(device=self.runner.device)
            generator.set_state(torch.frombuffer(bytearray(moved.generator), dtype=torch.uint8))
        request.num_computed_tokens, request.num_cached_tokens = moved.computed, moved.cached
        request.status = RequestStatus.RUNNING
        self.runner.requests[id] = CachedRequestState(
            req_id=id,
            prompt_token_ids=moved.prompt,
            mm_inputs=[],
            mm_positions=[],
            sampling_params=moved.params,
            generator=generator,
            block_ids=self.scheduler.kv_cache_manager.get_block_ids(id),
            num_computed_tokens=moved.computed,
            output_token_ids=list(moved.output),
        )
        self.scheduler.requests[id] = request
        self.scheduler.running.append(request)
        if moved.origin != self.rank:
            columns = 0 if moved.params.logprobs is None else moved.params.logprobs + 1
            self.foreign_tokens[id] = RequestTokens(moved.id, moved.origin, columns)


def _block_bytes(cache: torch.Tensor) -> int:
    return cache.nbytes // len(cache)  # not cache[0].nbytes: a sleeping engine has no cache[0]


def _is_movable(request: Any) -> bool:
    """Return whether another rank can continue a request: it decodes, and needs only its tokens, parameters and KV.

    Requests with stop strings stay: the output processor of their origin looks for the strings and would see the tokens
    too late.
    """
    params = request.sampling_params
    not_sent = (params.stop, params.guided_decoding, params.logits_processors, request.lora_request, request.mm_inputs)
    decodes = request.num_output_tokens > 0 and request.num_computed_tokens == request.num_tokens - 1
    log_probs = params.prompt_logprobs is None and (params.logprobs or 0) >= 0
    return decodes and log_probs and not any(not_sent) and not request.spec_token_ids


def _check_engine(engine: Any) -> None:
    core = getattr(getattr(engine, "engine_core", None), "engine_core", None)
    if core is None:
        faults = ["it is not vLLM's in-process V1 engine"]
    else:
        config, scheduler = engine.vllm_config, type(core.scheduler).__name__
        wrong_scheduler = f"its scheduler is {scheduler}, expected vLLM's own (no ascend_scheduler_config)"
        unfit = (
            (scheduler != "Scheduler", wrong_scheduler),
            (config.parallel_config.data_parallel_size == 1, "it has only one data-parallel rank"),
            (config.parallel_config.pipeline_parallel_size > 1, "it has pipeline stages"),
            (config.speculative_config is not None, "it decodes speculatively"),
            (len(core.scheduler.kv_cache_config.kv_cache_groups) > 1, "its layers have several kinds of KV cache"),
        )
        faults = [text for holds, text in unfit if holds]
    if faults:
        raise ConfigError(
            f"recipe.rollout.rebalance_every is set, but the rollout engine cannot move requests: {'; '.join(faults)}; "
            "set recipe.rollout.rebalance_every=null"
        )
