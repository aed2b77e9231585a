"""Find the bindings of an object in a source tree: each module-level or class-level `from M import f`, read as text.

Such a name still refers to the old object when `M.f` is replaced after the import, so a row must list it. Imports
inside functions run later and are no bindings; neither are those under `if TYPE_CHECKING:`. A star import is assumed
to bring every name without a leading underscore: __all__ is not read. Copies made by assignment, default values or
tables of functions are not found.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from verl_patches.patching.fingerprint import BLOCKS, FUNCTIONS, import_origin
from verl_patches.patching.spec import split_place

_FROM_IMPORT = re.compile(rb"\bfrom\b[.\w\s\\]*?(\w*)[\s\\]*\bimport\b(?=[\s\\]*(\([^)]*\)|(?:\\\r?\n|[^\n])*))")
_TYPE_CHECKING_TESTS = ("TYPE_CHECKING", "typing.TYPE_CHECKING")


@dataclass(frozen=True)
class Import:
    """Describe a from-import of one name: `place` ("module:qualname") gets `origin`'s `name` (or "*") at `line`."""

    place: str
    origin: str
    name: str
    line: int


class SourceFile:
    """Read one module of a tree, parsed on first use of its imports."""

    def __init__(self, module: str, path: Path):
        self.module, self.path = module, path
        self._text = path.read_bytes()
        self._imported: dict[bytes, set[bytes]] = {}  # {last part of a module, empty for `from . import`: names}
        for last_part, names in _FROM_IMPORT.findall(self._text):
            self._imported.setdefault(last_part, set()).update(re.findall(rb"\w+|[*#]", names))

    def may_import(self, module: str, name: str) -> bool:
        """Return False only if the file cannot have a from-import of `name` from `module`; the text is not parsed."""
        modules = (module.rpartition(".")[2].encode(), b"")
        # "#": in parentheses, a ")" inside a comment may have ended _FROM_IMPORT's match early, so any name may follow
        wanted = (name.encode(), b"*", b"#")
        return any(not self._imported[each].isdisjoint(wanted) for each in modules if each in self._imported)

    @cached_property
    def imports(self) -> list[Import]:
        """Return every from-import that runs while the module is imported."""
        try:
            tree = ast.parse(self._text, filename=str(self.path))
        except (SyntaxError, ValueError):  # this Python cannot import it either
            return []
        imports = []
        for prefix, node in _from_imports(tree, ""):
            origin = import_origin(node, self.module, self.path.name == "__init__.py")
            for alias in node.names:
                place = f"{self.module}:{prefix}{alias.asname or alias.name}"
                imports.append(Import(place, origin, alias.name, node.lineno))
        return imports


def read_tree(packages: Mapping[str, Path]) -> dict[str, SourceFile]:
    """Return {dotted module: its file} of all Python files in {top-level package: the folder that holds it}."""
    files = {}
    for package, root in packages.items():
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            files[module] = SourceFile(module, path)
    return files


def find_bindings(targets: Iterable[str], tree: Mapping[str, SourceFile]) -> dict[str, dict[str, Import]]:
    """Return {target: {place that imports it: the import there}} for "module:name" targets, re-exports followed."""
    bindings: dict[str, dict[str, Import]] = {target: {} for target in targets}
    for target, places in bindings.items():
        waiting = [target]
        while waiting:
            module, name = split_place(waiting.pop())
            for item in _imports_from(module, name, tree):
                if item.place not in places and item.place != target:
                    places[item.place] = item
                    waiting.append(item.place)
    return bindings


def _imports_from(module: str, name: str, tree: Mapping[str, SourceFile]) -> Iterator[Import]:
    for file in tree.values():
        if not file.may_import(module, name):
            continue
        for item in file.imports:
            if item.origin == module and item.name == name:
                yield item
            elif item.origin == module and item.name == "*" and not name.startswith("_"):
                yield Import(f"{item.place[:-1]}{name}", module, name, item.line)


def _from_imports(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.ImportFrom]]:
    children: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.If) and ast.unparse(node.test) in _TYPE_CHECKING_TESTS:
        children = node.orelse
    for child in children:
        if isinstance(child, ast.ImportFrom):
            yield prefix, child
        elif isinstance(child, ast.ClassDef):
            yield from _from_imports(child, f"{prefix}{child.name}.")
        elif isinstance(child, BLOCKS) and not isinstance(child, FUNCTIONS):
            yield from _from_imports(child, prefix)
