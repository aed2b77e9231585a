"""`check`: compares what every row of one line expects of upstream with upstream's sources.

For each row: the target's body is the reviewed one; the provider accepts every call that the target accepts (of a wrap,
`provider(original) -> replacement`, the functions that it returns are compared); all bindings are listed. Sources are
read as text from {top-level package: the folder that holds it}; nothing of upstream is imported. Bindings are searched
in the upstream packages of the line, and in those modules of other packages (torch) that rows name.
"""

from __future__ import annotations

import ast
import difflib
import importlib.metadata
import importlib.util
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from inspect import Parameter, Signature
from inspect import signature as signature_of
from pathlib import Path

from verl_patches.errors import ConfigError
from verl_patches.patching import fingerprint as fp
from verl_patches.patching.bindings import Import, SourceFile, find_bindings, read_tree
from verl_patches.patching.fingerprint import Definition, Statement
from verl_patches.patching.report import Finding, Report
from verl_patches.patching.spec import PatchSpec, split

PACKAGES = {
    "pypi": ("verl", "megatron", "vllm"),
    "a3": ("verl", "megatron", "mindspeed", "mindspeed_llm", "vllm", "vllm_ascend"),
}


_UNREADABLE = ", {} of them cannot be parsed: what they import from rows' targets is not known"


def installed_roots(line: str) -> dict[str, Path]:
    """Where this interpreter has the upstream packages of a line; ConfigError lists those that it lacks."""
    roots, missing = {}, []
    for package in PACKAGES[line]:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            missing.append(package)
        else:
            roots[package] = Path(next(iter(spec.submodule_search_locations))).parent
    if missing:
        raise ConfigError(
            f"line {line}: this interpreter has no {', '.join(missing)}; give the sources with --upstream DIR"
        )
    return roots


def check(specs: Iterable[PatchSpec], line: str, sources: Sources) -> Report:
    """One finding for each package that was read and each row of the line, on any platform; none if it has no rows."""
    rows = [spec.on_line(line) for spec in specs if line in spec.lines]
    if not rows:
        return Report("check", line, ())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # upstream's own, such as invalid escape sequences
        return Report("check", line, tuple(_findings(rows, line, sources)))


def _findings(rows: list[PatchSpec], line: str, sources: Sources) -> Iterator[Finding]:
    unseen = [spec for spec in rows if _packages_of(spec) & sources.absent]
    rows = [spec for spec in rows if spec not in unseen]
    tree = read_tree(sources.roots)
    named = {split(place)[0] for spec in rows if not spec.is_module_stub for place in (spec.target, *spec.bindings)}
    for module in sorted(named - set(tree)):  # outside: torch and the like, as far as the rows name it
        path = fp.source_file(module, sources.roots.get(module.split(".")[0]))
        if path is not None:
            tree[module] = SourceFile(module, path)
    imported = find_bindings([spec.target for spec in rows if can_be_bound(spec)], tree)
    for name, root in sources.roots.items():
        files = [file for module, file in tree.items() if module.split(".")[0] == name]
        unread = tuple(f"{file.module}: {file.unread}" for file in files if file.unread)
        yield Finding(
            f"package {name}",
            "note" if unread else "fine",
            where=str(root),
            details=unread,
            found=f"{len(files)} Python files{_UNREADABLE.format(len(unread)) if unread else ''}",
        )
    for spec in rows:
        yield RowCheck(spec, line, sources, imported, tree).finding()
    for spec in unseen:
        lacking = ", ".join(sorted(_packages_of(spec) & sources.absent))
        yield Finding(spec.id, "note", where=spec.target, found=f"not checked: no {lacking} in the folder given")


def _packages_of(spec: PatchSpec) -> set[str]:
    """The top-level packages that a row's target and bindings name."""
    return {place.partition(":")[0].split(".")[0] for place in (spec.target, *spec.bindings)}


