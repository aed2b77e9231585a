"""Calls to all workers: each argument is serialised once; bytes are counted.

verl hands each worker its arguments in that worker's own `.remote` (verl/single_controller/ray/base.py,
execute_all_async), where Ray serialises them again, so the last worker starts only after all others. verl
0.4.0 puts the batches of Megatron calls into Ray's store itself, one a DP rank, but not other arguments; 54c9b736
puts none. Workers receive the same values: Ray resolves references that are top-level arguments.

The starts that workers record (heartbeat/calls.py) give the skew of each call.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import numpy as np
import ray
import torch
from ray.experimental.locations import get_local_object_locations
from verl.protocol import DataProto

# arguments whose sum over all workers is smaller are passed inline. Ray 2.42.1, 32 calls with 16 KB each: 35 ms in the
# driver inline, 15 ms with one object in the store, the same as without an argument
INLINE_BYTES = 128 << 10

SENT = ("calls", "puts", "put_bytes", "inline_bytes")  # names of what is counted


_sent: Counter[str] = Counter()  # in this process, by names of SENT


def take_calls() -> dict[str, int]:
    """{calls to all workers, puts: their objects in Ray's store, put_bytes: of these, inline_bytes: in the calls}.

    Of this process since the last take_calls().
    """
    counted = {name: _sent[name] for name in SENT}
    _sent.clear()
    return counted


def put_before_calling(execute_all_async: Callable) -> Callable:
    """Row provider for RayWorkerGroup.execute_all_async: one reference for each distinct large argument."""

    @functools.wraps(execute_all_async)
    def execute(self: Any, method_name: str, *args: Any, **kwargs: Any) -> Any:
        workers = len(self._workers)
        given = [*args, *kwargs.values()]
        split = all(isinstance(each, list) and len(each) == workers for each in given)  # verl's own condition
        call = _Call()
        args = tuple(call.each(arg) if split else call.to_all(arg, workers) for arg in args)
        kwargs = {name: call.each(arg) if split else call.to_all(arg, workers) for name, arg in kwargs.items()}
        answers = execute_all_async(self, method_name, *args, **kwargs)
        _sent.update(call.counts())
        return answers

    return execute


@dataclass
class _Call:
    """Arguments of one call; holds references in `puts` and `given` until the workers' calls do."""

    puts: dict[int, ray.ObjectRef] = field(default_factory=dict)
    given: set[ray.ObjectRef] = field(default_factory=set)
    inline_bytes: int = 0

    def each(self, values: list[Any]) -> list[Any]:
        """One value a worker."""
        if self._is_small(values):
            return values
        return [self._reference(value) for value in values]

    def to_all(self, value: Any, workers: int) -> Any:
        """The same value for every worker."""
        return self._reference(value) if not self._is_small([value] * workers) else value

    def _is_small(self, values: list[Any]) -> bool:
        self.given |= {value for value in values if isinstance(value, ray.ObjectRef)}
        size = _bytes_up_to(values, INLINE_BYTES)
        if size > INLINE_BYTES:
            return False
        self.inline_bytes += size
        return True

    def _reference(self, value: Any) -> ray.ObjectRef:
        if isinstance(value, ray.ObjectRef):
            return value
        if id(value) not in self.puts:
            self.puts[id(value)] = ray.put(value)
        return self.puts[id(value)]

    def counts(self) -> dict[str, int]:
        """{name of SENT: of this call}; a reference from another process has no known size and counts 0."""
        references = [*self.puts.values(), *self.given]
        places = get_local_object_locations(references) if references else {}
        sizes = sum(place.get("object_size") or 0 for place in places.values())
        return dict(zip(SENT, (1, len(references), sizes, self.inline_bytes), strict=True))


def _bytes_up_to(values: list[Any], limit: int) -> int:
    """Approximate bytes of all values, repeated objects counted each time; exact only up to `limit`."""
    total = 0
    for size in _sizes(values):
        total += size
        if total > limit:
            break
    return total


def _sizes(value: Any) -> Iterator[int]:
    """Bytes of the parts of a value, without serialising it; an unknown type counts as large."""
    if value is None or isinstance(value, (bool, int, float, ray.ObjectRef)):
        yield 8
    elif isinstance(value, (str, bytes)):
        yield len(value)
    elif isinstance(value, (torch.Tensor, np.generic)) or (isinstance(value, np.ndarray) and value.dtype != object):
        yield value.nbytes
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from _sizes(name)
            yield from _sizes(part)
    elif isinstance(value, (list, tuple, np.ndarray)):
        for part in value:
            yield from _sizes(part)
    elif isinstance(value, DataProto):
        for part in value.batch.values() if value.batch is not None else ():
            yield from _sizes(part)
        yield from _sizes(value.non_tensor_batch)
        yield from _sizes(value.meta_info)
    elif is_dataclass(value):  # a payload
        yield from _sizes(vars(value))
    else:
        yield INLINE_BYTES + 1


def start_skew(workers: Sequence[Sequence[tuple[str, float]]]) -> dict[str, float]:
    """{method: seconds between its first and its last start in these workers, maximum over its calls}.

    The n-th start of a method belongs to the same call in every worker; methods with unequal counts are left out.
    """
    skew = {}
    for name in dict.fromkeys(name for name, _ in workers[0]) if workers else ():
        times = [[at for method, at in starts if method == name] for starts in workers]
        if len({len(of_worker) for of_worker in times}) == 1:
            skew[name] = round(max(max(call) - min(call) for call in zip(*times, strict=True)), 6)
    return skew


def dispatch_of_step(workers: list[list[tuple[str, float]]]) -> dict[str, Any]:
    """Bytes that the trainer's calls of a step sent, and the start skew of its workers (`take_starts` of each).

    {calls, puts, put_bytes, inline_bytes, start_skew_s: {max, by_call}}. Bytes are those that this process serialised:
    an object in Ray's store counts once, an inline argument once for each worker.
    """
    by_call = start_skew(workers)
    return {**take_calls(), "start_skew_s": {"max": max(by_call.values(), default=0.0), "by_call": by_call}}
