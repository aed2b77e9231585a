"""Fingerprints of upstream definitions: a hash of the source without comments, docstrings and layout.

Sources are read from disk; nothing is imported. A definition is a list of statements, each with its own hash, so that
`check` can name the statements that changed. A compound statement gives one entry for its header (test, target, handler
type, pattern ...) and one for every statement inside. Depth and field (body, orelse, finalbody) count, so a statement
that moves out of an `if` changes. Of a method, the headers of the classes around it count too: their decorators, bases
and keywords, such as a metaclass, decide what becomes of it. Fields of the syntax tree are read by name and empty ones
left out, so that fields which newer Python versions add (type_params and the like) change nothing;
tests/patching/test_fingerprint.py compares Python 3.10 to 3.13.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_patches.patching.spec import split

REVIEWED = Path(__file__).resolve().parent.parent / "fingerprints.json"
NO_SOURCE = "no-python-source"


@dataclass(frozen=True)
class Definition:
    """One definition of a name: its syntax tree, the file and module that it stands in, and the classes around it."""

    node: ast.AST
    file: Path
    module: str
    classes: tuple[ast.AST, ...] = ()

    def statements(self) -> list[Statement]:
        """Its own statements in source order, then the headers of its classes, the outermost first."""
        return [*flatten(self.node, self.file), *(flatten(each, self.file)[0] for each in self.classes)]


def fingerprint(place: str, root: Path | None = None) -> str:
    """16 hex digits for "module:qualname", or NO_SOURCE where its package's Python text does not define that name.

    `root`: the folder that holds the top-level package; default: where this interpreter would import it from.
    """
    parts = statements(place, root)
    return whole_hash(parts) if parts else NO_SOURCE


def statements(place: str, root: Path | None = None) -> list[Statement]:
    """The statements of "module:qualname", of all its definitions in source order; empty where there is none."""
    return [statement for d in definitions(place, root) for statement in d.statements()]


def current(line: str, target: str) -> str:
    """`fingerprint(target)`; without parsing where the files that it is read from have the bytes that were reviewed."""
    entry = reviewed(line).get(target, {})
    files = entry.get("files") or {}
    paths = {module: source_file(module) for module in files}
    if files and all(path and file_hash(path) == files[module] for module, path in paths.items()):
        return entry["hash"]
    return fingerprint(target)


def files_read(place: str, root: Path | None = None) -> dict[str, str]:
    """{module: hash of its file} of all files that the fingerprint of "module:qualname" depends on."""
    read: dict[str, Path] = {}
    definitions(place, root, read=read)
    return {module: file_hash(path) for module, path in sorted(read.items())}


def definitions(
    place: str, root: Path | None = None, seen: frozenset[str] = frozenset(), read: dict[str, Path] | None = None
) -> list[Definition]:
    """Every definition of "module:qualname"; a name imported from the same top-level package is followed there.

    `read`: gets the file of each module that was looked at.
    """
    module, qualname = split(place)
    path = source_file(module, root)
    if path is None or place in seen:
        return []
    if read is not None:
        read[module] = path
    stat, found = path.stat(), []
    for *classes, node in _nodes(str(path), (stat.st_mtime_ns, stat.st_size), qualname):
        if not isinstance(node, ast.ImportFrom):
            found.append(Definition(node, path, module, tuple(classes)))
            continue
        origin = import_origin(node, module, path.name == "__init__.py")
        if origin.split(".")[0] == module.split(".")[0]:
            name, *rest = qualname.split(".")
            real = next(a.name for a in node.names if (a.asname or a.name) == name)
            found += definitions(f"{origin}:{'.'.join((real, *rest))}", root, seen | {place}, read)
    return found


def review_command(row_id: str, line: str, upstream: str = "") -> str:
    """What to type once a change of this row's target was reviewed; `upstream`: the folder of clones that was read."""
    command = f"python -m verl_patches fingerprint {row_id} --write --line {line}"
    return f"{command} --upstream {upstream}" if upstream else command


