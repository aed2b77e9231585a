"""Decide which rank is stalled, from the nodes' reports: plain data in and out, without Ray and torch.

A place is a phase of a worker, or a call where it has no phases. The first stay there has a fixed bound; later ones
have the larger of a least time and `factor` times the longest stay of any rank so far. A rank that waits for another in
a process group has a shorter bound, as HCCL would end it with an error that names only the rank that waited. While
weights or checkpoints are read or written, no time counts in which the bytes of any process grow: a slow disk is no
stall, however long it takes.

A rank is overdue when its phase lasts longer than its bound, or when it waits for too long in a process group, of which
it has begun more operations than another rank. Then the culprit is the first of these that there is:

    a process that has ended, and whose end nobody has reported
    a process that is stopped (SIGSTOP, a debugger)
    a process whose Python has not run for SILENT_S (a call that holds the GIL, or one inside the kernel)
    a rank that others wait for, and that waits for none itself: it has begun fewer operations of a process group
    the controller, where no rank is in a call
    all overdue ranks, where none of these holds; of ranks that load together, those that have not ended

During the start (a worker's constructor, where process groups are made) ranks without a heartbeat are the culprits,
or, if there are none, those that are still in their constructor.

A group's numbers of begun operations are compared only if they were equal, and above 0, on all its members when their
present calls began: gloo counts sends and receives too, so that the numbers of a pipeline's stages differ.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from verl_patches.errors import RecipeError
from verl_patches.heartbeat.heartbeat import Beat, ranks_text
from verl_patches.heartbeat.node import STOPPED_STATES, SeenProcess
from verl_patches.layout.phases import LAST_CHECKPOINT, LOADED, PROFILE, START, VALIDATE
from verl_patches.values import size_text

GONE_S = 30.0  # how long a process may be gone before the watch says so: Ray and the trainer notice first
SILENT_S = 20.0
# {rank: {rank that waits for it: (group, operations that `rank` has begun, most of any member)}}; ranks as in a Beat
AwaitedRanks = dict[int | None, dict[int | None, tuple[str, int, int]]]
# Calls and phases that wait for the slowest disk or analyse a trace. As earlier times predict nothing, the larger of
# Bounds.first_s and load_s bounds the time from the last byte that any process has read or written.
SLOW_CALLS, SLOW_PHASES = {"init_model", "load_checkpoint", "finish_checkpoint"}, {LAST_CHECKPOINT, PROFILE}
WAIT_SHARE = 0.8  # of recipe.train.distributed_timeout_minutes; the rest, until HCCL's own timeout, is for stacks
MAX_NAMED = 8
_START_ACTIVITIES = {START: "in the worker's constructor", "init_model": "building the models", "": "waiting"}


class StallError(RecipeError):
    """Raised where a rank, or the controller, stays in one phase for longer than expected."""


class LostNodeError(RecipeError):
    """Raised where a node with ranks of the run no longer answers."""


class Limit(NamedTuple):
    """Hold a bound in seconds and the key that sets it."""

    seconds: float
    key: str

    def __str__(self) -> str:
        return f"where at most {self.seconds:.0f} s were expected ({self.key})"


@dataclass(frozen=True)
class Bounds:
    """Bound the seconds in a place: first_s, least_s and factor of recipe.watch; load_s of recipe.timeouts.

    collective_s: how long a rank may wait for another in an operation of a process group, but in slow places.
    """

    first_s: float
    least_s: float
    factor: float
    load_s: float = 0.0
    collective_s: float = float("inf")

    def place_bound(self, seen: SeenProcess, longest_s: float) -> Limit:
        """Return the bound of the place of `seen`; longest_s: the longest time of any process there so far."""
        first = Limit(self.first_s, "recipe.watch.first_s")
        if _is_slow(seen.beat):
            return max(first, Limit(self.load_s, "recipe.timeouts.load_s"))
        been_there = seen.beat.place in seen.beat.longest_s
        least = Limit(self.least_s, "recipe.watch.least_s") if been_there else first
        return max(least, Limit(self.factor * longest_s, "recipe.watch.factor"))

    def __str__(self) -> str:
        text = f"{self.first_s:.0f} s for a first time, then {self.least_s:.0f} s or {self.factor:g} x the longest time"
        return f"{text}; of a rank that waits for another in a process group: {self.collective_s:.0f} s"


def _is_slow(beat: Beat) -> bool:
    first_validation = beat.call == VALIDATE and beat.place not in beat.longest_s
    return beat.call in SLOW_CALLS or beat.phase in SLOW_PHASES or first_validation


@dataclass(frozen=True)
class Stall:
    """Describe a stall: the culprits, some rank that waits for them, and one sentence."""

    culprits: tuple[SeenProcess, ...]
    waiting: tuple[SeenProcess, ...]
    sentence: str


def find_stall(processes: Sequence[SeenProcess], bounds: Bounds, world: int = 0) -> Stall | None:
    """Return the stall of a run of `world` ranks, or None. `processes`: ranks and controller, from all nodes."""
    last_byte_s = min((seen.disk_still_s for seen in processes), default=math.inf)
    processes = [  # in a slow place the time counts from the last byte that any process has read or written
        replace(seen, in_place_s=min(seen.in_place_s, last_byte_s)) if _is_slow(seen.beat) else seen
        for seen in processes
    ]
    ranks = [seen for seen in processes if seen.beat.rank is not None]
    controller = next((seen for seen in processes if seen.beat.rank is None), None)
    longest: defaultdict[str, float] = defaultdict(float)
    for seen in processes:
        for place, seconds in seen.beat.longest_s.items():
            longest[place] = max(longest[place], seconds)
    gone = [seen for seen in processes if seen.state == "gone" and seen.silent_s > GONE_S]
    if gone:
        text = f"{_rank_names(gone)} ended {gone[0].silent_s:.0f} s ago in {_place_text(gone[0])}, by a signal"
        return _make_stall(gone, [], text)
    busy = [seen for seen in ranks if seen.beat.call]
    candidates = busy or _idle_controller(controller, ranks)
    limits = {id(seen): bounds.place_bound(seen, longest[seen.beat.place]) for seen in candidates}
    overdue = [seen for seen in candidates if seen.in_place_s > limits[id(seen)].seconds]
    if not overdue:
        return _find_long_wait(ranks, busy, bounds, controller)
    if overdue[0].beat.call == START and not any(seen.state[:1] in STOPPED_STATES for seen in ranks):
        return _stalled_start(ranks, overdue[0], limits[id(overdue[0])], world)
    culprits, why = _culprits(ranks, overdue) if busy else (overdue, "")
    first = max([seen for seen in overdue if seen in culprits] or overdue, key=lambda seen: seen.in_place_s)
    without = " without a byte read or written" if first.beat.call in SLOW_CALLS else ""
    late = f"{_place_text(first)} for {first.in_place_s:.0f} s{without}, {limits[id(first)]}"
    if not busy:
        return _make_stall(overdue, [], f"{first.where} is in {late}; no rank is in a call")
    others = [seen for seen in busy if seen not in culprits]
    text = f"{_rank_names(culprits)} {why}, in "
    text += late if first in culprits else f"{_place_text(culprits[0])}; {first.where} is in {late}"
    return _make_stall(culprits, others, text + _waiting_text(others, culprits), controller)


def _find_long_wait(
    ranks: Sequence[SeenProcess], busy: Sequence[SeenProcess], bounds: Bounds, controller: SeenProcess | None
) -> Stall | None:
    """Return the stall of a rank that waits too long in a process group's operation that another has not begun."""
    limit = Limit(bounds.collective_s, "recipe.train.distributed_timeout_minutes")
    still = [seen for seen in busy if seen.still_s > limit.seconds and not _is_slow(seen.beat)]
    awaited = find_awaited_ranks(ranks) if still else {}
    waiting = [seen for seen in still if _is_waiting(seen, awaited)]
    if not waiting:
        return None
    culprits, why = _culprits(ranks, waiting)
    first = max(waiting, key=lambda seen: seen.still_s)
    text = f"{_rank_names(culprits)} {why}, in {_place_text(culprits[0])}; {first.where} waits in {_place_text(first)}"
    text += f" for {first.still_s:.0f} s, {limit}"
    others = [seen for seen in busy if seen not in culprits]
    return _make_stall(culprits, others, text + _waiting_text(others, culprits), controller)


