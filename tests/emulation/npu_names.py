"""Which names of torch_npu, torch.npu, acl, apex and torchair a source tree uses, found by AST.

Names are dotted from the package ("torch_npu.npu.Stream"); torch.npu counts as torch_npu.npu. A name that is imported
under another one (`from torch_npu.npu import device as d`) counts as the imported one. Places are "file:line", files
relative to the tree.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("torch_npu", "acl", "apex", "torchair")


def _nodes(tree: Path, package: str, skipped: str = "mindspeed/mindspore/") -> Iterator[tuple[str, ast.AST]]:
    """(place, node) of all of tree/package; mindspore's own branch is left out."""
    for file in sorted((tree / package).rglob("*.py")):
        where = file.relative_to(tree).as_posix()
        if not where.startswith(skipped):
            for node in ast.walk(ast.parse(file.read_bytes().decode("utf-8", "replace"))):
                yield f"{where}:{getattr(node, 'lineno', 0)}", node


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def _dotted(node: ast.expr) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed([*parts, node.id])) if isinstance(node, ast.Name) else ""


def names_used(tree: Path, package: str) -> dict[str, set[str]]:
    """{name: places}; of a.b.c only the longest name counts."""
    found: dict[str, set[str]] = defaultdict(set)
    inner = set()  # ast.walk gives an attribute before the one inside it
    for place, node in _nodes(tree, package):
        names = _imported(node)
        if isinstance(node, ast.Attribute):
            inner.add(node.value)
            names = [] if node in inner else [_dotted(node)]
        for name in names:
            name = f"torch_npu.{name.removeprefix('torch.')}" if name.startswith("torch.npu.") else name
            if name.split(".")[0] in PACKAGES:
                found[name].add(place)
    return dict(found)


def calls_made(tree: Path, package: str, prefix: str) -> Iterator[tuple[str, str, int, tuple[str, ...]]]:
    """(name, place, number of positional arguments, keywords) of every call of a name that begins with `prefix`.

    Calls that spread *arguments or **keywords are left out.
    """
    for place, node in _nodes(tree, package):
        name = _dotted(node.func) if isinstance(node, ast.Call) else ""
        if name.startswith(prefix):
            keywords = tuple(keyword.arg for keyword in node.keywords)
            if None not in keywords and not any(isinstance(argument, ast.Starred) for argument in node.args):
                yield name, place, len(node.args), keywords
