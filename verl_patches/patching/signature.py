"""Whether a provider accepts every call that its target accepts, by the text of both: nothing is imported.

A wrap provider is `provider(original) -> replacement`: the functions that it returns are looked at. The first argument
of a method is never passed by name, so its name does not matter.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import Parameter, Signature
from inspect import signature as signature_of
from pathlib import Path

from verl_patches.patching.fingerprint import Definition, definitions, source_file
from verl_patches.patching.resolve import split
from verl_patches.patching.spec import PatchSpec

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_EMPTY = Parameter.empty


class UnknownSignature(Exception):
    """A signature that cannot be read from text; says why."""


@dataclass(frozen=True)
class Call:
    """How something is called, as its text tells. `bound`: a caller never names the first parameter (self, cls).

    `is_async`: what a call gives is awaited (or iterated by `async for`).
    """

    signature: Signature
    bound: bool = False
    is_async: bool = False


def signature_faults(spec: PatchSpec, root: Path | None = None) -> list[str]:
    """What the target of a row accepts and its provider does not, in words; raises UnknownSignature where one has no text.

    `root`: the folder that holds the target's top-level package. A new name (extend), a whole module and the name by
    which one imports another (`import torch`) have no calls to accept; a registered provider is called without
    arguments.
    """
    if spec.is_module_stub:
        return []
    if spec.kind == "register":
        return not_accepted(Signature(), of_function(_function(spec.provider)))
    if spec.kind == "wrap":
        original = Signature([Parameter("original", Parameter.POSITIONAL_ONLY)])
        refused = not_accepted(original, of_function(_function(spec.provider)))
        if refused:
            return [f"provider(original): {fault}" for fault in refused]
    if _names_a_module(spec.target, root):
        return []
    providers = _provider_calls(spec)
    if not providers:
        return ["returns no replacement"]
    if spec.kind == "extend":
        return []
    try:
        targets = _target_calls(spec.target, root)
    except UnknownSignature:
        if all(_takes_all(provider.signature, "." in split(spec.target)[1]) for provider in providers):
            return []
        raise
    return list(dict.fromkeys(fault for provider in providers for target in targets
                              for fault in _call_faults(target, provider)))


def _names_a_module(target: str, root: Path | None) -> bool:
    module, name = split(target)
    path = source_file(module, root)
    statements = ast.parse(path.read_text()).body if path else ()
    return any(isinstance(each, ast.Import) and name in [a.asname or a.name.partition(".")[0] for a in each.names]
               for each in statements)


def _call_faults(target: Call, provider: Call) -> list[str]:
    found = []
    if target.is_async != provider.is_async:
        found.append("is not async, callers await it" if target.is_async else "is async, callers do not await it")
    if not _takes_all(provider.signature, target.bound):
        found += not_accepted(target.signature, provider.signature, target.bound)
    return found


def _takes_all(signature: Signature, bound: bool) -> bool:
    """True for (*args, **kwargs), with or without a first parameter that is self."""
    kinds = [p.kind for p in signature.parameters.values()]
    rest = [Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD]
    return kinds == rest or (bound and kinds[1:] == rest)


def not_accepted(target: Signature, provider: Signature, bound: bool = False) -> list[str]:
    """What calls `target` allows and `provider` refuses or understands otherwise; empty where it takes them all."""
    wanted, given = list(target.parameters.values()), list(provider.parameters.values())
    places = [p for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = {p.name: p for p in given if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    rest = {p.kind for p in given}
    found, met = [], set()
    for number, want in enumerate(wanted, start=1):
        by_place = want.kind in (want.POSITIONAL_ONLY, want.POSITIONAL_OR_KEYWORD)
        by_name = want.kind in (want.POSITIONAL_OR_KEYWORD, want.KEYWORD_ONLY) and not (bound and number == 1)
        if want.kind in (want.VAR_POSITIONAL, want.VAR_KEYWORD):
            if want.kind not in rest:
                found.append(f"takes no {want}")
            continue
        here = places[number - 1] if by_place and number <= len(places) else None
        named = names.get(want.name) if by_name else None
        if by_place and here is None and want.VAR_POSITIONAL not in rest:
            found.append(f"takes no argument {number} ({want.name})")
        elif by_name and named is None and want.VAR_KEYWORD not in rest:
            found.append(f"takes no {want.name}=")
        elif by_name and by_place and named is not here:
            found.append(f"its argument {number} is {here.name if here else 'in *args'}, not {want.name}")
        for got in filter(None, (here, named)):
            met.add(got.name)
            if want.default is not _EMPTY and got.default is _EMPTY:
                found.append(f"needs {got.name}, which callers may leave out")
    found += [f"needs {p.name}, which callers do not pass" for p in given
              if p.name not in met and p.default is _EMPTY and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return list(dict.fromkeys(found))


def of_function(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> Signature:
    """The signature of a definition; defaults are only marked as there."""
    a = node.args
    plain = [*a.posonlyargs, *a.args]
    defaults = [_EMPTY] * (len(plain) - len(a.defaults)) + [...] * len(a.defaults)
    kinds = [Parameter.POSITIONAL_ONLY] * len(a.posonlyargs) + [Parameter.POSITIONAL_OR_KEYWORD] * len(a.args)
    found = [Parameter(arg.arg, kind, default=default)
             for arg, kind, default in zip(plain, kinds, defaults, strict=True)]
    if a.vararg:
        found.append(Parameter(a.vararg.arg, Parameter.VAR_POSITIONAL))
    found += [Parameter(arg.arg, Parameter.KEYWORD_ONLY, default=_EMPTY if default is None else ...)
              for arg, default in zip(a.kwonlyargs, a.kw_defaults, strict=True)]
    if a.kwarg:
        found.append(Parameter(a.kwarg.arg, Parameter.VAR_KEYWORD))
    return Signature(found)


def _target_calls(place: str, root: Path | None) -> list[Call]:
    found, seen = definitions(place, root), []
    qualname = split(place)[1]
    for definition in found:
        node = definition.node
        if isinstance(node, _FUNCTIONS):
            marks = _marks(node)
            if not marks & {"overload", "setter", "deleter"}:
                bound = "." in qualname and "staticmethod" not in marks
                seen.append(Call(of_function(node), bound, _is_async(node)))
        elif isinstance(node, ast.ClassDef):
            seen += [Call(signature) for signature in _of_class(definition, root)]
    if not found and "." in qualname and hasattr(object, qualname.rpartition(".")[2]):
        return [Call(signature_of(getattr(object, qualname.rpartition(".")[2])), bound=True)]
    if not seen:
        raise UnknownSignature("the target is assigned, not defined" if found else "the target has no Python text")
    return seen


def _of_class(definition: Definition, root: Path | None) -> list[Signature]:
    """The signatures of calling a class: its __init__ and __new__ without their first parameter."""
    made = [node for node in definition.node.body if isinstance(node, _FUNCTIONS)
            and node.name in ("__init__", "__new__")]
    if made:
        return [Signature(list(of_function(node).parameters.values())[1:]) for node in made]
    if not definition.node.bases and not definition.node.decorator_list:
        return [Signature()]
    for base in definition.node.bases:
        for found in definitions(f"{definition.module}:{ast.unparse(base)}", root):
            if isinstance(found.node, ast.ClassDef):
                return _of_class(found, root)
    raise UnknownSignature(f"class {definition.node.name} gets its __init__ from elsewhere")


def _function(place: str) -> ast.FunctionDef | ast.AsyncFunctionDef:
    found = definitions(place)
    if not found or not isinstance(found[-1].node, _FUNCTIONS):
        raise UnknownSignature(f"{place} is not defined by def")
    return found[-1].node


def _marks(node: ast.AST) -> set[str]:
    """The last names of the decorators of a definition; a lambda has none."""
    return {ast.unparse(mark).rpartition(".")[2] for mark in getattr(node, "decorator_list", ())}


def _is_async(node: ast.AST) -> bool:
    return isinstance(node, ast.AsyncFunctionDef) and "asynccontextmanager" not in _marks(node)


def _provider_calls(spec: PatchSpec) -> list[Call]:
    """How what a provider gives is called; empty where a wrap gives nothing, or its original only."""
    found = definitions(spec.provider)
    if found and spec.kind == "wrap":
        return [Call(of_function(node), is_async=_is_async(node)) for node in _returned(found[-1], 0)]
    if found and isinstance(found[-1].node, ast.ClassDef):
        return [Call(signature) for signature in _of_class(found[-1], None)]
    node = _function(spec.provider)
    return [Call(of_function(node), is_async=_is_async(node))]


def _returned(maker: Definition, depth: int) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda]:
    """The functions that a provider returns: defined inside it, or returned by another function of ours it calls."""
    if not isinstance(maker.node, _FUNCTIONS) or depth > 4:
        raise UnknownSignature(f"{maker.module} does not return a function that it defines")
    inner = {node.name: node for node in maker.node.body if isinstance(node, _FUNCTIONS)}
    original = maker.node.args.args[0].arg if maker.node.args.args else None
    results = list(_returns(maker.node))
    if all(result is None or ast.unparse(result) in ("None", original) for result in results):
        return
    for result in results:
        if isinstance(result, ast.Lambda):
            yield result
        elif isinstance(result, ast.Name) and result.id in inner:
            yield inner[result.id]
        elif isinstance(result, ast.Call) and isinstance(result.func, (ast.Name, ast.Attribute)):
            called = definitions(f"{maker.module}:{ast.unparse(result.func)}")
            if not called:
                raise UnknownSignature(f"{maker.node.name} returns {ast.unparse(result)}")
            yield from _returned(called[-1], depth + 1)
        elif not (isinstance(result, ast.Name) and result.id == original):
            raise UnknownSignature(f"{maker.node.name} returns {ast.unparse(result) if result else 'nothing'}")


def _returns(function: ast.AST) -> Iterator[ast.expr | None]:
    for child in ast.iter_child_nodes(function):
        if isinstance(child, ast.Return):
            yield child.value
        elif not isinstance(child, (*_FUNCTIONS, ast.ClassDef, ast.Lambda)):
            yield from _returns(child)
