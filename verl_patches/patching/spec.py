"""Define `PatchSpec`, a row of the catalogue: an upstream symbol, its replacement, and the reason."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from itertools import permutations

from verl_patches.errors import ConfigError

ROLES = ("correctness", "feature", "speed", "observe")
LEVELS = ("safe", "reference", "tuned")  # groups of keys (configs/level); rows of role speed are on at the last alone
KINDS = ("register", "subclass", "override", "wrap", "replace", "extend", "stub")
LINES = ("pypi", "a3")  # sets of pinned upstream versions (upstream/pins.py)
EMULATED_PLATFORMS = {"npu_emulated": "npu"}  # an emulating platform has the rows of the emulated one too
PLATFORMS = ("npu", "cpu", *EMULATED_PLATFORMS)
PROCESSES = ("controller", "worker")
DRIFT_POLICIES = ("strict", "warn")

_PLACE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*)?\Z")


@dataclass(frozen=True)
class PatchSpec:
    """Describe one replaced upstream symbol.

    `target` and `bindings` are "module:qualname"; a target "module" alone is a whole module that is missing here.
    An entry of `bindings` for one line only ends with "@line". `needs` names rows that must be on, and are applied
    first. `exit` says when the row can be deleted. `provider` is "module:qualname" of ours and is imported only after
    the target's module. Its type depends on `kind`: subclass: a class whose methods override those of the class
    `target` and call them by `super()`; override: one method of such a class, which the subclass row puts in place; its
    own row lets it be switched off alone, as the method asks `engine.is_on` whether to do its work; wrap:
    provider(original) -> replacement; replace, extend (the name must not exist), stub: the new object;
    register: () -> {key: object}, set in the mutable mapping `target`; module stub: our module ("module"),
    or a module object of ours ("module:name"), whose inner modules can be imported too.
    `role`: correctness (without the row the run is wrong or does not start, also for want of memory), feature (an
    addition of the recipe), observe, or speed, which a run has at level tuned only. `feature` names the run's feature
    that needs the row (run/features.py): the launcher leaves the row out of a run without it; without the launcher it
    is applied, but must do nothing. Empty: every run has the row.
    `under` names modules of other libraries that may wrap our object: the row stays active under their wrappers.
    A module stub is for a missing package; where that is installed, it is used and the row is off. A row is for all
    `lines`, `platforms` and `processes` unless it names some. Of two rows on one target the upper one must be a wrap
    that needs the lower one; of a row on m:C and one on m:C.x, one must need the other.
    """

    id: str
    target: str
    kind: str
    provider: str
    why: str
    exit: str
    bindings: tuple[str, ...] = ()
    under: tuple[str, ...] = ()
    lines: frozenset[str] = frozenset(LINES)
    platforms: frozenset[str] = frozenset(PLATFORMS) - frozenset(EMULATED_PLATFORMS)
    processes: frozenset[str] = frozenset(PROCESSES)
    needs: tuple[str, ...] = ()
    role: str = "correctness"
    feature: str = ""

    def on_line(self, line: str) -> PatchSpec:
        """Return this row with the bindings that it has on `line`, their "@line" removed."""
        entries = [binding.partition("@") for binding in self.bindings]
        return replace(self, bindings=tuple(place for place, _, only in entries if only in ("", line)))

    @property
    def all_platforms(self) -> frozenset[str]:
        """Return `platforms`, and the platforms that emulate one of them."""
        return self.platforms | {name for name, real in EMULATED_PLATFORMS.items() if real in self.platforms}

    @property
    def target_module(self) -> str:
        """Return the module of the target, on whose import the row is applied."""
        return split_place(self.target)[0]

    @property
    def is_module_stub(self) -> bool:
        """Return whether the target is a whole module, which is missing here."""
        return ":" not in self.target


def split_place(place: str) -> tuple[str, str]:
    """Return ("module", "qualname") of "module:qualname"; the second is empty for a module."""
    module, _, qualname = place.partition(":")
    return module, qualname


def validate(specs: Iterable[PatchSpec]) -> dict[str, PatchSpec]:
    """Check all rows before any is applied and return them by id, in order; ConfigError lists all faults at once."""
    specs = tuple(specs)
    by_id = {spec.id: spec for spec in specs}
    faults = [f"id {name!r} is used {count} times" for name, count in Counter(s.id for s in specs).items() if count > 1]
    for spec in specs:
        faults += [f"row {spec.id!r}: {fault}" for fault in _row_faults(spec, by_id)]
    for line in LINES:
        rows = {spec.id: spec.on_line(line) for spec in specs if line in spec.lines}
        faults += _need_cycles(rows) or _place_faults(rows)
    if faults:
        text = "\n  ".join(dict.fromkeys(faults))
        raise ConfigError(f"the patch catalogue is invalid, so no row was applied:\n  {text}")
    return by_id


def _row_faults(spec: PatchSpec, by_id: dict[str, PatchSpec]) -> list[str]:
    bindings = [place.partition("@") for place in spec.bindings]
    places = (spec.target, spec.provider, *(place for place, _, _ in bindings))
    is_module, holders = spec.is_module_stub, [by_id[need] for need in spec.needs if need in by_id]
    without_class = spec.kind == "override" and all(holder.kind != "subclass" for holder in holders)
    wrong = {
        f"kind is {spec.kind!r}, expected one of {', '.join(KINDS)}": spec.kind not in KINDS,
        f"role is {spec.role!r}, expected one of {', '.join(ROLES)}": spec.role not in ROLES,
        "role is feature, but `feature` is empty; name the feature": spec.role == "feature" and not spec.feature,
        **{f"{place!r}: expected module:qualname": not _PLACE.match(place) for place in places},
        f"kind is {spec.kind}; expected stub for a target that is a module": is_module and spec.kind != "stub",
        "a module stub must have empty bindings and needs": is_module and bool(bindings or spec.needs),
        f"provider is {spec.provider!r}; expected module:qualname": not is_module and ":" not in spec.provider,
        "kind register has bindings; expected none": spec.kind == "register" and bool(bindings),
        "kind override: `needs` must list the subclass row of the class that has the method": without_class,
        **{f"needs lists {other!r}; the catalogue has no such row": other not in by_id for other in spec.needs},
    }
    return [fault for fault, is_wrong in wrong.items() if is_wrong]


def _need_cycles(by_id: dict[str, PatchSpec]) -> list[str]:
    try:
        TopologicalSorter({name: spec.needs for name, spec in by_id.items()}).prepare()
    except CycleError as error:
        return [f"needs form a cycle: {' -> '.join(reversed(error.args[1]))}"]
    return []


def _place_faults(rows: dict[str, PatchSpec]) -> list[str]:
    """Return faults of rows that can be on together and change one place without a defined order."""
    faults = []
    for outer, inner in permutations(rows.values(), 2):
        fault = ""
        is_inside = inner.target.startswith(f"{outer.target}.") and not outer.is_module_stub
        if is_inside or (inner.target == outer.target and inner.id < outer.id):
            fault = _order_fault(rows, outer, inner)
        elif outer.target in inner.bindings and outer.kind != "register":
            fault = (
                f"row {inner.id!r}: its binding {outer.target} is the target of row {outer.id!r}; remove the binding"
            )
        if fault and outer.all_platforms & inner.all_platforms:
            faults.append(fault)
    return faults


def _order_fault(rows: dict[str, PatchSpec], outer: PatchSpec, inner: PatchSpec) -> str:
    """Return the fault of two rows on one target, or on a class and inside it, of which one could undo the other.

    Entries of a registry, and overrides of one method, cannot undo each other.
    """
    is_same, kinds = inner.target == outer.target, {outer.kind, inner.kind}
    if is_same and ("register" in kinds or kinds == {"override"}):
        return ""
    both = f"rows {inner.id!r} and {outer.id!r} are " + (
        f"both on {inner.target}" if is_same else f"on {inner.target}, inside {outer.target} of row {outer.id!r}"
    )
    pairs = (inner, outer), (outer, inner)
    upper = next((one for one, other in pairs if other.id in _all_needs(rows, one.id)), None)  # goes over the other
    if upper is None or (upper.kind != "wrap" and (is_same or upper is outer)):
        return (
            f"{both}: the one that is applied last must be a wrap and list the other in needs; or give them different "
            "lines or platforms"
        )
    if is_same and {*outer.bindings} != {*inner.bindings}:
        return f"{both}: they must list the same bindings"
    return ""


def _all_needs(by_id: dict[str, PatchSpec], name: str) -> set[str]:
    direct = set(by_id[name].needs) & set(by_id)
    return direct.union(*(_all_needs(by_id, need) for need in direct))
