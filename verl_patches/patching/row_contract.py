"""The look at one row of the catalogue: is upstream's source what the row was written for?"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from verl_patches.patching import fingerprint as fp
from verl_patches.patching import signature
from verl_patches.patching.bindings import Import, SourceFile
from verl_patches.patching.drift import changes, difference, near_modules, near_names
from verl_patches.patching.report import Finding
from verl_patches.patching.resolve import split
from verl_patches.patching.spec import PatchSpec
from verl_patches.patching.statements import Statement


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
        module, _ = split(self.spec.provider)
        if fp.source_file(module) is None:
            self.problems.append(f"our module {module} is not there")
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
            faults = signature.faults(self.spec, self.root)
        except signature.Unseen as reason:
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
