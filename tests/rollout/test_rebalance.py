"""Test the planner of rebalancing against brute force on small cases, its limits, and when nothing moves."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_patches.rollout.rebalance import FIXED_REQUEST, NO_REQUEST, InstanceState, MoveCost, find_tier, plan_moves

BLOCK, RESERVE, TIERS = 4, 4, [1, 3, 4]
FREE_OF_COST = MoveCost(block_bytes=0, steps=10**9, fixed_s=0)
ROW = st.lists(st.sampled_from([FIXED_REQUEST, 1, 3, 4, 5, 9, 14]), max_size=4)
INSTANCES = st.lists(st.tuples(ROW, st.sampled_from([0, 60])), min_size=2, max_size=3)  # free blocks: none or enough


def make_state(lengths, free_blocks):
    """Return a State of lists of unequal lengths."""
    width = max(map(len, lengths), default=0)
    rows = [[*row, *[NO_REQUEST] * (width - len(row))] for row in lengths]
    return InstanceState(
        np.array(rows, dtype=np.int64).reshape(len(rows), width), np.array(free_blocks, dtype=np.int64)
    )


def count_blocks(tokens, reserve=0):
    return -(-(tokens + reserve) // BLOCK)


def outcome(lengths, free, targets, loads):
    """Return (tier, blocks moved, requests of the fullest receiver) of an assignment, None if it is not allowed.

    `targets`: {(rank, request): receiver}. A rank must not both give and receive.
    """
    donors, receivers = {rank for rank, _ in targets}, set(targets.values())
    if donors & receivers:
        return None
    after, moved = list(loads), 0
    left = [blocks - load * count_blocks(RESERVE) for blocks, load in zip(free, loads, strict=True)]
    for (rank, request), receiver in targets.items():
        tokens = lengths[rank][request]
        after[rank], after[receiver] = after[rank] - 1, after[receiver] + 1
        left[receiver] -= count_blocks(tokens, RESERVE)
        moved += count_blocks(tokens)
    if any(left[receiver] < 0 for receiver in receivers):
        return None
    return find_tier(max(after), TIERS), moved, max((after[r] for r in receivers), default=0)


def best_by_brute_force(lengths, free):
    loads = [len(row) for row in lengths]
    movable = [(r, at) for r, row in enumerate(lengths) for at, tokens in enumerate(row) if tokens > 0]
    best = (find_tier(max(loads), TIERS), 0, 0)
    for chosen in itertools.product([None, *range(len(lengths))], repeat=len(movable)):
        targets = {place: to for place, to in zip(movable, chosen, strict=True) if to is not None}
        found = outcome(lengths, free, targets, loads)
        if targets and found is not None and found[0] < find_tier(max(loads), TIERS):
            best = min(best, found)
    return best


@given(INSTANCES)
@settings(max_examples=120)
def test_no_plan_is_better(instance):
    """Compare all assignments by tier, then blocks, then fullest receiver, where free blocks are not scarce."""
    lengths, free = [row for row, _ in instance], [blocks for _, blocks in instance]
    if sum(tokens > 0 for row in lengths for tokens in row) > 7:
        return
    assert outcome_of_plan(lengths, free) == best_by_brute_force(lengths, free)


def outcome_of_plan(lengths, free):
    made = plan_moves(make_state(lengths, free), TIERS, BLOCK, RESERVE, FREE_OF_COST)
    targets = {(move.donor, request): move.receiver for move in made.moves for request in move.requests}
    assert len(targets) == sum(len(move.requests) for move in made.moves)  # none moves twice
    assert all(lengths[rank][request] > 0 for rank, request in targets)
    found = outcome(lengths, free, targets, [len(row) for row in lengths])
    assert found is not None and found[:2] == (made.after, made.blocks)
    return found


@pytest.mark.parametrize(("free", "lowered"), [([0, 6, 6], True), ([0, 6, 5], False), ([0, 99, 6], True)])
def test_scarce_blocks_and_seats_are_not_exceeded(free, lowered):
    """Fit requests of 3, 3, 2, 2 blocks into 5 and 5 free ones, not into 5 and 4; tier 4 has room for 3 a rank."""
    lengths = [[8, 8, 4, 4, *[FIXED_REQUEST] * 4], [FIXED_REQUEST], [FIXED_REQUEST]]
    made = plan_moves(make_state(lengths, free), [1, 4, 16], BLOCK, RESERVE, FREE_OF_COST)
    assert made.after == (4 if lowered else 16) and bool(made.moves) is lowered
    for move in made.moves:
        assert len(move.requests) <= 3
        assert sum(count_blocks(lengths[0][at], RESERVE) for at in move.requests) <= free[move.receiver] - 1


@given(st.integers(0, 2**32 - 1), st.floats(0.2, 2.0))
@settings(max_examples=30)
def test_every_plan_of_256_ranks_is_within_limits(seed, spread):
    draw = np.random.default_rng(seed)
    lengths = np.where(draw.random((256, 64)) < draw.random((256, 1)), draw.lognormal(6.5, spread, (256, 64)) + 1, 0)
    lengths = lengths.astype(np.int64)
    free = draw.integers(0, 900, 256)
    made = plan_moves(
        make_state(lengths.tolist(), free.tolist()), [1, 2, 4, 8, 16, 32, 64], 128, 32, MoveCost(9_000_000, 32)
    )
    loads, left = np.count_nonzero(lengths, axis=1), free - np.count_nonzero(lengths, axis=1)
    moved = set()
    for move in made.moves:
        needs = [-(-(int(lengths[move.donor, at]) + 32) // 128) for at in move.requests]
        loads[move.donor], loads[move.receiver] = loads[move.donor] - len(needs), loads[move.receiver] + len(needs)
        left[move.receiver] -= sum(needs)
        moved |= {(move.donor, at) for at in move.requests}
    assert all(lengths[place] > 0 for place in moved) and len(moved) == sum(len(m.requests) for m in made.moves)
    assert find_tier(int(loads.max()), [1, 2, 4, 8, 16, 32, 64]) == made.after <= made.before
    assert not made.moves or all(left[move.receiver] >= 0 for move in made.moves)
    assert {m.donor for m in made.moves}.isdisjoint(m.receiver for m in made.moves)


UNEVEN = [[100] * 40, [100] * 8]


@pytest.mark.parametrize(
    ("change", "after"),
    [
        ({}, 32),
        ({"tiers": [64]}, 64),  # no lower tier
        ({"free": [900, 20]}, 64),  # 8 requests of 2 blocks, and a block for each of 8 of its own
        ({"cost": MoveCost(9_000_000, 2)}, 64),  # two steps of 9 ms less do not pay for 20 ms and the bytes
        ({"cost": MoveCost(10**12, 32)}, 64),
        ({"lengths": [[FIXED_REQUEST] * 33 + [100] * 7, [100] * 8]}, 64),
    ],
)
def test_nothing_moves_where_it_does_not_fit_or_pay(change, after):
    given_ = {"lengths": UNEVEN, "free": [900, 900], "tiers": [8, 16, 32, 64], "cost": MoveCost(9_000_000, 32)} | change
    made = plan_moves(make_state(given_["lengths"], given_["free"]), given_["tiers"], 128, 32, given_["cost"])
    assert made.after == after and bool(made.moves) == (after != 64)
