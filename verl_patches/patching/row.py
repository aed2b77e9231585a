"""One row in one process: what it comes to in a module, putting it there, taking it out, looking who stands there now.

`prepare` runs upstream's and our providers' code and changes nothing; the methods of Row change upstream, run no code
of anybody's, and are called with the engine's lock held.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

from verl_patches.patching.hooks import is_half_built
from verl_patches.patching.resolve import (
    MISSING,
    ResolveError,
    Slot,
    describe,
    load,
    peek,
    rewrap,
    slot,
    split,
    unwrap,
    wraps,
)
from verl_patches.patching.spec import PatchSpec

NOT_AS_REVIEWED = ("drifted", "unsupported")  # the states that the policy `drift=` is for


@dataclass(frozen=True)
class Prepared:
    """What a row comes to in one module: its state and why, and what to put where."""

    state: str
    reason: str = ""
    place: Slot | None = None
    new: Any = None
    error: Exception | None = None


@dataclass
class Row:
    """What one process knows of one row."""

    spec: PatchSpec
    decided: str = ""  # why it is on or off
    state: str = "off"
    reason: str = ""
    applied: int = 0  # how often apply() took it up: a hook that an earlier apply() armed does nothing
    hook: Callable[[ModuleType], None] | None = None  # None: not taken up, or reverted
    module: ModuleType | None = None  # where it was put, or left alone by policy
    place: Slot | None = None
    installed: Any = MISSING
    registry: Any = None
    entries: dict[Any, tuple[Any, Any]] = field(default_factory=dict)  # register: key -> (before, ours)

    @property
    def in_place(self) -> bool:
        """True where upstream was changed for it."""
        return self.place is not None or self.registry is not None

    @property
    def left_alone(self) -> bool:
        """True where upstream is not as reviewed and this row does nothing to it, as an unsupported one never does."""
        return self.state == "unsupported" or (self.state == "drifted" and not self.in_place)

    def put(self, found: Prepared) -> Prepared:
        """Change upstream, and the bindings that exist by now; what cannot be set there is unsupported."""
        place = found.place
        try:
            if self.spec.kind == "register":
                entries = {key: (place.found.get(key, MISSING), value) for key, value in found.new.items()}
                place.found.update(found.new)
                self.registry, self.entries = place.found, entries
            elif self.spec.kind == "override":
                self.place, self.installed = place, place.found  # stands there since the subclass does
            else:
                installed = rewrap(place.found, found.new)
                setattr(place.holder, place.attribute, installed)
                self.place, self.installed = place, installed
        except Exception as error:
            return Prepared("unsupported", _text(error), error=error)
        for binding in self.spec.bindings:
            self.rebind(binding)
        return found

    def rebind(self, binding: str) -> None:
        """Put ours where `from M import f` holds what stood at the target; another object there is left alone."""
        if self.place is not None and peek(binding) is self.place.found is not MISSING:
            place = slot(binding)
            setattr(place.holder, place.attribute, self.installed)

    def take_out(self) -> None:
        """Put back what was there, wherever ours still stands."""
        for binding in self.spec.bindings if self.place else ():
            if peek(binding) is self.installed:
                place = slot(binding)
                setattr(place.holder, place.attribute, self.place.found)
        if self.place and self.spec.kind != "override" and self.place.current() is self.installed:
            self.place.restore()
        for key, (before, ours) in self.entries.items():
            if self.registry.get(key) is ours:
                self.registry.pop(key) if before is MISSING else self.registry.__setitem__(key, before)
        self.place, self.installed, self.registry, self.entries = None, MISSING, None, {}

    def found_over(self, expected: Any) -> str:
        """Who put what over this row, in words; empty where `expected` (ours, or a row over it) stands everywhere."""
        if self.registry is not None:
            key = next((k for k, (_, ours) in self.entries.items() if self.registry.get(k) is not ours), MISSING)
            return "" if key is MISSING else f"entry {key!r} is {describe(self.registry.get(key, MISSING))} now"
        module, qualname = split(self.spec.target)
        holder, _, _ = qualname.rpartition(".")
        on_demand = holder and peek(f"{module}:{holder}") is MISSING  # upstream makes the holder when it is asked for
        places = {self.spec.target: self.place.current() if on_demand else peek(self.spec.target)}
        for binding in self.spec.bindings:
            if not is_half_built(sys.modules.get(split(binding)[0])):
                places[binding] = peek(binding)
        for place, found in places.items():
            if found is expected or (found is MISSING and place != self.spec.target) or self._is_under(found, expected):
                continue
            how = "wraps ours" if wraps(found, expected) else "replaces ours"
            return f"{describe(found)} stands at {place} now and {how}"
        return ""

    def _is_under(self, found: Any, expected: Any) -> bool:
        """True where `found` is a wrapper that `spec.under` allows, and it holds `expected`."""
        found = unwrap(found)
        named = isinstance(found, FunctionType) and found.__globals__.get("__name__") in self.spec.under
        return named and wraps(found, expected)


def prepare(spec: PatchSpec, module: ModuleType, line: str, policy: str) -> Prepared:
    """Find the place of a row in its imported module and make what goes there."""
    drift = _drift(spec, line)
    if drift and policy != "warn":
        return Prepared("drifted", drift)
    try:
        place = slot(spec.target, module)
        if (place.found is MISSING) != (spec.kind == "extend"):
            raise ResolveError(f"{spec.target} {'does not exist' if place.found is MISSING else 'exists already'}")
        if spec.kind == "register" and not hasattr(place.found, "update"):
            raise ResolveError(f"{spec.target} is {describe(place.found)}, which takes no entries")
    except Exception as error:
        return Prepared("unsupported", _text(error), error=error)
    try:
        new = _provided(spec, place.value())
    except Exception as error:
        return Prepared("failed", _text(error), error=error)
    return Prepared("drifted" if drift else "active", drift, place, new)


def _drift(spec: PatchSpec, line: str) -> str:
    """Why the body of the target is not the reviewed one; empty where it is, or none was reviewed."""
    from verl_patches.patching import fingerprint  # reads and parses sources: not needed to start the prelude

    known = fingerprint.reviewed_hash(line, spec.target)
    found = known and fingerprint.fingerprint(spec.target)
    if found == known:
        return ""
    file = fingerprint.source_file(spec.target_module)
    return f"its body is not the reviewed one: expected {known}, found {found} in {file}"


def _provided(spec: PatchSpec, original: Any) -> Any:
    """What the provider of a row gives for its target; anything unusable is an error."""
    provided = load(spec.provider)
    if spec.kind == "override":
        if unwrap(original) is not unwrap(provided):
            raise TypeError(f"expected {spec.provider} there, found {describe(original)}")
        return provided
    if spec.kind == "subclass":
        return subclass_of(original, provided)
    new = provided(original) if spec.kind == "wrap" else provided() if spec.kind == "register" else provided
    if spec.kind == "register" and not isinstance(new, dict):
        raise TypeError(f"a register provider must give a dict, this one gave {describe(new)}")
    if spec.kind == "wrap" and callable(original) and not callable(unwrap(new)):
        raise TypeError(f"a wrap provider must give something to call, this one gave {describe(new)}")
    if new is original:
        raise TypeError("it gave the original back, which would change nothing")
    return new


def subclass_of(upstream: type, ours: type) -> type:
    """A class with the methods of `ours` before those of `upstream`, under upstream's name: Ray pickles it by that."""
    named = {name: getattr(upstream, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(upstream)(upstream.__name__, (ours, upstream), named)


def refusal(spec: PatchSpec, found: Prepared, line: str) -> str:
    """Why the run stops at this row, and what can be done."""
    from verl_patches.patching.fingerprint import review_command

    off = f"switch the row off with -{spec.id}"
    if found.state == "failed":
        return (f"row {spec.id}: cannot {spec.kind} {spec.target}, because its provider {spec.provider} failed: "
                f"{found.reason}. That is a fault of this recipe; to run without it {off}")
    policy = "or say drift=warn (apply it where possible) or drift=skip (leave upstream alone) in VERL_PATCHES"
    if found.state == "unsupported":
        return (f"row {spec.id}: cannot {spec.kind} {spec.target}, because upstream here does not take it: "
                f"{found.reason}. Install the pinned version, {off}, {policy}")
    return (f"row {spec.id}: {spec.target} has drifted: {found.reason}. Install the pinned version, or review the "
            f"change and run `{review_command(spec.id, line)}`, {off}, {policy}")


def log_outcome(spec: PatchSpec, found: Prepared, in_place: bool) -> None:
    """One log line: debug for an active row, a warning for one that is not as reviewed."""
    import logging  # not needed to start the prelude

    log = logging.getLogger(__name__)
    if found.state == "active":
        log.debug("patch %s active at %s", spec.id, spec.target)
    else:
        log.warning("patch %s is %s at %s: %s; it was %s", spec.id, found.state, spec.target, found.reason,
                    "applied all the same (drift=warn)" if in_place else "not applied")


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
