"""Fingerprint upstream definitions: hash a target's source without comments, docstrings and layout.

Sources are read from disk; nothing is imported. All definitions of a name count, in source order. For a method the
headers of its classes count too: their decorators, bases and keywords, such as a metaclass, can change the method.
Fields of the syntax tree are read by name and empty ones left out, so that fields which newer Python versions add
(type_params and the like) change nothing.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import json
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_patches.errors import our_command
from verl_patches.patching.spec import split_place

REVIEWED_FILE = Path(__file__).resolve().parent.parent / "fingerprints.json"
NO_SOURCE = "no-python-source"


@dataclass(frozen=True)
class Definition:
    """Describe one definition of a name: its syntax tree, its file and module, and the classes around it."""

    node: ast.stmt
    file: Path
    module: str
    classes: tuple[ast.stmt, ...] = ()


def fingerprint(place: str, root: Path | None = None) -> str:
    """Return 16 hex digits for "module:qualname", or NO_SOURCE if its package's Python text does not define that name.

    `root`: the folder that holds the top-level package; default: where this interpreter would import it from.
    """
    return body_hash(definitions(place, root))


def body_hash(found: Collection[Definition]) -> str:
    """Return 16 hex digits over all definitions of one name; NO_SOURCE without any."""
    texts = [[_tree_text(d.node), *(_tree_text(each, leave_out=("body",)) for each in d.classes)] for d in found]
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16] if texts else NO_SOURCE


def current_hash(line: str, target: str) -> str:
    """Return `fingerprint(target)`, without parsing if the bytes of the files that it reads are those reviewed."""
    entry = reviewed_entries(line).get(target, {})
    files = entry.get("files") or {}
    paths = {module: source_file(module) for module in files}
    if files and all(path and file_hash(path) == files[module] for module, path in paths.items()):
        return entry["hash"]
    return fingerprint(target)


def file_hashes(place: str, root: Path | None = None) -> dict[str, str]:
    """Return {module: hash of its file} of all files that the fingerprint of "module:qualname" depends on."""
    read: dict[str, Path] = {}
    definitions(place, root, read=read)
    return {module: file_hash(path) for module, path in sorted(read.items())}


def definitions(
    place: str, root: Path | None = None, seen: frozenset[str] = frozenset(), read: dict[str, Path] | None = None
) -> list[Definition]:
    """Return every definition of "module:qualname"; a name imported from the same top-level package is followed.

    `read` collects the file of each module that was read.
    """
    module, qualname = split_place(place)
    path = source_file(module, root)
    if path is None or place in seen:
        return []
    if read is not None:
        read[module] = path
    found = []
    for *classes, node in _binding_paths(path, qualname):
        if not isinstance(node, ast.ImportFrom):
            found.append(Definition(node, path, module, tuple(classes)))
            continue
        origin = import_origin(node, module, path.name == "__init__.py")
        if origin.split(".")[0] == module.split(".")[0]:
            depth = sum(isinstance(holder, ast.ClassDef) for holder in classes)  # an imported holder is followed here
            name, *rest = qualname.split(".")[depth:]
            real = next(a.name for a in node.names if (a.asname or a.name) == name)
            found += definitions(f"{origin}:{'.'.join((real, *rest))}", root, seen | {place}, read)
    return found


def review_command(row_id: str, line: str, upstream: str = "") -> str:
    """Return the command that records a reviewed change of a row's target; `upstream`: the folder of clones."""
    folder = ["--upstream", upstream] if upstream else []
    return our_command("check", row_id, "--write", "--line", line, *folder)


