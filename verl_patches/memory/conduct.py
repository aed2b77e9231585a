"""Carries out an order (phases.py): the moves of a phase before and after its work, then the ledger's check.

Tenants without a mover are moved by their owner (vLLM wakes and drops its own). A mover's verbs do nothing where
nothing is to be done, as the table says. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

from verl_patches.errors import ConfigError
from verl_patches.memory import ledger as ledgers
from verl_patches.memory.phases import TENANTS, Move, Order


class Mover(Protocol):
    """What brings one tenant to the device and away from it; see phases.py for the verbs."""

    def load(self) -> None:
        """Device memory, filled from the host."""

    def alloc(self) -> None:
        """Device memory, contents made there."""

    def offload(self) -> None:
        """To the host, device memory freed."""

    def free(self) -> None:
        """Device memory freed, nothing copied."""


class Conductor:
    """One worker's order under way. `movers`: by tenant; `stays`: tenants that the run never moves; see `trim_of`."""

    def __init__(
        self, order: Order, movers: Mapping[str, Mover], trim: Callable[[], None], stays: Collection[str] = ()
    ):
        unknown = [tenant for tenant in movers if tenant not in TENANTS]
        if unknown:
            raise ConfigError(f"memory order: movers for {', '.join(unknown)}; expected some of {', '.join(TENANTS)}")
        self.order, self._trim = order, trim
        self._movers = {tenant: mover for tenant, mover in movers.items() if tenant not in stays}
        self._open: str | None = None

    def begin(self, phase: str) -> None:
        """Before the work of `phase`; a phase that was left open by an error is left first. ConfigError: no phase."""
        enter = self.order.phase(phase).enter
        self.end()
        self._open = phase
        self._carry_out(enter)
        ledgers.enter(phase)

    def end(self) -> None:
        """After the work of the phase that was begun last; nothing to do if it has ended."""
        if self._open is not None:
            phase, self._open = self.order.phase(self._open), None
            ledgers.look()
            self._carry_out(phase.leave)

    def _carry_out(self, moves: Iterable[Move]) -> None:
        for move in moves:
            if move.verb == "trim":
                self._trim()
            elif move.tenant in self._movers:
                getattr(self._movers[move.tenant], move.verb)()


def trim_of(device: Any) -> Callable[[], None]:
    """What `trim` calls: `device` is torch.npu, torch.cuda, or None where there is no allocator to ask (a CPU).

    torch_npu's light form keeps the physical pages and gives only addresses back; it came with 2.6.0 (v7.2.0), the
    pinned 2.5.1.post1 has not got it.
    """
    if device is None:
        return lambda: None
    return getattr(device, "empty_virt_addr_cache", device.empty_cache)
