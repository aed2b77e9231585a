"""A hash of what a symbol's source says, comments and docstrings dropped, read from disk without importing anything.

The hash walks the syntax tree field by field and leaves out empty fields, so that fields which newer Python versions
add (type_params and the like) do not change it.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from verl_patches.patching.resolve import split

REVIEWED = Path(__file__).resolve().parent.parent / "fingerprints.json"
NO_SOURCE = "no-python-source"
_DEFS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def fingerprint(place: str, root: Path | None = None) -> str:
    """16 hex digits for "module:qualname", or NO_SOURCE where the module's own text does not define that name.

    `root`: the folder that holds the top-level package; default: where this interpreter would import it from.
    """
    module, qualname = split(place)
    path = source_file(module, root)
    if path is None:
        return NO_SOURCE
    nodes: list[ast.AST] = [_tree(str(path), path.stat().st_mtime_ns)]
    for step in qualname.split("."):
        nodes = [found for node in nodes for found in _definitions(node, step)]
    return _hash(nodes) if nodes else NO_SOURCE


def source_file(module: str, root: Path | None = None) -> Path | None:
    """The .py file of a dotted module, found on disk without importing it; None for built-in or absent modules."""
    top, *rest = module.split(".")
    if root is None:
        loaded = sys.modules.get(top)
        try:
            spec = loaded.__spec__ if loaded is not None else importlib.util.find_spec(top)
        except ValueError:
            return None
        if spec is None or not (spec.submodule_search_locations or spec.origin):
            return None
        bases = [Path(p) for p in spec.submodule_search_locations or ()] or [Path(spec.origin)]
    else:
        bases = [root / top if rest or (root / top).is_dir() else root / f"{top}.py"]
    for base in bases:
        here = base.joinpath(*rest)
        for candidate in (here / "__init__.py", here.with_name(here.name + ".py"), here):
            if candidate.is_file() and candidate.suffix == ".py":
                return candidate
    return None


def file_hash(path: Path) -> str:
    """16 hex digits over the bytes of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def package_hash() -> str:
    """16 hex digits over all Python files of verl_patches, names included."""
    root = REVIEWED.parent
    lines = (f"{path.relative_to(root)} {file_hash(path)}" for path in sorted(root.rglob("*.py")))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def reviewed() -> dict[str, dict[str, str]]:
    """The reviewed fingerprints that travel with the package: {line: {"module:qualname": hash}}."""
    return json.loads(REVIEWED.read_text()) if REVIEWED.is_file() else {}


def write_reviewed(line: str, prints: dict[str, str]) -> None:
    """Record fingerprints of one line, sorted; entries of other targets and lines stay."""
    table = reviewed()
    table[line] = dict(sorted({**table.get(line, {}), **prints}.items()))
    REVIEWED.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


@functools.lru_cache(maxsize=256)
def _tree(path: str, _mtime_ns: int) -> ast.Module:
    return ast.parse(Path(path).read_bytes(), filename=path)


def _definitions(node: ast.AST, name: str) -> Iterator[ast.AST]:
    """Every definition of `name` directly in a module or class body, also inside if/try/with blocks there."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _DEFS):
            if child.name == name:
                yield child
        elif isinstance(child, (ast.Assign, ast.AnnAssign)):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            if any(isinstance(t, ast.Name) and t.id == name for t in targets):
                yield child
        elif isinstance(child, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
            yield from _definitions(child, name)


def _hash(nodes: list[ast.AST]) -> str:
    return hashlib.sha256("\n".join(_text(node) for node in nodes).encode()).hexdigest()[:16]


def _text(value: object) -> str:
    if isinstance(value, ast.AST):
        fields = []
        for name, child in ast.iter_fields(value):
            if name == "body" and isinstance(value, _DEFS) and ast.get_docstring(value, clean=False) is not None:
                child = child[1:]
            if name in ("ctx", "kind", "type_comment") or child is None or child == []:
                continue
            fields.append(f"{name}={_text(child)}")
        return f"{type(value).__name__}({','.join(fields)})"
    if isinstance(value, list):
        return f"[{','.join(_text(item) for item in value)}]"
    return repr(value)