@dataclass(frozen=True)
class Sources:
    """Where the sources of one line are.

    `roots`: {top-level package: the folder that holds it}; other packages (torch, tensordict) are those of this
    interpreter. `installed`: the roots are this interpreter's too. `base`: a tree known to be good, as `roots`.
    `versions`: {distribution: pinned version}. `absent`: packages of the line that `roots` lack; rows that name them
    are not checked. `verified`: {top-level package: its source and version}, where all its files are as pinned.
    """

    roots: Mapping[str, Path]
    installed: bool = True
    base: Mapping[str, Path] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    absent: frozenset[str] = frozenset()
    verified: Mapping[str, str] = field(default_factory=dict)


def can_be_bound(spec: PatchSpec) -> bool:
    """Whether others can hold the same object: not so for attributes of classes, which are shared, and new names."""
    return spec.target.count(":") == 1 and "." not in split(spec.target)[1] and spec.kind not in ("register", "extend")


class RowCheck:
    """The check of one row; every step adds to `problems`, `notes`, `passed` and `details`."""

    def __init__(
        self,
        spec: PatchSpec,
        line: str,
        sources: Sources,
        imported: Mapping[str, Mapping[str, Import]],
        tree: Mapping[str, SourceFile],
    ):
        self.spec, self.line, self.sources, self.imported, self.tree = spec, line, sources, imported, tree
        self.top = spec.target.partition(":")[0].split(".")[0]
        self.root = sources.roots.get(self.top)
        self.file = None if spec.is_module_stub else fp.source_file(spec.target_module, self.root)
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.passed: list[str] = []
        self.details: list[str] = []
        self.todo: list[str] = []
        self.statements = self._statements()

    def _statements(self) -> list[Statement]:
        if self.file is None:
            return []
        try:
            return fp.statements(self.spec.target, self.root)
        except SyntaxError as error:
            self.problems.append(f"this Python cannot read {self._at(self.file, error.lineno)}: {error.msg}")
            return []

    def finding(self) -> Finding:
        if self.spec.is_module_stub:
            self._check_module_stub()
        elif self.file is None and self.root is None and not self.sources.installed and not _is_here(self.top):
            self.notes.append(f"not checked: {self.top} is neither in this tree nor in this interpreter")
        elif self.file is None:
            self.problems.append(f"there is no module {self.spec.target_module}")
            near = difflib.get_close_matches(self.spec.target_module, self.tree, n=3)
            self.details += [f"near: {module}" for module in near]
            self.todo.append("find its new place and set the row's target")
        elif not self.problems and self._check_body():
            if self.spec.kind != "extend":
                self._check_signature()
            self._check_bindings()
        state = "problem" if self.problems else "note" if self.notes else "fine"
        reviewed = fp.reviewed_hash(self.line, self.spec.target)
        return Finding(
            self.spec.id,
            state,
            where=self._where(),
            expected=f"reviewed {reviewed}" if reviewed else "",
            found="; ".join((*self.problems, *self.notes, *self.passed)),
            todo="; ".join(self.todo),
            details=tuple(self.details),
        )

    def _where(self) -> str:
        if self.file is None:
            return self.spec.target_module
        return self._at(self.statements[0].file, self.statements[0].line) if self.statements else self._at(self.file)

    def _at(self, file: Path, line: int | None = None) -> str:
        """file:line with the file as seen from the folder that holds its top-level package."""
        depth = self.spec.target_module.count(".") + (self.file.name == "__init__.py")
        short = str(file.relative_to(self.file.parents[depth]))
        return short if line is None else f"{short}:{line}"

    def _check_module_stub(self) -> None:
        module, _ = split(self.spec.provider)
        if fp.source_file(module) is None:
            self.problems.append(f"our module {module} is not there")
        self.passed.append("replaces a whole module where that is missing")

    # -- the body -----------------------------------------------------------------------------------------------------

    def _check_body(self) -> bool:
        """Compare with the reviewed body; False where the target does not exist."""
        known, found = fp.reviewed_hash(self.line, self.spec.target), fp.fingerprint(self.spec.target, self.root)
        pinned, here = self.sources.versions.get(self.top), _version(self.top)
        if self.root is None and not self.sources.installed:
            self.passed.append(f"{self.top} {here} of this interpreter was checked")
            if pinned and _public(pinned) != _public(here):
                self.notes.append(f"body not compared: the pin is {self.top} {pinned}")
                return True
        if self.spec.kind == "extend":
            return self._check_new_name()
        if not self.statements:
            return self._check_without_source(known, pinned, here)
        if known is None:
            self.problems.append(f"its fingerprint {found} was never reviewed")
            self.todo.append(f"review it, then `{self._review()}`")
        elif known != found:
            self._report_drift(found)
        else:
            self.passed.append("body as reviewed")
        return True

    def _check_new_name(self) -> bool:
        holder = self.spec.target.rpartition("." if "." in split(self.spec.target)[1] else ":")[0]
        if self.statements:
            self.problems.append("upstream has this name now")
            self.todo.append("compare the two; make the row a wrap or replace, or delete it")
        elif ":" in holder and not fp.definitions(holder, self.root):
            return self._report_missing()
        else:
            self.passed.append("upstream has no such name, as expected")
        return True

    def _check_without_source(self, known: str | None, pinned: str | None, here: str) -> bool:
        if known != fp.NO_SOURCE:
            return self._report_missing()
        text = "no Python text of its own (an imported name, compiled or inherited)"
        version = f"{text}: identified by the version of {self.top}, {here} here"
        if self.top in self.sources.verified:
            self.passed.append(f"{text}: identified by {self.sources.verified[self.top]}")
        elif self.top in self.sources.roots and not self.sources.installed:
            self.notes.append(f"{text}, and {self.top} is not as pinned, so it cannot be identified")
        elif pinned is None:
            self.notes.append(f"{version}; the line pins no version of it")
        elif _public(pinned) != _public(here):
            self.notes.append(f"{version}, pinned {pinned}")
        else:
            self.passed.append(f"{version}, as pinned")
        return True

    def _report_missing(self) -> bool:
        self.problems.append(f"{split(self.spec.target)[1]} is not in {self._at(self.file)}")
        self.details += _near_names(split(self.spec.target)[1].rpartition(".")[2], self.file)
        self.todo.append("find its new place and set the row's target")
        return False

    def _report_drift(self, found: str) -> None:
        changed, gone = _changes(fp.reviewed_statements(self.line, self.spec.target), self.statements)
        count = sum(number for number, _ in gone)
        self.problems.append(f"the body is {found}: {len(changed)} statement(s) new or changed, {count} gone")
        self.details += [
            f"{self._at(s.file, s.line)}: {' '.join(line.strip() for line in s.source())}" for s in changed
        ]
        self.details += [
            f"{number} reviewed statement(s) gone "
            + (f"after {self._at(last.file, last.line)}" if last else "at the start")
            for number, last in gone
        ]
        self.details += self._diff()
        self.todo.append(
            f"review the change, then `{self._review()}`"
            + ("" if self.sources.base else "; --base DIR shows the whole difference")
        )

    def _review(self) -> str:
        return fp.review_command(self.spec.id, self.line, "" if self.sources.installed else "DIR")

    def _diff(self) -> list[str]:
        base = self.sources.base.get(self.top)
        if base is None:
            return []
        before, after = (_source_text(fp.definitions(self.spec.target, root)) for root in (base, self.root))
        return list(difflib.unified_diff(before, after, f"base/{self._where()}", self._where(), lineterm=""))

    # -- signature and bindings ---------------------------------------------------------------------------------------

    def _check_signature(self) -> None:
        try:
            faults = signature_faults(self.spec, self.root)
        except UnknownSignature as reason:
            self.notes.append(f"signature not checked: {reason}")
            return
        if faults:
            self.problems.append(f"{self.spec.provider} does not fit its target: {', '.join(faults)}")
            self.todo.append("make the provider's replacement accept every call of the target")
        else:
            self.passed.append("signature accepted")

    def _check_bindings(self) -> None:
        found, listed = self.imported.get(self.spec.target, {}), set(self.spec.bindings)
        if names_a_module(self.spec.target, self.root):  # `import torch`: the same module wherever it stands
            listed -= {place for place in listed if names_a_module(place, self.root)}
        missing = [item for place, item in found.items() if place not in listed]
        extra = sorted(listed - set(found))
        if missing:
            self.problems.append(f"{len(missing)} binding(s) not listed")
            self.details += [
                f"{_file_of(item.place, self.tree)}:{item.line}: {item.place} is the same object" for item in missing
            ]
            self.todo.append(f"add to the row's bindings: {', '.join(item.place for item in missing)}")
        if extra:
            self.problems.append(f"listed bindings that are not the target: {', '.join(extra)}")
            self.todo.append("remove them from the row's bindings")
        if not missing and not extra and listed:
            self.passed.append(f"{len(listed)} binding(s) complete")


