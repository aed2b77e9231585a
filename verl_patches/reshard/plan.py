"""The plan of a weight sync: what each rank copies, sends and receives, bucket by bucket. No torch, no communication.

Every rank computes the same plan from the same inputs (`digest` proves it): blocks of regions that are sent as one
(blocks.py), a sender for each rank that needs one and buckets of bounded size (route.py). What a rank holds in training
already is never sent to it, so it receives exactly its lower bound: what it needs minus what it has (tensors that are
sent complete come on top).
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
from verl_patches.reshard.region import Region
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
    """The plan of all ranks; `for_rank` is what a rank executes. Lists of figures are indexed by rank, sizes are bytes.

    `whole`: HF tensors that are sent complete.
    """

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
        """What `rank` copies, sends and receives. Raises ConfigError for a rank that does not exist."""
        self.train.coordinates(rank)
        send, receive = ([defaultdict(tuple) for _ in range(self.bucket_count)] for _ in range(2))
        for piece in self._pieces_of[rank]:
            regions = regions_of(self.blocks[piece.block], piece.start, piece.stop)
            if piece.sender == rank:
                send[piece.bucket][piece.receiver] += regions
            else:
                receive[piece.bucket][piece.sender] += regions
        local = tuple(region for block in self._local_blocks[rank] for region in block.regions)
        sides = zip(send, receive, strict=True)
        return RankPlan(
            rank, local, tuple(BucketPlan(*(dict(sorted(side.items())) for side in pair)) for pair in sides)
        )

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
        for piece in self.pieces:
            sums[piece.sender][piece.receiver] += piece.size_bytes
        return sums

    @functools.cached_property
    def local_bytes(self) -> list[int]:
        """Bytes that each rank has already."""
        return [sum(block.raw_bytes for block in blocks) for blocks in self._local_blocks]

    @functools.cached_property
    def lower_bound_bytes(self) -> list[int]:
        """Bytes that must reach each rank whatever the plan: what its rollout layout needs minus what it holds."""
        bound = [0] * self.world_size
        for block in self.blocks:
            size = block.raw_bytes
            for rank in set(block.owners).difference(block.holders):
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
        for piece in self.pieces:
            sends[piece.sender, piece.bucket] += piece.size_bytes
            receives[piece.receiver, piece.bucket] += piece.size_bytes
        return 2 * max(sends.values(), default=0) + 2 * max(receives.values(), default=0)

    def digest(self) -> str:
        """Hex digest of inputs and result: ranks that are to run this plan together must agree on it."""
        inputs = self.inventory.model, self.train, self.rollout, self.train_library, self.rollout_library
        digest = hashlib.sha256()
        for part in (*inputs, self.bucket_bytes, self.topology, sorted(self.whole), *self.blocks):
            digest.update(repr(part).encode())
        digest.update(array("q", [number for piece in self.pieces for number in piece[:-1]]).tobytes())
        return digest.hexdigest()

    @functools.cached_property
    def _pieces_of(self) -> list[list[Piece]]:
        by_rank = [[] for _ in range(self.world_size)]
        for piece in self.pieces:
            by_rank[piece.sender].append(piece)
            by_rank[piece.receiver].append(piece)
        return by_rank

    @functools.cached_property
    def _local_blocks(self) -> list[list[Block]]:
        by_rank = [[] for _ in range(self.world_size)]
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
    topology: Topology = Topology(),  # noqa: B008 frozen
    whole: Collection[str] = (),
) -> ReshardPlan:
    """The plan that moves `inventory` (dtypes: those sent) from `train` to `rollout`, equal for equal arguments.

    `*_library`: keys of layout/sharding.py's LIBRARIES. `bucket_bytes`: most that a rank sends, and receives, in one
    bucket. `whole`: HF tensors that each rollout rank which holds a part of it gets complete. Raises ConfigError for
    pairs of layouts that cannot be served, and for a bucket too small for one row of some tensor.
    """
    whole = frozenset(whole)
    blocks = make_blocks(inventory, train, rollout, train_library, rollout_library, bucket_bytes, whole)
    stages = [train.coordinates(rank).pp for rank in range(train.world_size)]
    pieces = schedule(blocks, route(blocks, stages, topology), bucket_bytes)
    return ReshardPlan(
        inventory, train, rollout, train_library, rollout_library, bucket_bytes, topology, whole, blocks, pieces
    )
