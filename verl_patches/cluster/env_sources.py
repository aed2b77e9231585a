"""Do upstream's sources read the variables that the pin file says they read? Nothing is imported to find out.

A `read_by` text "package/file.py:line" is looked up in the syntax tree; C++ files (no tree here) must hold the quoted
name in that line. Any other text names a library whose source is not at hand (Rust, closed CANN libraries) and is left
alone.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from verl_patches.cluster.pins import Pins
from verl_patches.patching.report import Finding

_PLACE = re.compile(r"^([\w.-]+(?:/[\w.-]+)+\.(?:py|cpp|h)):(\d+)")
_READERS = re.compile(r"(getenv|env_bool|env_integer|env_float|_env)$")  # os.getenv, and Ray's helpers
_METHODS = ("get", "pop", "setdefault")
_NAMES_A_VARIABLE = re.compile(r"env(ironment)?_var", re.IGNORECASE)  # X_ENV_VAR = "X": read elsewhere by that constant
_COMPUTED = "<computed>"
_CORRECT = "correct {} in configs/upstream.yaml"
ReadFile = Callable[[str], "str | None"]  # "package/file.py" -> text; None: that package is not here


@dataclass(frozen=True)
class Read:
    """One place where a source reads a variable; `default`: its literal default as text, None without one."""

    line: int
    default: str | None


def place_of(read_by: str) -> tuple[str, int] | None:
    """("package/file.py", line) of a `read_by` text; None where it names no source file."""
    found = _PLACE.match(read_by)
    return (found[1], int(found[2])) if found else None


def files_below(roots: Mapping[str, Path]) -> ReadFile:
    """Reads "package/file.py" below {top-level package: folder that holds it}; FileNotFoundError for a wrong file."""

    def read(file: str) -> str | None:
        root = roots.get(file.partition("/")[0])
        return (root / file).read_text() if root else None

    return read


def reads_in(text: str) -> dict[str, list[Read]]:
    """{variable: where this source reads it}: os.environ[...], .get, in, os.getenv, and names bound to a constant."""
    tree = ast.parse(text)
    found: dict[str, list[Read]] = {}
    constants: dict[str, str] = {}
    for node in ast.walk(tree):
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(target, ast.Name) and _is_text(value):
            constants[target.id] = value.value
            if _NAMES_A_VARIABLE.search(target.id):
                found.setdefault(value.value, []).append(Read(node.lineno, _COMPUTED))
    for node in ast.walk(tree):
        for key, default in _reads_of(node):
            name = key.value if _is_text(key) else constants.get(key.id) if isinstance(key, ast.Name) else None
            if name is not None:
                found.setdefault(name, []).append(Read(key.lineno, _literal(default)))
    return found


def _reads_of(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    if isinstance(node, ast.Call) and node.args:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        of_environ = isinstance(node.func, ast.Attribute) and _is_environ(node.func.value) and name in _METHODS
        if of_environ or _READERS.search(name):
            keyword = next((k.value for k in node.keywords if k.arg == "default"), None)
            yield node.args[0], node.args[1] if len(node.args) > 1 else keyword
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and _is_environ(node.value):
        yield node.slice, None
    elif isinstance(node, ast.Compare) and any(map(_is_environ, node.comparators)):
        yield node.left, None


def _is_environ(node: ast.expr) -> bool:
    return (node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")) == "environ"


def _is_text(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _literal(node: ast.expr | None) -> str | None:
    if node is None:
        return None
    if isinstance(node, ast.Constant):
        return None if node.value is None else str(node.value)
    return _COMPUTED


def verify_environment(pins: Pins, line: str, read: ReadFile) -> list[Finding]:
    """One finding for each place that the pin file gives for `line`: fine, or what the source says instead.

    A note: the package is not here, or the line number is off. A problem: no such file, no such read, or another
    literal default than the pin file's.
    """
    found = []
    for name, variable in pins.environment.items():
        for text in variable.reads(line):
            place = place_of(text)
            if place:
                found.append(_verify(name, variable.default, *place, read))
    return found


def _verify(name: str, default: str | None, file: str, number: int, read: ReadFile) -> Finding:
    where = f"{file}:{number}"
    try:
        text = read(file)
    except FileNotFoundError:
        return Finding(name, "problem", where, "a file", "no such file", _CORRECT.format("read_by"))
    if text is None:
        return Finding(name, "note", where, "", f"{file.partition('/')[0]} is not here")
    if not file.endswith(".py"):
        if f'"{name}"' in "".join(text.splitlines()[number - 1 : number]):
            return Finding(name, "fine", where)
        return Finding(name, "problem", where, f'"{name}" in that line', "not there", _CORRECT.format("read_by"))
    reads = reads_in(text).get(name, [])
    if not reads:
        return Finding(name, "problem", where, f"a read of {name}", "none in that file",
                       _CORRECT.format("name or read_by"))
    here = [r for r in reads if r.line == number] or reads
    if all(r.default not in (default, _COMPUTED) for r in here):
        return Finding(name, "problem", where, f"default {default}", f"default {here[0].default}",
                       _CORRECT.format("default"))
    if here[0].line != number:
        return Finding(name, "note", where, f"line {number}", f"line {', '.join(str(r.line) for r in reads)}")
    return Finding(name, "fine", where)
