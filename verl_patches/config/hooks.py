"""The rules about the user's code that a run imports: it must import, and define what is named.

It is imported in a process of its own, with the variables and the PYTHONPATH of the run, so that this process imports
neither torch nor verl, and a module that hangs or ends its process does no harm.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from omegaconf import DictConfig

from verl_patches.config.environment import derive, process_environment
from verl_patches.upstream.checkouts import Trees
from verl_patches.upstream.pins import load_pins

IMPORT_S = 120  # time limit of an import
_FILES = ("custom_reward_function", "data.custom_cls")  # path and name, which verl loads
_CHILD = """
import importlib, importlib.util, json, os, sys, traceback
where, name, answer = sys.argv[1:]
fault = missing = late = None
elsewhere = False  # the run's platform is not this machine's
try:
    import verl_patches.prelude_patch  # as in the run: upstream's modules may need it
except Exception:
    elsewhere = True
try:
    if os.path.isfile(where):
        spec = importlib.util.spec_from_file_location("custom_module", where)
        if spec is None:
            raise ImportError("its name does not end with .py")
        module = sys.modules["custom_module"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    if name and not hasattr(module, name):
        fault = f"{where} does not define {name}"
except BaseException as error:
    frames = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__) if f.filename[:1] != "<"]
    frames = [frame for frame in frames if frame[0] != importlib.__file__]
    frames += [(error.filename, error.lineno)] if isinstance(error, SyntaxError) and error.filename else []
    place = "%s:%s: " % ([f for f in frames if f[0] == where] or frames)[-1] if frames else ""
    fault = f"{place}{type(error).__name__}: {error}"
    missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
    late = f"this machine has no {missing} and is not of the run's platform" if missing and elsewhere else None
with open(answer, "w") as file:
    json.dump([fault, missing, late], file)
os._exit(0)
"""


class Hook(NamedTuple):
    """A file or module, what it must define ("": it is imported only), and the key or section that says so."""

    where: str
    name: str
    key: str


def hooks_of(config: DictConfig) -> Iterator[Hook]:
    """The user's code that `config` names."""
    for section, of in zip(_FILES, (config.custom_reward_function, config.data.custom_cls), strict=True):
        if of.path:
            yield Hook(of.path, of.name or "", section)
    if hook := config.recipe.worker_process_setup_hook:
        module, _, name = hook.rpartition(".")
        yield Hook(module, name, "recipe.worker_process_setup_hook")
    if library := config.actor_rollout_ref.model.external_lib:
        yield Hook(library, "", "actor_rollout_ref.model.external_lib")


def checks(
    config: DictConfig, must_exist: Collection[str] = (), trees: Trees | None = None
) -> Iterator[tuple[str, bool, str, bool]]:
    """(name, whether it holds, detail, whether it is a note) of each hook; it is imported where `trees` are given.

    must_exist: as in checks.check_config. A package of the line that is not on this machine is a note.
    """
    for hook in hooks_of(config):
        what, file = f"{hook.name} of {hook.where}" if hook.name else hook.where, Path(hook.where)
        if hook.key in _FILES and not file.is_file():
            key, detail = f"{hook.key}.path", f"{file} is not on this machine, so it was not imported"
            if given := key in must_exist:
                detail = f"{file} is no file here; expected a Python file"
            yield "hooks", not given, f"{key}: {detail}", not given
            continue
        fault = missing = late = None
        if trees is not None:
            environment = process_environment(derive(config, tempfile.gettempdir(), trees), os.environ)
            stamp = file.stat().st_mtime_ns if file.is_file() else 0
            fault, missing, late = _import(hook.where, hook.name, stamp, tuple(sorted(environment.items())))
        if late:
            yield "hooks", True, f"{what} was not checked: {late} ({hook.key})", True
        elif missing and missing.partition(".")[0] in _packages(config.recipe.line):
            yield "hooks", True, f"{what} was not imported, as this machine has no {missing} ({hook.key})", True
        else:
            text = f"{hook.key}: expected {what}, which can be imported; found {fault}. Correct it, or the key"
            yield "hooks", not fault, text if fault else what, False


def _packages(line: str) -> set[str]:
    pins = load_pins().line(line)
    return {*pins.packages, *(name for one in pins.repositories.values() for name in one.packages)}


@functools.lru_cache(16)  # one command checks a configuration more than once
def _import(
    where: str, name: str, stamp: int, environment: tuple[tuple[str, str], ...]
) -> tuple[str | None, str | None, str | None]:
    """(what is wrong, the module that is not installed, why it is not known) of an import; `stamp`: of the file."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer")
        command = [sys.executable, "-c", _CHILD, where, name, str(answer)]
        try:
            subprocess.run(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=IMPORT_S,
            )
        except subprocess.TimeoutExpired:
            return None, None, f"its import took more than {IMPORT_S} s"
        if not answer.exists():
            return f"the process that imports {where} ended without an answer", None, None
        return tuple(json.loads(answer.read_text()))