def import_origin(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    """The dotted module that a `from ... import` in `module` names, relative ones made absolute."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join((*parts, node.module) if node.module else parts)


def bindings_of(node: ast.AST) -> Iterator[tuple[Collection[str], ast.AST]]:
    """(names, the statement that binds them) directly in a module or class body, also inside if, for, try ... there.

    Not seen: plain imports, the targets of `for`, `with`, `except` and `case` themselves, `:=` and `del`.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, DEFINITIONS):
            yield (child.name,), child
        elif isinstance(child, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            parts = [part for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]
            yield {part.id for part in parts if isinstance(part.ctx, ast.Store)}, child
        elif isinstance(child, ast.ImportFrom):
            yield {alias.asname or alias.name for alias in child.names}, child
        elif isinstance(child, BLOCKS):
            yield from bindings_of(child)


def source_file(module: str, root: Path | None = None) -> Path | None:
    """The .py file of a dotted module, found on disk without importing it; None for built-in or absent modules."""
    top, *rest = module.split(".")
    if root is None:
        loaded = sys.modules.get(top)
        try:
            spec = loaded.__spec__ if loaded is not None else importlib.util.find_spec(top)
        except ValueError:
            return None
        if spec is None:
            return None
        bases = [Path(p) for p in spec.submodule_search_locations or filter(None, [spec.origin])]
    else:
        bases = [root / top if rest or (root / top).is_dir() else root / f"{top}.py"]
    for base in bases:
        here = base.joinpath(*rest)
        for candidate in (here / "__init__.py", here.with_name(here.name + ".py"), here):
            if candidate.is_file() and candidate.suffix == ".py":
                return candidate
    return None


def file_hash(path: Path) -> str:
    """16 hex digits over the bytes of a file, read again only if its time or size has changed."""
    stat = path.stat()
    return _hash_of_version(str(path), (stat.st_mtime_ns, stat.st_size))


@functools.lru_cache(maxsize=1024)
def _hash_of_version(path: str, _version: tuple[int, int]) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


def package_hash() -> str:
    """16 hex digits over all Python files of verl_patches, names included."""
    root = REVIEWED.parent
    lines = (f"{path.relative_to(root)} {file_hash(path)}" for path in sorted(root.rglob("*.py")))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def reviewed(line: str) -> dict[str, dict[str, Any]]:
    """What was reviewed on a line, as it travels with the package: {target: {hash, statements, files}}.

    statements: their hashes in order. files: {module: hash of its file} of all that the fingerprint depends on.
    """
    return _record().get(line, {})


def reviewed_hash(line: str, target: str) -> str | None:
    """The reviewed fingerprint of one target on one line; None where none was recorded."""
    return reviewed(line).get(target, {}).get("hash")


def write_reviewed(
    line: str,
    found: Mapping[str, Sequence[Statement]],
    whole: bool = False,
    files: Mapping[str, Mapping[str, str]] | None = None,
) -> list[str]:
    """Record {target: its statements} of one line, sorted; gives the targets whose entries went.

    `files`: {target: `files_read`}, for a start that need not parse them. Entries of other lines stay, and so do those
    of other targets unless this is the `whole` line.
    """
    table = dict(_record())
    gone = [target for target in reviewed(line) if whole and target not in found]
    entries = {
        target: {
            "hash": whole_hash(seen) if seen else NO_SOURCE,
            "statements": [s.hash for s in seen],
            "files": dict((files or {}).get(target, {})),
        }
        for target, seen in found.items()
    }
    table[line] = {**({} if whole else reviewed(line)), **entries}
    blocks = (
        f" {json.dumps(name)}: {{\n"
        + ",\n".join(f"  {json.dumps(target)}: {json.dumps(rows[target])}" for target in sorted(rows))
        + "\n }"
        for name, rows in sorted(table.items())
    )
    REVIEWED.write_text("{\n" + ",\n".join(blocks) + "\n}\n")
    return gone


def _record() -> dict[str, dict[str, dict[str, Any]]]:
    if not REVIEWED.is_file():
        return {}
    stat = REVIEWED.stat()
    return _read_record(str(REVIEWED), (stat.st_mtime_ns, stat.st_size))


@functools.lru_cache(maxsize=1)
def _read_record(path: str, _version: tuple[int, int]) -> dict[str, dict[str, dict[str, Any]]]:
    return json.loads(Path(path).read_text())


@functools.lru_cache(maxsize=2)  # rows of one file mostly stand together; many live trees make garbage collection slow
def _tree(path: str, _version: tuple[int, int]) -> ast.Module:
    return ast.parse(Path(path).read_bytes(), filename=path)


@functools.lru_cache(maxsize=512)
def _nodes(path: str, version: tuple[int, int], qualname: str) -> tuple[tuple[ast.AST, ...], ...]:
    """(classes around it ..., statement) of each that binds a qualname; a from-import of the first name ends it."""
    paths: list[tuple[ast.AST, ...]] = [(_tree(path, version),)]
    for step in qualname.split("."):
        paths = [(*outer, node) for outer in paths for node in _named(outer[-1], step)]
    return tuple(nodes[1:] for nodes in paths)


def _named(node: ast.AST, name: str) -> list[ast.AST]:
    if isinstance(node, ast.ImportFrom):
        return [node]
    is_holder = isinstance(node, (ast.Module, ast.ClassDef))
    return [nodes for names, nodes in bindings_of(node) if name in names] if is_holder else []


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
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
        lines = self.file.read_text(encoding="utf-8", errors="replace").split("\n")  # a form feed, for one, ends none
        return lines[self.line - 1 : self.end_line]


def flatten(node: ast.AST, file: Path) -> list[Statement]:
    """The statements of one definition in source order, its own header first."""
    return list(_flatten(node, file, 0, ""))


def whole_hash(statements: Sequence[Statement]) -> str:
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


def _lines(node: Any, nested: dict[str, list[ast.AST]]) -> tuple[int, int]:
    """First and last line of a statement, or of its header where it holds others."""
    if not nested:
        return node.lineno, node.end_lineno
    values = [value for name, value in ast.iter_fields(node) if name not in nested]
    children = [child for value in values for child in (value if isinstance(value, list) else [value])]
    parts: list[Any] = [part for child in children if isinstance(child, ast.AST) for part in ast.walk(child)]
    header = [part for part in parts if hasattr(part, "lineno")]
    first = min([part.lineno for part in header] + [getattr(node, "lineno", 1 << 30)])
    return first, max([part.end_lineno for part in header] + [getattr(node, "lineno", first)])


def _text(value: object, leave_out: Collection[str] = ()) -> str:
    """A syntax tree as plain ASCII, the same on every Python version."""
    if isinstance(value, ast.JoinedStr):
        return f"JoinedStr([{','.join(_joined(value.values))}])"
    if isinstance(value, ast.AST):
        fields = (
            f"{name}={_text(child)}"
            for name, child in ast.iter_fields(value)
            if name not in leave_out and name not in _NO_MEANING and child is not None and child != []
        )
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
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            constant += value.value
            continue
        if constant:
            yield ascii(constant)
        constant = ""
        yield _text(value)
    if constant:
        yield ascii(constant)
