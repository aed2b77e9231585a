"""Plan which running requests move between the data-parallel (DP) ranks of one vLLM instance, where that pays.

All DP ranks of an instance decode in lock step, padded to one batch size, the "tier": the smallest graph batch size
that holds the requests of the fullest rank. `plan_moves` chooses a lower tier and moves requests from ranks above it
(donors) to ranks below it (receivers). It is a pure function of numbers that every rank has gathered, so that all ranks
compute the same plan.

It chooses, in this order:
1. the smallest tier that can be reached and whose gain is above the cost of its moves (`MoveCost`);
2. the fewest blocks moved: each donor gives exactly its excess, its shortest requests. A set of shorter requests also
   fits wherever a set of longer ones does, so that this choice excludes no tier;
3. the lowest number of requests on the fullest receiver: requests end at random times, so the rank that has the most
   is likely to be the last to leave its tier.

Placing blocks of different numbers is bin packing. The placement is greedy: longest request first, to the rank with the
most free blocks. It may miss a tier where KV memory is scarce.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

NO_REQUEST, FIXED_REQUEST = 0, -1  # values in InstanceState.lengths: no request; a request that cannot move
# published seconds of a decode step by requests a rank: DeepSeek-V3 671B, DP128 TP2 EP256 on Atlas A3
STEP_S = {1: 0.054, 2: 0.054, 4: 0.055, 8: 0.057, 16: 0.061, 32: 0.067, 64: 0.076}
LINK_BYTES_S = 0.7 * 196e9  # from one die to another, at an assumed efficiency of 0.7


@dataclass(frozen=True)
class InstanceState:
    """Hold the gathered numbers of all ranks of an instance.

    lengths: int [R, S], tokens in KV of each unfinished request; NO_REQUEST or FIXED_REQUEST elsewhere. free_blocks:
    int [R].
    """

    lengths: np.ndarray
    free_blocks: np.ndarray


@dataclass(frozen=True)
class MoveCost:
    """Model the cost of moves and the gain of a lower tier (modelled, not measured here).

    block_bytes: bytes of one KV block over all layers. steps: decode steps for which a lower tier counts as gained:
    those until requests can move again. fixed_s: seconds of one exchange without its bytes.
    """

    block_bytes: int
    steps: int
    fixed_s: float = 0.02
    link_bytes_s: float = LINK_BYTES_S

    def gain_s(self, before: int, after: int) -> float:
        """Return the seconds gained by steps of tier `after` instead of `before`."""
        return self.steps * (step_s(before) - step_s(after))

    def moves_s(self, blocks: int) -> float:
        """Return the seconds of an exchange whose busiest rank sends, or receives, `blocks`."""
        return self.fixed_s + blocks * self.block_bytes / self.link_bytes_s


class RequestMove(NamedTuple):
    """Name requests that one rank gives to another, by their places in the donor's row of InstanceState.lengths."""

    donor: int
    receiver: int
    requests: tuple[int, ...]


@dataclass(frozen=True)
class MovePlan:
    """Hold moves, and the tier of the instance before and after them; `blocks` counts all blocks moved."""

    moves: tuple[RequestMove, ...]
    before: int
    after: int
    blocks: int = 0


class _MovingRequests(NamedTuple):
    """Hold the requests to move: donors (ascending), places in their rows, tokens."""

    donors: np.ndarray
    requests: np.ndarray
    tokens: np.ndarray


def step_s(requests: int) -> float:
    """Return the seconds of a decode step at this number of requests a rank, interpolated from published ones."""
    return float(np.interp(requests, list(STEP_S), list(STEP_S.values())))


def find_tier(requests: int, tiers: Sequence[int]) -> int:
    """Return the smallest of `tiers` (ascending) that holds `requests`, or `requests` itself above the largest."""
    return next((tier for tier in tiers if tier >= requests), requests)


