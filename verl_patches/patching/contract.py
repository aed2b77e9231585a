"""The contract with upstream: what every row of one line expects of the sources, against the sources as they are.

Everything is read as text from {top-level package: the folder that holds it}; nothing of upstream is imported. A row's
bindings must be complete over the upstream packages of its line, and over those modules of other packages (torch) that
rows name; the rest of such packages is not searched.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from verl_patches.errors import ConfigError
from verl_patches.patching import fingerprint as fp
from verl_patches.patching.bindings import SourceFile, find_bindings, read_tree
from verl_patches.patching.report import Finding, Report
from verl_patches.patching.resolve import split
from verl_patches.patching.row_contract import RowCheck, Sources, can_be_bound
from verl_patches.patching.spec import PatchSpec

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
