"""Run something right after a module is imported, once it is whole; the only place that writes to sys.modules.

wrapt runs the hooks. What is added here, because it was seen to go wrong:
- a module that is only half built while the prelude runs (the prelude line sits inside it) is waited for;
- a hook that raises is armed again first, and the module is dropped, so that the next import fails too instead of
  silently giving the unpatched module. ImportError is turned into HookError, because upstream swallows ImportError.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType

import wrapt

Hook = Callable[[ModuleType], None]


class HookError(RuntimeError):
    """A post-import hook failed; the module it belongs to was not left imported."""


def is_half_built(module: ModuleType) -> bool:
    """True while the module's own code is still running."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


_HOOKS: dict[str, list[Hook]] = {}


def after_import(name: str, hook: Hook) -> None:
    """Call hook(module) as soon as module `name` is whole: now, when its body ends, or when it is first imported."""
    module = sys.modules.get(name)
    if module is not None and not is_half_built(module):
        hook(module)
        return
    first = name not in _HOOKS
    _HOOKS.setdefault(name, []).append(hook)
    if first:
        _arm(name, module)


def _arm(name: str, module: ModuleType | None) -> None:
    if module is None:
        wrapt.register_post_import_hook(_run, name)  # one entry a module: wrapt forgets the rest when one raises
    else:
        module.__spec__.__dict__.pop("_initializing", None)
        module.__spec__.__class__ = _WatchedSpec


def _run(module: ModuleType) -> None:
    name = module.__name__
    hooks = _HOOKS.pop(name, [])
    try:
        for hook in hooks:
            hook(module)
    except BaseException as error:
        sys.modules.pop(name, None)
        _HOOKS[name] = hooks
        _arm(name, None)
        if isinstance(error, ImportError):
            raise HookError(f"patching {name} failed: {error}") from error
        raise


class _WatchedSpec(ModuleSpec):
    """A module spec that tells when the import system marks its module as no longer initialising.

    importlib sets `spec._initializing = False` as the last act of every import; nothing else marks that moment.
    """

    _initializing_now = True

    @property
    def _initializing(self):
        return self._initializing_now

    @_initializing.setter
    def _initializing(self, value):
        self._initializing_now = value
        module = sys.modules.get(self.name)
        if not value and module is not None and self.name in _HOOKS:
            _run(module)


class _ModuleStubs(importlib.abc.MetaPathFinder):
    """Last finder of all: resolves a missing top-level module (and its submodules) to a module of ours."""

    def __init__(self):
        self.providers: dict[str, str] = {}

    def find_spec(self, name, path=None, target=None):
        provider = self.providers.get(name)
        return None if provider is None else importlib.util.spec_from_loader(name, _AliasLoader(provider))


class _AliasLoader(importlib.abc.Loader):
    def __init__(self, provider: str):
        self.provider = provider

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        provider = importlib.import_module(self.provider)
        public = {k: v for k, v in vars(provider).items() if not k.startswith("__")}
        vars(module).update(public, __doc__=provider.__doc__, __path__=[], __version__="0")


_STUBS = _ModuleStubs()


def stand_in(name: str, provider: str) -> None:
    """Let `import name` find our module `provider` where no real one is installed."""
    _STUBS.providers[name] = provider
    if _STUBS not in sys.meta_path:
        sys.meta_path.append(_STUBS)


def remove_stand_in(name: str) -> None:
    """Undo stand_in, including an import that it served."""
    _STUBS.providers.pop(name, None)
    module = sys.modules.get(name)
    if module is not None and isinstance(getattr(module.__spec__, "loader", None), _AliasLoader):
        del sys.modules[name]


def stand_in_serves(name: str) -> bool:
    """True where `import name` gives (or would give) our module; a real package that is installed goes first."""
    module = sys.modules.get(name)
    if module is None:
        top = importlib.util.find_spec(name.partition(".")[0])
        return name in _STUBS.providers and isinstance(getattr(top, "loader", None), _AliasLoader)
    return isinstance(getattr(module.__spec__, "loader", None), _AliasLoader)
