"""Handle one row in one process: find its place, prepare the replacement, put it in, take it out, inspect the place.

`prepare` runs our providers' code and changes nothing; the methods of Row change upstream, run no other code, and are
called with the engine's lock held. A place is read from dictionaries alone, so that no upstream code runs; names that
a module makes by __getattr__ are therefore not found.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from verl_patches.errors import our_command
from verl_patches.patching.signatures import refused_calls
from verl_patches.patching.spec import PatchSpec, split_place

UNREVIEWED_STATES = ("drifted", "unsupported")  # the states that the policy `drift=` may accept
MISSING = object()


class ResolveError(LookupError):
    """Report a place that does not exist under its name."""


@dataclass(frozen=True)
class Slot:
    """Describe `holder.attribute`, the attribute of a module or class that refers to an object.

    `raw`: the value in the holder's own dictionary, MISSING for a name that is inherited or new. `found`: the same, or
    the inherited value, with descriptors unresolved; MISSING only where the name does not exist.
    """

    holder: Any
    attribute: str
    raw: Any
    found: Any

    def current(self) -> Any:
        """Return the present value in the holder's own dictionary, or MISSING."""
        return vars(self.holder).get(self.attribute, MISSING)

    def restore(self) -> None:
        """Put back the raw object, or delete the attribute where the name was inherited or new."""
        if self.raw is MISSING:
            delattr(self.holder, self.attribute)
        else:
            setattr(self.holder, self.attribute, self.raw)


def find_slot(place: str, module: ModuleType | None = None) -> Slot:
    """Return the slot of a place in an imported module; ResolveError names the missing part. No upstream code runs."""
    name, qualname = split_place(place)
    holder: Any = module if module is not None else sys.modules.get(name)
    if holder is None:
        raise ResolveError(f"module {name} is not imported")
    *path, attribute = qualname.split(".")
    for step in path:
        holder = _read_attribute(holder, step)
        if holder is MISSING:
            raise ResolveError(f"{name} has no {step!r}, a part of {qualname!r}")
    if not hasattr(holder, "__dict__"):
        raise ResolveError(f"{describe(holder)} has no __dict__, so {qualname!r} cannot be replaced")
    return Slot(holder, attribute, vars(holder).get(attribute, MISSING), _read_attribute(holder, attribute))


def read_place(place: str) -> Any:
    """Return the present object at a place, descriptors unresolved, or MISSING. No upstream code runs."""
    name, qualname = split_place(place)
    holder: Any = sys.modules.get(name, MISSING)
    for step in qualname.split("."):
        holder = _read_attribute(holder, step)
    return holder


def _read_attribute(holder: Any, name: str) -> Any:
    """Return `holder.name` from the dictionaries of the holder and its bases, or MISSING."""
    for owner in holder.__mro__ if isinstance(holder, type) else (holder,):
        if name in getattr(owner, "__dict__", ()):
            return vars(owner)[name]
    return MISSING


def unwrap(raw: Any) -> Any:
    """Return the plain function behind a static method, class method or property getter; other objects unchanged."""
    if isinstance(raw, (staticmethod, classmethod)):
        return raw.__func__
    return raw.fget if isinstance(raw, property) else raw


def rewrap(raw: Any, new: Any) -> Any:
    """Return `new` in the same kind of descriptor as `raw`."""
    if isinstance(raw, (staticmethod, classmethod)) and not isinstance(new, type(raw)):
        return type(raw)(new)
    if isinstance(raw, property) and not isinstance(new, property):
        return property(new, raw.fset, raw.fdel, raw.__doc__)
    return new