def plan_moves(
    state: InstanceState, tiers: Sequence[int], block_size: int, reserve_tokens: int, cost: MoveCost
) -> MovePlan:
    """Return the moves of one exchange; the plan has none if no lower tier can be reached or pays.

    tiers: graph batch sizes. block_size: tokens of a KV block. reserve_tokens: tokens by which each request may grow
    before the next exchange; receivers keep blocks for it, for their own requests and for those that they receive.
    """
    tiers = sorted(tiers)
    loads = np.count_nonzero(state.lengths, axis=1)
    most, total = int(loads.max(initial=0)), int(loads.sum())
    before = find_tier(most, tiers)
    free = state.free_blocks - loads * -(-reserve_tokens // block_size)
    for tier in tiers:
        if tier >= before:
            break
        if total > tier * len(loads):
            continue
        items = _shortest_requests(state.lengths, np.maximum(loads - tier, 0))
        if items is None:
            continue
        receivers = _place_evenly(-(-(items.tokens + reserve_tokens) // block_size), loads, free, tier)
        if receivers is None:
            continue
        blocks: np.ndarray = -(-items.tokens // block_size)
        busiest = max(np.bincount(side, blocks).max() for side in (items.donors, receivers))
        if cost.gain_s(before, tier) > cost.moves_s(busiest):
            return MovePlan(_group_moves(items, receivers), before, tier, int(blocks.sum()))
    return MovePlan((), before, before)


def _shortest_requests(lengths: np.ndarray, excess: np.ndarray) -> _MovingRequests | None:
    """Return each donor's excess as its shortest requests, None if a donor has too few that can move."""
    donors, width = np.flatnonzero(excess), lengths.shape[1]
    rows, count = lengths[donors], excess[donors]
    movable = rows > 0
    if (np.count_nonzero(movable, axis=1) < count).any():
        return None
    keys = np.where(movable, rows * width + np.arange(width), np.iinfo(np.int64).max)
    keys.sort(axis=1)
    tokens, requests = np.divmod(keys[np.arange(width) < count[:, None]], width)
    return _MovingRequests(np.repeat(donors, count), requests, tokens)


def _place_evenly(needs: np.ndarray, loads: np.ndarray, free: np.ndarray, tier: int) -> np.ndarray | None:
    """Return each request's receiver so that the fullest receiver ends with as few as can be; None if they do not fit.

    A level is the number of requests up to which receivers are filled; the search is for the lowest one that works.
    """
    room = np.bincount(loads[loads < tier], minlength=tier).cumsum().cumsum()  # [n]: places up to level n + 1
    level = low = 1 + int(np.searchsorted(room, len(needs)))  # tried first, as it mostly fits
    high, placed = tier, None
    while low <= high:
        placement = _place_requests(needs, np.maximum(level - loads, 0), free)
        if placement is None:
            low = level + 1  # a lower level leaves less room
        else:
            placed, high = placement, level - 1
        level = (low + high) // 2
    return placed


def _place_requests(needs: np.ndarray, room: np.ndarray, free: np.ndarray) -> np.ndarray | None:
    """Return each request's receiver; `needs` are its blocks; rank r takes at most room[r] requests, free[r] blocks."""
    if (free >= room * needs.max()).all(where=room > 0):  # they fit in any order
        return np.repeat(np.arange(len(room)), room)[: len(needs)]
    order = np.argsort(-needs, kind="stable").tolist()
    placed = _place_greedily(needs.tolist(), order, room.tolist(), free.tolist())
    return None if placed is None else np.array(placed)


def _place_greedily(needs: list[int], order: list[int], room: list[int], free: list[int]) -> list[int] | None:
    """Place the longest request first, each on the rank with the most free blocks; None where one does not fit."""
    heap = [(-blocks, rank, room[rank]) for rank, blocks in enumerate(free) if room[rank] and blocks > 0]
    heapq.heapify(heap)
    placed = [0] * len(needs)
    for at in order:
        if not heap or -heap[0][0] < needs[at]:
            return None
        blocks, placed[at], left = heap[0]
        if left > 1:
            heapq.heapreplace(heap, (blocks + needs[at], placed[at], left - 1))
        else:
            heapq.heappop(heap)
    return placed


def _group_moves(items: _MovingRequests, receivers: np.ndarray) -> tuple[RequestMove, ...]:
    """Return one move for each donor and receiver, in their order."""
    width = int(receivers.max()) + 1
    pairs = items.donors * width + receivers
    order = np.argsort(pairs, kind="stable")
    pairs, requests = pairs[order], tuple(items.requests[order].tolist())
    starts = np.flatnonzero(np.diff(pairs, prepend=-1))
    donors, receivers = (side.tolist() for side in np.divmod(pairs[starts], width))
    ends = [*starts[1:].tolist(), len(requests)]
    bounds = zip(donors, receivers, starts.tolist(), ends, strict=True)
    return tuple([RequestMove(donor, receiver, requests[begin:end]) for donor, receiver, begin, end in bounds])
