"""Compare each row's expectations of upstream with upstream's sources, for the command `check`.

A row expects that its target's body is the reviewed one and that its bindings are complete. Sources are read as text
from {top-level package: the folder that holds it}; nothing of upstream is imported. Bindings are searched in the
upstream packages of the line, and in those modules of other packages (torch) that rows name. Whether a replacement
accepts the calls of its target is checked when the row is applied (signatures.py).
"""

from __future__ import annotations

import ast
import difflib
import importlib.metadata
import importlib.util
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from verl_patches.errors import our_command
from verl_patches.patching import fingerprint as fp
from verl_patches.patching.bindings import Import, SourceFile, find_bindings, read_tree
from verl_patches.patching.report import STATES, Finding, Report
from verl_patches.patching.spec import PatchSpec, split_place

PACKAGES = {
    "pypi": ("verl", "megatron", "vllm"),
    "a3": ("verl", "megatron", "mindspeed", "mindspeed_llm", "vllm", "vllm_ascend"),
}
_RETARGET_TODO = "find where upstream has it now, and change the row's target"


def installed_root(package: str) -> Path | None:
    """Return the folder that holds a top-level package as this interpreter finds it, links resolved; None without one.

    Nothing is imported.
    """
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]).resolve().parent if places else None


@dataclass(frozen=True)
class Sources:
    """Describe where the sources of one line are.

    `roots`: {top-level package: the folder that holds it}; other packages (torch, tensordict) are those of this
    interpreter, and rows that name a package of the line which `roots` lacks are not checked. `installed`: this
    interpreter imports from the roots. `versions`: {distribution: pinned version}. `verified`: {top-level package: its
    source and version} of the packages whose files are all as pinned.
    """

    roots: Mapping[str, Path]
    installed: bool = True
    versions: Mapping[str, str] = field(default_factory=dict)
    verified: Mapping[str, str] = field(default_factory=dict)


def check_rows(specs: Iterable[PatchSpec], line: str, sources: Sources) -> Report:
    """Return a report on each package that was read and each row of the line; it is empty if the line has no rows."""
    rows = [spec.on_line(line) for spec in specs if line in spec.lines]
    if not rows:
        return Report("check", line, ())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # upstream's sources have some, such as invalid escape sequences
        return Report("check", line, tuple(_findings(rows, line, sources)))


def _findings(rows: list[PatchSpec], line: str, sources: Sources) -> Iterator[Finding]:
    missing_packages = set(PACKAGES[line]) - set(sources.roots)
    named_by = {spec.id: {_package(place) for place in (spec.target, *spec.bindings)} for spec in rows}
    absent = {name: ", ".join(sorted(packages & missing_packages)) for name, packages in named_by.items()}
    present = [spec for spec in rows if not absent[spec.id]]
    tree = read_tree(sources.roots)
    named = {
        split_place(place)[0] for spec in present if not spec.is_module_stub for place in (spec.target, *spec.bindings)
    }
    for module in sorted(named - set(tree)):  # modules of other packages, such as torch
        path = fp.source_file(module, sources.roots.get(_package(module)))
        if path is not None:
            tree[module] = SourceFile(module, path)
    imported = find_bindings([spec.target for spec in present if _can_be_bound(spec)], tree)
    for name, root in sources.roots.items():
        files = [file for module, file in tree.items() if _package(module) == name]
        parse_error = tuple(f"{file.module}: {file.parse_error}" for file in files if file.parse_error)
        text = f"{len(files)} Python files"
        if parse_error:
            text += f", {len(parse_error)} of them cannot be parsed, so their imports of rows' targets were not checked"
        yield Finding(f"package {name}", "note" if parse_error else "fine", str(root), found=text, details=parse_error)
    for spec in present:
        yield RowCheck(spec, line, sources, imported, tree).finding()
    for spec in rows:
        if absent[spec.id]:
            text = f"not checked: no {absent[spec.id]} in the folder given"
            yield Finding(spec.id, "note", where=spec.target, found=text)


def _package(place: str) -> str:
    return place.partition(":")[0].partition(".")[0]


