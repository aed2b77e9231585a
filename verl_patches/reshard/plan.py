"""Plan a weight sync: what each rank copies, sends and receives, bucket by bucket, without torch or communication.

Every rank computes the same plan from the same inputs (`digest` proves it): blocks of regions that are sent as one
(blocks.py), a sender for each rank that needs a block, and buckets of bounded size. A rank never receives what it holds
in training already, so it receives exactly its lower bound: what it needs minus what it has.

Senders: each rank that needs a block gets it from one of the ranks that hold it. Blocks with one holder are assigned
first, then those with a near holder (on the same card, then the same node), then the rest, each time to the holder that
sends least so far. A near holder is passed over if it would then send more than its stage's mean, and already sends
more than the block's least-loaded holder plus SENDER_LEAD of that mean.

Buckets: each is one collective, in which each rank sends and receives at most `bucket_bytes`. A bucket is filled sender
by sender, those with most left first, each towards the receivers with most left. So every bucket mixes all pipeline
stages, and the rank that must send most is busy in every bucket. A region that does not fit is cut along its axis, but
room of less than 1/CUT_DIVISOR of a bucket is left empty. This avoids tiny pieces and loses at most that share of a
busy rank's bucket.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from verl_patches.layout.inventory import Inventory
from verl_patches.layout.parallel import ParallelLayout
from verl_patches.reshard.blocks import DEFAULT_BUCKET_BYTES, Block, make_blocks
from verl_patches.reshard.region import ALIGN_BYTES, Region, align

DIES_PER_CARD, DIES_PER_NODE = 2, 16  # of Atlas A3; consecutive ranks fill cards, and cards fill nodes
NEARNESS = ("itself", "card", "node", "across")  # the same die, card or node, or another node
SENDER_LEAD = 0.05  # share of the stage's mean by which a near sender may be ahead of the block's other holders
Routes = list[dict[int, list[int]]]  # by sender: receiver -> numbers of blocks, in wire order


def nearness(rank: int, other: int) -> str:
    """Return which of NEARNESS two ranks have."""
    if rank == other:
        return "itself"
    if rank // DIES_PER_CARD == other // DIES_PER_CARD:
        return "card"
    return "node" if rank // DIES_PER_NODE == other // DIES_PER_NODE else "across"


def route_blocks(blocks: Sequence[Block], stages: Sequence[int]) -> Routes:
    """Return the sender of every block for each receiver without it; `stages[rank]` is its training pipeline stage."""
    router = _Router(blocks, stages)
    # blocks with few holders first, as they have the least choice; then large ones, whose unevenness small ones level
    order = sorted(range(len(blocks)), key=lambda i: (len(blocks[i].holders), -router.sizes[i], i))
    far = [(i, router.send_from_near(i)) for i in order]
    for i, receivers in far:
        router.send_from_least_loaded(i, receivers)
    return router.routes


class _Router:
    def __init__(self, blocks: Sequence[Block], stages: Sequence[int]):
        self.blocks, self.stages = blocks, stages
        self.sizes = [block.wire_bytes for block in blocks]
        self.load = [0] * len(stages)
        self.routes: Routes = [defaultdict(list) for _ in stages]
        self._places: dict[tuple[int, ...], tuple[dict, dict]] = {}
        total = defaultdict[int, int](int)  # bytes that each stage must send
        for block, size in zip(blocks, self.sizes, strict=True):
            total[stages[block.holders[0]]] += size * len(set(block.receivers).difference(block.holders))
        self.mean = {stage: total[stage] / count for stage, count in Counter(stages).items()}

    def send_from_near(self, number: int) -> list[int]:
        """Assign senders to receivers of a block with a near or a single holder, and return the other receivers."""
        block, size = self.blocks[number], self.sizes[number]
        holders = set(block.holders)
        others = [rank for rank in block.receivers if rank not in holders]
        if len(holders) == 1:
            for rank in others:
                self._send(block.holders[0], rank, number)
            return []
        by_card, by_node = self._holders_by_place(block.holders)
        mean = self.mean[self.stages[block.holders[0]]]
        far = []
        for rank in others:
            card, node = rank // DIES_PER_CARD, rank // DIES_PER_NODE
            for near in (by_card.get(card), by_node.get(node)):
                sender = min(near, key=self.load.__getitem__) if near else None
                if sender is not None and self._may_send(sender, size, mean, block.holders):
                    self._send(sender, rank, number)
                    break
            else:
                far.append(rank)
        return far

    def _may_send(self, sender: int, size: int, mean: float, holders: tuple[int, ...]) -> bool:
        load = self.load[sender]
        return load + size <= mean or load <= min(self.load[rank] for rank in holders) + SENDER_LEAD * mean

    def _holders_by_place(self, holders: tuple[int, ...]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        if holders not in self._places:
            by_card, by_node = defaultdict(list), defaultdict(list)
            for rank in holders:
                by_card[rank // DIES_PER_CARD].append(rank)
                by_node[rank // DIES_PER_NODE].append(rank)
            self._places[holders] = by_card, by_node
        return self._places[holders]

    def send_from_least_loaded(self, number: int, receivers: list[int]) -> None:
        """Assign to each of `receivers` the holder that sends least so far, near or far."""
        waiting = [(self.load[rank], rank) for rank in self.blocks[number].holders]
        heapq.heapify(waiting)
        for rank in receivers:
            sender = waiting[0][1]
            self._send(sender, rank, number)
            heapq.heapreplace(waiting, (self.load[sender], sender))

    def _send(self, sender: int, receiver: int, number: int) -> None:
        self.load[sender] += self.sizes[number]
        self.routes[sender][receiver].append(number)


CUT_DIVISOR = 16  # a region is cut only for room of at least 1/CUT_DIVISOR of a bucket


class Piece(NamedTuple):
    """Describe what one rank sends another of a block in one bucket: rows [start, stop), counted through its regions.

    `size_bytes`: bytes in the bucket, with alignment.
    """

    bucket: int
    sender: int
    receiver: int
    block: int
    start: int
    stop: int
    size_bytes: int


def block_regions(block: Block, start: int, stop: int) -> tuple[Region, ...]:
    """Return the regions of rows [start, stop) of `block`, counted through all its regions."""
    regions, first = [], 0
    for region in block.regions:
        a, b = max(start - first, 0), min(stop - first, region.rows)
        if a < b:
            regions.append(Region(region.name, region.axis, region.start + a, region.start + b))
        first += region.rows
    return tuple(regions)


def schedule_pieces(blocks: Sequence[Block], routes: Routes, bucket_bytes: int) -> list[Piece]:
    """Return all pieces, bucket by bucket; `bucket_bytes` must hold the largest row of every region."""
    packer, bucket = _Packer(blocks, routes, bucket_bytes), 0
    while any(packer.queues):
        packer.fill(bucket)
        bucket += 1
    return packer.pieces


class _Packer:
    def __init__(self, blocks: Sequence[Block], routes: Routes, bucket_bytes: int):
        self.bucket_bytes = bucket_bytes
        self.rows = [[(r.rows, size) for r, size in zip(b.regions, b.row_bytes, strict=True)] for b in blocks]
        self.row_counts = [sum(rows for rows, _ in block) for block in self.rows]
        self.min_room = -(-bucket_bytes // CUT_DIVISOR)  # a rank with less room than this gets no more of the bucket
        sizes = [block.wire_bytes for block in blocks]
        # by sender: receiver -> numbers of the blocks left, the next one last; `first_rows`: where that one goes on
        self.queues = [{receiver: numbers[::-1] for receiver, numbers in pairs.items()} for pairs in routes]
        self.first_rows: dict[tuple[int, int], int] = {}
        self.to_send, self.to_receive = [0] * len(routes), [0] * len(routes)
        for sender, pairs in enumerate(routes):
            for receiver, numbers in pairs.items():
                size = sum(sizes[i] for i in numbers)
                self.to_send[sender] += size
                self.to_receive[receiver] += size
        self.pieces: list[Piece] = []

    def fill(self, bucket: int) -> None:
        """Pack one bucket with at least one row."""
        ranks = range(len(self.queues))
        rooms = [self.bucket_bytes] * len(ranks)
        receivers = sorted(ranks, key=lambda r: (-self.to_receive[r], r))
        for sender in sorted(ranks, key=lambda r: (-self.to_send[r], r)):
            room = self.bucket_bytes
            for receiver in [r for r in receivers if r in self.queues[sender]]:
                taken = self._take(bucket, sender, receiver, min(room, rooms[receiver]))
                room -= taken
                rooms[receiver] -= taken
                if rooms[receiver] < self.min_room:
                    receivers.remove(receiver)
                if room < self.min_room:
                    break

    def _take(self, bucket: int, sender: int, receiver: int, room: int) -> int:
        """Add the pieces from one rank to another that fit into `room` bytes, and return the bytes they take."""
        queue, pair, taken = self.queues[sender][receiver], (sender, receiver), 0
        while queue:
            number = queue[-1]
            start = self.first_rows.get(pair, 0)
            stop, size = self._fit(number, start, room - taken)
            if stop > start:
                self.pieces.append(Piece(bucket, sender, receiver, number, start, stop, size))
                taken += size
            if stop < self.row_counts[number]:
                self.first_rows[pair] = stop
                break
            queue.pop()
            self.first_rows.pop(pair, None)
        else:
            del self.queues[sender][receiver]
        self.to_send[sender] -= taken
        self.to_receive[receiver] -= taken
        return taken

    def _fit(self, number: int, start: int, room: int) -> tuple[int, int]:
        """Return (row after the last that fits into `room`, bytes of the rows from `start` to it)."""
        stop, size, first = start, 0, 0
        for rows, row in self.rows[number]:
            left = first + rows - stop  # rows of this region that are left
            first += rows
            if left <= 0:
                continue
            if size + align(left * row) <= room:
                stop, size = stop + left, size + align(left * row)
                continue
            if room - size >= self.min_room:
                fitting = (room - size) // ALIGN_BYTES * ALIGN_BYTES // row
                stop, size = stop + fitting, size + align(fitting * row)
            break
        return stop, size


class BucketPlan(NamedTuple):
    """Hold one rank's part of a bucket: peer -> regions in wire order, sorted by peer, without peers that have none."""

    send: dict[int, tuple[Region, ...]]
    receive: dict[int, tuple[Region, ...]]


