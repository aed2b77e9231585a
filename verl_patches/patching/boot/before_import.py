"""Run the prelude right before upstream's own code, in each process that imports upstream.

The `.pth` file of install_prelude.py adds a finder to every process of one Python. The finder calls this file when
Python searches for an upstream package, so this file must stay cheap to import. A search without an import
(`importlib.util.find_spec`) does not run the prelude.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from _thread import get_ident
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from verl_patches.errors import ConfigError, our_command
from verl_patches.patching.switches import PATCHES_VAR

PRELUDE = "verl_patches.prelude_patch"


class PreludeFinder:
    """Find modules of upstream packages through the other finders, and run the prelude before the modules' code."""

    def __init__(self) -> None:
        self._searches: set[tuple[int, str]] = set()  # (thread, module) of running searches by other finders

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of an upstream module, with a loader that runs the prelude before the module's code.

        Returns None, so that other finders decide, in three cases: the prelude has run; VERL_PATCHES is not set and the
        package is not verl (a process that imports only vLLM or Megatron is not a run of ours); this is a search for
        the same module inside our own search, as Python reads the `.pth` files of a venv twice, so that this finder may
        be there twice. The spec of a namespace package has no loader and is returned unchanged.
        """
        search = (get_ident(), name)
        without_switches = PATCHES_VAR not in os.environ and name.partition(".")[0] != "verl"
        if PRELUDE in sys.modules or without_switches or search in self._searches:
            return None
        self._searches.add(search)
        try:
            finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]  # old finders lack it
            spec = next(filter(None, (finder.find_spec(name, path, target) for finder in finders)), None)
        finally:
            self._searches.discard(search)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = functools.partial(_execute_module, loader)
        return spec


prelude_first = PreludeFinder().find_spec  # the `.pth` file of each Python calls this


def _execute_module(loader: Any, module: ModuleType) -> None:
    del loader.exec_module  # this loader's attribute; its class has the real method
    _run_prelude()
    loader.exec_module(module)


def _run_prelude() -> None:
    ray = sys.modules.get("ray._private.worker")
    if PATCHES_VAR not in os.environ and ray is not None and ray.global_worker.mode == ray.WORKER_MODE:
        import socket

        raise ConfigError(
            f"{PATCHES_VAR} is not set in this Ray worker (pid {os.getpid()} on {socket.gethostname()}); expected the "
            f"value of its driver, so that both have the same patches. Run `{our_command('install-prelude')}` in "
            "the driver's Python and import verl there before ray.init, or set the variable for each `ray start`"
        )
    try:
        importlib.import_module(PRELUDE)
    except ImportError as error:  # upstream would swallow an ImportError and go on
        raise ConfigError(
            f"{PRELUDE} cannot be imported, and upstream must not run without it: {error}. Put verl_patches and what "
            f"it needs on this process's PYTHONPATH, or remove the .pth file: "
            f"{our_command('install-prelude', '--undo')}"
        ) from error
