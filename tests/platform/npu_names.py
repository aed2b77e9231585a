"""Which names of torch_npu, torch.npu, acl, apex and torchair a source tree uses, found by AST.

Names are dotted from the package ("torch_npu.npu.Stream"); torch.npu counts as torch_npu.npu. A name that is imported
under another one (`from torch_npu.npu import device as d`) counts as the imported one.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("torch_npu", "acl", "apex", "torchair")


def names_used(tree: Path, package: str) -> dict[str, set[str]]:
    """{name: {"file:line"}} over all of tree/package, files relative to tree; mindspore's own branch is left out."""
    found: dict[str, set[str]] = defaultdict(set)
    for file in sorted((tree / package).rglob("*.py")):
        where = file.relative_to(tree).as_posix()
        if where.startswith("mindspeed/mindspore/"):
            continue
        for name, line in _of_module(ast.parse(file.read_bytes().decode("utf-8", "replace"))):
            found[name].add(f"{where}:{line}")
    return dict(found)


def _of_module(module: ast.Module) -> Iterator[tuple[str, int]]:
    inner = {id(node.value) for node in ast.walk(module) if isinstance(node, ast.Attribute)}
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            yield from _known(_dotted(node), node.lineno)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield from _known(alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield from _known(f"{node.module}.{alias.name}", node.lineno)


def _known(name: str, line: int) -> Iterator[tuple[str, int]]:
    if name.startswith("torch.npu."):
        name = f"torch_npu.{name.removeprefix('torch.')}"
    if name.split(".")[0] in PACKAGES:
        yield name, line


def _dotted(node: ast.expr) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed([*parts, node.id])) if isinstance(node, ast.Name) else ""


def calls_made(tree: Path, package: str, prefix: str) -> Iterator[tuple[str, str, int, tuple[str, ...]]]:
    """(name, "file:line", number of positional arguments, keywords) of every call of a name that begins with `prefix`.

    Calls that spread *arguments or **keywords are left out.
    """
    for file in sorted((tree / package).rglob("*.py")):
        where = file.relative_to(tree).as_posix()
        for node in ast.walk(ast.parse(file.read_bytes().decode("utf-8", "replace"))):
            name = _dotted(node.func) if isinstance(node, ast.Call) else ""
            if not name.startswith(prefix) or where.startswith("mindspeed/mindspore/"):
                continue
            keywords = tuple(keyword.arg for keyword in node.keywords)
            if None not in keywords and not any(isinstance(argument, ast.Starred) for argument in node.args):
                yield name, f"{where}:{node.lineno}", len(node.args), keywords


def builders_loaded(tree: Path, package: str) -> dict[str, set[str]]:
    """{op builder class: {"file:line"}} that modules of tree/package import by name, op_builder itself left out."""
    found: dict[str, set[str]] = defaultdict(set)
    for file in sorted((tree / package).rglob("*.py")):
        where = file.relative_to(tree).as_posix()
        if where.startswith(("mindspeed/mindspore/", "mindspeed/op_builder/")):
            continue
        for node in ast.walk(ast.parse(file.read_bytes().decode("utf-8", "replace"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("mindspeed.op_builder"):
                for alias in node.names:
                    if alias.name.endswith("Builder"):
                        found[alias.name].add(f"{where}:{node.lineno}")
    return dict(found)
