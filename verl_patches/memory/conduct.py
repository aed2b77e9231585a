"""Carries out an order (phases.py): the moves of a phase before and after its work, then the ledger's check.

A worker has one conductor, `current()`; verl's own calls of its four functions then do nothing for what the conductor
moves (offload.py). Without one (rows memory.order* off) `begin` and `end` only tell the ledger. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

from verl_patches.errors import ConfigError
from verl_patches.memory import ledger as ledgers
from verl_patches.memory import moves
from verl_patches.memory.phase_clock import timed
from verl_patches.memory.phases import TENANTS, Move, Order

_BY_VLLM = ("rollout_weights", "kv_cache")  # one call of its own moves them
_current: Conductor | None = None


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


class Conductor:
    """One worker's order under way; `stays`: tenants that the run never moves; `trim`: see `trim_of`."""

    def __init__(self, order: Order, trim: Callable[[], None], stays: Collection[str] = ()):
        self.order, self._trim, self._stays = order, trim, frozenset(stays)
        self._movers: dict[str, Mover] = {}
        self._open: str | None = None

    def add(self, movers: Mapping[str, Mover]) -> None:
        """Movers by tenant. ConfigError for what is no tenant. Tenants without one are moved by their owners."""
        unknown = [tenant for tenant in movers if tenant not in TENANTS]
        if unknown:
            raise ConfigError(f"memory order: movers for {', '.join(unknown)}; expected some of {', '.join(TENANTS)}")
        self._movers.update({tenant: mover for tenant, mover in movers.items() if tenant not in self._stays})

    def moves(self, of: Any) -> bool:
        """Whether a mover moves memory of this very object."""
        return any(mover.of is of for mover in self._movers.values())

    def begin(self, phase: str, by_vllm: Callable[[], Any] | None = None) -> None:
        """Before the work of `phase`; one that is still open, by an error too, is left first. ConfigError: no phase.

        `by_vllm` is called once, in place of the moves that vLLM makes.
        """
        enter = self.order.phase(phase).enter
        self.end()
        self._open = phase
        self._carry_out(enter, by_vllm)
        ledgers.enter(phase)

    def end(self) -> None:
        """After the work of the phase that was begun last; nothing to do if it has ended."""
        if self._open is not None:
            phase, self._open = self.order.phase(self._open), None
            ledgers.look()
            self._carry_out(phase.leave)

    def _carry_out(self, some: Iterable[Move], by_vllm: Callable[[], Any] | None = None) -> None:
        for move in some:
            if move.verb == "trim":
                self._trim()
                moves.note_trim()
            elif move.tenant in self._movers:
                timed("offload", getattr(self._movers[move.tenant], move.verb))()
            elif move.tenant in _BY_VLLM and by_vllm is not None:
                by_vllm()
                by_vllm = None


def trim_of(device: Any) -> Callable[[], None]:
    """What `trim` calls: `device` is torch.npu, torch.cuda, or None where there is no allocator to ask (a CPU).

    torch_npu's light form keeps the physical pages and gives only addresses back; it came with 2.6.0 (v7.2.0), the
    pinned 2.5.1.post1 has not got it.
    """
    if device is None:
        return lambda: None
    return getattr(device, "empty_virt_addr_cache", device.empty_cache)


def current() -> Conductor | None:
    """The conductor of this process, None where verl's own calls move."""
    return _current


def keep(conductor: Conductor | None) -> None:
    """Make `conductor` the one of this process."""
    global _current
    _current = conductor


def begin(phase: str, by_vllm: Callable[[], Any] | None = None) -> None:
    """`Conductor.begin`; without one only vLLM moves here, and the ledger checks."""
    if _current is not None:
        _current.begin(phase, by_vllm)
        return
    if by_vllm is not None:
        by_vllm()
    ledgers.enter(phase)


def end() -> None:
    """`Conductor.end`; without one the ledger looks."""
    if _current is not None:
        _current.end()
    else:
        ledgers.look()


def moved_here(of: Any) -> bool:
    """Whether this process's conductor moves memory of this very object (a list of chunks, an optimizer)."""
    return _current is not None and _current.moves(of)
