"""The plan of a weight sync: what each rank keeps, sends and receives, bucket by bucket. No torch, no communication.

Every rank computes the same plan from the same inputs (`digest` proves it): blocks of regions that are sent as one
(blocks.py), a sender for each rank that needs one and buckets of bounded size (route.py). What a rank holds in training
already is never sent to it, so it receives exactly its lower bound: what it needs minus what it has (tensors that are
wanted whole come on top).
"""

from __future__ import annotations

import functools
import hashlib
from array import array
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from verl_patches.layout.inventory import Inventory
from verl_patches.layout.parallel import ParallelLayout
from verl_patches.reshard.blocks import DEFAULT_BUCKET_BYTES, Block, make_blocks
from verl_patches.reshard.region import Region, align
from verl_patches.reshard.route import Piece, Topology, regions_of, route, schedule


class BucketPlan(NamedTuple):
    """One bucket of one rank: peer rank -> regions in wire order, sorted by peer; a peer without any is absent."""

    send: dict[int, tuple[Region, ...]]
    receive: dict[int, tuple[Region, ...]]


@dataclass(frozen=True)
class RankPlan:
    """All that one rank does in a sync; every rank has the same number of buckets.

    `local`: regions that the rank holds in training and needs in rollout; they are copied on the device.
    """

    rank: int
    local: tuple[Region, ...]
    buckets: tuple[BucketPlan, ...]


@dataclass(frozen=True, eq=False)
class ReshardPlan:
    """The whole plan; `for_rank` is what a rank executes. Lists of figures are indexed by rank, sizes are bytes."""

    inventory: Inventory
    train: ParallelLayout
    rollout: ParallelLayout
    train_library: str
    rollout_library: str
    bucket_bytes: int
    topology: Topology
    whole: frozenset[str]
    blocks: Sequence[Block]
    pieces: Sequence[Piece]

    @property
    def world_size(self) -> int:
        """Ranks, of training and of rollout alike."""
        return self.train.world_size

    @functools.cached_property
    def bucket_count(self) -> int:
        """Buckets of a sync: one collective each."""
        return max((piece.bucket for piece in self.pieces), default=-1) + 1

    def for_rank(self, rank: int) -> RankPlan:
        """What `rank` keeps, sends and receives. Raises ConfigError for a rank that does not exist."""
        self.train.coordinates(rank)
        send, receive = ([defaultdict(tuple) for _ in range(self.bucket_count)] for _ in range(2))
        for number in self._pieces_of[rank]:
            bucket, sender, receiver, block, start, stop = self.pieces[number]
            regions = regions_of(self.blocks[block], start, stop)
            if sender == rank:
                send[bucket][receiver] += regions
            else:
                receive[bucket][sender] += regions
        local = tuple(region for block in self._local_blocks[rank] for region in self.blocks[block].regions)
        buckets = tuple(
            BucketPlan(dict(sorted(s.items())), dict(sorted(r.items()))) for s, r in zip(send, receive, strict=True)
        )
        return RankPlan(rank, local, buckets)

    @functools.cached_property
    def sent_bytes(self) -> list[int]:
        """Bytes that each rank sends, with alignment."""
        return [sum(sent) for sent in self.traffic]

    @functools.cached_property
    def received_bytes(self) -> list[int]:
        """Bytes that each rank receives, with alignment."""
        return [sum(received) for received in zip(*self.traffic, strict=True)]

    @functools.cached_property
    def traffic(self) -> list[list[int]]:
        """Bytes that each rank (first index) sends to each (second index), with alignment."""
        sums = [[0] * self.world_size for _ in range(self.world_size)]
        for piece, size in zip(self.pieces, self.piece_bytes, strict=True):
            sums[piece.sender][piece.receiver] += size
        return sums

    @functools.cached_property
    def local_bytes(self) -> list[int]:
        """Bytes that each rank has already."""
        return [sum(self.blocks[block].raw_bytes for block in blocks) for blocks in self._local_blocks]

    @functools.cached_property
    def lower_bound_bytes(self) -> list[int]:
        """Bytes that must reach each rank whatever the plan: what its rollout layout needs minus what it holds."""
        bound = [0] * self.world_size
        for block in self.blocks:
            size, holders = block.raw_bytes, set(block.holders)
            for rank in block.owners:
                if rank not in holders:
                    bound[rank] += size
        return bound

    @functools.cached_property
    def stages(self) -> list[int]:
        """The training pipeline stage of each rank."""
        return [self.train.coordinates(rank).pp for rank in range(self.world_size)]

    @functools.cached_property
    def peak_extra_bytes(self) -> int:
        """Wire buffers of the busiest rank: two to send and two to receive, each as large as its fullest bucket."""
        sends, receives = defaultdict(int), defaultdict(int)
        for piece, size in zip(self.pieces, self.piece_bytes, strict=True):
            sends[piece.sender, piece.bucket] += size
            receives[piece.receiver, piece.bucket] += size
        return 2 * max(sends.values(), default=0) + 2 * max(receives.values(), default=0)

    def digest(self) -> str:
        """Hex digest of inputs and result: ranks that are to run this plan together must agree on it."""
        digest = hashlib.sha256()
        for part in (
            self.inventory.model,
            self.train,
            self.rollout,
            self.train_library,
            self.rollout_library,
            self.bucket_bytes,
            self.topology,
            sorted(self.whole),
        ):
            digest.update(repr(part).encode())
        for block in self.blocks:
            digest.update(repr(block).encode())
        digest.update(array("q", [number for piece in self.pieces for number in piece]).tobytes())
        return digest.hexdigest()

    @functools.cached_property
    def _pieces_of(self) -> list[list[int]]:
        found = [[] for _ in range(self.world_size)]
        for number, piece in enumerate(self.pieces):
            found[piece.sender].append(number)
            found[piece.receiver].append(number)
        return found

    @functools.cached_property
    def _local_blocks(self) -> list[list[int]]:
        found = [[] for _ in range(self.world_size)]
        for number, block in enumerate(self.blocks):
            for rank in set(block.holders).intersection(block.receivers):
                found[rank].append(number)
        return found

    @functools.cached_property
    def piece_bytes(self) -> list[int]:
        """Bytes of each piece, with alignment."""
        uncut = [block.wire_bytes for block in self.blocks]
        rows = [sum(r.rows for r in block.regions) for block in self.blocks]
        return [
            uncut[p.block] if p.stop - p.start == rows[p.block] else _cut_bytes(self.blocks[p.block], p)
            for p in self.pieces
        ]


