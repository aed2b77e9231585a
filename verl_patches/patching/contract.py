"""The contract with upstream: what every row of one line expects of the sources, against the sources as they are.

Everything is read as text from {top-level package: the folder that holds it}; nothing of upstream is imported. A row's
bindings must be complete over the upstream packages of its line, and over those modules of other packages (torch) that
rows name; the rest of such packages is not searched. A provider must accept every call that its target accepts: of a
wrap, `provider(original) -> replacement`, the functions that it returns are compared.
"""

from __future__ import annotations

import ast
import difflib
import importlib.metadata
import importlib.util
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from inspect import Parameter, Signature
from inspect import signature as signature_of
from pathlib import Path

from verl_patches.errors import ConfigError
from verl_patches.patching import fingerprint as fp
from verl_patches.patching.bindings import Import, SourceFile, find_bindings, read_tree
from verl_patches.patching.fingerprint import Definition, Statement, bindings_of, definitions, source_file, source_lines
from verl_patches.patching.report import Finding, Report
from verl_patches.patching.spec import PatchSpec, split

PACKAGES = {
    "pypi": ("verl", "megatron", "vllm"),
    "a3": ("verl", "megatron", "mindspeed", "mindspeed_llm", "vllm", "vllm_ascend"),
}


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
        raise ConfigError(f"line {line}: this interpreter has no {', '.join(missing)}; "
                          "give the sources with --upstream DIR")
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
    unseen = [spec for spec in rows if _names(spec) & sources.absent]
    rows = [spec for spec in rows if not _names(spec) & sources.absent]
    tree = read_tree(sources.roots)
    named = {split(place)[0] for spec in rows if not spec.is_module_stub for place in (spec.target, *spec.bindings)}
    for module in sorted(named - set(tree)):  # outside: torch and the like, as far as the rows name it
        path = fp.source_file(module, sources.roots.get(module.split(".")[0]))
        if path is not None:
            tree[module] = SourceFile(module, path)
    held = find_bindings([spec.target for spec in rows if can_be_bound(spec)], tree)
    for name, root in sources.roots.items():
        files = [file for module, file in tree.items() if module.split(".")[0] == name]
        unread = tuple(f"{file.module}: {file.unread}" for file in files if file.unread)
        yield Finding(f"package {name}", "note" if unread else "fine", where=str(root), details=unread,
                      found=f"{len(files)} Python files" + f", {len(unread)} of them unreadable: what they import from "
                      "rows' targets is not known" * bool(unread))
    for spec in rows:
        yield RowCheck(spec, line, sources, held, tree).finding()
    for spec in unseen:
        lacking = ", ".join(sorted(_names(spec) & sources.absent))
        yield Finding(spec.id, "note", where=spec.target, found=f"not looked at: no {lacking} in the folder given")


def _names(spec: PatchSpec) -> set[str]:
    """The top-level packages that a row's target and bindings name."""
    return {place.partition(":")[0].split(".")[0] for place in (spec.target, *spec.bindings)}


@dataclass(frozen=True)
class Sources:
    """Where the sources of one line lie.

    `roots`: {top-level package: the folder that holds it}; other packages (torch, tensordict) are those of this
    interpreter. `installed`: the roots are this interpreter's too. `base`: a tree known to be good, as `roots`.
    `versions`: {distribution: pinned version}. `absent`: packages of the line that `roots` lack; rows that name them
    are not looked at. `held`: {top-level package: what it is, whole, as compared with its pin}.
    """

    roots: Mapping[str, Path]
    installed: bool = True
    base: Mapping[str, Path] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    absent: frozenset[str] = frozenset()
    held: Mapping[str, str] = field(default_factory=dict)


def can_be_bound(spec: PatchSpec) -> bool:
    """Whether others can hold the same object: not so for attributes of classes, which are shared, and new names."""
    return spec.target.count(":") == 1 and "." not in split(spec.target)[1] and spec.kind not in ("register", "extend")


