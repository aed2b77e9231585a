"""Apply, revert, prove and explain the rows of the catalogue in one process.

A row goes off | waiting -> active | drifted | failed, and active -> overridden | reverted. "active" is only said after
looking at the place itself: the object found there `is` the one that was put there.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from verl_patches.errors import ConfigError
from verl_patches.patching import fingerprint, hooks
from verl_patches.patching.resolve import MISSING, ResolveError, Slot, describe, load, rewrap, slot, split
from verl_patches.patching.spec import PatchSpec, validate
from verl_patches.patching.switches import Switches

log = logging.getLogger(__name__)


class PatchError(RuntimeError):
    """A row could not be made active, or is no longer: the message names row, target, expected, found and remedy."""


@dataclass
class _Row:
    """What one process knows of one row."""

    spec: PatchSpec
    state: str = "off"
    reason: str = ""
    installed: Any = None
    applied: int = 0  # how often apply() took it up: a hook that an earlier apply() armed does nothing
    place: Slot | None = None
    original: Any = MISSING
    entries: dict[Any, tuple[Any, Any]] = field(default_factory=dict)  # register: key -> (before, ours)


class Engine:
    """The rows of one process. All methods are safe to call from any thread, and again."""

    def __init__(self, specs: Iterable[PatchSpec], switches: Switches):
        self.specs = validate(specs)
        self.switches = switches
        switches.check_against(self.specs)
        self._rows = {name: _Row(spec) for name, spec in self.specs.items()}
        self._lock = threading.RLock()
        self._check_wanted()

    def _check_wanted(self) -> None:
        """Decide every row and refuse wanted rows whose needs are off or whose conflicts are on."""
        wanted = {}
        for name, row in self._rows.items():
            wanted[name], row.reason = self.switches.decide(row.spec)
        for name, row in self._rows.items():
            if not wanted[name]:
                continue
            for need in row.spec.needs:
                if not wanted[need]:
                    raise ConfigError(f"row {name} needs {need}, which is off ({self._rows[need].reason}); "
                                      f"switch {name} off too (-{name}) or {need} on")
            for other in row.spec.conflicts:
                if wanted[other]:
                    raise ConfigError(f"rows {name} and {other} exclude each other and both are on; "
                                      f"switch one off: -{name} or -{other}")
        self.wanted = {name for name, on in wanted.items() if on}

    # -- apply and revert ---------------------------------------------------------------------------------------------

    def apply(self) -> None:
        """Put every wanted row in place, now or as soon as its target module is imported. Idempotent."""
        with self._lock:
            for name in (n for n in self._in_need_order() if self._rows[n].state in ("off", "reverted")):
                row = self._rows[name]
                row.state, row.applied = "waiting", row.applied + 1
                if row.spec.is_module_stub:
                    hooks.stand_in(row.spec.target, row.spec.provider)
                    row.state = "active"
                    continue
                hooks.after_import(row.spec.target_module,
                                   lambda module, row=row, nth=row.applied: self._install(row, nth, module))

    def _in_need_order(self) -> list[str]:
        order: list[str] = []

        def visit(name: str) -> None:
            for need in self.specs[name].needs:
                visit(need)
            if name not in order:
                order.append(name)

        for name in self.specs:
            if name in self.wanted:
                visit(name)
        return order

    def _install(self, row: _Row, nth: int, module: ModuleType) -> None:
        with self._lock:
            if row.state == "reverted" or nth != row.applied:
                return
            try:
                self._check_drift(row)
                if row.spec.kind == "register":
                    self._register(row, module)
                else:
                    self._replace(row, module)
                row.state = "active"
                log.debug("patch %s active at %s", row.spec.id, row.spec.target)
            except PatchError:
                raise
            except Exception as error:
                row.state, row.reason = "failed", f"{type(error).__name__}: {error}"
                raise PatchError(f"row {row.spec.id}: cannot {row.spec.kind} {row.spec.target} with "
                                 f"{row.spec.provider}: {error}. Switch it off with -{row.spec.id} to run without "
                                 "it") from error

    def _check_drift(self, row: _Row) -> None:
        known = fingerprint.reviewed().get(self.switches.line, {}).get(row.spec.target)
        found = fingerprint.fingerprint(row.spec.target)
        if known is not None and found != known:
            row.state, row.reason = "drifted", f"fingerprint {found}, reviewed {known}"
            raise PatchError(
                f"row {row.spec.id}: the body of {row.spec.target} is not the one that was reviewed (expected "
                f"{known}, found {found} in {fingerprint.source_file(row.spec.target_module)}). Install the pinned "
                f"version, or review the change and run `python -m verl_patches fingerprint {row.spec.id} --write`, "
                f"or switch the row off with -{row.spec.id}"
            )

    def _replace(self, row: _Row, module: ModuleType) -> None:
        spec, place = row.spec, slot(row.spec.target, module)
        original = place.value()
        if (original is MISSING) != (spec.kind == "extend"):
            raise ResolveError(f"{spec.target} {'does not exist' if original is MISSING else 'exists already'}")
        provided = load(spec.provider)
        new = provided(original) if spec.kind == "wrap" else provided
        row.place, row.original, row.installed = place, original, rewrap(place.raw, new)
        setattr(place.holder, place.attribute, row.installed)
        for binding in spec.bindings:
            name, _ = split(binding)
            if name in sys.modules:
                hooks.after_import(name, lambda _, b=binding: self._rebind(row, b))

    def _rebind(self, row: _Row, binding: str) -> None:
        place = slot(binding)
        if place.raw is not MISSING and place.raw is row.original:
            setattr(place.holder, place.attribute, row.installed)

    def _register(self, row: _Row, module: ModuleType) -> None:
        registry = slot(row.spec.target, module).value()
        for key, value in load(row.spec.provider)().items():
            row.entries[key] = (registry.get(key, MISSING), value)
            registry[key] = value

    def revert(self) -> None:
        """Take every row out again, in reverse order; what somebody else put over one of ours is left alone."""
        with self._lock:
            for name in reversed(self._in_need_order()):
                row = self._rows[name]
                if row.spec.is_module_stub:
                    hooks.remove_stand_in(row.spec.target)
                for place in reversed(self._places(row)):
                    if place.current() is not row.installed:
                        continue
                    if place.holder is row.place.holder and place.attribute == row.place.attribute:
                        row.place.restore()
                    else:
                        setattr(place.holder, place.attribute, row.original)
                self._unregister(row)
                row.place, row.original, row.entries, row.installed = None, MISSING, {}, None
                row.state = "reverted"

    def _unregister(self, row: _Row) -> None:
        if not row.entries:
            return
        registry = slot(row.spec.target).value()
        for key, (before, ours) in row.entries.items():
            if registry.get(key) is ours:
                registry.pop(key) if before is MISSING else registry.__setitem__(key, before)

    # -- say and prove ------------------------------------------------------------------------------------------------

    def status(self) -> list[dict[str, str]]:
        """One {id, state, target, reason} a row, in catalogue order, after looking at every place anew."""
        with self._lock:
            for row in self._rows.values():
                self._look(row)
            return [{"id": n, "state": r.state, "target": r.spec.target, "reason": r.reason}
                    for n, r in self._rows.items()]

    def _look(self, row: _Row) -> None:
        if row.state not in ("active", "overridden"):
            return
        if row.spec.is_module_stub:
            fine, found = hooks.stand_in_serves(row.spec.target), "an installed package"
        elif row.spec.kind == "register":
            registry = slot(row.spec.target).value()
            fine = all(registry.get(key) is ours for key, (_, ours) in row.entries.items())
            found = "another entry"
        else:
            others = [p.current() for p in self._places(row) if p.current() is not row.installed]
            fine, found = not others, describe(others[0]) if others else ""
        row.state = "active" if fine else "overridden"
        if not fine:
            row.reason = f"{found} stands there now"

    def _places(self, row: _Row) -> list[Slot]:
        """The target and every binding whose module is imported by now: all must hold what we installed."""
        loaded = [slot(b) for b in row.spec.bindings if split(b)[0] in sys.modules]
        return [row.place, *(p for p in loaded if p.raw is not MISSING)] if row.place else []

    def verify(self, process: str) -> None:
        """Prove that every wanted row meant for this process ("controller" or "worker") is active; else PatchError.

        Rows of the other process and rows with default "auto" may still wait.
        """
        bad = []
        for entry in self.status():
            spec = self.specs[entry["id"]]
            if entry["id"] in self.wanted and process in spec.processes:
                allowed = ("active", "waiting") if spec.default == "auto" else ("active",)
                if entry["state"] not in allowed:
                    bad.append(f"{spec.id} is {entry['state']} at {spec.target} ({entry['reason']})")
        if bad:
            raise PatchError(
                f"{len(bad)} row(s) meant for this {process} process are not active:\n  " + "\n  ".join(bad)
                + "\nA waiting row's module was not imported; an overridden one was replaced by another library after "
                "us: import that library first, or switch the row off."
            )

    def explain(self, name: str) -> dict[str, Any]:
        """Everything about one row as plain data; ConfigError for an unknown id, with the nearest ones."""
        if name not in self.specs:
            near = difflib.get_close_matches(name, self.specs, n=3) or sorted(self.specs)[:3]
            raise ConfigError(f"the catalogue has no row {name!r}; nearest: {', '.join(near)}. "
                              "`python -m verl_patches status` lists them.")
        spec = self.specs[name]
        entry = next(e for e in self.status() if e["id"] == name)
        plain = {k: sorted(v) if isinstance(v, frozenset) else v for k, v in vars(spec).items()}
        return {**plain, "state": entry["state"], "reason": entry["reason"], "wanted": name in self.wanted,
                "fingerprint": fingerprint.fingerprint(spec.target),
                "reviewed": fingerprint.reviewed().get(self.switches.line, {}).get(spec.target)}

    def intent(self) -> dict[str, str]:
        """{row id: what it means to do here}: switch, provider's source hash, fingerprint of the target on disk.

        One more entry, "verl_patches", hashes all our own sources: a provider may lean on any of them.
        """
        found = {"verl_patches": fingerprint.package_hash()}
        for name in sorted(self.specs):
            spec = self.specs[name]
            if name not in self.wanted:
                found[name] = "off"
                continue
            provider = fingerprint.source_file(split(spec.provider)[0])
            source = fingerprint.file_hash(provider) if provider else "missing"
            target = "module" if spec.is_module_stub else fingerprint.fingerprint(spec.target)
            found[name] = f"on:{source}:{target}"
        return found

    def digest(self) -> str:
        """64 hex digits over `intent()`, line and platform: equal in all processes that mean to do the same."""
        text = json.dumps([self.switches.line, self.switches.platform, self.intent()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


_CURRENT: Engine | None = None
_CURRENT_LOCK = threading.Lock()


def start(specs: Iterable[PatchSpec], switches: Switches) -> Engine:
    """This process's engine, made at the first call and the same ever after; the prelude calls it, then apply()."""
    global _CURRENT
    with _CURRENT_LOCK:
        if _CURRENT is None:
            _CURRENT = Engine(specs, switches)
        return _CURRENT


def current() -> Engine:
    """The engine that the prelude started in this process; PatchError where the prelude has not run."""
    if _CURRENT is None:
        raise PatchError("the prelude has not run in this process: `from verl_patches import prelude_patch` must come "
                         "first (run `python -m verl_patches install-prelude`, or start through our own entry point)")
    return _CURRENT
