"""Execute a memory schedule (schedule.py): make a phase's moves before and after its work, and run the ledger."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from verl_patches.memory.counters import note_empty_cache, timed
from verl_patches.memory.ledger import Ledger
from verl_patches.memory.schedule import LOADS, Move, Schedule

_MOVED_BY_VLLM = ("rollout_weights", "kv_cache")  # vLLM moves them itself, in one call a phase


class Scheduler:
    """Execute `schedule` in one process.

    `empty_cache` is that of the device's allocator, None for a CPU, which has no such allocator. `stays` are the memory
    groups that the run never moves. `ledger`, if not None, checks the groups at the beginning of each phase.
    """

    def __init__(self, schedule: Schedule, empty_cache: Callable[[], None] | None, stays: Collection[str] = ()):
        self.schedule, self._empty_cache, self._stays = schedule, empty_cache, frozenset(stays)
        self.ledger: Ledger | None = None
        self._handlers: dict[str, Any] = {}
        self._open: str | None = None
        self._resident: set[str] = set()  # groups on the device; empty when a step begins

    def add(self, handlers: Mapping[str, Any]) -> None:
        """Add offload handlers by memory group (memory/offload.py); a handler has a method for each verb of its group.

        Groups without a handler are moved by other code.
        """
        self._handlers |= {group: handler for group, handler in handlers.items() if group not in self._stays}

    def moves(self, group: str) -> bool:
        """Return whether there is a handler for `group`."""
        return group in self._handlers

    def has(self, group: str) -> bool:
        """Return whether `group` is on the device now, by the schedule's moves."""
        return group in self._resident

    def begin(self, phase: str, by_vllm: Callable[[], Any] | None = None) -> None:
        """End the phase before, also after an error, then make the moves before the work of `phase`.

        `by_vllm` is called once, in place of the moves that vLLM makes. An unknown phase raises KeyError.
        """
        enter = self.schedule.phase(phase).enter
        self.end()
        self._open = phase
        self._carry_out(enter, by_vllm)
        if self.ledger is not None:
            self.ledger.enter(phase)

    def end(self) -> None:
        """Make the moves after the work of the phase that was begun last; a second call does nothing."""
        if self._open is None:
            return
        phase, self._open = self.schedule.phase(self._open), None
        if self.ledger is not None:
            self.ledger.raise_peak()
        self._carry_out(phase.leave)

    def _carry_out(self, moves: Iterable[Move], by_vllm: Callable[[], Any] | None = None) -> None:
        """Make `moves`; after a first error, which is raised at the end, groups are released but no longer loaded."""
        error: Exception | None = None
        for move in moves:
            if error is not None and move.verb in LOADS:
                continue
            if move.group in _MOVED_BY_VLLM and move.group not in self._handlers:
                work, by_vllm = by_vllm, None
            else:
                work = functools.partial(self._make, move)
            try:
                if work is not None:
                    work()
            except Exception as why:
                error = error or why
            if move.verb in LOADS:
                self._resident.add(move.group)
            else:
                self._resident.discard(move.group)
        if error is not None:
            raise error

    def _make(self, move: Move) -> None:
        """Make a move by the group's handler, if there is one, or empty the allocator's cache."""
        if move.verb == "empty_cache":
            if self._empty_cache is not None:
                self._empty_cache()
            note_empty_cache()
        elif move.group in self._handlers:
            with timed("offload"):
                getattr(self._handlers[move.group], move.verb)()
