"""Binary layout of what ranks send each other when requests move; no pickle.

A segment, for one receiver: results, then requests. Each of both lists: int64 count, then messages. A message: int64
length of each of its fields, then the fields; numbers are int64 or float64 of this machine's byte order, sampling
parameters are vLLM's own msgpack encoding of them. KV blocks go in collectives of their own (rebalance_engine.py).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_NO = -1  # for None


@dataclass
class Result:
    """What a rank has generated for a request of another rank since the last exchange.

    id: at its origin. tokens [T]; log_prob_ids, log_probs [T, columns], ranks [T]: vLLM's LogprobsLists, flat, empty
    without log-probs. finish, stop: reason and stop token once it has ended, else None.
    """

    id: str
    columns: int
    tokens: list[int] = field(default_factory=list)
    log_prob_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    finish: int | None = None
    stop: int | None = None
    cached: int = 0

    def add(self, output: Any) -> None:
        """Take over vLLM's EngineCoreOutput of one step."""
        self.tokens += output.new_token_ids
        if self.columns:
            for ids, values in zip(output.new_logprobs.logprob_token_ids, output.new_logprobs.logprobs, strict=True):
                self.log_prob_ids += ids[: self.columns]
                self.log_probs += values[: self.columns]
            self.ranks += output.new_logprobs.sampled_token_ranks
        self.finish, self.stop, self.cached = output.finish_reason, output.stop_reason, output.num_cached_tokens

    def output(self) -> Any:
        """All of it as one EngineCoreOutput for the origin's output processor."""
        from vllm.v1.engine import EngineCoreOutput, FinishReason
        from vllm.v1.outputs import LogprobsLists

        rows, log_probs = range(0, len(self.log_probs), self.columns or 1), None
        if self.columns:
            ids, values = ([of[at : at + self.columns] for at in rows] for of in (self.log_prob_ids, self.log_probs))
            log_probs = LogprobsLists(ids, values, self.ranks)
        finish = None if self.finish is None else FinishReason(self.finish)
        more = {"finish_reason": finish, "stop_reason": self.stop, "num_cached_tokens": self.cached}
        return EngineCoreOutput(self.id, self.tokens, new_logprobs=log_probs, **more)

    def fields(self) -> list[bytes]:
        """Of its message."""
        state = [self.columns, _number(self.finish), _number(self.stop), self.cached]
        integers = [_integers(values) for values in (state, self.tokens, self.log_prob_ids, self.ranks)]
        return [self.id.encode(), *integers, np.array(self.log_probs, np.float64).tobytes()]

    @classmethod
    def of(cls, fields: Sequence[bytes]) -> Result:
        """Of the fields of a message."""
        columns, finish, stop, cached = _list(fields[1])
        values = np.frombuffer(fields[5], np.float64).tolist()
        tokens, ids, ranks = (_list(of) for of in fields[2:5])
        return cls(fields[0].decode(), columns, tokens, ids, values, ranks, _none(finish), _none(stop), cached)


@dataclass
class Moved:
    """A request on its way: all that another engine needs to go on with it, but for its KV blocks.

    id, origin: at the DP rank that verl gave it to. computed: tokens in KV; output holds one more, which the next step
    computes. params: vLLM's SamplingParams. generator: state of its own random generator, empty without a seed.
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

    def fields(self) -> list[bytes]:
        """Of its message."""
        import msgspec

        state = _integers([self.origin, self.computed, _number(self.eos), self.cached])
        tokens = [_integers(self.prompt), _integers(self.output)]
        return [self.id.encode(), state, *tokens, msgspec.msgpack.encode(self.params), self.generator]

    @classmethod
    def of(cls, fields: Sequence[bytes]) -> Moved:
        """Of the fields of a message."""
        import msgspec
        from vllm import SamplingParams

        origin, computed, eos, cached = _list(fields[1])
        params = msgspec.msgpack.decode(fields[4], type=SamplingParams)
        prompt, output = _list(fields[2]), _list(fields[3])
        return cls(fields[0].decode(), origin, prompt, output, params, fields[5], computed, _none(eos), cached)


def pack(results: Sequence[Result], requests: Sequence[Moved]) -> bytes:
    """The segment for one receiver."""
    return _pack_list(each.fields() for each in results) + _pack_list(each.fields() for each in requests)


def unpack(segment: bytes) -> tuple[list[Result], list[Moved]]:
    """Both lists of a segment; ValueError if it is longer than they are."""
    results, at = _unpack_list(segment, 0, 6)
    requests, at = _unpack_list(segment, at, 6)
    if at != len(segment):
        raise ValueError(
            f"segment has {len(segment)} bytes, its messages end at {at}; expected equal versions of ranks"
        )
    return [Result.of(fields) for fields in results], [Moved.of(fields) for fields in requests]


def _pack_list(messages: Iterable[list[bytes]]) -> bytes:
    packed = [struct.pack(f"={len(of)}q", *map(len, of)) + b"".join(of) for of in messages]
    return struct.pack("=q", len(packed)) + b"".join(packed)


def _unpack_list(segment: bytes, at: int, fields: int) -> tuple[list[list[bytes]], int]:
    (count,), at, messages = struct.unpack_from("=q", segment, at), at + 8, []
    for _ in range(count):
        lengths, at, message = struct.unpack_from(f"={fields}q", segment, at), at + 8 * fields, []
        for length in lengths:
            message.append(segment[at : at + length])
            at += length
        messages.append(message)
    return messages, at


def _integers(values: Sequence[int]) -> bytes:
    return np.array(values, np.int64).tobytes()


def _list(data: bytes) -> list[int]:
    return np.frombuffer(data, np.int64).tolist()


def _number(value: int | None) -> int:
    return _NO if value is None else int(value)


def _none(value: int) -> int | None:
    return None if value == _NO else value
