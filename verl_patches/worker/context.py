"""Hold the memory state of a process; verl's actor, critic and reference workers share one process and one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from verl_patches.heartbeat import heartbeat

if TYPE_CHECKING:
    from verl_patches.memory.ledger import Ledger
    from verl_patches.memory.schedule import Schedule
    from verl_patches.memory.scheduler import Scheduler
    from verl_patches.worker.profile import PhaseProfiler
    from verl_patches.worker.step_guard import StepGuard


@dataclass
class WorkerContext:
    """Hold the objects that the workers of one process share.

    `scheduler`: moves memory; None with row memory.order off, where verl's worker moves it. `ledger`: checks memory;
    None with recipe.memory.ledger=off or without a scheduler. `profiler`: traces the phases of a profiled step; None in
    other steps. `schedule`, `unmoved_groups` (memory groups that are never moved): from memory/schedule.py, set by the
    workers' constructors, all of which verl calls before a model is built. `step_guards`: of trained models, in
    building order.
    """

    schedule: Schedule | None = None
    unmoved_groups: frozenset[str] = frozenset()
    scheduler: Scheduler | None = None
    ledger: Ledger | None = None
    profiler: PhaseProfiler | None = None
    step_guards: list[StepGuard] = field(default_factory=list)

    def begin(self, phase: str, vllm_moves: Callable[[], Any] | None = None) -> None:
        """Begin `phase` of memory/schedule.py and end the previous one; `vllm_moves` makes vLLM sleep or wake."""
        self.trace(phase)
        heartbeat.current_heartbeat().begin_phase(phase)
        if self.scheduler is not None:
            self.scheduler.begin(phase, vllm_moves)
        elif vllm_moves is not None:
            vllm_moves()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Run a call of verl's worker in phase `name`; without a scheduler the phase moves no memory.

        After an error the phase stays open, and the next phase ends it.
        """
        self.begin(name)
        yield
        self.trace(None)
        if self.scheduler is not None:
            self.scheduler.end()

    def trace(self, phase: str | None) -> None:
        """End the trace of the previous phase, with its moves, and begin that of `phase`, in a profiled step."""
        if self.profiler is not None:
            self.profiler.snapshot()
            if self.scheduler is not None:
                self.scheduler.end()
            self.profiler.begin(phase)

    def raise_peak(self, extra_bytes: int = 0) -> None:
        """Raise the ledger's peak of this phase to the bytes held now plus `extra_bytes`, if that is higher."""
        if self.ledger is not None:
            self.ledger.raise_peak(extra_bytes)


_context = WorkerContext()


def context() -> WorkerContext:
    """Return the context of this process."""
    return _context
