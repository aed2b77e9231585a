"""What became of a target that is not as reviewed: changed statements, a diff, or where a name that is gone may be."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Mapping
from pathlib import Path

from verl_patches.patching.bindings import SourceFile
from verl_patches.patching.fingerprint import Definition, bindings_of
from verl_patches.patching.resolve import split
from verl_patches.patching.statements import Statement, source_lines


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
