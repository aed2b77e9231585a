"""State that the workers of one process share: verl's actor and reference workers are one process on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from verl_patches.watch import heartbeat

if TYPE_CHECKING:
    import torch

    from verl_patches.memory.ledger import Ledger
    from verl_patches.memory.scheduler import Scheduler
    from verl_patches.worker.dynamic_batches import Packing
    from verl_patches.worker.expert_load import ExpertLoad
    from verl_patches.worker.on_policy_update import OnPolicyUpdate
    from verl_patches.worker.profile import PhaseProfiler
    from verl_patches.worker.routing_replay import RoutingReplay
    from verl_patches.worker.tensor_cache_stages import CachedBatch, PlannedSplits


@dataclass
class WorkerContext:
    """One object per process.

    `scheduler`: moves memory; None with row memory.order off, where verl's worker moves it. `ledger`: checks memory;
    None with recipe.memory.ledger=off. `device`: torch.npu, whose free memory is checked after the rollout's sleep;
    None on a CPU and with recipe.memory.ledger=off. `batch`: tensors that stay here between stages; None before the
    first stage, or without recipe.tensor_cache. `update`: the on-policy update in progress. `routing`: the routing
    replay whose pass is in progress. `splits`: the planned micro batches of the stage in progress. `token_budget`: of a
    micro batch of that stage, on line a3; None for a fixed number of samples. `packing`: the micro batches of the
    actor's pass in progress, where they are dynamic. `pads_sequences`: sequences of a micro batch are padded, not
    packed (line a3, recipe.train.use_remove_padding). `weight_reads`: how often this process has read the model's
    folder. `reference_weights`: that folder and the model chunks of the reference, once it has read it
    (worker/weight_loading.py). `weights_move`: the rollout engine's weights have other addresses after each sleep.
    `rollout_load`: counts tokens of the rollout engine's experts, with the number of each layer by the id() of its
    weight; None without recipe.expert_load. `profiler`: traces the phases of this step; None in others.
    """

    scheduler: Scheduler | None = None
    ledger: Ledger | None = None
    device: ModuleType | None = None
    batch: CachedBatch | None = None
    update: OnPolicyUpdate | None = None
    routing: RoutingReplay | None = None
    splits: PlannedSplits | None = None
    token_budget: int | None = None
    packing: Packing | None = None
    pads_sequences: bool = False
    weight_reads: int = 0
    reference_weights: tuple[str, Sequence[torch.nn.Module]] | None = None
    weights_move: bool = False
    rollout_load: tuple[ExpertLoad, dict[int, int]] | None = None
    profiler: PhaseProfiler | None = None

    def begin(self, phase: str, by_vllm: Callable[[], Any] | None = None) -> None:
        """Begin `phase` of memory/schedule.py and end the one before; `by_vllm` makes the moves that are vLLM's."""
        self.trace(phase)
        heartbeat.phase(phase)
        if self.scheduler is not None:
            self.scheduler.begin(phase, by_vllm)
            return
        if by_vllm is not None:
            by_vllm()
        if self.ledger is not None:
            self.ledger.enter(phase)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase of our schedule around a call of verl's worker; nothing without a scheduler.

        After an error the phase stays open, and the next phase ends it.
        """
        self.trace(name)
        heartbeat.phase(name)
        if self.scheduler is None:  # verl's worker moves memory inside the call: worker/memory.py, _check_inside
            yield
        else:
            self.scheduler.begin(name)
            yield
        self.trace(None)
        if self.scheduler is not None:
            self.scheduler.end()

    def trace(self, phase: str | None) -> None:
        """In a profiled step, end the trace of the phase before, with its moves, and begin that of `phase`."""
        if self.profiler is not None:
            self.profiler.look()
            if self.scheduler is not None:
                self.scheduler.end()
            self.profiler.begin(phase)

    @contextmanager
    def micro_batches_of(self, token_budget: int | None) -> Iterator[None]:
        """A stage whose micro batches have that token budget; None: a fixed number of samples."""
        self.token_budget = token_budget
        try:
            yield
        finally:
            self.token_budget = None

    def look(self, extra_bytes: int = 0) -> None:
        """Raise the ledger's peak of this phase to the bytes held now plus `extra_bytes` of temporary memory."""
        if self.ledger is not None:
            self.ledger.look(extra_bytes)


_context = WorkerContext()


def context() -> WorkerContext:
    """The context of this process."""
    return _context