def _stalled_start(ranks: Sequence[SeenProcess], first: SeenProcess, limit: Limit, world: int) -> Stall:
    """Return the stall of `first`, overdue in the start, when no process group yet says who waits for whom."""
    text = f"{first.where} is in the start for {first.in_place_s:.0f} s, {limit}"
    late = unstarted_ranks_text(ranks, world)
    culprits = []  # a rank without a heartbeat has no process to name
    if not _missing_ranks(ranks, world):
        culprits = [seen for seen in ranks if seen.beat.call == START] or [first]
    return _make_stall(culprits, [first], f"{text}; {late}" if late else text)


def _missing_ranks(ranks: Sequence[SeenProcess], world: int) -> list[int]:
    return sorted(set(range(world)) - {seen.beat.rank for seen in ranks})


def unstarted_ranks_text(processes: Sequence[SeenProcess], world: int) -> str:
    """Return as text the ranks that have not started; "" where all have."""
    ranks = [seen for seen in processes if seen.beat.rank is not None]
    inside = [seen for seen in ranks if seen.beat.call == START and seen.state != "gone"]
    texts = []
    if missing := _missing_ranks(ranks, world):
        names = f"rank{'s' if len(missing) > 1 else ''} {ranks_text(missing)}"
        verb = "have" if len(missing) > 1 else "has"
        texts.append(f"{names} of {world} {verb} no heartbeat: not placed by Ray, or still importing")
    if inside:
        texts.append(f"{_rank_names(inside)} {_verb(inside)} in the worker's constructor")
    return "; ".join(texts)


