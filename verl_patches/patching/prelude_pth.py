"""The `.pth` file that runs the prelude before upstream in every process of one Python, and both ways in together.

verl's TaskRunner and workers import much of upstream before the inserted line (prelude_line.py) is reached. Python
reads `.pth` files of its site-packages at every start. Ours holds one line: a finder that does nothing until a package
of PACKAGES is imported (before_import.py). It needs verl_patches to be importable then, else that import
fails with a RuntimeError.
"""

from __future__ import annotations

import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from verl_patches.errors import ConfigError
from verl_patches.patching import prelude_line
from verl_patches.patching.prelude_line import PreludeResult

NAME = "verl_patches_prelude.pth"
PACKAGES = ("verl", "megatron", "mindspeed", "mindspeed_llm", "vllm", "vllm_ascend")
_WITHOUT_US = (
    f"{NAME} is in the site-packages of this Python, but verl_patches cannot be imported: put it on the PYTHONPATH of "
    "this process, or remove the file (python -m verl_patches install-prelude --undo)"
)
_FINDER = f'''
import sys
class VerlPatchesPrelude:
    def find_spec(self, name, *where):
        if name.partition(".")[0] not in {PACKAGES}:
            return None
        try:
            from verl_patches.patching.before_import import prelude_first
        except ImportError as error:
            raise RuntimeError({_WITHOUT_US!r} + ": " + str(error)) from error
        return prelude_first(name, *where)
sys.meta_path.insert(0, VerlPatchesPrelude())
'''
TEXT = f"import sys; exec({_FINDER!r}, {{}})\n"  # one line, as Python reads .pth files; an ImportError may be swallowed


@dataclass(frozen=True)
class PreludeResults:
    """Both ways in: the line in verl's worker module and the `.pth` file (whose `line` is None)."""

    line: PreludeResult
    pth: PreludeResult


def install_prelude(verl_path: str | Path | None = None) -> PreludeResults:
    """Insert the prelude line and write the `.pth` file of this Python; idempotent.

    Raises ConfigError, with nothing changed, where one of both cannot be done.
    """
    line = prelude_line.insert_line(verl_path)
    try:
        return PreludeResults(line, write_pth())
    except ConfigError:
        if line.state == "installed":
            prelude_line.remove_line(verl_path)
        raise


def remove_prelude(verl_path: str | Path | None = None) -> PreludeResults:
    """Remove the `.pth` file, then take the line out; ConfigError from the second leaves the first removed."""
    pth = remove_pth()
    return PreludeResults(prelude_line.remove_line(verl_path), pth)


def write_pth() -> PreludeResult:
    """Write the `.pth` file into this Python's site-packages, whole or not at all; ConfigError where it cannot."""
    file = _pth_file()
    if _text_of(file) == TEXT:
        return PreludeResult(file, None, "already installed")
    prelude_line.write_whole(file, TEXT.encode(), 0o644)
    return PreludeResult(file, None, "installed")


def remove_pth() -> PreludeResult:
    """Remove the `.pth` file from this Python's site-packages; ConfigError where it cannot be removed."""
    file = _pth_file()
    if _text_of(file) is None:
        return PreludeResult(file, None, "not installed")
    try:
        file.unlink()
    except OSError as why:
        raise ConfigError(f"{file}: cannot be removed ({why.strerror}). Run this as a user who may write its folder."
                          ) from why
    return PreludeResult(file, None, "removed")


def _pth_file() -> Path:
    folder = Path(sysconfig.get_path("purelib"))
    if str(folder) not in sys.path:
        raise ConfigError(f"install-prelude: expected {folder}, the site-packages of {sys.executable}, on sys.path; "
                          "found it is not, so no .pth file would be read there. Run it without -S.")
    return folder / NAME


def _text_of(file: Path) -> str | None:
    try:
        return file.read_text()
    except FileNotFoundError:
        return None
    except OSError as why:
        raise ConfigError(f"{file}: cannot be read ({why.strerror}). Run this as a user who may.") from why