def _cut_bytes(block: Block, piece: Piece) -> int:
    row_bytes = {region.name: size for region, size in zip(block.regions, block.row_bytes, strict=True)}
    return sum(align(r.rows * row_bytes[r.name]) for r in regions_of(block, piece.start, piece.stop))


def plan_reshard(
    inventory: Inventory,
    train: ParallelLayout,
    rollout: ParallelLayout,
    *,
    train_library: str,
    rollout_library: str,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    topology: Topology = Topology(),  # noqa: B008 frozen
    whole: Collection[str] = (),
) -> ReshardPlan:
    """The plan that moves `inventory` (dtypes: those sent) from `train` to `rollout`, equal for equal arguments.

    `*_library`: keys of layout/sharding.py's LIBRARIES. `bucket_bytes`: most that a rank sends, and receives, in one
    bucket. `whole`: HF tensors that each rollout rank which holds a part of it gets whole. Raises ConfigError for
    pairs of layouts that cannot be served, and for a bucket too small for one row of some tensor.
    """
    blocks = make_blocks(
        inventory,
        train,
        rollout,
        train_library=train_library,
        rollout_library=rollout_library,
        bucket_bytes=bucket_bytes,
        whole=whole,
    )
    stages = [train.coordinates(rank).pp for rank in range(train.world_size)]
    pieces = schedule(blocks, route(blocks, stages, topology), bucket_bytes)
    return ReshardPlan(
        inventory,
        train,
        rollout,
        train_library,
        rollout_library,
        bucket_bytes,
        topology,
        frozenset(whole),
        blocks,
        pieces,
    )
