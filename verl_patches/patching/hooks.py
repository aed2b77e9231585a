"""Run hooks right after a module is imported completely; no other file writes to sys.modules.

wrapt tells when a module's body has run, importlib's flag `_initializing` when its import has ended. This file adds:
- hooks of a module whose import is running while the prelude runs (inside that import) wait for the import's end;
- a hook that raises is armed again, and the module is dropped, so that the next import fails too instead of returning
  the unpatched module. ImportError becomes HookError, because upstream swallows ImportError;
- other threads see a module as unfinished until its hooks have run, and hooks run without a lock.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable
from importlib._bootstrap import _lock_unlock_module  # type: ignore[attr-defined]  # waits for a running import
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import wrapt

Hook = Callable[[ModuleType], None]


class HookError(RuntimeError):
    """Report a post-import hook that failed; its module was removed from sys.modules."""


def is_half_built(module: ModuleType) -> bool:
    """Return True while the module's own code, or a hook of it, is still running."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


_HOOKS: dict[str, list[Hook]] = {}
_LOCK = threading.Lock()  # guards _HOOKS; no foreign code runs while it is held


def after_import(name: str, hook: Hook) -> None:
    """Call hook(module) once module `name` is fully imported: now, or when its present or first import ends.

    A hook that already waits is not added again. The caller must hold no lock, as upstream's code may run.
    """
    module = sys.modules.get(name)
    if module is not None and not is_half_built(module):
        hook(module)
        return
    with _LOCK:
        waiting = _HOOKS.setdefault(name, [])
        if hook not in waiting:
            waiting.append(hook)
    if module is None:
        _arm_hooks(name)
    else:
        _watch_module(module)


def is_armed(name: str) -> bool:
    """Return whether a hook waits for the next import of module `name`."""
    return name in _HOOKS


def _arm_hooks(name: str) -> None:
    wrapt.register_post_import_hook(_watch_module, name)
    _lock_unlock_module(name)  # wait for an import in another thread, which may be inside wrapt's finder
    module = sys.modules.get(name)
    if module is not None and not is_half_built(module):
        _run_hooks(name, module)


def _watch_module(module: ModuleType) -> None:
    """Run the module's hooks when its import ends."""
    spec = getattr(module, "__spec__", None)
    if isinstance(spec, _WatchedSpec):
        return
    if type(spec) is not ModuleSpec:
        _run_hooks(module.__name__, module)  # a spec of another class cannot be watched; the module's body has run
        return
    spec.__class__ = _WatchedSpec  # runs `_finish_import` at the end of the import
    if not spec.__dict__.pop("_initializing", False):
        _finish_import(spec)  # the import had already ended


def _finish_import(spec: ModuleSpec) -> None:
    module = sys.modules.get(spec.name)
    try:
        if module is not None:
            _run_hooks(spec.name, module)
        elif is_armed(spec.name):
            _arm_hooks(spec.name)  # the module's own code raised: hook its next import
    finally:
        spec.__dict__["_initializing"] = False
        spec.__class__ = ModuleSpec
    if module is not None and is_armed(spec.name):
        _run_hooks(spec.name, module)  # another thread added a hook while the last ones ran


def _run_hooks(name: str, module: ModuleType) -> None:
    ran: list[Hook] = []
    try:
        while hooks := _take_hooks(name):
            ran += hooks
            for hook in hooks:
                hook(module)
    except BaseException as error:
        sys.modules.pop(name, None)
        with _LOCK:
            _HOOKS[name] = ran + [hook for hook in _HOOKS.get(name, ()) if hook not in ran]
        _arm_hooks(name)
        if isinstance(error, ImportError):
            raise HookError(f"patching {name} failed: {error}") from error
        raise


def _take_hooks(name: str) -> list[Hook]:
    with _LOCK:
        return _HOOKS.pop(name, [])


class _WatchedSpec(ModuleSpec):
    """Run the hooks when importlib sets the module spec's `_initializing` to False, the last act of every import.

    The flag stays True until the hooks have run, so that `import` in other threads waits for them.
    """

    @property
    def _initializing(self):
        return True

    @_initializing.setter
    def _initializing(self, value):
        if not value:
            _finish_import(self)


class _ModuleStubs:
    """Resolve a missing package, and modules inside it, to modules of ours; this finder is the last one asked."""

    def __init__(self) -> None:
        self.providers: dict[str, str] = {}

    def find_spec(self, name, path=None, target=None):
        provider = self.providers.get(name)
        package, _, inner = name.partition(".")
        if provider is None and inner and package in self.providers:
            outer = self.providers[package]
            provider = f"{outer}.{inner}" if ":" in outer else f"{outer}:{inner}"
            if _find_module(provider, name) is None:
                return None
        return None if provider is None else importlib.util.spec_from_loader(name, _AliasLoader(provider))


def _find_module(provider: str, name: str) -> ModuleType | None:
    """Return our module "m", or the module object at "m:a.b", or None; HookError where ours cannot be imported."""
    module, _, path = provider.partition(":")
    obj: Any
    try:
        obj = importlib.import_module(module)
    except ImportError as error:
        raise HookError(f"our module {module}, the stub for {name}, cannot be imported: {error}") from error
    for step in filter(None, path.split(".")):
        obj = vars(obj).get(step)
        if not isinstance(obj, ModuleType):
            return None
    return obj


_COPIED_NAMES = ("__doc__", "__file__", "__getattr__", "__version__")


class _AliasLoader:
    def __init__(self, provider: str):
        self.provider = provider

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        provided = _find_module(self.provider, module.__name__)
        if provided is None:
            raise HookError(f"{self.provider}, the stub for {module.__name__}: expected a module there, found none")
        shown = {k: v for k, v in vars(provided).items() if not k.startswith("__") or k in _COPIED_NAMES}
        vars(module).update({"__version__": "0", **shown, "__path__": []})


_STUBS = _ModuleStubs()


def add_module_stub(name: str, provider: str) -> None:
    """Let `import name` find our module `provider`, and the modules inside it, where no real one is installed.

    `provider` is "module", or "module:name" for a module object.
    """
    _STUBS.providers[name] = provider
    if _STUBS not in sys.meta_path:
        sys.meta_path.append(_STUBS)


def remove_module_stub(name: str) -> None:
    """Undo add_module_stub, and remove the modules that it provided from sys.modules."""
    _STUBS.providers.pop(name, None)
    for served, module in list(sys.modules.items()):
        loader = getattr(getattr(module, "__spec__", None), "loader", None)
        if (served == name or served.startswith(f"{name}.")) and isinstance(loader, _AliasLoader):
            del sys.modules[served]


def import_source(name: str) -> str:
    """Return what `import name` gives: "ours", "package" for an installed one, else "" (such as one made in memory)."""
    top = name.partition(".")[0]
    module = sys.modules.get(name)
    if module is None and name in _STUBS.providers and top not in _STUBS.providers:
        return "ours"  # a module that an installed package lacks
    module = module or sys.modules.get(top)
    spec = importlib.util.find_spec(top) if module is None else module.__spec__
    loader = getattr(spec, "loader", None)
    return "ours" if isinstance(loader, _AliasLoader) else "package" if loader else ""