def _can_be_bound(spec: PatchSpec) -> bool:
    """Return whether other modules can bind the target; False for attributes of classes, new names and module stubs."""
    is_attribute = "." in split_place(spec.target)[1]
    return not (spec.is_module_stub or is_attribute or spec.kind in ("register", "extend"))


class Part(NamedTuple):
    """Hold one result of a row's check; its fields are those of Finding."""

    state: str
    found: str
    todo: str = ""
    details: tuple[str, ...] = ()


class RowCheck:
    """Check one row in several parts, which `finding` joins with the problems first."""

    def __init__(
        self,
        spec: PatchSpec,
        line: str,
        sources: Sources,
        imported: Mapping[str, Mapping[str, Import]],
        tree: Mapping[str, SourceFile],
    ):
        self.spec, self.line, self.sources, self.imported, self.tree = spec, line, sources, imported, tree
        self.top = _package(spec.target)
        self.root = sources.roots.get(self.top)
        self.file = None if spec.is_module_stub else fp.source_file(spec.target_module, self.root)
        self.reviewed = fp.reviewed_hash(line, spec.target)
        self.definitions: list[fp.Definition] = []

    def finding(self) -> Finding:
        """Return the finding about this row."""
        parts = sorted(self._check_parts(), key=lambda part: -STATES.index(part.state))
        return Finding(
            self.spec.id,
            parts[0].state,
            where=self._target_location(),
            expected=f"reviewed {self.reviewed}" if self.reviewed else "",
            found="; ".join(part.found for part in parts),
            todo="; ".join(part.todo for part in parts if part.todo),
            details=tuple(detail for part in parts for detail in part.details),
        )

    def _check_parts(self) -> Iterator[Part]:
        spec, pinned, here = self.spec, self.sources.versions.get(self.top), _installed_version(self.top)
        is_outside = self.root is None and not self.sources.installed
        if spec.is_module_stub:
            if fp.source_file(split_place(spec.provider)[0]) is None:
                yield Part("problem", f"our stub module {split_place(spec.provider)[0]} does not exist")
            yield Part("fine", "stub of a module; used only where the package is not installed")
            return
        if self.file is None and is_outside and importlib.util.find_spec(self.top) is None:
            yield Part("note", f"not checked: {self.top} is neither in this tree nor in this interpreter")
            return
        if self.file is None:
            near = difflib.get_close_matches(spec.target_module, self.tree, n=3)
            details = tuple(f"similar name: {module}" for module in near)
            yield Part("problem", f"there is no module {spec.target_module}", _RETARGET_TODO, details)
            return
        try:
            self.definitions = fp.definitions(spec.target, self.root)
        except SyntaxError as error:
            place = f"{_relative_path(self.file, spec.target_module)}:{error.lineno}"
            yield Part("problem", f"this Python cannot parse {place}: {error.msg}")
            return
        if is_outside:
            yield Part("fine", f"{self.top} {here} of this interpreter was checked")
        if is_outside and pinned and _public_version(pinned) != _public_version(here):
            yield Part("note", f"body not compared: the pin is {self.top} {pinned}")
        elif not self._target_exists():
            yield self._missing_target(self.file)
            return
        else:
            yield self._compare_body(pinned, here)
        yield from self._compare_bindings()

    def _target_location(self) -> str:
        if self.file is None:
            return self.spec.target_module
        if not self.definitions:
            return _relative_path(self.file, self.spec.target_module)
        found = self.definitions[0]
        return f"{_relative_path(found.file, found.module)}:{found.node.lineno}"

    def _target_exists(self) -> bool:
        """Return whether the target exists; for kind extend, whether the holder of the new name exists."""
        if self.spec.kind != "extend":
            return bool(self.definitions) or self.reviewed == fp.NO_SOURCE
        module, qualname = split_place(self.spec.target)
        holder = qualname.rpartition(".")[0]
        return not holder or bool(fp.definitions(f"{module}:{holder}", self.root))

    def _compare_body(self, pinned: str | None, here: str) -> Part:
        """Compare the target's body with the reviewed one."""
        if self.spec.kind == "extend":
            if not self.definitions:
                return Part("fine", "upstream has no such name, as expected")
            todo = "compare the two; make the row a wrap or replace, or delete it"
            return Part("problem", "upstream has this name now", todo)
        if not self.definitions:
            return self._compare_version(pinned, here)
        found = fp.body_hash(self.definitions)
        review = fp.review_command(self.spec.id, self.line, "" if self.sources.installed else "DIR")
        if self.reviewed is None:
            return Part("problem", f"its fingerprint {found} was never reviewed", f"review it, then `{review}`")
        if self.reviewed == found:
            return Part("fine", "body as reviewed")
        switches = f"line={self.line},platform={min(self.spec.platforms)}"
        explain = our_command("explain", self.spec.id, "--switches", switches, "--upstream", "DIR")
        todo = f"review the change (`{explain}` prints it), then `{review}`"
        return Part("problem", f"the hash of its body is {found}, not the reviewed one", todo)

    def _missing_target(self, file: Path) -> Part:
        qualname = split_place(self.spec.target)[1]
        tree = ast.parse(file.read_bytes())
        lines = {node.name: node.lineno for node in ast.walk(tree) if isinstance(node, fp.DEFINITIONS)}
        near = difflib.get_close_matches(qualname.rpartition(".")[2], lines, n=3, cutoff=0.5)
        details = tuple(f"similar name: {name}, line {lines[name]}" for name in near)
        text = f"{qualname} is not in {_relative_path(file, self.spec.target_module)}"
        return Part("problem", text, _RETARGET_TODO, details)

    def _compare_version(self, pinned: str | None, here: str) -> Part:
        """Compare the package's version instead, as the target has no Python source (and had none when reviewed)."""
        text = "no Python source of its own (an imported name, compiled or inherited)"
        version = f"{text}, so its body is compared by the version of {self.top}: {here} here"
        if self.top in self.sources.verified:
            return Part("fine", f"{text}, so its body is compared by its package: {self.sources.verified[self.top]}")
        if self.top in self.sources.roots and not self.sources.installed:
            return Part("note", f"{text}, and {self.top} is not as pinned, so its body was not compared")
        if pinned is None:
            return Part("note", f"{version}; the line pins no version of it")
        if _public_version(pinned) != _public_version(here):
            return Part("note", f"{version}, pinned {pinned}")
        return Part("fine", f"{version}, as pinned")

    def _compare_bindings(self) -> Iterator[Part]:
        found, listed = self.imported.get(self.spec.target, {}), set(self.spec.bindings)
        if names_a_module(self.spec.target, self.root):  # `import torch` binds the same module everywhere
            listed -= {place for place in listed if names_a_module(place, self.root)}
        missing = [item for place, item in found.items() if place not in listed]
        extra = ", ".join(sorted(listed - set(found)))
        if missing:
            files = [self.tree[split_place(item.place)[0]] for item in missing]
            details = tuple(
                f"{_relative_path(file.path, file.module)}:{item.line}: {item.place} is the same object"
                for file, item in zip(files, missing, strict=True)
            )
            todo = f"add to the row's bindings: {', '.join(item.place for item in missing)}"
            yield Part("problem", f"{len(missing)} binding(s) not listed", todo, details)
        if extra:
            todo = "remove them from the row's bindings"
            yield Part("problem", f"listed bindings that are not the target: {extra}", todo)
        if not missing and not extra and listed:
            yield Part("fine", f"{len(listed)} binding(s) complete")


def names_a_module(target: str, root: Path | None) -> bool:
    """Return whether "module:name" is a module, because a top-level `import` statement of `module` binds `name`."""
    module, name = split_place(target)
    path = fp.source_file(module, root)
    imports = [node for node in ast.parse(path.read_bytes()).body if isinstance(node, ast.Import)] if path else ()
    return any(name == (a.asname or a.name.partition(".")[0]) for node in imports for a in node.names)


def _relative_path(file: Path, module: str) -> str:
    """Return the path of a module's file relative to the folder that holds its top-level package."""
    return str(file.relative_to(file.parents[module.count(".") + (file.name == "__init__.py")]))


def _installed_version(package: str) -> str:
    if package in sys.stdlib_module_names:
        return "of Python " + sys.version.split()[0]
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _public_version(version: str) -> str:
    return version.partition("+")[0]