def start_progress(processes: Sequence[SeenProcess], world: int) -> str:
    """Return as text how many ranks have started, and what they do; "" once a step has begun."""
    if any(seen.beat.rank is None and seen.beat.step for seen in processes):
        return ""
    doing = Counter(
        _START_ACTIVITIES.get(seen.beat.call, seen.beat.place) for seen in processes if seen.beat.rank is not None
    )
    begun = f"{doing.total()} of {world} ranks have started"
    places = ", ".join(f"{count} {place}" for place, count in doing.items())
    if reading := [seen for seen in processes if seen.beat.disk_bytes]:
        last = min(reading, key=lambda seen: seen.beat.disk_bytes)
        total = size_text(sum(seen.beat.disk_bytes for seen in reading))
        places += f"; {total} of weights read, by {last.where} {size_text(last.beat.disk_bytes)}"
    return f"{begun}: {places}" if places else begun


def _idle_controller(controller: SeenProcess | None, ranks: Sequence[SeenProcess]) -> list[SeenProcess]:
    """Return the controller, whose time in place begins at the end of its last call of a rank; empty before step 1."""
    if controller is None or not controller.beat.call:
        return []
    alone_s = min((seen.in_place_s for seen in ranks), default=controller.in_place_s)
    return [replace(controller, in_place_s=min(controller.in_place_s, alone_s))]


def _make_stall(
    culprits: Sequence[SeenProcess],
    waiting: Sequence[SeenProcess],
    sentence: str,
    controller: SeenProcess | None = None,
) -> Stall:
    controller = controller or next((seen for seen in culprits if seen.beat.rank is None), None)
    step = f"step {controller.beat.step}: " if controller and controller.beat.step else ""
    return Stall(tuple(culprits), tuple(waiting[:1]), f"{step}{sentence}")


