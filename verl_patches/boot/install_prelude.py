"""`install-prelude`: one line in verl's Megatron worker module, and a `.pth` file, that run the prelude.

The line is the only change to an upstream file that this package makes. Where to insert it is read from the syntax
tree, never from a line number; a file that is not recognised is refused.

verl's TaskRunner and workers import much of upstream before that line is reached, hence the `.pth` file, which Python
reads from its site-packages at every start. It holds one line: a finder that does nothing until a package of PACKAGES
is imported (before_import.py). If verl_patches cannot be imported then, the import fails with a RuntimeError.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import os
import re
import stat
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from verl_patches.errors import ConfigError
from verl_patches.shared_files import replacing

LINE = "from verl_patches import prelude_patch  # noqa: F401"
INSIDE = Path("workers") / "megatron_workers.py"
PLACES = (
    f"FILE:LINE is of the pinned sources as they come; with the prelude line, places below it in verl/{INSIDE} "
    "are one line further down"
)
# any text about our prelude besides LINE: an edited, commented-out or foreign one
MENTION = re.compile(rb"verl_patches|prelude_patch")


@dataclass(frozen=True)
class PreludeResult:
    """The result for one file: its path, the number of the prelude line in it (from 1; None: no line), and the state.

    state: "installed" | "already installed" | "removed" | "not installed" (nothing to undo).
    """

    file: Path
    line: int | None
    state: str


class _WorkerFile(NamedTuple):
    """verl's worker file: its lines with their ends, its syntax tree, the number of the prelude line or None."""

    file: Path
    lines: list[bytes]
    tree: ast.Module
    present: int | None


def insert_line(verl_path: str | Path | None = None) -> PreludeResult:
    """Insert LINE before the first import of verl's Megatron worker module, once.

    verl_path: an upstream checkout, or its package folder; None: the installed verl, found without importing it.
    Idempotent; encoding, newline style and file mode stay; the new file replaces the old one at once, so a hard link to
    a package cache is left as it was. Raises ConfigError, having written nothing, for a file it does not recognise.
    """
    found = _worker_file(verl_path)
    if found.present is not None:
        return PreludeResult(found.file, found.present, "already installed")
    first = _first_import(found.file, found.tree)
    before, after = found.lines[: first - 1], found.lines[first - 1 :]
    newline = after[0][len(after[0].rstrip(b"\r\n")) :] or b"\n"
    new = b"".join((*before, LINE.encode("ascii"), newline, *after))
    if _parse(found.file, new).present != first:
        raise AssertionError(f"{found.file}: the prelude line is not at line {first}")
    _write(found.file, new)
    return PreludeResult(found.file, first, "installed")


def remove_line(verl_path: str | Path | None = None) -> PreludeResult:
    """Take LINE out again: the file is then byte for byte what it was before `insert_line`. Same rules and errors."""
    found = _worker_file(verl_path)
    if found.present is None:
        return PreludeResult(found.file, None, "not installed")
    del found.lines[found.present - 1]
    _write(found.file, b"".join(found.lines))
    return PreludeResult(found.file, found.present, "removed")


def find_worker_file(verl_path: str | Path | None = None) -> Path:
    """The real path of verl's megatron_workers.py (see `insert_line`); ConfigError if absent or a link to outside."""
    if verl_path is None:
        spec = importlib.util.find_spec("verl")  # a top-level name: looked up, not imported
        if spec is None or not spec.origin:
            raise ConfigError(
                "install-prelude: expected an installed verl, found none in this Python. "
                "Give an upstream checkout with --verl-path DIR, or run it with the Python that has verl."
            )
        candidates = [Path(spec.origin).parent]
    else:
        candidates = [Path(verl_path) / "verl", Path(verl_path)]
    package = next((package for package in candidates if (package / INSIDE).is_file()), None)
    if package is None:
        raise ConfigError(
            f"install-prelude: expected verl/{INSIDE} or {INSIDE} in {verl_path or candidates[0]}, found neither. "
            "Give the root of a verl checkout with --verl-path DIR."
        )
    real = (package / INSIDE).resolve()
    if not real.is_relative_to(package.resolve()):
        raise ConfigError(
            f"{package / INSIDE}: expected a file inside {package}, found a link to {real}, which others may share. "
            "Give the tree that it belongs to with --verl-path DIR, or replace the link by a copy."
        )
    return real


@contextlib.contextmanager
def _refused(file: Path, action: str) -> Iterator[None]:
    """An error of the file system inside is a ConfigError."""
    try:
        yield
    except OSError as why:
        raise ConfigError(f"{file}: cannot be {action} ({why.strerror}). Run this as a user who may.") from why


def _worker_file(verl_path: str | Path | None) -> _WorkerFile:
    file = find_worker_file(verl_path)
    with _refused(file, "read"):
        data = file.read_bytes()
    return _parse(file, data)