def _file_of(place: str, tree: Mapping[str, SourceFile]) -> str:
    module = split(place)[0]
    path = tree[module].path
    return "/".join(path.parts[-(module.count(".") + 1 + (path.name == "__init__.py")) :])


def _is_here(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _version(package: str) -> str:
    if package in sys.stdlib_module_names:
        return "of Python " + sys.version.split()[0]
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _public(version: str) -> str:
    return version.partition("+")[0]


def _changes(reviewed: list[str], found: list[Statement]) -> tuple[list[Statement], list[tuple[int, Statement | None]]]:
    """(statements new or changed, [(how many reviewed ones are gone, the statement they followed)])."""
    changed, gone = [], []
    matcher = difflib.SequenceMatcher(None, reviewed, [s.hash for s in found], autojunk=False)
    for tag, i, i_end, j, j_end in matcher.get_opcodes():
        if tag != "equal":
            changed += found[j:j_end]
            fewer = (i_end - i) - (j_end - j)
            if fewer > 0:
                gone.append((fewer, found[j_end - 1] if j_end else None))
    return changed, gone


def _source_text(found: list[Definition]) -> list[str]:
    """The lines of some definitions, decorators included."""
    lines = []
    for one in found:
        first = min([one.node.lineno, *(mark.lineno for mark in getattr(one.node, "decorator_list", ()))])
        lines += fp.source_lines(one.file)[first - 1 : one.node.end_lineno]
    return lines


def _near_names(name: str, file: Path) -> list[str]:
    """Lines such as "near: fit_again, line 80": definitions of a file whose names are like a missing one."""
    tree = ast.parse(file.read_bytes())
    lines = {node.name: node.lineno for node in ast.walk(tree) if isinstance(node, fp.DEFINITIONS)}
    return [f"near: {near}, line {lines[near]}" for near in difflib.get_close_matches(name, lines, n=3, cutoff=0.5)]


# -- signatures -------------------------------------------------------------------------------------------------------

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class UnknownSignature(Exception):
    """A signature that cannot be read from text; says why."""


@dataclass(frozen=True)
class Call:
    """How something is called. `bound`: callers never name the first parameter (self, cls).

    `is_async`: callers await the result, or iterate over it by `async for`.
    """

    signature: Signature
    bound: bool = False
    is_async: bool = False


def signature_faults(spec: PatchSpec, root: Path | None = None) -> list[str]:
    """What the target of a row accepts and its provider does not, in words; UnknownSignature where one has no text.

    `root`: the folder that holds the target's top-level package. A registered provider is called without arguments; a
    new name (extend) and a name by which a module imports another (`import torch`) have no calls to accept.
    """
    if spec.kind == "register":
        return refused_calls(Signature(), of_function(_function(spec.provider)))
    if spec.kind == "wrap":
        original = Signature([Parameter("original", Parameter.POSITIONAL_ONLY)])
        faults = refused_calls(original, of_function(_function(spec.provider)))
        if faults:
            return [f"provider(original): {fault}" for fault in faults]
    if names_a_module(spec.target, root):
        return []
    if spec.kind == "subclass":
        return _method_faults(spec, root)
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
    faults = []
    for provider in providers:
        for target in targets:
            if target.is_async and not provider.is_async:
                faults.append("is not async, callers await it")
            if provider.is_async and not target.is_async:
                faults.append("is async, callers do not await it")
            faults += refused_calls(target.signature, provider.signature, target.bound)
    return list(dict.fromkeys(faults))


def _method_faults(spec: PatchSpec, root: Path | None) -> list[str]:
    """Faults of each method of a subclass that upstream's class has too, in its own text."""
    found = []
    for node in fp.definitions(spec.provider)[-1].node.body:
        if isinstance(node, _FUNCTIONS) and fp.definitions(f"{spec.target}.{node.name}", root):
            method = replace(
                spec, kind="override", target=f"{spec.target}.{node.name}", provider=f"{spec.provider}.{node.name}"
            )
            found += [f"{node.name} {fault}" for fault in signature_faults(method, root)]
    return found


def refused_calls(target: Signature, provider: Signature, bound: bool = False) -> list[str]:
    """Calls that `target` accepts and `provider` refuses, with Python's reason, or takes in another order.

    Tried are: all arguments by place, all by name (but the first, if `bound`), only those without a default, and one
    more by place or by name where the target has *args or **kwargs.
    """
    wanted = list(target.parameters.values())
    by_place = [p for p in wanted if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    unnamed = [p for n, p in enumerate(by_place) if p.kind == p.POSITIONAL_ONLY or (bound and n == 0)]
    by_name = [p for p in wanted if p.kind == p.KEYWORD_ONLY]
    kinds = {p.kind for p in wanted}
    calls = [
        (by_place, by_name),
        (unnamed, [p for p in by_place if p not in unnamed] + by_name),
        ([p for p in by_place if p.default is p.empty], [p for p in by_name if p.default is p.empty]),
    ]
    if Parameter.VAR_POSITIONAL in kinds:
        calls.append(([*by_place, Parameter("one_more", Parameter.POSITIONAL_ONLY)], by_name))
    if Parameter.VAR_KEYWORD in kinds:
        calls.append((by_place, [*by_name, Parameter("one_more", Parameter.KEYWORD_ONLY)]))
    taken, faults = [], []
    for places, names in calls:
        try:
            found = provider.bind(*(p.name for p in places), **{p.name: p.name for p in names})
        except TypeError as error:
            faults.append(f"refuses a call that the target takes: {error}")
            continue
        taken.append({name: value for name, value in found.arguments.items() if isinstance(value, str)})
    if not faults and taken[0] != taken[1]:
        faults.append(f"takes {', '.join(taken[0])} by place, but {', '.join(taken[1])} by name")
    return list(dict.fromkeys(faults))


def _takes_all(signature: Signature, bound: bool) -> bool:
    """True for (*args, **kwargs), with or without a first parameter that is self."""
    kinds = [p.kind for p in signature.parameters.values()]
    rest = [Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD]
    return kinds == rest or (bound and kinds[1:] == rest)


def of_function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Signature:
    """The signature of a definition; a default is `...` whatever it is."""
    a = node.args
    plain = [*a.posonlyargs, *a.args]
    kinds = [Parameter.POSITIONAL_ONLY] * len(a.posonlyargs) + [Parameter.POSITIONAL_OR_KEYWORD] * len(a.args)
    defaults = [Parameter.empty] * (len(plain) - len(a.defaults)) + [...] * len(a.defaults)
    found = [
        Parameter(arg.arg, kind, default=default) for arg, kind, default in zip(plain, kinds, defaults, strict=True)
    ]
    if a.vararg:
        found.append(Parameter(a.vararg.arg, Parameter.VAR_POSITIONAL))
    found += [
        Parameter(arg.arg, Parameter.KEYWORD_ONLY, default=Parameter.empty if default is None else ...)
        for arg, default in zip(a.kwonlyargs, a.kw_defaults, strict=True)
    ]
    if a.kwarg:
        found.append(Parameter(a.kwarg.arg, Parameter.VAR_KEYWORD))
    return Signature(found)


def names_a_module(target: str, root: Path | None) -> bool:
    module, name = split(target)
    path = fp.source_file(module, root)
    statements = ast.parse(path.read_text()).body if path else ()
    return any(
        isinstance(each, ast.Import) and name in [a.asname or a.name.partition(".")[0] for a in each.names]
        for each in statements
    )


def _target_calls(place: str, root: Path | None) -> list[Call]:
    qualname = split(place)[1]
    definitions, calls = fp.definitions(place, root), []
    for node in (definition.node for definition in definitions):
        if isinstance(node, ast.ClassDef):
            calls += _calls_of_class(node)
        elif isinstance(node, _FUNCTIONS) and not _marks(node) & {"overload", "setter", "deleter"}:
            bound = "." in qualname and "staticmethod" not in _marks(node)
            calls.append(Call(of_function(node), bound, _is_async(node)))
    if not definitions and "." in qualname and hasattr(object, qualname.rpartition(".")[2]):
        return [Call(signature_of(getattr(object, qualname.rpartition(".")[2])), bound=True)]
    if not definitions:
        raise UnknownSignature("the target has no Python text")
    if not calls:
        raise UnknownSignature("the target is assigned, not defined")
    return calls


def _calls_of_class(node: ast.ClassDef) -> list[Call]:
    """How a class is called: its own __init__ and __new__ without their first parameter."""
    made = [each for each in node.body if isinstance(each, _FUNCTIONS) and each.name in ("__init__", "__new__")]
    if not made:
        raise UnknownSignature(f"class {node.name} defines no __init__ of its own")
    return [Call(Signature(list(of_function(each).parameters.values())[1:])) for each in made]


def _function(place: str) -> ast.FunctionDef | ast.AsyncFunctionDef:
    found = fp.definitions(place)
    if not found or not isinstance(found[-1].node, _FUNCTIONS):
        raise UnknownSignature(f"{place} is not defined by def")
    return found[-1].node


def _marks(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """The last names of a function's decorators."""
    return {ast.unparse(mark).rpartition(".")[2] for mark in node.decorator_list}


def _is_async(node: ast.AST) -> bool:
    return isinstance(node, ast.AsyncFunctionDef) and "asynccontextmanager" not in _marks(node)


def _provider_calls(spec: PatchSpec) -> list[Call]:
    """How what a provider gives is called; empty where a wrap returns nothing, or its original only."""
    found = fp.definitions(spec.provider)
    if found and spec.kind == "wrap":
        return [Call(of_function(node), is_async=_is_async(node)) for node in _returned(found[-1], 0)]
    if found and isinstance(found[-1].node, ast.ClassDef):
        return _calls_of_class(found[-1].node)
    node = _function(spec.provider)
    return [Call(of_function(node), is_async=_is_async(node))]


def _returned(maker: Definition, depth: int) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions that a provider returns: defined inside it, or returned by another function of ours it calls."""
    if not isinstance(maker.node, _FUNCTIONS) or depth > 4:
        raise UnknownSignature(f"{maker.module} does not return a function that it defines")
    inner = {node.name: node for node in maker.node.body if isinstance(node, _FUNCTIONS)}
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
        elif not isinstance(child, (*_FUNCTIONS, ast.ClassDef, ast.Lambda)):
            yield from _returns(child)