def _culprits(ranks: Sequence[SeenProcess], overdue: Sequence[SeenProcess]) -> tuple[list[SeenProcess], str]:
    """Return (culprits, what they do), chosen in the order that the module's docstring gives."""
    if stopped := [seen for seen in ranks if seen.state[:1] in STOPPED_STATES]:
        return stopped, f"{_verb(stopped)} stopped (state {stopped[0].state}: SIGSTOP or a debugger)"
    silent = [seen for seen in ranks if seen.silent_s > SILENT_S]
    if silent and len(silent) < len(ranks):
        text = f"{'has' if len(silent) == 1 else 'have'} run no Python for {silent[0].silent_s:.0f} s"
        return silent, f"{text} (state {silent[0].state})"
    awaited = find_awaited_ranks(ranks)
    sinks = [seen for seen in ranks if awaited.get(seen.beat.rank) and not _is_waiting(seen, awaited)]
    if sinks and len(sinks) < len(ranks):
        return sinks, f"{_verb(sinks)} behind the others"
    late = [seen for seen in overdue if seen.beat.phase != LOADED] or list(overdue)
    return late, f"{_verb(late)} overdue"


def find_awaited_ranks(ranks: Iterable[SeenProcess]) -> AwaitedRanks:
    """Return which ranks wait for which, by their numbers of begun operations."""
    members: defaultdict[str, list[SeenProcess]] = defaultdict(list)
    for seen in ranks:
        for group in seen.beat.groups:
            members[group].append(seen)
    waiting: defaultdict[int | None, dict[int | None, tuple[str, int, int]]] = defaultdict(dict)
    for group, group_ranks in members.items():
        if len({_count_before(seen, group) for seen in group_ranks}) != 1 or not _count_before(group_ranks[0], group):
            continue
        most = max(seen.beat.groups[group] for seen in group_ranks)
        for seen, other in itertools.permutations(group_ranks, 2):
            if seen.beat.groups[group] < other.beat.groups[group]:
                waiting[seen.beat.rank].setdefault(other.beat.rank, (group, seen.beat.groups[group], most))
    return dict(waiting)


def _count_before(seen: SeenProcess, group: str) -> int:
    beat = seen.beat
    return (beat.groups_before if beat.call else beat.groups).get(group, 0)


def _is_waiting(seen: SeenProcess, awaited: AwaitedRanks) -> bool:
    return any(seen.beat.rank in waiting for waiting in awaited.values())


def _waiting_text(others: Sequence[SeenProcess], culprits: Sequence[SeenProcess]) -> str:
    """Return as text how many ranks wait, and in which operation of which group."""
    if not others:
        return ""
    count = f"; {len(others)} other rank{'s are' if len(others) > 1 else ' is'} in a call"
    awaited = find_awaited_ranks([*others, *culprits])
    for seen in culprits:
        for group, number, most in awaited.get(seen.beat.rank, {}).values():
            name, _, ranks = group.partition(" ")
            return (
                f"{count}, at operation {most} of process group {name} (ranks {ranks}); {seen.beat.name} is at {number}"
            )
    return count


def _place_text(seen: SeenProcess) -> str:
    beat = seen.beat
    if not beat.call:
        return "no call"
    inside = [beat.phase] if beat.phase else []
    inside += [f"{size_text(beat.disk_bytes)} read or written"] if beat.disk_bytes else []
    return f"{beat.call} ({', '.join(inside)})" if inside else beat.call


def _verb(several: Sequence[SeenProcess]) -> str:
    return "is" if len(several) == 1 else "are"


def _rank_names(several: Sequence[SeenProcess]) -> str:
    more = f" and {len(several) - MAX_NAMED} more" if len(several) > MAX_NAMED else ""
    return ", ".join(seen.where for seen in several[:MAX_NAMED]) + more