class RowCheck:
    """The look at one row: every step adds to `problems`, `notes`, `said` (what is fine) and `details`."""

    def __init__(self, spec: PatchSpec, line: str, sources: Sources, held: Mapping[str, Mapping[str, Import]],
                 tree: Mapping[str, SourceFile]):
        self.spec, self.line, self.sources, self.held, self.tree = spec, line, sources, held, tree
        self.top = spec.target.partition(":")[0].split(".")[0]
        self.root = sources.roots.get(self.top)
        self.file = None if spec.is_module_stub else fp.source_file(spec.target_module, self.root)
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.said: list[str] = []
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
            self.details += near_modules(self.spec.target_module, self.tree)
            self.todo.append("find where it went and set the row's target")
        elif not self.problems and self._check_body():
            if self.spec.kind != "extend":
                self._check_signature()
            self._check_bindings()
        state = "problem" if self.problems else "note" if self.notes else "fine"
        reviewed = fp.reviewed_hash(self.line, self.spec.target)
        return Finding(self.spec.id, state, where=self._where(), expected=f"reviewed {reviewed}" if reviewed else "",
                       found="; ".join((*self.problems, *self.notes, *self.said)), todo="; ".join(self.todo),
                       details=tuple(self.details))

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
        if fp.source_file(self.spec.provider) is None:
            self.problems.append(f"our module {self.spec.provider} is not there")
        self.said.append("stands in for a whole module where that is missing")

    # -- the body -----------------------------------------------------------------------------------------------------

    def _check_body(self) -> bool:
        """Compare with the reviewed body; False where the target is not there, so that nothing more can be said."""
        known, found = fp.reviewed_hash(self.line, self.spec.target), fp.fingerprint(self.spec.target, self.root)
        pinned, here = self.sources.versions.get(self.top), _version(self.top)
        if self.root is None and not self.sources.installed:
            self.said.append(f"{self.top} {here} of this interpreter was looked at")
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
            self._tell_drift(found)
        else:
            self.said.append("body as reviewed")
        return True

    def _check_new_name(self) -> bool:
        holder = self.spec.target.rpartition("." if "." in split(self.spec.target)[1] else ":")[0]
        if self.statements:
            self.problems.append("upstream has this name now")
            self.todo.append("compare the two; the row must become a wrap or replace, or go")
        elif ":" in holder and not fp.definitions(holder, self.root):
            return self._tell_missing()
        else:
            self.said.append("upstream has no such name, as expected")
        return True

    def _check_without_source(self, known: str | None, pinned: str | None, here: str) -> bool:
        if known != fp.NO_SOURCE:
            return self._tell_missing()
        text = "no Python text of its own (an imported name, compiled or inherited): held by "
        if self.top in self.sources.held:
            self.said.append(text + self.sources.held[self.top])
            return True
        text += f"the version of {self.top}, {here} here"
        if self.top in self.sources.roots and not self.sources.installed:
            self.notes.append(f"{text.partition(' held')[0]} {self.top} is not as pinned, so nothing says what it is")
        elif pinned is None:
            self.notes.append(f"{text}; the line pins no version of it")
        elif _public(pinned) != _public(here):
            self.notes.append(f"{text}, pinned {pinned}")
        else:
            self.said.append(f"{text}, as pinned")
        return True

    def _tell_missing(self) -> bool:
        self.problems.append(f"{split(self.spec.target)[1]} is not in {self._at(self.file)}")
        self.details += near_names(self.spec.target, self.file, self.tree)
        self.todo.append("find where it went and set the row's target")
        return False

    def _tell_drift(self, found: str) -> None:
        changed, gone = changes(fp.reviewed_statements(self.line, self.spec.target), self.statements)
        count = sum(number for number, _ in gone)
        self.problems.append(f"the body is {found}: {len(changed)} statement(s) new or changed, {count} gone")
        self.details += [f"{self._at(s.file, s.line)}: {' '.join(line.strip() for line in s.source())}"
                         for s in changed]
        self.details += [f"{number} reviewed statement(s) gone "
                         + (f"after {self._at(last.file, last.line)}" if last else "at the start")
                         for number, last in gone]
        self.details += self._diff()
        self.todo.append(f"review the change, then `{self._review()}`"
                         + ("" if self.sources.base else "; --base DIR shows the whole difference"))

    def _review(self) -> str:
        return fp.review_command(self.spec.id, self.line, "" if self.sources.installed else "DIR")

    def _diff(self) -> list[str]:
        base = self.sources.base.get(self.top)
        if base is None:
            return []
        return difference(fp.definitions(self.spec.target, base), fp.definitions(self.spec.target, self.root),
                          self._where())

    # -- signature and bindings ---------------------------------------------------------------------------------------

    def _check_signature(self) -> None:
        try:
            faults = signature_faults(self.spec, self.root)
        except UnknownSignature as reason:
            self.notes.append(f"signature not checked: {reason}")
            return
        if faults:
            self.problems.append(f"{self.spec.provider} does not fit its target: {', '.join(faults)}")
            self.todo.append("make the provider give what can be called, and awaited, as the target is")
        else:
            self.said.append("signature accepted")

    def _check_bindings(self) -> None:
        found, listed = self.held.get(self.spec.target, {}), set(self.spec.bindings)
        missing = [item for place, item in found.items() if place not in listed]
        extra = sorted(listed - set(found))
        if missing:
            self.problems.append(f"{len(missing)} binding(s) not listed")
            self.details += [f"{_file_of(item.place, self.tree)}:{item.line}: {item.place} holds the same object"
                             for item in missing]
            self.todo.append(f"add to the row's bindings: {', '.join(item.place for item in missing)}")
        if extra:
            self.problems.append(f"listed bindings that do not hold it: {', '.join(extra)}")
            self.todo.append("take them out of the row's bindings")
        if not missing and not extra and listed:
            self.said.append(f"{len(listed)} binding(s) complete")