def describe(obj: Any) -> str:
    """Return module.qualname of an object (or of its type, if it has no name) and, for functions, the file and line.

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
    """Return whether `outer` reaches `inner` by `__wrapped__` or its closure, at any depth, so that it can call it."""
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
                except ValueError:  # the cell is still empty
                    continue
    return False


def load_provider(place: str) -> Any:
    """Import a provider "module:qualname" and return it; ResolveError if the module has no such name."""
    name, qualname = split_place(place)
    obj: Any = importlib.import_module(name)
    for step in filter(None, qualname.split(".")):
        obj = getattr(obj, step, MISSING)
        if obj is MISSING:
            raise ResolveError(f"provider module {name} has no {qualname!r}")
    return obj


@dataclass(frozen=True)
class Prepared:
    """Hold the result of preparing a row in one module: state, reason, and the object to put at a place."""

    state: str
    reason: str = ""
    place: Slot | None = None
    new: Any = None
    error: Exception | None = None


@dataclass
class Row:
    """Hold one row's state in one process."""

    spec: PatchSpec
    switch_reason: str = ""  # the reason why it is on or off
    state: str = "off"
    reason: str = ""
    apply_count: int = 0  # counts apply() after revert(), so that a hook of an earlier apply() has no effect
    hook: Callable[[ModuleType], None] | None = None  # None: not applied, or reverted
    module: ModuleType | None = None  # the module that was handled: patched, or left as it is (drift=warn)
    place: Slot | None = None
    installed: Any = MISSING
    registry: Any = None
    entries: dict[Any, tuple[Any, Any]] = field(default_factory=dict)  # register: key -> (before, ours)

    @property
    def in_place(self) -> bool:
        """Return whether upstream was changed for this row."""
        return self.place is not None or self.registry is not None

    def put(self, prepared: Prepared, place: Slot) -> Prepared:
        """Change upstream at the target, and return `prepared`, or state unsupported if the place cannot be set."""
        try:
            if self.spec.kind == "register":
                entries = {key: (place.found.get(key, MISSING), value) for key, value in prepared.new.items()}
                place.found.update(prepared.new)
                self.registry, self.entries = place.found, entries
            elif self.spec.kind == "override":
                self.place, self.installed = place, place.found  # the subclass has put it there
            else:
                installed = rewrap(place.found, prepared.new)
                setattr(place.holder, place.attribute, installed)
                self.place, self.installed = place, installed
        except Exception as error:
            return Prepared("unsupported", _error_text(error), error=error)
        return prepared

    def uninstall(self) -> None:
        """Restore the original object in each place that still has ours."""
        if self.place is not None:
            for binding in self.spec.bindings:
                if read_place(binding) is self.installed:
                    place = find_slot(binding)
                    setattr(place.holder, place.attribute, self.place.found)
            if self.spec.kind != "override" and self.place.current() is self.installed:
                self.place.restore()
        for key, (before, ours) in self.entries.items():
            if self.registry.get(key) is not ours:
                continue
            if before is MISSING:
                self.registry.pop(key)
            else:
                self.registry[key] = before
        self.place, self.installed, self.registry, self.entries = None, MISSING, None, {}

    def replacement_text(self, expected: Any, open_bindings: Set[str]) -> str:
        """Return in words which object replaces `expected` (ours, or that of a row over it); empty if none does.

        The bindings in `open_bindings` are not compared: they are set again when an import has ended.
        """
        if self.registry is not None:
            key = next((k for k, (_, ours) in self.entries.items() if self.registry.get(k) is not ours), MISSING)
            return "" if key is MISSING else f"entry {key!r} is now {describe(self.registry.get(key, MISSING))}"
        for place in (self.spec.target, *(name for name in self.spec.bindings if name not in open_bindings)):
            found = read_place(place)
            if found is expected or (found is MISSING and place != self.spec.target) or self._is_under(found, expected):
                continue
            effect = "wraps ours" if wraps(found, expected) else "replaces ours"
            return f"{place} is now {describe(found)}, which {effect}"
        return ""

    def _is_under(self, found: Any, expected: Any) -> bool:
        """Return whether `found` is a wrapper of `expected` that `spec.under` allows."""
        found = unwrap(found)
        named = isinstance(found, FunctionType) and found.__globals__.get("__name__") in self.spec.under
        return named and wraps(found, expected)


def prepare(spec: PatchSpec, module: ModuleType, line: str, policy: str) -> Prepared:
    """Find the place of a row in its imported module and make the object to put there."""
    drift = _drift_text(spec, line)
    if drift and policy != "warn":
        return Prepared("drifted", drift)
    try:
        place = find_slot(spec.target, module)
        if (place.found is MISSING) != (spec.kind == "extend"):
            raise ResolveError(f"{spec.target} {'does not exist' if place.found is MISSING else 'exists already'}")
        if spec.kind == "register" and not hasattr(place.found, "update"):
            raise ResolveError(f"{spec.target} is {describe(place.found)}, which takes no entries (it has no update())")
    except Exception as error:
        return Prepared("unsupported", _error_text(error), error=error)
    try:
        new = _make_replacement(spec, unwrap(place.found))
    except Exception as error:
        return Prepared("failed", _error_text(error), error=error)
    if faults := _signature_faults(spec, place, new):
        return Prepared("unsupported", f"{spec.provider} does not fit its target: {', '.join(faults)}")
    return Prepared("drifted" if drift else "active", drift, place, new)


