"""Compare each row's expectations of upstream with upstream's sources, and record reviewed bodies, for `check`.

A row expects that its target's body is the reviewed one and that its bindings are complete. Sources are read as text
from {top-level package: the folder that holds it}; nothing of upstream is imported. Bindings are searched in the
upstream packages of the line, and in those modules of other packages (torch) that rows name. Whether a replacement
accepts the calls of its target is checked when the row is applied (signatures.py).
"""

from __future__ import annotations

import ast
import importlib.util
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from verl_patches.errors import ConfigError
from verl_patches.patching import fingerprint as fp
from verl_patches.patching.bindings import Import, SourceFile, find_bindings, read_tree
from verl_patches.patching.report import Finding
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


def check_rows(
    specs: Iterable[PatchSpec], line: str, roots: Mapping[str, Path], installed: bool = True
) -> list[Finding]:
    """Return a finding about each row of the line.

    roots: {top-level package: the folder that holds it}. installed: this interpreter imports from the roots, so that
    other packages (torch, tensordict) are its own; else the rows that name another package are not checked.
    """
    rows = [spec.on_line(line) for spec in specs if line in spec.lines]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # upstream's sources have some, such as invalid escape sequences
        return [*_findings(rows, line, roots, installed)]


def _findings(rows: list[PatchSpec], line: str, roots: Mapping[str, Path], installed: bool) -> Iterator[Finding]:
    tree, places, absent = read_tree(roots), dict[str, tuple[str, ...]](), dict[str, str]()
    for spec in rows:
        places[spec.id] = () if spec.is_module_stub else (spec.target, *spec.bindings)
        packages = set() if installed else {_package(place) for place in places[spec.id]} - set(roots)
        absent[spec.id] = ", ".join(sorted(packages))
    present = [spec for spec in rows if not absent[spec.id]]
    named = {split_place(place)[0] for spec in present for place in places[spec.id]}
    for module in sorted(named - set(tree)):  # modules of other packages, such as torch
        path = fp.source_file(module, roots.get(_package(module)))
        if path is not None:
            tree[module] = SourceFile(module, path)
    imported = find_bindings([spec.target for spec in present if _can_be_bound(spec)], tree)
    for spec in rows:
        if absent[spec.id]:
            text = f"not checked: no {absent[spec.id]} in the folder given"
            yield Finding(spec.id, "note", where=spec.target, found=text)
        else:
            root, found = roots.get(_package(spec.target)), imported.get(spec.target, {})
            yield _row_finding(spec, line, root, found, tree, "" if installed else "DIR")


def _package(place: str) -> str:
    return place.partition(":")[0].partition(".")[0]


def _can_be_bound(spec: PatchSpec) -> bool:
    """Return whether other modules can bind the target; False for attributes of classes, new names and module stubs."""
    is_attribute = "." in split_place(spec.target)[1]
    return not (spec.is_module_stub or is_attribute or spec.kind in ("register", "extend"))


class Part(NamedTuple):
    """Hold the result for a row's body or its bindings."""

    ok: bool
    found: str
    todo: str = ""
    details: tuple[str, ...] = ()


def _row_finding(
    spec: PatchSpec,
    line: str,
    root: Path | None,
    imported: Mapping[str, Import],
    tree: Mapping[str, SourceFile],
    upstream: str,
) -> Finding:
    """Return the finding about one row; imported: {binding of its target: the import there}."""
    if spec.is_module_stub:
        text = "stub of a module; used only where the package is not installed"
        return Finding(spec.id, "fine", spec.target, found=text)
    file = fp.source_file(spec.target_module, root)
    if file is None:
        text = f"there is no module {spec.target_module}"
        return Finding(spec.id, "problem", spec.target, found=text, todo=_RETARGET_TODO)
    where = _relative_path(file, spec.target_module)
    try:
        definitions = fp.definitions(spec.target, root)
    except SyntaxError as error:
        text = f"this Python cannot parse it: {error.msg}"
        return Finding(spec.id, "problem", f"{where}:{error.lineno}", found=text)
    body = _compare_body(spec, line, root, definitions, upstream)
    if definitions:
        first = definitions[0]
        where = f"{_relative_path(first.file, first.module)}:{first.node.lineno}"
    parts = sorted([body, *_compare_bindings(spec, root, imported, tree)], key=lambda part: part.ok)
    return Finding(
        spec.id,
        "fine" if parts[0].ok else "problem",
        where,
        expected=f"reviewed {fp.reviewed_hash(line, spec.target)}",
        found="; ".join(part.found for part in parts),
        todo="; ".join(part.todo for part in parts if part.todo),
        details=tuple(detail for part in parts for detail in part.details),
    )


