"""Install the prelude: one line in verl's Megatron worker module, and a `.pth` file (command `install-prelude`).

The line is the only change to an upstream file that this package makes.

verl's TaskRunner and workers import much of upstream before that line is reached. Therefore Python also reads the
`.pth` file from its site-packages at every start. It holds one line: a finder that acts only when a package of PACKAGES
is imported (before_import.py). If verl_patches cannot be imported then, the import fails with a RuntimeError.
"""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from verl_patches.errors import ConfigError, our_command
from verl_patches.shared_files import disk_errors, replacing, write_whole

PRELUDE_LINE = "from verl_patches import prelude_patch  # noqa: F401"
WORKER_FILE = Path("workers") / "megatron_workers.py"
PTH_NAME = "verl_patches_prelude.pth"
PACKAGES = ("verl", "megatron", "mindspeed", "mindspeed_llm", "vllm", "vllm_ascend")
_IMPORT_ERROR_TEXT = (
    f"{PTH_NAME} is in the site-packages of this Python, but the verl_patches that wrote it cannot be imported: put it "
    f"on the PYTHONPATH of this process, write the file again ({our_command('install-prelude')}), or remove it "
    "(the same with --undo)"
)
_FINDER_CODE = f"""
import sys
class VerlPatchesPrelude:
    def find_spec(self, name, *where):
        if name.partition(".")[0] not in {PACKAGES}:
            return None
        try:
            from verl_patches.patching.boot.before_import import prelude_first
        except ImportError as error:
            raise RuntimeError({_IMPORT_ERROR_TEXT!r} + ": " + str(error)) from error
        return prelude_first(name, *where)
sys.meta_path.insert(0, VerlPatchesPrelude())
"""
PTH_TEXT = (
    f"import sys; exec({_FINDER_CODE!r}, {{}})\n"  # .pth files need one line; upstream may swallow an ImportError
)


@dataclass(frozen=True)
class PreludeResult:
    """Hold the result for one file: its path, the prelude line's number (from 1; None: no line), and the state.

    state: "installed" | "already installed" | "removed" | "not installed" (nothing to undo).
    """

    file: Path
    line: int | None
    state: str


def install_prelude(verl_path: str | Path | None = None) -> dict[str, PreludeResult]:
    """Insert the prelude line ("line") and write the `.pth` file of this Python ("pth"). Idempotent."""
    line, pth = insert_line(verl_path), _pth_file()
    if pth.exists() and pth.read_text() == PTH_TEXT:
        return {"line": line, "pth": PreludeResult(pth, None, "already installed")}
    with disk_errors(pth, ""):
        write_whole(pth, PTH_TEXT)
    return {"line": line, "pth": PreludeResult(pth, None, "installed")}


def remove_prelude(verl_path: str | Path | None = None) -> dict[str, PreludeResult]:
    """Remove the `.pth` file, also where no verl is found, and then the prelude line. Idempotent."""
    pth = _pth_file()
    state = "removed" if pth.exists() else "not installed"
    with disk_errors(pth, ""):
        pth.unlink(missing_ok=True)
    return {"line": remove_line(verl_path), "pth": PreludeResult(pth, None, state)}


def insert_line(verl_path: str | Path | None = None) -> PreludeResult:
    """Insert PRELUDE_LINE before the first import of verl's Megatron worker module. Idempotent.

    verl_path: a verl checkout, or its package folder; None: the installed verl, which is not imported. Raises
    ConfigError where the file is missing.
    """
    file, lines = _worker_file(verl_path)
    if PRELUDE_LINE in lines:
        return PreludeResult(file, lines.index(PRELUDE_LINE) + 1, "already installed")
    number = next(number for number, line in enumerate(lines) if line.startswith("import "))
    _write_lines(file, [*lines[:number], PRELUDE_LINE, *lines[number:]])
    return PreludeResult(file, number + 1, "installed")


def remove_line(verl_path: str | Path | None = None) -> PreludeResult:
    """Remove PRELUDE_LINE, with the arguments and errors of `insert_line`. Idempotent."""
    file, lines = _worker_file(verl_path)
    if PRELUDE_LINE not in lines:
        return PreludeResult(file, None, "not installed")
    number = lines.index(PRELUDE_LINE)
    _write_lines(file, [*lines[:number], *lines[number + 1 :]])
    return PreludeResult(file, number + 1, "removed")


def _worker_file(verl_path: str | Path | None) -> tuple[Path, list[str]]:
    """Return verl's megatron_workers.py and its lines; ConfigError where it is missing."""
    if verl_path is None:
        spec = importlib.util.find_spec("verl")  # find_spec of a top-level name imports nothing
        if spec is None or not spec.origin:
            raise ConfigError("install-prelude: no verl is installed in this Python; give a checkout: --verl-path DIR")
        packages = [Path(spec.origin).parent]
    else:
        packages = [Path(verl_path) / "verl", Path(verl_path)]
    file = next((package / WORKER_FILE for package in packages if (package / WORKER_FILE).is_file()), None)
    if file is None:
        raise ConfigError(
            f"install-prelude: expected verl/{WORKER_FILE} in {verl_path or packages[0]}, found none; "
            "give the root of a verl checkout: --verl-path DIR"
        )
    return file, file.read_text().split("\n")


def _write_lines(file: Path, lines: list[str]) -> None:
    """Replace `file` as a whole, with its mode; other hard links to it, as in a package cache, keep their text."""
    with disk_errors(file, ""), replacing(file) as new:
        new.write_text("\n".join(lines))
        shutil.copymode(file, new)


def _pth_file() -> Path:
    return Path(sysconfig.get_path("purelib")) / PTH_NAME
