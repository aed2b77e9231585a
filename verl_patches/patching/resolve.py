"""From "module:qualname" to the object that holds it, and safe getting, setting and restoring there."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

MISSING = object()


class ResolveError(LookupError):
    """A place does not exist as named."""


@dataclass(frozen=True)
class Slot:
    """Where one object is kept: `holder.attribute`, and `raw`, what the holder's own dictionary had (or MISSING)."""

    holder: Any
    attribute: str
    raw: Any

    def current(self) -> Any:
        """What the holder's own dictionary has now, or MISSING."""
        return vars(self.holder).get(self.attribute, MISSING)

    def value(self) -> Any:
        """The object a caller would get from the slot as it was found, descriptors unwrapped; MISSING if none."""
        if self.raw is MISSING:
            return getattr(self.holder, self.attribute, MISSING)
        return unwrap(self.raw)

    def restore(self) -> None:
        """Put back what was there: the raw object, or nothing where the name was inherited or new."""
        if self.raw is MISSING:
            delattr(self.holder, self.attribute)
        else:
            setattr(self.holder, self.attribute, self.raw)


def split(place: str) -> tuple[str, str]:
    """("module", "qualname") of "module:qualname"."""
    module, _, qualname = place.partition(":")
    return module, qualname


def slot(place: str, module: ModuleType | None = None) -> Slot:
    """The slot of a place in an imported module; ResolveError says which part is missing."""
    name, qualname = split(place)
    holder: Any = module if module is not None else sys.modules.get(name)
    if holder is None:
        raise ResolveError(f"module {name} is not imported")
    *path, attribute = qualname.split(".")
    for step in path:
        if not hasattr(holder, step):
            raise ResolveError(f"{name} has no {step!r} on the way to {qualname!r}")
        holder = getattr(holder, step)
    return Slot(holder, attribute, vars(holder).get(attribute, MISSING))


def unwrap(raw: Any) -> Any:
    """The plain function behind a static method, class method or property getter; other objects as they are."""
    if isinstance(raw, (staticmethod, classmethod)):
        return raw.__func__
    return raw.fget if isinstance(raw, property) else raw


def rewrap(raw: Any, new: Any) -> Any:
    """`new` in the same kind of descriptor that `raw` is."""
    if isinstance(raw, (staticmethod, classmethod)) and not isinstance(new, type(raw)):
        return type(raw)(new)
    if isinstance(raw, property) and not isinstance(new, property):
        return property(new, raw.fset, raw.fdel, raw.__doc__)
    return new


def describe(obj: Any) -> str:
    """module.qualname of an object for messages."""
    obj = unwrap(obj)
    name = getattr(obj, "__qualname__", None) or type(obj).__qualname__
    return f"{getattr(obj, '__module__', None) or type(obj).__module__}.{name}"


def load(place: str) -> Any:
    """Import a provider "module:qualname"; ResolveError if the module has no such name."""
    import importlib

    name, qualname = split(place)
    obj: Any = importlib.import_module(name)
    for step in filter(None, qualname.split(".")):
        found = inspect.getattr_static(obj, step, MISSING)
        if found is MISSING:
            raise ResolveError(f"provider module {name} has no {qualname!r}")
        obj = getattr(obj, step)
    return obj
