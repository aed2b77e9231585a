"""Move parameters, gradients and optimizer states of Megatron between device and host, by one handler a memory group.

The methods of a handler are the verbs of memory/schedule.py. Parameters and gradients include the buffers of routed
experts. Gradients are never copied: they are freed, and allocated again as zeros. Parameters that were loaded for
reading only (log-probs, the reference) are freed without a copy. Handlers do not call empty_cache; the schedule has
moves for it. Errors are those of memory/host_backed.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from verl_patches.memory.counters import note_move
from verl_patches.memory.host_backed import (
    ModelOffloadState,
    model_offload_state,
    optimizer_offload_state,
    single_optimizers,
    synchronise,
)
from verl_patches.memory.schedule import ACTOR, TrainedGroups


class _ModelHandler:
    def __init__(self, chunks: Sequence[torch.nn.Module]):
        self._chunks = chunks

    def _states(self) -> list[ModelOffloadState]:  # made at the first move, so a group that is never moved has none
        return [model_offload_state(chunk) for chunk in self._chunks]


class Params(_ModelHandler):
    """Move the parameters of `chunks`: group actor_params, ref_params, critic_params or reward_params."""

    def load(self) -> None:
        """Load the parameters for reading; `Grads.alloc` permits writes."""
        for state in self._states():
            state.load_params()
        self._synchronise()

    def offload(self) -> None:
        """Offload the parameters; they are copied only if they may have been written."""
        for state in self._states():
            state.offload_params()
        self._synchronise()

    free = offload

    def _synchronise(self) -> None:
        synchronise(storage for state in self._states() for storage in state.params.values())


@contextmanager
def parameters_loaded(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Load the parameters of `chunks` for reading in the code inside, and offload those again that were offloaded.

    Parameters that verl's own offload has moved to the host stay there.
    """
    states = ((chunk, getattr(chunk, "recipe_offload_state", None)) for chunk in chunks)
    params = Params([chunk for chunk, state in states if state is not None and state.offloaded])
    params.load()
    try:
        yield
    finally:
        params.offload()


class Grads(_ModelHandler):
    """Move the gradients of `chunks`; chunks that are not in DDP have none."""

    def alloc(self) -> None:
        """Allocate zero gradients; from now on the parameters may be written."""
        for state in self._states():
            state.alloc_grads()

    def free(self) -> None:
        """Free the gradients."""
        for state in self._states():
            state.free_grads()


class Optimizer:
    """Move main parameters and states of a Megatron optimizer, or of a chain of them; `group` is their memory group."""

    def __init__(self, optimizer: Any, group: str = ACTOR.optimizer):
        self._optimizer, self._group = optimizer, group

    def load(self) -> None:
        """Load all main parameters and states."""
        self._move("load")

    def offload(self) -> None:
        """Offload all main parameters and states."""
        self._move("offload")

    def _move(self, verb: str) -> None:
        states = [optimizer_offload_state(one) for one in single_optimizers(self._optimizer)]
        note_move(verb, self._group, sum(getattr(state, verb)() for state in states))
        synchronise(storage for state in states for storage in state.storages.values())


def training_handlers(
    chunks: Sequence[torch.nn.Module], optimizer: Any, groups: TrainedGroups = ACTOR
) -> dict[str, Any]:
    """Return {memory group: handler} of a model in DDP and its Megatron optimizer."""
    states = Optimizer(optimizer, groups.optimizer)
    return {groups.grads: Grads(chunks), groups.params: Params(chunks), groups.optimizer: states}