def _signature_faults(spec: PatchSpec, place: Slot, new: Any) -> list[str]:
    """Return the calls of the target, or of a subclass's methods, that the replacement refuses."""
    package = spec.target_module.partition(".")[0]
    if spec.kind == "subclass":
        ours, upstream = new.__bases__
        faults = []
        for name, method in vars(ours).items():
            if isinstance(unwrap(method), FunctionType):
                bound = not isinstance(method, staticmethod)
                found = refused_calls(unwrap(_read_attribute(upstream, name)), unwrap(method), package, bound)
                faults += [f"{name} {fault}" for fault in found]
        return faults
    if spec.kind not in ("wrap", "replace", "stub"):
        return []
    bound = isinstance(place.holder, type) and not isinstance(place.found, staticmethod)
    return refused_calls(unwrap(place.found), unwrap(new), package, bound)


def _drift_text(spec: PatchSpec, line: str) -> str:
    """Return how the target's body differs from the reviewed one, or that none was reviewed; empty if they agree."""
    from verl_patches.patching import fingerprint  # not at the top: the prelude starts without parsing sources

    known, found = fingerprint.reviewed_hash(line, spec.target), fingerprint.current_hash(line, spec.target)
    if found == known:
        return ""
    wrong = "its source is not the reviewed one" if known else "its source was never reviewed"
    return f"{wrong}: expected {known or 'a record'}, found {found} in {fingerprint.source_file(spec.target_module)}"


def _make_replacement(spec: PatchSpec, original: Any) -> Any:
    """Return the object that a row's provider gives for its target; TypeError for an unusable one."""
    provided = load_provider(spec.provider)
    if spec.kind == "override":
        if unwrap(original) is not unwrap(provided):
            raise TypeError(f"expected {spec.provider} at the target, found {describe(original)}")
        return provided
    if spec.kind == "subclass":
        return make_subclass(original, provided)
    new = provided
    if spec.kind == "wrap":
        new = provided(original)
    elif spec.kind == "register":
        new = provided()
    if spec.kind == "register" and not isinstance(new, dict):
        raise TypeError(f"a register provider must return a dict, this one returned {describe(new)}")
    if spec.kind == "wrap" and callable(original) and not callable(unwrap(new)):
        raise TypeError(f"a wrap provider must return a callable, this one returned {describe(new)}")
    if new is original:
        raise TypeError("it returned the original, which would change nothing")
    return new


def make_subclass(upstream: type, ours: type) -> type:
    """Return a class with the methods of `ours` before those of `upstream`, under upstream's name, for Ray's pickle."""
    named = {name: getattr(upstream, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(upstream)(upstream.__name__, (ours, upstream), named)


def refusal_text(spec: PatchSpec, prepared: Prepared, line: str) -> str:
    """Return the message of a run that stops at this row: reason and remedy."""
    from verl_patches.patching.fingerprint import review_command

    off = f"switch the row off with -{spec.id}"
    if prepared.state == "failed":
        return (
            f"row {spec.id}: cannot {spec.kind} {spec.target}, because its provider {spec.provider} failed: "
            f"{prepared.reason}. This is an error in verl_patches; to run without the row, {off}"
        )
    policy = "or set drift=warn in VERL_PATCHES (apply it where possible)"
    package = spec.target_module.partition(".")[0]
    versions = our_command("versions", "--line", line)
    pinned = f"Install the pinned version of {package} (`{versions}` names it)"
    if prepared.state == "unsupported":
        return (
            f"row {spec.id}: cannot {spec.kind} {spec.target} of the installed upstream: {prepared.reason}. "
            f"{pinned}, {off}, {policy}"
        )
    return (
        f"row {spec.id}: {spec.target} has drifted: {prepared.reason}. {pinned}, or review the change and run "
        f"`{review_command(spec.id, line)}`, {off}, {policy}"
    )


def log_outcome(spec: PatchSpec, prepared: Prepared, in_place: bool) -> None:
    """Log one line: debug for an active row, a warning for one that is not as reviewed."""
    import logging  # not at the top: the prelude starts without it

    log = logging.getLogger(__name__)
    if prepared.state == "active":
        log.debug("patch %s active at %s", spec.id, spec.target)
    else:
        done = "applied anyway (drift=warn)" if in_place else "not applied"
        log.warning("patch %s is %s at %s: %s; it was %s", spec.id, prepared.state, spec.target, prepared.reason, done)


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
