"""Encode what ranks send each other when requests move, as msgpack, which vLLM uses for requests too; no pickle.

A segment, for one receiver, holds results and requests. KV blocks go in collectives of their own (rebalance_engine.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec


@dataclass
class RequestTokens:
    """Hold the tokens that a rank has generated for a request of another rank since the last exchange.

    id: the request's id at rank `origin`. tokens [T]; log_prob_ids, log_probs [T, columns], ranks [T]: vLLM's
    LogprobsLists, empty without log-probs. finish, stop: reason and stop token once it has ended, else None.
    """

    id: str
    origin: int
    columns: int
    tokens: list[int] = field(default_factory=list)
    log_prob_ids: list[list[int]] = field(default_factory=list)
    log_probs: list[list[float]] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    finish: int | None = None
    stop: int | None = None
    cached: int = 0

    def add(self, output: Any) -> None:
        """Add vLLM's EngineCoreOutput of one step."""
        self.tokens += output.new_token_ids
        if self.columns:
            self.log_prob_ids += [ids[: self.columns] for ids in output.new_logprobs.logprob_token_ids]
            self.log_probs += [values[: self.columns] for values in output.new_logprobs.logprobs]
            self.ranks += output.new_logprobs.sampled_token_ranks
        self.finish, self.stop, self.cached = output.finish_reason, output.stop_reason, output.num_cached_tokens

    def output(self) -> Any:
        """Return all tokens as one EngineCoreOutput for the origin's output processor."""
        from vllm.v1.engine import EngineCoreOutput, FinishReason
        from vllm.v1.outputs import LogprobsLists

        log_probs = LogprobsLists(self.log_prob_ids, self.log_probs, self.ranks) if self.columns else None
        finish = None if self.finish is None else FinishReason(self.finish)
        more = {"finish_reason": finish, "stop_reason": self.stop, "num_cached_tokens": self.cached}
        return EngineCoreOutput(self.id, self.tokens, new_logprobs=log_probs, **more)


@dataclass
class MovedRequest:
    """Hold a moving request: all that another engine needs to continue it, except its KV blocks.

    origin: the DP rank that verl gave it to; id: its id there. computed: tokens in KV; output holds one more, which the
    next step computes. params: vLLM's SamplingParams. generator: state of its own random generator, empty without a
    seed.
    """

    id: str
    origin: int
    prompt: list[int]
    output: list[int]
    params: Any
    generator: bytes
    computed: int
    eos: int | None
    cached: int


def pack_segment(results: Sequence[RequestTokens], requests: Sequence[MovedRequest]) -> bytes:
    """Return the segment for one receiver."""
    return msgspec.msgpack.encode((results, requests))


def unpack_segment(segment: bytes) -> tuple[list[RequestTokens], list[MovedRequest]]:
    """Return both lists of a segment; raises msgspec.DecodeError if it is not a segment of this version."""
    from vllm import SamplingParams

    results, requests = msgspec.msgpack.decode(segment, type=tuple[list[RequestTokens], list[MovedRequest]])
    for request in requests:
        request.params = msgspec.convert(request.params, SamplingParams)
    return results, requests