def _parse(file: Path, data: bytes) -> _WorkerFile:
    """ConfigError for a file that is not Python, or that has a second, an edited, a moved or a foreign prelude."""
    try:
        tree = ast.parse(data, filename=str(file))
    except (SyntaxError, ValueError) as why:
        raise ConfigError(
            f"{file}: expected a Python file, found {why}. Restore it from upstream, then run this again."
        ) from why
    lines = data.splitlines(keepends=True)
    mentions = [number for number, line in enumerate(lines, 1) if MENTION.search(line)]
    if not mentions:
        return _WorkerFile(file, lines, tree, None)
    text = lines[mentions[0] - 1].rstrip(b"\r\n")
    if len(mentions) > 1 or text != LINE.encode() or [node.lineno for node in _imports(tree)][:1] != mentions:
        raise ConfigError(
            f"{file}:{mentions[-1]}: expected no prelude, or exactly one line `{LINE}` before all other imports; found "
            f"{len(mentions)}, the first `{text.decode(errors='replace').strip()}` at line {mentions[0]}. "
            "Take it out by hand, or restore the file from upstream, then run this again."
        )
    return _WorkerFile(file, lines, tree, mentions[0])


def _imports(tree: ast.Module) -> list[ast.stmt]:
    """Top-level statements that import something, in order; `from __future__` ones aside, which must stay first."""

    def imports(node: ast.AST) -> bool:
        return isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and node.module != "__future__")

    return [node for node in tree.body if any(imports(inner) for inner in ast.walk(node))]


def _first_import(file: Path, tree: ast.Module) -> int:
    """Line of the first top-level import; ConfigError unless the module imports torch and defines the worker class."""
    imports = _imports(tree)
    names = {a.name for node in imports if isinstance(node, ast.Import) for a in node.names}
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    plain = [node for node in imports[:1] if isinstance(node, (ast.Import, ast.ImportFrom)) and node.col_offset == 0]
    expected = {
        "`import torch` at top level": "torch" in names,
        "class ActorRolloutRefWorker": "ActorRolloutRefWorker" in classes,
        "plain import that begins a line": bool(plain),  # neither in a block nor behind a semicolon
    }
    missing = [text for text, is_there in expected.items() if not is_there]
    if missing:
        raise ConfigError(
            f"{file}: expected verl's Megatron worker module, found no {', no '.join(missing)}. "
            "This verl is not one of the pinned lines (support matrix in README.md); check --verl-path."
        )
    return imports[0].lineno


def _write(file: Path, data: bytes) -> None:
    """Write whole or not at all, with the mode and owner of the file there; other hard links to that keep its text."""
    before = file.stat() if file.exists() else None
    if before is not None and not before.st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"{file}: expected a file that may be written, found it read-only. chmod u+w it, then run this again."
        )
    with _refused(file, "replaced"), replacing(file, durable=True) as new:
        new.write_bytes(data)
        new.chmod(0o644 if before is None else stat.S_IMODE(before.st_mode))
        if before is not None:
            with contextlib.suppress(PermissionError):  # only root may keep another owner
                os.chown(new, before.st_uid, before.st_gid)


NAME = "verl_patches_prelude.pth"
PACKAGES = ("verl", "megatron", "mindspeed", "mindspeed_llm", "vllm", "vllm_ascend")
_WITHOUT_US = (
    f"{NAME} is in the site-packages of this Python, but verl_patches cannot be imported: put it on the PYTHONPATH of "
    "this process, or remove the file (python -m verl_patches install-prelude --undo)"
)
_FINDER = f"""
import sys
class VerlPatchesPrelude:
    def find_spec(self, name, *where):
        if name.partition(".")[0] not in {PACKAGES}:
            return None
        try:
            from verl_patches.boot.before_import import prelude_first
        except ImportError as error:
            raise RuntimeError({_WITHOUT_US!r} + ": " + str(error)) from error
        return prelude_first(name, *where)
sys.meta_path.insert(0, VerlPatchesPrelude())
"""
TEXT = f"import sys; exec({_FINDER!r}, {{}})\n"  # one line, as Python reads .pth files; an ImportError may be swallowed


def install_prelude(verl_path: str | Path | None = None) -> dict[str, PreludeResult]:
    """Insert the prelude line ("line") and write the `.pth` file of this Python ("pth"); idempotent.

    Raises ConfigError, with nothing changed, where one of both cannot be done.
    """
    line = insert_line(verl_path)
    try:
        return {"line": line, "pth": write_pth()}
    except ConfigError:
        if line.state == "installed":
            remove_line(verl_path)
        raise


def remove_prelude(verl_path: str | Path | None = None) -> dict[str, PreludeResult]:
    """Remove the `.pth` file, then take the line out; ConfigError from the second leaves the first removed."""
    pth = remove_pth()
    return {"line": remove_line(verl_path), "pth": pth}


def write_pth() -> PreludeResult:
    """Write the `.pth` file into this Python's site-packages, whole or not at all; ConfigError where it cannot."""
    file = _pth_file()
    with _refused(file, "read"):
        if file.exists() and file.read_bytes() == TEXT.encode():
            return PreludeResult(file, None, "already installed")
    _write(file, TEXT.encode())
    return PreludeResult(file, None, "installed")


def remove_pth() -> PreludeResult:
    """Remove the `.pth` file from this Python's site-packages; ConfigError where it cannot be removed."""
    file = _pth_file()
    if not file.exists():
        return PreludeResult(file, None, "not installed")
    with _refused(file, "removed"):
        file.unlink()
    return PreludeResult(file, None, "removed")


def _pth_file() -> Path:
    folder = Path(sysconfig.get_path("purelib"))
    if str(folder) not in sys.path:
        raise ConfigError(
            f"install-prelude: expected {folder}, the site-packages of {sys.executable}, on sys.path; "
            "found it is not, so no .pth file would be read there. Run it without -S."
        )
    return folder / NAME
