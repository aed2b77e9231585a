"""Definitions as lists of statements, each with a hash of what it says: comments, docstrings and layout dropped.

A compound statement gives one entry for its header (test, target, handler type, pattern ...) and one for every
statement inside; depth and field (body, orelse, finalbody) count, so a statement that moves out of an `if` changes.
Fields of the syntax tree are walked by name and empty ones left out, so that fields which newer Python versions add
(type_params and the like) change nothing; tests/patching/test_fingerprint.py compares Python 3.10 to 3.13.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
BLOCKS = (ast.stmt, ast.ExceptHandler, ast.match_case)  # what statements stand in, definitions among them
_NESTED = ("body", "orelse", "handlers", "cases", "finalbody")
_NO_MEANING = ("ctx", "kind", "type_comment", "type_ignores")


@dataclass(frozen=True)
class Statement:
    """One statement of a definition. `hash`: 8 hex digits; `line`, `end_line`: where it (or its header) stands."""

    hash: str
    file: Path
    line: int
    end_line: int

    def source(self) -> list[str]:
        """Its lines as they stand in the file."""
        return source_lines(self.file)[self.line - 1:self.end_line]


def source_lines(file: Path) -> list[str]:
    """The lines of a file as Python counts them: a form feed, for one, ends none."""
    return file.read_text(encoding="utf-8", errors="replace").split("\n")


def flatten(node: ast.AST, file: Path) -> list[Statement]:
    """The statements of one definition in source order, its own header first."""
    return list(_flatten(node, file, 0, ""))


def whole_hash(statements: list[Statement]) -> str:
    """16 hex digits over all statements."""
    return hashlib.sha256(" ".join(s.hash for s in statements).encode()).hexdigest()[:16]


def _flatten(node: ast.AST, file: Path, depth: int, field: str) -> Iterator[Statement]:
    nested = {name: value for name, value in ast.iter_fields(node) if name in _NESTED and isinstance(value, list)}
    text = f"{depth}{field}:{_text(node, leave_out=nested)}"
    yield Statement(hashlib.sha256(text.encode()).hexdigest()[:8], file, *_lines(node, nested))
    for name, children in nested.items():
        if name == "body" and isinstance(node, DEFINITIONS) and ast.get_docstring(node, clean=False) is not None:
            children = children[1:]
        for child in children:
            yield from _flatten(child, file, depth + 1, name)


def _lines(node: ast.AST, nested: dict[str, list[ast.AST]]) -> tuple[int, int]:
    """First and last line of a statement, or of its header where it holds others."""
    if not nested:
        return node.lineno, node.end_lineno
    header = [part for name, value in ast.iter_fields(node) if name not in nested
              for child in (value if isinstance(value, list) else [value]) if isinstance(child, ast.AST)
              for part in ast.walk(child) if hasattr(part, "lineno")]
    first = min([part.lineno for part in header] + [getattr(node, "lineno", 1 << 30)])
    return first, max([part.end_lineno for part in header] + [getattr(node, "lineno", first)])


def _text(value: object, leave_out: object = ()) -> str:
    """A syntax tree as plain ASCII, the same on every Python version."""
    if isinstance(value, ast.JoinedStr):
        return f"JoinedStr([{','.join(_joined(value.values))}])"
    if isinstance(value, ast.AST):
        fields = (f"{name}={_text(child)}" for name, child in ast.iter_fields(value)
                  if name not in leave_out and name not in _NO_MEANING and child is not None and child != [])
        return f"{type(value).__name__}({','.join(fields)})"
    if isinstance(value, list):
        return f"[{','.join(_text(item) for item in value)}]"
    if type(value) is int:
        return hex(value)  # repr() refuses very long integers
    return ascii(value)  # repr() depends on the Unicode tables


def _joined(values: list[ast.expr]) -> Iterator[str]:
    """Parts of an f-string: neighbouring constants are one, empty ones none, as not all Python versions do it."""
    constant = ""
    for value in values:
        if isinstance(value, ast.Constant):
            constant += value.value
            continue
        if constant:
            yield ascii(constant)
        constant = ""
        yield _text(value)
    if constant:
        yield ascii(constant)
