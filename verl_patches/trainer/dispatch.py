"""Serialise each argument of a call to all workers once, and count the bytes.

verl hands each worker its arguments in that worker's own `.remote` (verl/single_controller/ray/base.py,
execute_all_async), where Ray serialises them again, so the last worker starts only after all others. verl
0.4.0 puts the batches of Megatron calls into Ray's store itself, one for each DP rank, but no other arguments;
54c9b736 puts none. Workers receive the same values: Ray resolves references that are top-level arguments.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import ray
from ray.experimental.locations import get_local_object_locations

from verl_patches.current import Current

_PASSED_INLINE = (type(None), bool, int, float, str)
COUNTERS = ("calls", "puts", "put_bytes")  # names of the counters


sent_counts: Current[Counter[str]] = Current(Counter())  # counters of this process, by names of COUNTERS


def take_calls() -> dict[str, int]:
    """Return {calls: calls to all workers, puts: objects of Ray's store that they passed, put_bytes: size of these}.

    They count this process's calls since the last take_calls(), which set them to 0.
    """
    counted, sent_counts.value = sent_counts.value, Counter()
    return {name: counted[name] for name in COUNTERS}


def object_store_usage() -> dict[str, int]:
    """Return {object_store_bytes}: what Ray's object stores hold on all nodes; {} without Ray."""
    if not ray.is_initialized():
        return {}
    size, free = (get().get("object_store_memory", 0.0) for get in (ray.cluster_resources, ray.available_resources))
    return {"object_store_bytes": round(size - free)}


def put_before_calling(execute_all_async: Callable) -> Callable:
    """Wrap RayWorkerGroup.execute_all_async: put each distinct argument that is not a scalar into Ray's store once.

    Measured with Ray 2.42.1, 32 calls with 16 KB each: 35 ms in the driver inline, 15 ms with one object in the store,
    the same as without an argument.
    """

    @functools.wraps(execute_all_async)
    def execute(self: Any, method_name: str, *args: Any, **kwargs: Any) -> Any:
        workers = len(self._workers)
        given = [*args, *kwargs.values()]
        split = all(isinstance(each, list) and len(each) == workers for each in given)  # verl's own condition to split
        references: dict[int, ray.ObjectRef] = {}  # keeps the objects until the workers' calls hold them

        def reference(value: Any) -> Any:
            if isinstance(value, ray.ObjectRef):
                references[id(value)] = value
            elif isinstance(value, _PASSED_INLINE):
                return value
            elif id(value) not in references:
                references[id(value)] = ray.put(value)
            return references[id(value)]

        def in_store(value: Any) -> Any:
            return [reference(each) for each in value] if split else reference(value)

        args, kwargs = tuple(map(in_store, args)), {name: in_store(value) for name, value in kwargs.items()}
        answers = execute_all_async(self, method_name, *args, **kwargs)
        # a reference from another process has no known size and counts 0
        distinct = list({*references.values()})
        places = get_local_object_locations(distinct) if distinct else {}
        sizes = sum(place.get("object_size") or 0 for place in places.values())
        sent_counts.value.update(dict(zip(COUNTERS, (1, len(distinct), sizes), strict=True)))
        return answers

    return execute
