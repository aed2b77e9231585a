"""References in traced graphs: Dynamo sees each op as one node, whose outputs are known by shape alone.

torch_npu registers a Meta kernel for each op. A reference that reads values (lengths, group sizes) has none: under a
fake tensor `shapes` answers in its place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


class Graph:
    """Whether a compiled graph runs in this process now."""

    runs = False


def with_shapes(shapes: Callable[..., Any]) -> Callable[[Callable], Callable]:
    """Decorator of a reference that reads values: `shapes`(the same arguments) gives empty outputs for fake tensors."""

    def decorate(reference: Callable) -> Callable:
        @functools.wraps(reference)
        def call(**given: Any) -> Any:
            from torch._subclasses.fake_tensor import FakeTensor

            tensors = (x[0] if isinstance(x, (list, tuple)) and len(x) else x for x in given.values())
            fake = any(isinstance(x, FakeTensor) for x in tensors)
            return shapes(**given) if fake else reference(**given)

        return call

    return decorate


def no_values(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The empty tensor that an op gives for an output that was not asked for."""
    return x.new_empty(0, dtype=dtype)