@dataclass(frozen=True)
class RankPlan:
    """Hold one rank's part of a weight sync; every rank has the same number of buckets.

    `local`: regions that the rank holds in training and needs in rollout; they are copied on the device.
    """

    rank: int
    local: tuple[Region, ...]
    buckets: tuple[BucketPlan, ...]


@dataclass(frozen=True, eq=False)
class ReshardPlan:
    """Hold the plan of all ranks; `for_rank` returns a rank's part. Lists are indexed by rank, sizes are bytes."""

    inventory: Inventory
    train: ParallelLayout
    rollout: ParallelLayout
    train_library: str
    rollout_library: str
    bucket_bytes: int
    blocks: Sequence[Block]
    pieces: Sequence[Piece]

    @property
    def world_size(self) -> int:
        """Return the number of ranks, which training and rollout share."""
        return self.train.world_size

    @functools.cached_property
    def bucket_count(self) -> int:
        """Return the number of buckets of a sync, each of which is one collective."""
        return max((piece.bucket for piece in self.pieces), default=-1) + 1

    def for_rank(self, rank: int) -> RankPlan:
        """Return what `rank` copies, sends and receives; raises ConfigError for a rank that does not exist."""
        self.train.coordinates(rank)
        send = [defaultdict[int, tuple[Region, ...]](tuple) for _ in range(self.bucket_count)]
        receive = [defaultdict[int, tuple[Region, ...]](tuple) for _ in range(self.bucket_count)]
        for piece in self._pieces_by_rank[rank]:
            regions = block_regions(self.blocks[piece.block], piece.start, piece.stop)
            if piece.sender == rank:
                send[piece.bucket][piece.receiver] += regions
            else:
                receive[piece.bucket][piece.sender] += regions
        local = tuple(region for block in self._local_blocks_by_rank[rank] for region in block.regions)
        buckets = [
            BucketPlan(dict(sorted(sent.items())), dict(sorted(received.items())))
            for sent, received in zip(send, receive, strict=True)
        ]
        return RankPlan(rank, local, tuple(buckets))

    @functools.cached_property
    def sent_bytes(self) -> list[int]:
        """Return the bytes that each rank sends, with alignment."""
        return [sum(sent) for sent in self.traffic]

    @functools.cached_property
    def received_bytes(self) -> list[int]:
        """Return the bytes that each rank receives, with alignment."""
        return [sum(received) for received in zip(*self.traffic, strict=True)]

    @functools.cached_property
    def traffic(self) -> list[list[int]]:
        """Return the bytes that each rank (first index) sends to each rank (second index), with alignment."""
        sums = [[0] * self.world_size for _ in range(self.world_size)]
        for piece in self.pieces:
            sums[piece.sender][piece.receiver] += piece.size_bytes
        return sums

    @functools.cached_property
    def local_bytes(self) -> list[int]:
        """Return the bytes that each rank needs and holds already."""
        return [sum(block.raw_bytes for block in blocks) for blocks in self._local_blocks_by_rank]

    @functools.cached_property
    def lower_bound_bytes(self) -> list[int]:
        """Return the bytes that must reach each rank by any plan: what its rollout layout needs minus what it holds."""
        bound = [0] * self.world_size
        for block in self.blocks:
            size = block.raw_bytes
            for rank in set(block.receivers).difference(block.holders):
                bound[rank] += size
        return bound

    @functools.cached_property
    def stages(self) -> list[int]:
        """Return the training pipeline stage of each rank."""
        return [self.train.coordinates(rank).pp for rank in range(self.world_size)]

    @functools.cached_property
    def peak_extra_bytes(self) -> int:
        """Return the most bytes of a rank's wire buffers: two to send, two to receive, each for the fullest bucket."""
        sends, receives = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
        for piece in self.pieces:
            sends[piece.sender, piece.bucket] += piece.size_bytes
            receives[piece.receiver, piece.bucket] += piece.size_bytes
        return 2 * max(sends.values(), default=0) + 2 * max(receives.values(), default=0)

    def digest(self) -> str:
        """Return a hex digest of inputs and result, which must be equal on all ranks that run the plan together."""
        inputs = self.inventory.model, self.train, self.rollout, self.train_library, self.rollout_library
        digest = hashlib.sha256()
        for part in (*inputs, self.bucket_bytes, *self.blocks):
            digest.update(repr(part).encode())
        digest.update(array("q", [number for piece in self.pieces for number in piece[:-1]]).tobytes())
        return digest.hexdigest()

    @functools.cached_property
    def _pieces_by_rank(self) -> list[list[Piece]]:
        by_rank: list[list[Piece]] = [[] for _ in range(self.world_size)]
        for piece in self.pieces:
            by_rank[piece.sender].append(piece)
            by_rank[piece.receiver].append(piece)
        return by_rank

    @functools.cached_property
    def _local_blocks_by_rank(self) -> list[list[Block]]:
        by_rank: list[list[Block]] = [[] for _ in range(self.world_size)]
        for block in self.blocks:
            for rank in set(block.holders).intersection(block.receivers):
                by_rank[rank].append(block)
        return by_rank


def plan_reshard(
    inventory: Inventory,
    train: ParallelLayout,
    rollout: ParallelLayout,
    *,
    train_library: str,
    rollout_library: str,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> ReshardPlan:
    """Return the plan that moves `inventory` (in the dtypes sent) from `train` to `rollout`, equal for equal arguments.

    `*_library`: keys of layout/sharding.py's LIBRARIES. `bucket_bytes`: most that a rank sends, and receives, in one
    bucket. Raises ConfigError for pairs of layouts that cannot be served, and for a bucket too small for one row of
    some tensor.
    """
    blocks = make_blocks(inventory, train, rollout, train_library, rollout_library, bucket_bytes)
    stages = [train.coordinates(rank).pp for rank in range(train.world_size)]
    pieces = schedule_pieces(blocks, route_blocks(blocks, stages), bucket_bytes)
    sides = inventory, train, rollout, train_library, rollout_library
    return ReshardPlan(*sides, bucket_bytes, blocks, pieces)
