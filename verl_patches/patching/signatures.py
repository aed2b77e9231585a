"""Whether a row's provider accepts every call that its target accepts; both are read as text, nothing is imported."""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Iterator
from dataclasses import replace
from inspect import Parameter, Signature
from pathlib import Path

from verl_patches.patching import fingerprint as fp
from verl_patches.patching.fingerprint import FUNCTIONS, Definition
from verl_patches.patching.spec import PatchSpec, split

Function = ast.FunctionDef | ast.AsyncFunctionDef


class UnknownSignature(Exception):
    """A signature cannot be read from text; the message gives the reason."""


def signature_faults(spec: PatchSpec, root: Path | None = None) -> list[str]:
    """What the target of a row accepts and its provider does not, as text; UnknownSignature where one has no text.

    `root`: the folder that holds the target's top-level package. A registered provider is called without arguments; a
    name by which a module imports another (`import torch`) is not called.
    """
    if spec.kind in ("register", "wrap"):
        call = [Parameter("original", Parameter.POSITIONAL_ONLY)] if spec.kind == "wrap" else []
        faults = [f for provider, _ in _signatures(spec.provider) for f in refused_calls(Signature(call), provider)]
        if faults or spec.kind == "register":
            return [f"provider({'original' if call else ''}): {fault}" for fault in faults]
    if names_a_module(spec.target, root):
        return []
    if spec.kind == "subclass":
        return _method_faults(spec, root)
    if spec.kind == "wrap":
        providers = [of_function(node) for node in _returned(fp.definitions(spec.provider)[-1], 0)]
    else:
        providers = [provider for provider, _ in _signatures(spec.provider)]
    if not providers:
        return ["returns no replacement"]
    try:
        targets = _signatures(spec.target, root)
    except UnknownSignature:
        if all(_takes_all(provider, "." in split(spec.target)[1]) for provider in providers):
            return []
        raise
    faults = [fault for one in providers for target, bound in targets for fault in refused_calls(target, one, bound)]
    return list(dict.fromkeys(faults))


def _method_faults(spec: PatchSpec, root: Path | None) -> list[str]:
    """Faults of each method of a subclass that upstream's class defines too."""
    faults = []
    for node in ast.iter_child_nodes(fp.definitions(spec.provider)[-1].node):
        if not isinstance(node, FUNCTIONS):
            continue
        target, provider = (f"{place}.{node.name}" for place in (spec.target, spec.provider))
        if fp.definitions(target, root):
            method = replace(spec, kind="override", target=target, provider=provider)
            faults += [f"{node.name} {fault}" for fault in signature_faults(method, root)]
    return faults


def refused_calls(target: Signature, provider: Signature, bound: bool = False) -> list[str]:
    """Calls that `target` accepts and `provider` refuses, with Python's reason, or takes in another order.

    Tried are: all arguments by place, all by name (but the first, if `bound`), only those without a default, and one
    more by place or by name where the target has *args or **kwargs.
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
            bound_arguments = provider.bind(*(p.name for p in places), **{p.name: p.name for p in names}).arguments
        except TypeError as error:
            faults.append(f"refuses a call that the target takes: {error}")
        else:
            taken.append({name: value for name, value in bound_arguments.items() if isinstance(value, str)})
    if not faults and taken[0] != taken[1]:
        faults.append(f"takes {', '.join(taken[0])} by place, but {', '.join(taken[1])} by name")
    return list(dict.fromkeys(faults))


def _takes_all(signature: Signature, bound: bool) -> bool:
    """True for (*args, **kwargs), with or without a first parameter that is self."""
    kinds = [p.kind for p in signature.parameters.values()]
    rest = [Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD]
    return kinds == rest or (bound and kinds[1:] == rest)


def of_function(node: Function) -> Signature:
    """The signature of a definition; each default is `...`.

    Nothing of upstream is evaluated: a lambda compiles no annotations, its defaults are replaced, its body is `...`.
    """
    arguments, default = copy.copy(node.args), ast.Constant(...)
    arguments.defaults = [default] * len(arguments.defaults)
    arguments.kw_defaults = [given and default for given in arguments.kw_defaults]
    expression = ast.fix_missing_locations(ast.Expression(ast.Lambda(arguments, default)))
    return inspect.signature(eval(compile(expression, "<signature>", "eval")))


def names_a_module(target: str, root: Path | None) -> bool:
    """Whether the name of "module:name" is bound by an `import` statement of that module, so that it is a module."""
    module, name = split(target)
    path = fp.source_file(module, root)
    imports = [node for node in ast.parse(path.read_bytes()).body if isinstance(node, ast.Import)] if path else ()
    return any(name == (a.asname or a.name.partition(".")[0]) for node in imports for a in node.names)


def _signatures(place: str, root: Path | None = None) -> list[tuple[Signature, bool]]:
    """How what is defined at a place is called, and whether callers never name its first parameter (self, cls)."""
    qualname = split(place)[1]
    definitions, signatures = fp.definitions(place, root), []
    if not definitions:
        of_object = getattr(object, qualname.rpartition(".")[2], None) if "." in qualname else None
        if of_object is None:
            raise UnknownSignature(f"{place} has no Python text")
        return [(inspect.signature(of_object), True)]
    for node in (definition.node for definition in definitions):
        if isinstance(node, ast.ClassDef):
            makers = [m for m in node.body if isinstance(m, FUNCTIONS) and m.name in ("__init__", "__new__")]
            signatures += [(Signature(list(of_function(maker).parameters.values())[1:]), False) for maker in makers]
        elif isinstance(node, FUNCTIONS):
            marks = {ast.unparse(mark).rpartition(".")[2] for mark in node.decorator_list}
            if not marks & {"overload", "setter", "deleter"}:
                signatures.append((of_function(node), "." in qualname and "staticmethod" not in marks))
    if not signatures:
        raise UnknownSignature(f"{place} is assigned, or a class without an __init__ of its own")
    return signatures


def _returned(maker: Definition, depth: int) -> Iterator[Function]:
    """The functions that a provider returns: defined inside it, or returned by another function of ours it calls."""
    if not isinstance(maker.node, FUNCTIONS) or depth > 4:
        raise UnknownSignature(f"{maker.module} does not return a function that it defines")
    inner = {node.name: node for node in maker.node.body if isinstance(node, FUNCTIONS)}
    original = maker.node.args.args[0].arg if maker.node.args.args else None
    for result in _returns(maker.node):
        if result is None or ast.unparse(result) in ("None", original):
            continue
        if isinstance(result, ast.Name) and result.id in inner:
            yield inner[result.id]
            continue
        called = fp.definitions(f"{maker.module}:{ast.unparse(result.func)}") if isinstance(result, ast.Call) else []
        if not called:
            raise UnknownSignature(f"{maker.node.name} returns {ast.unparse(result)}")
        yield from _returned(called[-1], depth + 1)


def _returns(function: ast.AST) -> Iterator[ast.expr | None]:
    for child in ast.iter_child_nodes(function):
        if isinstance(child, ast.Return):
            yield child.value
        elif not isinstance(child, (*FUNCTIONS, ast.ClassDef, ast.Lambda)):
            yield from _returns(child)
