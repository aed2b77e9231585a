"""Execute a memory schedule (schedule.py): make a phase's moves before and after its work, and run the ledger."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from verl_patches.memory.counters import note_empty_cache, time_phase
from verl_patches.memory.ledger import Ledger
from verl_patches.memory.schedule import LOAD_VERBS, Move, Schedule

_VLLM_GROUPS = ("rollout_weights", "kv_cache")  # vLLM moves them itself, in one call a phase


class Scheduler:
    """Execute `schedule` in one process.

    `empty_cache` is that of the device's allocator, None for a CPU, which has no such allocator. `unmoved_groups` are
    memory groups that the run never moves. `ledger`, if not None, checks the groups at the beginning of each phase.
    """

    def __init__(
        self, schedule: Schedule, empty_cache: Callable[[], None] | None, unmoved_groups: Collection[str] = ()
    ):
        self.schedule, self._empty_cache, self._unmoved_groups = schedule, empty_cache, frozenset(unmoved_groups)
        self.ledger: Ledger | None = None
        self._handlers: dict[str, Any] = {}
        self._open_phase: str | None = None
        self._resident: set[str] = set()  # groups on the device; empty when a step begins

    def add(self, handlers: Mapping[str, Any]) -> None:
        """Add offload handlers by memory group (memory/offload.py); a handler has a method for each verb of its group.

        Groups without a handler are moved by other code.
        """
        self._handlers |= {group: handler for group, handler in handlers.items() if group not in self._unmoved_groups}

    def offloaded_handlers(self, groups: Iterable[str]) -> list[Any]:
        """Return the handlers of those of `groups` that are not on the device now, by the schedule's moves."""
        return [self._handlers[group] for group in groups if group in self._handlers and group not in self._resident]

    def begin(self, phase: str, vllm_moves: Callable[[], Any] | None = None) -> None:
        """End the phase before, also after an error, then make the moves before the work of `phase`.

        `vllm_moves` is called once, in place of the moves that vLLM makes. An unknown phase raises KeyError.
        """
        enter = self.schedule.phase(phase).enter
        self.end()
        self._open_phase = phase
        self._make_moves(enter, vllm_moves)
        if self.ledger is not None:
            self.ledger.enter(phase)

    def end(self) -> None:
        """Make the moves after the work of the phase that was begun last; a second call does nothing."""
        if self._open_phase is None:
            return
        phase, self._open_phase = self.schedule.phase(self._open_phase), None
        if self.ledger is not None:
            self.ledger.raise_peak()
        self._make_moves(phase.leave)

    def _make_moves(self, moves: Iterable[Move], vllm_moves: Callable[[], Any] | None = None) -> None:
        """Make `moves`; after a first error, which is raised at the end, groups are released but no longer loaded."""
        error: Exception | None = None
        for move in moves:
            if error is not None and move.verb in LOAD_VERBS:
                continue
            if move.group in _VLLM_GROUPS and move.group not in self._handlers:
                work, vllm_moves = vllm_moves, None
            else:
                work = functools.partial(self._make_move, move)
            try:
                if work is not None:
                    work()
            except Exception as why:
                error = error or why
            if move.verb in LOAD_VERBS:
                self._resident.add(move.group)
            else:
                self._resident.discard(move.group)
        if error is not None:
            raise error

    def _make_move(self, move: Move) -> None:
        """Make a move by the group's handler, if there is one, or empty the allocator's cache."""
        if move.verb == "empty_cache":
            if self._empty_cache is not None:
                self._empty_cache()
            note_empty_cache()
        elif move.group in self._handlers:
            with time_phase("offload"):
                getattr(self._handlers[move.group], move.verb)()