def import_origin(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    """Return the dotted module that a `from ... import` in `module` names; relative ones are made absolute."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join((*parts, node.module) if node.module else parts)


def binding_statements(node: ast.AST) -> Iterator[tuple[Collection[str], ast.stmt]]:
    """Yield (names, the statement that binds them) of a module or class body, also inside its if, for, try and so on.

    Not included: plain imports, the targets of `for`, `with`, `except` and `case` themselves, `:=` and `del`.
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
            yield from binding_statements(child)


def source_file(module: str, root: Path | None = None) -> Path | None:
    """Return the .py file of a dotted module, found without importing it; None for built-in or absent modules."""
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


@functools.lru_cache(maxsize=1024)
def file_hash(path: Path) -> str:
    """Return 16 hex digits over the bytes of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def package_hash() -> str:
    """Return 16 hex digits over all Python files of verl_patches, names included."""
    root = REVIEWED_FILE.parent
    lines = (f"{path.relative_to(root)} {file_hash(path)}" for path in sorted(root.rglob("*.py")))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def reviewed_entries(line: str) -> dict[str, dict[str, Any]]:
    """Return the reviewed fingerprints of a line, {target: {hash, files}}, which are part of the package.

    files: {module: hash of its file} of all modules that the fingerprint depends on.
    """
    return _read_table(REVIEWED_FILE).get(line, {})


def reviewed_hash(line: str, target: str) -> str | None:
    """Return the reviewed fingerprint of one target on one line; None without a record."""
    return reviewed_entries(line).get(target, {}).get("hash")


def write_reviewed(line: str, found: Mapping[str, dict[str, Any]], whole: bool = False) -> list[str]:
    """Record {target: {hash, files}} of one line, sorted, and return the targets whose entries were removed.

    Entries of other lines stay, and unless `found` is the `whole` line, those of other targets too.
    """
    table = dict(_read_table(REVIEWED_FILE))
    gone = [target for target in reviewed_entries(line) if whole and target not in found]
    table[line] = {**({} if whole else reviewed_entries(line)), **found}
    blocks = (
        f" {json.dumps(name)}: {{\n"
        + ",\n".join(f"  {json.dumps(target)}: {json.dumps(rows[target])}" for target in sorted(rows))
        + "\n }"
        for name, rows in sorted(table.items())
    )
    REVIEWED_FILE.write_text("{\n" + ",\n".join(blocks) + "\n}\n")
    _read_table.cache_clear()
    return gone


@functools.lru_cache(maxsize=1)
def _read_table(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    return json.loads(path.read_text()) if path.is_file() else {}


@functools.lru_cache(maxsize=2)  # enough, as rows of a file are mostly neighbours; more trees slow garbage collection
def _parse_file(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes(), filename=str(path))


@functools.lru_cache(maxsize=512)
def _binding_paths(path: Path, qualname: str) -> tuple[tuple[ast.stmt, ...], ...]:
    """Return (its classes ..., statement) of each binding of a qualname; a from-import of its class is one too."""
    first, *rest = qualname.split(".")
    paths: list[tuple[ast.stmt, ...]] = [(node,) for node in _statements_binding(_parse_file(path), first)]
    for step in rest:
        paths = [(*outer, node) for outer in paths for node in _statements_binding(outer[-1], step)]
    return tuple(paths)


def _statements_binding(node: ast.AST, name: str) -> list[ast.stmt]:
    if isinstance(node, ast.ImportFrom):
        return [node]
    is_holder = isinstance(node, (ast.Module, ast.ClassDef))
    return [nodes for names, nodes in binding_statements(node) if name in names] if is_holder else []


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
BLOCKS = (ast.stmt, ast.ExceptHandler, ast.match_case)  # nodes whose bodies may have statements such as definitions
_IGNORED_FIELDS = ("ctx", "kind", "type_comment", "type_ignores")


def _tree_text(value: object, leave_out: Collection[str] = ()) -> str:
    """Return a syntax tree without docstrings as plain ASCII, equal on every Python version."""
    if isinstance(value, ast.JoinedStr):  # joins neighbouring constants, as some Python versions do not
        return f"JoinedStr({''.join(map(_fstring_part, value.values))})"
    if isinstance(value, ast.AST):
        fields = dict(ast.iter_fields(value))
        if isinstance(value, DEFINITIONS) and ast.get_docstring(value, clean=False) is not None:
            fields["body"] = fields["body"][1:]
        texts = (
            f"{name}={_tree_text(child)}"
            for name, child in fields.items()
            if name not in leave_out and name not in _IGNORED_FIELDS and child is not None and child != []
        )
        return f"{type(value).__name__}({','.join(texts)})"
    if isinstance(value, list):
        return f"[{','.join(_tree_text(item) for item in value)}]"
    if type(value) is int:
        return hex(value)  # repr() refuses very long integers
    return ascii(value)  # repr() depends on the Unicode tables


def _fstring_part(part: ast.expr) -> str:
    """Return one part of an f-string: a constant as JSON without its quotes, or another part in quotes."""
    if isinstance(part, ast.Constant) and isinstance(part.value, str):
        return json.dumps(part.value)[1:-1]
    return f'"{_tree_text(part)}"'
