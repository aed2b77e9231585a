"""Check that a replacement accepts every call that upstream's own function or class accepts."""

from __future__ import annotations

import inspect
from inspect import Parameter, Signature
from typing import Any

_VARIADIC = {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}


def refused_calls(upstream: Any, new: Any, package: str, bound: bool = False) -> list[str]:
    """Return the calls that `upstream` accepts and `new` refuses or takes in another order, with Python's reason.

    Three cases are not compared: one of them has no signature (compiled, or not callable); upstream's signature is
    (*args, **kwargs), that of a decorator's wrapper, which does not say how it is called; upstream is not defined in
    the top-level `package`, so another library put it there. `bound`: callers never name the first parameter (self,
    cls). Annotations are not evaluated.
    """
    target, replacement = _signature(inspect.unwrap(upstream)), _signature(new, follow_wrapped=False)
    is_own = str(getattr(inspect.unwrap(upstream), "__module__", "")).partition(".")[0] == package
    if not is_own or target is None or replacement is None:
        return []
    return [] if {p.kind for p in target.parameters.values()} == _VARIADIC else _call_faults(target, replacement, bound)


def _signature(function: Any, follow_wrapped: bool = True) -> Signature | None:
    try:
        return inspect.signature(function, follow_wrapped=follow_wrapped)
    except (TypeError, ValueError):
        return None


def _call_faults(target: Signature, replacement: Signature, bound: bool) -> list[str]:
    """Bind calls with all arguments by place, all by name, the required ones, and one more for *args and for **kwargs.

    Each argument's value is its parameter's name: a replacement with the parameters in another order binds the first
    two calls differently.
    """
    wanted = list(target.parameters.values())
    by_place = [p for p in wanted if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    unnamed = [p for n, p in enumerate(by_place) if p.kind == p.POSITIONAL_ONLY or (bound and n == 0)]
    by_name = [p for p in wanted if p.kind == p.KEYWORD_ONLY]
    calls = [
        (by_place, by_name),
        (unnamed, [p for p in by_place if p not in unnamed] + by_name),
        ([p for p in by_place if p.default is p.empty], [p for p in by_name if p.default is p.empty]),
    ]
    kinds, one_more = {p.kind for p in wanted}, Parameter("one_more", Parameter.KEYWORD_ONLY)
    if Parameter.VAR_POSITIONAL in kinds:
        calls.append(([*by_place, one_more], by_name))
    if Parameter.VAR_KEYWORD in kinds:
        calls.append((by_place, [*by_name, one_more]))
    taken, faults = [], []
    for places, names in calls:
        try:
            arguments = replacement.bind(*(p.name for p in places), **{p.name: p.name for p in names}).arguments
        except TypeError as error:
            faults.append(f"refuses a call that the target accepts: {error}")
        else:
            taken.append({name: value for name, value in arguments.items() if isinstance(value, str)})
    if not faults and taken[0] != taken[1]:
        order = ", ".join(p.name for p in by_place)
        faults.append(f"has its parameters in the order {', '.join(taken[0])}; expected the target's order {order}")
    return list(dict.fromkeys(faults))