def _compare_body(
    spec: PatchSpec, line: str, root: Path | None, definitions: Sequence[fp.Definition], upstream: str
) -> Part:
    """Compare the target's body with the reviewed one; of kind extend the name must not exist, but its holder must."""
    name, found, reviewed = split_place(spec.target)[1], fp.body_hash(definitions), fp.reviewed_hash(line, spec.target)
    if spec.kind == "extend":
        if definitions:
            todo = "compare the two; make the row a wrap or replace, or delete it"
            return Part(False, "upstream has this name now", todo)
        name = name.rpartition(".")[0]
        exists = not name or bool(fp.definitions(f"{spec.target_module}:{name}", root))
    else:
        exists = bool(definitions) or reviewed == fp.NO_SOURCE
    if not exists:
        return Part(False, f"{spec.target_module} has no {name}", _RETARGET_TODO)
    if reviewed == found:
        return Part(True, "body as reviewed")
    review = fp.review_command(spec.id, line, upstream)
    if reviewed is None:
        return Part(False, f"its fingerprint {found} was never reviewed", f"review it, then `{review}`")
    todo = f"review the change (git diff in its clone, or the pinned package's files), then `{review}`"
    return Part(False, f"the hash of its body is {found}, not the reviewed one", todo)


def _compare_bindings(
    spec: PatchSpec, root: Path | None, imported: Mapping[str, Import], tree: Mapping[str, SourceFile]
) -> Iterator[Part]:
    listed = set(spec.bindings)
    if names_a_module(spec.target, root):  # `import torch` binds the same module everywhere
        listed -= {place for place in listed if names_a_module(place, root)}
    missing = [item for place, item in imported.items() if place not in listed]
    extra = ", ".join(sorted(listed - set(imported)))
    if missing:
        files = [tree[split_place(item.place)[0]] for item in missing]
        details = tuple(
            f"{_relative_path(file.path, file.module)}:{item.line}: {item.place} is the same object"
            for file, item in zip(files, missing, strict=True)
        )
        todo = f"add to the row's bindings: {', '.join(item.place for item in missing)}"
        yield Part(False, f"{len(missing)} binding(s) not listed", todo, details)
    if extra:
        todo = "remove them from the row's bindings"
        yield Part(False, f"listed bindings that are not the target: {extra}", todo)
    if not missing and not extra and listed:
        yield Part(True, f"{len(listed)} binding(s) complete")


def record_rows(
    specs: Iterable[PatchSpec], line: str, roots: Mapping[str, Path], no_source: bool = False, whole: bool = False
) -> list[str]:
    """Record the bodies of the rows' targets as reviewed, and return the targets whose records were removed.

    Those are, of a `whole` line, targets that no row has any more. A target without Python text is recorded where the
    row is an `extend`, where it was reviewed as such, or with `no_source`; else nothing is written (ConfigError).
    """
    found, absent = {}, []
    for spec in specs:
        root = roots.get(_package(spec.target))
        digest = fp.fingerprint(spec.target, root)
        may_lack_text = spec.kind == "extend" or no_source or fp.reviewed_hash(line, spec.target) == fp.NO_SOURCE
        if fp.source_file(spec.target_module, root) is None or (digest == fp.NO_SOURCE and not may_lack_text):
            absent.append(f"{spec.id}: {spec.target}")
        found[spec.target] = {"hash": digest, "files": fp.file_hashes(spec.target, root)}
    if absent:
        raise ConfigError(
            "check --write: nothing was written, these targets have no Python text here:\n  "
            + "\n  ".join(absent)
            + "\nCorrect them; for a compiled or inherited target add --no-source"
        )
    return fp.write_reviewed(line, found, whole)


def names_a_module(target: str, root: Path | None) -> bool:
    """Return whether "module:name" is a module, because a top-level `import` statement of `module` binds `name`."""
    module, name = split_place(target)
    path = fp.source_file(module, root)
    imports = [node for node in ast.parse(path.read_bytes()).body if isinstance(node, ast.Import)] if path else ()
    return any(name == (a.asname or a.name.partition(".")[0]) for node in imports for a in node.names)


def _relative_path(file: Path, module: str) -> str:
    """Return the path of a module's file relative to the folder that holds its top-level package."""
    return str(file.relative_to(file.parents[module.count(".") + (file.name == "__init__.py")]))
