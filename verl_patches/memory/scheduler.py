"""Carries out a schedule (schedule.py): the moves of a phase before and after its work, then the ledger's check."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

from verl_patches.errors import ConfigError
from verl_patches.memory import counters
from verl_patches.memory.counters import timed
from verl_patches.memory.ledger import Ledger
from verl_patches.memory.schedule import COMES, TENANTS, Move, Order

_BY_VLLM = ("rollout_weights", "kv_cache")  # one call of its own moves them


class Mover(Protocol):
    """What brings one tenant to the device and away from it; see phases.py for the verbs. `of`: whose memory it is."""

    of: Any

    def load(self) -> None:
        """Device memory, filled from the host."""

    def alloc(self) -> None:
        """Device memory, contents made there."""

    def offload(self) -> None:
        """To the host, device memory freed."""

    def free(self) -> None:
        """Device memory freed, nothing copied."""


class Scheduler:
    """One process's order under way; `stays`: groups that the run never moves; `trim`: see `trim_of`.

    `ledger`: checks at the beginning of each phase, None for none.
    """

    def __init__(self, order: Order, trim: Callable[[], None], stays: Collection[str] = ()):
        self.order, self._trim, self._stays = order, trim, frozenset(stays)
        self.ledger: Ledger | None = None
        self._movers: dict[str, Mover] = {}
        self._open: str | None = None
        self._there: set[str] = set()  # by the table: a step begins with nothing

    def add(self, movers: Mapping[str, Mover]) -> None:
        """Movers by tenant. ConfigError for what is no tenant. Tenants without one are moved by their owners."""
        unknown = [tenant for tenant in movers if tenant not in TENANTS]
        if unknown:
            raise ConfigError(f"memory order: movers for {', '.join(unknown)}; expected some of {', '.join(TENANTS)}")
        self._movers.update({tenant: mover for tenant, mover in movers.items() if tenant not in self._stays})

    def moves(self, tenant: str) -> bool:
        """Whether it has a mover of `tenant`."""
        return tenant in self._movers

    def has(self, tenant: str) -> bool:
        """Whether the order has `tenant`, which it moves, on the device now."""
        return tenant in self._there

    def begin(self, phase: str, by_vllm: Callable[[], Any] | None = None) -> None:
        """Before the work of `phase`; one that is still open, by an error too, is left first. ConfigError: no phase.

        `by_vllm` is called once, in place of the moves that vLLM makes.
        """
        enter = self.order.phase(phase).enter
        self.end()
        self._open = phase
        self._carry_out(enter, by_vllm)
        if self.ledger is not None:
            self.ledger.enter(phase)

    def end(self) -> None:
        """After the work of the phase that was begun last; nothing to do if it has ended."""
        if self._open is not None:
            phase, self._open = self.order.phase(self._open), None
            if self.ledger is not None:
                self.ledger.look()
            self._carry_out(phase.leave)
            if phase not in self.order.phases:  # the next phase in the order does not expect its groups
                self._carry_out(Move("free", move.tenant) for move in phase.enter if move.verb in COMES)

    def _carry_out(self, some: Iterable[Move], by_vllm: Callable[[], Any] | None = None) -> None:
        """After a first error, which is raised at the end, what goes still goes, and nothing more comes."""
        error: Exception | None = None
        for move in some:
            if error is not None and move.verb in COMES:
                continue
            try:
                if move.verb == "trim":
                    self._trim()
                    counters.note_trim()
                elif move.tenant in self._movers:
                    with timed("offload"):
                        getattr(self._movers[move.tenant], move.verb)()
                elif move.tenant in _BY_VLLM and by_vllm is not None:
                    call, by_vllm = by_vllm, None
                    call()
            except Exception as why:
                error = error or why
            if move.verb in COMES:
                self._there.add(move.tenant)
            else:
                self._there.discard(move.tenant)
        if error is not None:
            raise error


def trim_of(device: Any, in_pool: bool) -> Callable[[], None]:
    """What `trim` calls: `device` is torch.npu, torch.cuda, or None where there is no allocator to ask (a CPU).

    torch_npu's light form empty_virt_addr_cache (from 2.6.0, v7.2.0, on; the pinned 2.5.1.post1 has not got it) keeps
    the physical pages in the pool: it gives nothing to memory past the pool, which vLLM's sleep mode takes, and it is a
    RuntimeError without expandable segments, which config/environment.py switches off for that mode. So it is taken
    only where both are otherwise: the rollout's memory is in the pool too (`in_pool`), and PYTORCH_NPU_ALLOC_CONF says
    so.
    """
    if device is None:
        return lambda: None
    settings = os.environ.get("PYTORCH_NPU_ALLOC_CONF", "").lower().replace(" ", "").split(",")
    light = getattr(device, "empty_virt_addr_cache", None)
    return light if light and in_pool and "expandable_segments:true" in settings else device.empty_cache
