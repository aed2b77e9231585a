"""Who sends: for each rank that needs a block, one of the ranks that hold it. No torch.

Bytes that only one rank holds are dealt out first, then what is near (the same card, then the same node), then the
rest, each time to the holder that sends least so far. A near sender is passed over where it would send more than its
stage's mean and is ahead of other holders: those are waited for, not it.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from verl_patches.errors import ConfigError
from verl_patches.reshard.blocks import Block


@dataclass(frozen=True)
class Topology:
    """How ranks are placed: consecutive ranks fill cards, cards fill nodes (Atlas A3: 2 dies a card, 16 a node)."""

    dies_per_card: int = 2
    dies_per_node: int = 16

    def __post_init__(self):
        if self.dies_per_card < 1 or self.dies_per_node % self.dies_per_card or self.dies_per_node < 1:
            raise ConfigError(
                f"topology: {self.dies_per_card} dies per card and {self.dies_per_node} per node do not fit; "
                "expected whole cards in each node, such as 2 and 16"
            )

    def nearness(self, rank: int, other: int) -> str:
        """One of NEARNESS."""
        if rank == other:
            return "itself"
        if rank // self.dies_per_card == other // self.dies_per_card:
            return "card"
        return "node" if rank // self.dies_per_node == other // self.dies_per_node else "across"


NEARNESS = ("itself", "card", "node", "across")  # the same die, card, node, or none of these
AHEAD = 0.05  # of the stage's mean: how far a near sender may be ahead of the block's other holders
Routes = list[dict[int, list[int]]]  # for each sender: receiver -> numbers of blocks, in wire order


def route(blocks: Sequence[Block], stages: Sequence[int], topology: Topology) -> Routes:
    """The sender of every (block, receiver that does not hold it); `stages[rank]` is its training stage."""
    router = _Router(blocks, stages, topology)
    # few holders first: they have the least choice; then large blocks first: small ones level what is left uneven
    order = sorted(range(len(blocks)), key=lambda i: (len(blocks[i].holders), -router.sizes[i], i))
    far = [(i, router.send_from_near(i)) for i in order]
    for i, receivers in far:
        router.send_from_least_loaded(i, receivers)
    return router.routes


class _Router:
    def __init__(self, blocks: Sequence[Block], stages: Sequence[int], topology: Topology):
        self.blocks, self.topology, self.stages = blocks, topology, stages
        self.sizes = [block.wire_bytes for block in blocks]
        self.load = [0] * len(stages)
        self.routes: Routes = [defaultdict(list) for _ in stages]
        self.mean = self._means()
        self._places: dict[tuple[int, ...], tuple[dict, dict]] = {}

    def _means(self) -> dict[int, float]:
        total, ranks = defaultdict(int), defaultdict(int)
        for stage in self.stages:
            ranks[stage] += 1
        for block, size in zip(self.blocks, self.sizes, strict=True):
            holders = set(block.holders)
            total[self.stages[block.holders[0]]] += size * sum(r not in holders for r in block.receivers)
        return {stage: total[stage] / count for stage, count in ranks.items()}

    def send_from_near(self, number: int) -> list[int]:
        """Route to the receivers that have a holder near, or no choice; returns the other receivers."""
        block, size = self.blocks[number], self.sizes[number]
        holders = set(block.holders)
        others = [rank for rank in block.receivers if rank not in holders]
        if len(holders) == 1:
            for rank in others:
                self._send(block.holders[0], rank, number)
            return []
        by_card, by_node = self._near(block.holders)
        mean = self.mean[self.stages[block.holders[0]]]
        far = []
        for rank in others:
            for near in (by_card.get(rank // self.topology.dies_per_card),
                         by_node.get(rank // self.topology.dies_per_node)):
                sender = min(near, key=self.load.__getitem__) if near else None
                if sender is not None and self._may_send(sender, size, mean, block.holders):
                    self._send(sender, rank, number)
                    break
            else:
                far.append(rank)
        return far

    def _may_send(self, sender: int, size: int, mean: float, holders: tuple[int, ...]) -> bool:
        load = self.load[sender]
        return load + size <= mean or load <= min(self.load[rank] for rank in holders) + AHEAD * mean

    def _near(self, holders: tuple[int, ...]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        if holders not in self._places:
            by_card, by_node = defaultdict(list), defaultdict(list)
            for rank in holders:
                by_card[rank // self.topology.dies_per_card].append(rank)
                by_node[rank // self.topology.dies_per_node].append(rank)
            self._places[holders] = by_card, by_node
        return self._places[holders]

    def send_from_least_loaded(self, number: int, receivers: list[int]) -> None:
        """Route to each of `receivers` from the holder that sends least so far, wherever it is."""
        if not receivers:
            return
        waiting = [(self.load[rank], rank) for rank in self.blocks[number].holders]
        heapq.heapify(waiting)
        for rank in receivers:
            sender = waiting[0][1]
            self._send(sender, rank, number)
            heapq.heapreplace(waiting, (self.load[sender], sender))

    def _send(self, sender: int, receiver: int, number: int) -> None:
        self.load[sender] += self.sizes[number]
        self.routes[sender][receiver].append(number)
