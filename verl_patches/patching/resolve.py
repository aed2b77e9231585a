"""From "module:qualname" to the object that holds it, and safe getting, setting and restoring there."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

MISSING = object()


class ResolveError(LookupError):
    """A place does not exist as named."""


@dataclass(frozen=True)
class Slot:
    """Where one object is kept: `holder.attribute`.

    `raw`: what the holder's own dictionary had, MISSING for a name that is inherited or new. `found`: the same, or what
    the holder inherits, descriptors and all; MISSING only where the name does not exist.
    """

    holder: Any
    attribute: str
    raw: Any
    found: Any

    def current(self) -> Any:
        """What the holder's own dictionary has now, or MISSING."""
        return vars(self.holder).get(self.attribute, MISSING)

    def value(self) -> Any:
        """The object as it was found, the plain function for descriptors; MISSING if there is none."""
        return unwrap(self.found)

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
    """The slot of a place in an imported module; ResolveError says which part is missing.

    Names that a module makes on demand are asked for, so upstream's code can run: hold no lock.
    """
    name, qualname = split(place)
    holder: Any = module if module is not None else sys.modules.get(name)
    if holder is None:
        raise ResolveError(f"module {name} is not imported")
    *path, attribute = qualname.split(".")
    for step in path:
        holder = _get(holder, step)
        if holder is MISSING:
            raise ResolveError(f"{name} has no {step!r} on the way to {qualname!r}")
    if not hasattr(holder, "__dict__"):
        raise ResolveError(f"{describe(holder)} has no attributes of its own, so {qualname!r} cannot be replaced")
    return Slot(holder, attribute, vars(holder).get(attribute, MISSING), _get(holder, attribute))


def peek(place: str) -> Any:
    """What stands at a place now, descriptors and all, or MISSING; runs no upstream code, so a lock may be held."""
    name, qualname = split(place)
    holder: Any = sys.modules.get(name, MISSING)
    for step in qualname.split("."):
        holder = _static(holder, step)
    return holder


def _static(holder: Any, name: str) -> Any:
    """`holder.name` out of dictionaries alone, inherited ones too."""
    for owner in holder.__mro__ if isinstance(holder, type) else (holder,):
        if name in getattr(owner, "__dict__", ()):
            return vars(owner)[name]
    return MISSING


def _get(holder: Any, name: str) -> Any:
    found = _static(holder, name)
    return getattr(holder, name, MISSING) if found is MISSING else found


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
    """module.qualname of an object (of its type, where it has no name) and, for functions, the file and line.

    A function is named by its code, because functools.wraps gives it the name of what it wraps.
    """
    if obj is MISSING:
        return "nothing"
    obj = unwrap(obj)
    if isinstance(obj, FunctionType):
        code = obj.__code__
        name = getattr(code, "co_qualname", code.co_name)  # co_qualname: Python 3.11
        return f"{obj.__globals__.get('__name__')}.{name} ({code.co_filename}:{code.co_firstlineno})"
    named = obj if isinstance(obj, (type, BuiltinFunctionType)) else type(obj)
    return f"{named.__module__}.{named.__qualname__}"


def wraps(outer: Any, inner: Any) -> bool:
    """True where function `outer` holds `inner` by `__wrapped__` or in its closure, however deep: it can call it."""
    inner, todo, seen = unwrap(inner), [outer], set()
    while todo:
        obj = unwrap(todo.pop())
        if obj is inner:
            return True
        if isinstance(obj, FunctionType) and id(obj) not in seen:
            seen.add(id(obj))
            todo.append(vars(obj).get("__wrapped__"))
            for cell in obj.__closure__ or ():
                try:
                    todo.append(cell.cell_contents)
                except ValueError:  # still empty
                    continue
    return False


def load(place: str) -> Any:
    """Import a provider "module:qualname"; ResolveError if the module has no such name."""
    import importlib

    name, qualname = split(place)
    obj: Any = importlib.import_module(name)
    for step in filter(None, qualname.split(".")):
        obj = getattr(obj, step, MISSING)
        if obj is MISSING:
            raise ResolveError(f"provider module {name} has no {qualname!r}")
    return obj