def _file_of(place: str, tree: Mapping[str, SourceFile]) -> str:
    module = split(place)[0]
    path = tree[module].path
    return "/".join(path.parts[-(module.count(".") + 1 + (path.name == "__init__.py")):])


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


def changes(
    reviewed: list[str], found: list[Statement]
) -> tuple[list[Statement], list[tuple[int, Statement | None]]]:
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


def difference(before: list[Definition], after: list[Definition], name: str) -> list[str]:
    """The unified diff of two sets of definitions, decorators included."""
    return list(difflib.unified_diff(_source_text(before), _source_text(after), f"base/{name}", name, lineterm=""))


def _source_text(found: list[Definition]) -> list[str]:
    lines = []
    for one in found:
        first = min([one.node.lineno, *(mark.lineno for mark in getattr(one.node, "decorator_list", ()))])
        lines += source_lines(one.file)[first - 1:one.node.end_lineno]
    return lines


def near_names(place: str, file: Path, tree: Mapping[str, SourceFile]) -> list[str]:
    """Lines such as "near: fit_again, line 80" and "same name: verl.utils.other, line 12" for a missing place."""
    *holders, name = split(place)[1].split(".")
    body = _bound_names(ast.parse(file.read_bytes()))
    for holder in holders:
        if not isinstance(body.get(holder), ast.ClassDef):
            name = holder
            break
        body = _bound_names(body[holder])
    near = difflib.get_close_matches(name, body, n=3, cutoff=0.5)
    found = [f"near: {other}, line {body[other].lineno}" for other in near]
    return found + ([] if holders else _same_name(name, place, tree))


def near_modules(module: str, tree: Mapping[str, SourceFile]) -> list[str]:
    """Modules of the tree with a name like that of a missing one."""
    return [f"near: {other}" for other in difflib.get_close_matches(module, tree, n=3)]


def _bound_names(node: ast.AST) -> dict[str, ast.AST]:
    """{name: the last statement that binds it} in a module or class body."""
    return {name: statement for names, statement in bindings_of(node) for name in names}


def _same_name(name: str, place: str, tree: Mapping[str, SourceFile]) -> list[str]:
    pattern = re.compile(rf"^(?:async def|def|class) {re.escape(name)}\b".encode(), re.M)
    found = []
    for module, file in tree.items():
        if module.split(".")[0] == split(place)[0].split(".")[0]:
            text = file.path.read_bytes()
            lines = (text.count(b"\n", 0, match.start()) + 1 for match in pattern.finditer(text))
            found += [f"same name: {module}, line {line}" for line in lines]
    return found[:3]


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
    """What the target of a row accepts and its provider does not, in words; UnknownSignature where one has no text.

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
