"""Apply, revert, verify and explain the rows of the catalogue in one process.

A row (spec.py) replaces one upstream object. The prelude (prelude_patch.py) makes the engine and calls `apply` before
upstream is imported; a row is put in place once its target's module is imported (hooks.py).

States of a row: off, waiting -> active | drifted | unsupported | failed, and active -> overridden | reverted. A row is
active only if the object at its target `is` the one that the engine put there. Where upstream is not as reviewed, the
row is drifted (another body, or none was reviewed) or unsupported (the place does not exist, or accepts calls that our
replacement refuses), and the policy `drift=` decides what follows; failed is a fault of our own provider and always
stops the run.

Threads: `_lock` guards the rows and the replacement itself. No import runs while it is held, because a thread inside
an import holds that module's lock and may wait for ours. Providers run without it: two threads may prepare the same
row, and the first one to finish puts it in place.

Bindings: a module that is inside `from M import f` while a row is put on M:f may have fetched the previous object and
store it later. So each binding of a row is open from the moment the row is put in place until its module's import has
ended and the binding was set again; an open binding is not compared with the object that is expected there.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

from verl_patches.current import Current
from verl_patches.errors import ConfigError, RecipeError, our_command
from verl_patches.patching import hooks
from verl_patches.patching.row import (
    MISSING,
    UNREVIEWED_STATES,
    Prepared,
    Row,
    find_slot,
    log_outcome,
    prepare,
    read_place,
    refusal_text,
)
from verl_patches.patching.spec import PatchSpec, split_place, validate
from verl_patches.patching.switches import Switches, nearest_text

_ADVICE = {
    "waiting": "waiting: the target's module was never imported in this process, or was imported before the prelude; "
    "import the prelude first, then that module.",
    "reverted": "reverted: call apply() after revert().",
    "overridden": "overridden: another library replaced the target after our patch. Import it before the prelude, so "
    "that our patch wraps its change, or disable its change, or switch our row off (-row.id).",
}


class PatchError(RecipeError):
    """Report a row that is not active; the message names row, target, expected, found and remedy."""


class Engine:
    """Apply and check the rows of one process. All methods are thread-safe and idempotent."""

    def __init__(self, specs: Iterable[PatchSpec], switches: Switches):
        self.specs = {name: spec.on_line(switches.line) for name, spec in validate(specs).items()}
        self.switches = switches
        switches.check_against(self.specs)
        self._rows = {name: Row(spec) for name, spec in self.specs.items()}
        self._lock = threading.RLock()
        self._open_bindings: set[str] = set()
        self._check_wanted()
        self._order = [self._rows[name] for name in self._in_need_order()]

    def _check_wanted(self) -> None:
        """Decide which rows are wanted, and refuse a wanted row that needs one which is off."""
        self.wanted: set[str] = set()
        for name, row in self._rows.items():
            wanted, row.switch_reason = self.switches.decide(row.spec)
            row.reason = row.switch_reason
            if wanted:
                self.wanted.add(name)
        for name, spec in self.specs.items():
            for need in spec.needs if name in self.wanted else ():
                if need not in self.wanted:
                    raise ConfigError(
                        f"row {name} needs {need}, which is off ({self._rows[need].reason}); "
                        f"switch {name} off too (-{name}) or {need} on"
                    )

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

    # -- apply and revert ---------------------------------------------------------------------------------------------

    def apply(self) -> None:
        """Put every wanted row in place, now or as soon as its target module is imported. Idempotent.

        A second apply() tries a row again that could not be put in place, and fails like the first. Raises PatchError.
        """
        with self._lock:
            for row in self._order:
                if row.hook is None:
                    row.state, row.reason, row.apply_count = "waiting", row.switch_reason, row.apply_count + 1
                    row.hook = functools.partial(self._install, row, row.apply_count)
                if row.spec.is_module_stub:
                    hooks.add_module_stub(row.spec.target, row.spec.provider)
                    row.state = "active"
            due = [
                (row.spec.target_module, row.hook)
                for row in self._order
                if row.hook is not None and row.module is None and not row.spec.is_module_stub
            ]
        for name, hook in due:
            hooks.after_import(name, hook)
            module = sys.modules.get(name)
            if module is not None and not hooks.is_half_built(module):
                hook(module)  # another thread may have taken the hook and still be running it

    def _install(self, row: Row, nth: int, module: ModuleType) -> None:
        """Install one row in its imported module (the row's import hook); raise PatchError where the run must stop."""
        if self._is_done(row, nth, module):
            return
        for need in (self._rows[name] for name in row.spec.needs):
            if need.spec.target_module == row.spec.target_module and not need.spec.is_module_stub:
                self._install(need, need.apply_count, module)  # so a row wraps what it needs in any order of hooks
        policy = self.switches.drift
        prepared = self._unmet_need(row.spec) or prepare(row.spec, module, self.switches.line, policy)
        with self._lock:
            if self._is_done(row, nth, module):
                return
            prepared = self._unmet_need(row.spec) or prepared
            row.uninstall()  # from an earlier copy of the module, which was dropped when patching it failed
            if prepared.place is not None:
                prepared = row.put(prepared, prepared.place)
                self._open_bindings.update(row.spec.bindings if row.in_place else ())
                for binding in row.spec.bindings:
                    self._bind(row, binding)
            row.state, row.reason = prepared.state, prepared.reason or row.switch_reason
            stops = prepared.state == "failed" or (prepared.state != "active" and policy == "strict")
            if not stops:
                row.module = module
                self._revert_dependents(row)
            in_place = row.in_place
        if stops:
            raise PatchError(refusal_text(row.spec, prepared, self.switches.line)) from prepared.error
        log_outcome(row.spec, prepared, in_place)
        for binding in row.spec.bindings if in_place else ():
            self._close_binding(row, binding)

    def _is_done(self, row: Row, nth: int, module: ModuleType) -> bool:
        return row.apply_count != nth or row.hook is None or row.module is module

    def _unmet_need(self, spec: PatchSpec) -> Prepared | None:
        """Return the state of a row that needs one which was not applied; None if all needed rows were applied."""
        for need in (self._rows[name] for name in spec.needs):
            needs_class = spec.kind == "override" and need.spec.provider == spec.provider.rpartition(".")[0]
            if need.state == "unsupported" or (needs_class and not need.in_place):
                text = f"it needs row {need.spec.id}, which is {need.state} and was not applied"
                return Prepared("unsupported", text)
        return None

    def _revert_dependents(self, left: Row) -> None:
        """Revert the rows that need one which was not applied."""
        if left.state != "unsupported":
            return
        leaving = []
        for row in self._order:  # a needed row comes first
            is_left_out = any(self._rows[name].state == "unsupported" for name in row.spec.needs)
            unmet = self._unmet_need(row.spec) if row.hook is not None and is_left_out else None
            if unmet:
                row.state, row.reason = unmet.state, unmet.reason
                leaving.append(row)
        for row in reversed(leaving):  # the upper row of a place first: each puts back the object it found
            row.uninstall()

    def _bind(self, row: Row, binding: str) -> None:
        """Set a binding to the uppermost row's object, if it holds the original object or that of a lower row."""
        found = read_place(binding)
        uppermost = self._uppermost(row.spec.target, found)
        if uppermost is not found:
            place = find_slot(binding)
            setattr(place.holder, place.attribute, uppermost)

    def _close_binding(self, row: Row, binding: str) -> None:
        """Set a binding once its module's import has ended; a running import may store an object fetched earlier."""
        name, _ = split_place(binding)

        def close(module: ModuleType) -> None:
            with self._lock:
                self._bind(row, binding)
                self._open_bindings.discard(binding)

        with self._lock:
            if sys.modules.get(name) is None:  # a later import fetches the uppermost row's object
                self._open_bindings.discard(binding)
                return
        hooks.after_import(name, close)

    def revert(self) -> None:
        """Restore upstream, in reverse order; changes that another library made over ours stay.

        No import may run meanwhile: a module that is inside `from M import f` may keep our object.
        """
        with self._lock:
            for row in reversed(self._order):
                if row.hook is None:
                    continue
                if row.spec.is_module_stub:
                    hooks.remove_module_stub(row.spec.target)
                covered = row.replacement_text(row.installed, self._open_bindings) if row.in_place else ""
                row.uninstall()
                row.hook = row.module = None
                row.state, row.reason = "reverted", f"{covered}; it was left there" if covered else ""

    # -- status and verification --------------------------------------------------------------------------------------

    def status(self) -> list[dict[str, str]]:
        """Return {id, state, target, reason} of each row, in catalogue order; every place is checked again."""
        with self._lock:
            observed = [(row.spec, *self._observed(row)) for row in self._rows.values()]
        return [
            {"id": spec.id, "state": state, "target": spec.target, "reason": reason} for spec, state, reason in observed
        ]

    def _observed(self, row: Row) -> tuple[str, str]:
        """Return the present (state, reason) of a row."""
        name = row.spec.target_module
        now = sys.modules.get(name)
        if row.spec.is_module_stub and row.state == "active" and (provided := hooks.import_source(name)) != "ours":
            if provided:
                return "off", f"the installed package {name} is used instead of our stub"
            return "overridden", f"sys.modules has a module {name} that is neither our stub nor an installed package"
        if not row.in_place:
            missed = row.state == "waiting" and now is not None and not hooks.is_half_built(now)
            return row.state, "its module was imported without our hook; call apply() again" if missed else row.reason
        if now is not row.module and hooks.is_armed(name):
            return "waiting", "its module was removed from sys.modules, because patching it failed"
        if now is None:
            return "overridden", f"{name} was removed from sys.modules after it was patched"
        covered = row.replacement_text(self._uppermost(row.spec.target, row.installed), self._open_bindings)
        return ("overridden", covered) if covered else (row.state, row.reason)

    def _uppermost(self, target: str, found: Any) -> Any:
        """Return the object of the last of the rows on a target that replaced `found`, one over another.

        It is `found` itself where no row did.
        """
        over = {}
        for row in self._order:
            place = row.place if row.spec.target == target and row.spec.kind != "override" else None
            if place is not None and place.found is not MISSING:
                over[id(place.found)] = row.installed
        while id(found) in over:
            found = over[id(found)]
        return found

    def verify(self, process: str, unused: tuple[str, ...] = ()) -> None:
        """Raise PatchError unless every wanted row for this process ("controller" or "worker") is active.

        Rows of the other process may still wait, as may those on `unused` packages and modules, which this process need
        not import. A module stub may be off where its package is installed. A policy other than strict accepts drifted
        and unsupported rows.
        """
        allowed = {"active", *(() if self.switches.drift == "strict" else UNREVIEWED_STATES)}
        bad, states = [], set()
        for entry in self.status():
            spec, state = self.specs[entry["id"]], entry["state"]
            waits = state == "waiting" and f"{spec.target_module}.".startswith(tuple(f"{name}." for name in unused))
            not_needed = waits or (spec.is_module_stub and state == "off")
            if spec.id in self.wanted and process in spec.processes and state not in allowed and not not_needed:
                bad.append(f"{spec.id} is {state} at {spec.target} ({entry['reason']})")
                states.add(state)
        if bad:
            advice = [text for state, text in _ADVICE.items() if state in states]
            raise PatchError(
                f"{len(bad)} patch row(s) are not active in this {process} process:\n  " + "\n  ".join((*bad, *advice))
            )

    def explain(self, name: str) -> dict[str, Any]:
        """Return all facts about one row as plain data; ConfigError for an unknown id, with the nearest ones."""
        from verl_patches.patching import fingerprint

        spec = find_row(name, self.specs)
        entry = next(e for e in self.status() if e["id"] == name)
        return {
            **{key: sorted(value) if isinstance(value, frozenset) else value for key, value in vars(spec).items()},
            "state": entry["state"],
            "reason": entry["reason"],
            "wanted": name in self.wanted,
            "fingerprint": fingerprint.fingerprint(spec.target),
            "reviewed": fingerprint.reviewed_hash(self.switches.line, spec.target),
        }

    def intent(self) -> dict[str, str]:
        """Return {row id: "off", or hashes of its provider's file, of its target on disk and of the reviewed target}.

        One more entry, "verl_patches", hashes all our own sources, because a provider may use any of them.
        """
        from verl_patches.patching import fingerprint

        line, hashes = self.switches.line, {"verl_patches": fingerprint.package_hash()}
        for name in sorted(self.specs):
            spec = self.specs[name]
            if name not in self.wanted:
                hashes[name] = "off"
                continue
            provider = fingerprint.source_file(split_place(spec.provider)[0])
            source = fingerprint.file_hash(provider) if provider else "missing"
            target = "module" if spec.is_module_stub else fingerprint.current_hash(line, spec.target)
            hashes[name] = f"on:{source}:{target}:{fingerprint.reviewed_hash(line, spec.target) or 'never reviewed'}"
        return hashes

    def digest(self) -> str:
        """Return 64 hex digits over `intent()`, line, platform and policy; equal patches have equal digests."""
        import hashlib
        import json

        facts = [self.switches.line, self.switches.platform, self.switches.drift, self.intent()]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def find_row(name: str, specs: Mapping[str, PatchSpec]) -> PatchSpec:
    """Return the row of this id; ConfigError for an unknown one, with the nearest ids."""
    if name not in specs:
        lists = f"`{our_command('status')}` lists them."
        raise ConfigError(f"the catalogue has no row {name!r}{nearest_text(name, specs)}. {lists}")
    return specs[name]


process_engine: Current[Engine | None] = Current(None)  # set by the prelude's import, which Python runs once


def start_engine(specs: Iterable[PatchSpec], switches: Switches) -> Engine:
    """Return this process's engine, created at the first call; the prelude calls this, then apply()."""
    if process_engine.value is None:
        process_engine.value = Engine(specs, switches)
    return process_engine.value


def is_on(row: str) -> bool:
    """Return whether the row of this id is wanted in this process; False without a prelude."""
    return process_engine.value is not None and row in process_engine.value.wanted


def current_engine() -> Engine:
    """Return the engine that the prelude started in this process; PatchError where the prelude has not run."""
    if process_engine.value is None:
        raise PatchError(
            "the prelude has not run in this process: expected `from verl_patches import prelude_patch` before imports "
            f"of upstream; run `{our_command('install-prelude')}`, or start with "
            f"`{our_command('train', '--config-name', 'CONFIG')}`"
        )
    return process_engine.value
