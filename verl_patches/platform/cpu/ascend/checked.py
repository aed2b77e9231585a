"""Calls are checked as the real binding checks them: unknown names and arguments of a wrong kind are TypeErrors."""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Callable
from typing import Any

import torch

from verl_patches.platform.npu import op_schemas

_KINDS: dict[str, Callable[[Any], bool]] = {
    "Tensor": lambda x: isinstance(x, torch.Tensor),
    "int": lambda x: isinstance(x, numbers.Integral) and not isinstance(x, bool),
    "float": lambda x: isinstance(x, numbers.Real) and not isinstance(x, bool),
    "Scalar": lambda x: isinstance(x, numbers.Number),
    "bool": lambda x: isinstance(x, bool),
    "str": lambda x: isinstance(x, str),
    "ScalarType": lambda x: isinstance(x, torch.dtype),
}


def is_of_kind(value: Any, kind: str) -> bool:
    """Does a Python value go where a schema says `kind` ("Tensor?", "int[]", "float")?"""
    if kind.endswith("?"):
        return value is None or is_of_kind(value, kind[:-1])
    if kind.endswith("]"):
        item = kind[: kind.index("[")]
        return isinstance(value, (list, tuple)) and all(is_of_kind(entry, item) for entry in value)
    return _KINDS[kind.replace("SymInt", "int")](value)


def torch_npu_op(function: Callable) -> Callable:
    """Decorator of a reference: check calls against the schema of the torch_npu function of the same name."""
    return _checked(function, op_schemas.read()[function.__name__])


def builder_op(*schemas: str) -> Callable[[Callable], Callable]:
    """The same for a function of a MindSpeed op builder, whose overloads are written here after its C++ source."""
    return lambda function: _checked(function, tuple(map(op_schemas.parse, schemas)))


def _checked(function: Callable, schemas: tuple[op_schemas.Schema, ...]) -> Callable:
    signature = inspect.signature(function)
    kinds: dict[str, tuple[str, ...]] = {
        name: tuple(dict.fromkeys(s.kinds[name] for s in schemas if name in s.kinds)) for name in signature.parameters
    }

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{function.__name__}: {error}; it takes {signature}") from None
        for name, value in given.items():
            if not any(is_of_kind(value, kind) for kind in kinds[name]):
                raise TypeError(
                    f"{function.__name__}: argument {name!r} must be {' or '.join(kinds[name])}, "
                    f"found {_describe(value)}"
                )
        return function(*args, **kwargs)

    call.schemas = schemas
    return call


def _describe(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__} of {sorted({type(entry).__name__ for entry in value})}"
    return f"{type(value).__name__} {value!r}" if not isinstance(value, torch.Tensor) else "a tensor"


def demand(fine: Any, op: str, text: str) -> None:
    """ValueError "op: text" unless `fine`: a call that a device refuses, or computes nonsense for."""
    if not fine:
        raise ValueError(f"{op}: {text}")


def wide(x: torch.Tensor) -> torch.Tensor:
    """x in fp32, or in fp64 where it is fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
