"""When things are sent: bytes of all pairs of ranks packed into few buckets, each one collective. No torch.

In every bucket each rank sends and receives at most `bucket_bytes`. A bucket is filled sender by sender, those with
most left first, each towards the receivers with most left: so every bucket mixes all pipeline stages, and the rank
that must send most is busy in every one. A region that does not fit any more is cut along its axis, but room of less
than 1/CUT of a bucket is left empty instead: no crumbs, and at most that share of a busy rank's bucket is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from verl_patches.reshard.blocks import Block
from verl_patches.reshard.region import Region
from verl_patches.reshard.route import Routes
from verl_patches.reshard.sizes import ALIGN_BYTES, align

CUT = 16


class Piece(NamedTuple):
    """Rows [start, stop) of a block, counted through all its regions, on their way in one bucket."""

    bucket: int
    sender: int
    receiver: int
    block: int
    start: int
    stop: int


def regions_of(block: Block, start: int, stop: int) -> tuple[Region, ...]:
    """The regions that rows [start, stop) of `block` are."""
    found, first = [], 0
    for region in block.regions:
        rows = region.stop - region.start
        a, b = max(start - first, 0), min(stop - first, rows)
        if a < b:
            uncut = (a, b) == (0, rows)
            found.append(region if uncut else region._replace(start=region.start + a, stop=region.start + b))
        first += rows
    return tuple(found)


def schedule(blocks: Sequence[Block], routes: Routes, bucket_bytes: int) -> list[Piece]:
    """All pieces, bucket by bucket; `bucket_bytes` must hold the largest row of every region."""
    packer = _Packer(blocks, routes, bucket_bytes)
    bucket = 0
    while any(packer.queues):
        packer.fill(bucket)
        bucket += 1
    return packer.pieces


class _Packer:
    def __init__(self, blocks: Sequence[Block], routes: Routes, bucket_bytes: int):
        self.bucket_bytes = bucket_bytes
        self.rows = [[(r.stop - r.start, size) for r, size in zip(b.regions, b.row_bytes, strict=True)] for b in blocks]
        self.end = [sum(rows for rows, _ in block) for block in self.rows]
        self.least = -(-bucket_bytes // CUT)  # a rank with less room than this is done with the bucket
        sizes = [block.wire_bytes for block in blocks]
        # what is left of each pair, last first, and the row at which its first block goes on
        self.queues = [{receiver: numbers[::-1] for receiver, numbers in pairs.items()} for pairs in routes]
        self.begun: dict[tuple[int, int], int] = {}
        self.to_send, self.to_receive = [0] * len(routes), [0] * len(routes)
        for sender, pairs in enumerate(routes):
            for receiver, numbers in pairs.items():
                size = sum(sizes[i] for i in numbers)
                self.to_send[sender] += size
                self.to_receive[receiver] += size
        self.pieces: list[Piece] = []

    def fill(self, bucket: int) -> None:
        """Pack one bucket; at least one row goes into it."""
        ranks = range(len(self.queues))
        rooms = [self.bucket_bytes] * len(ranks)
        receivers = sorted(ranks, key=lambda r: (-self.to_receive[r], r))
        for sender in sorted(ranks, key=lambda r: (-self.to_send[r], r)):
            room, full, queues = self.bucket_bytes, [], self.queues[sender]
            for receiver in receivers if queues else ():
                if receiver not in queues:
                    continue
                taken = self._take(bucket, sender, receiver, min(room, rooms[receiver]))
                room -= taken
                rooms[receiver] -= taken
                if rooms[receiver] < self.least:
                    full.append(receiver)
                if room < self.least:
                    break
            for receiver in full:
                receivers.remove(receiver)

    def _take(self, bucket: int, sender: int, receiver: int, room: int) -> int:
        """Send what fits into `room` bytes from one rank to another; returns the bytes it takes."""
        queue, pair, taken = self.queues[sender][receiver], (sender, receiver), 0
        while queue:
            number = queue[-1]
            start = self.begun.get(pair, 0)
            stop, size = self._fit(number, start, room - taken)
            if stop > start:
                self.pieces.append(Piece(bucket, sender, receiver, number, start, stop))
                taken += size
            if stop < self.end[number]:
                self.begun[pair] = stop
                break
            queue.pop()
            self.begun.pop(pair, None)
        else:
            del self.queues[sender][receiver]
        self.to_send[sender] -= taken
        self.to_receive[receiver] -= taken
        return taken

    def _fit(self, number: int, start: int, room: int) -> tuple[int, int]:
        """(row after the last that fits, bytes of the rows from `start` to it)."""
        stop, size, first = start, 0, 0
        for rows, row in self.rows[number]:
            left = first + rows - stop  # of this region
            first += rows
            if left <= 0:
                continue
            if size + align(left * row) <= room:
                stop, size = stop + left, size + align(left * row)
                continue
            if room - size >= self.least:
                fitting = (room - size) // ALIGN_BYTES * ALIGN_BYTES // row
                stop, size = stop + fitting, size + align(fitting * row)
            break
        return stop, size
