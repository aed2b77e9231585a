"""Measure plans that rebalance rollout requests over 128 data-parallel ranks, and model their gain. By hand:

    python tests/benchmarks/rebalance.py

Prints JSON: a list of figures, each with `value`, `bound` (what it must not exceed; null where it is reported only) and
`peer`. Exits 1 where a bound is exceeded. Seconds of planning are measured. All else is modelled: decode steps are
simulated for 8192 responses of lognormal length, 64 a rank, those of a prompt on one rank as verl gives them; a step
costs what was published for its graph batch size (rollout/rebalance.py, STEP_S), an exchange what `MoveCost` says, the
agreement before each 14 ms (the published figure of a call over Gloo). Prefill is left out. `alike` is assumed.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from report import figure, print_report
from tqdm import tqdm

from verl_patches.rollout.rebalance import InstanceState, MoveCost, MovePlan, find_tier, plan_moves, step_s

RANKS, EACH, BLOCK, STEPS = 128, 64, 128, 32
TIERS = [1, 2, 4, 8, 16, 32, 64]
BLOCK_BYTES = 61 * BLOCK * (512 + 64) * 2  # DeepSeek-V3's latents and rotary keys of all layers in bf16
KV_BLOCKS = int(20e9 // BLOCK_BYTES)  # blocks in a die's cache of about 20 GB
AGREE_S = 0.014
COST = MoveCost(BLOCK_BYTES, STEPS)
PROMPT, MEAN, LONGEST = 200, 1000, 3072  # tokens of a prompt, of responses before they are cut, of the longest
CASES = [(cv, alike) for cv in (0.4, 0.7, 1.0) for alike in (0.0, 0.5)]
SEEDS = (1, 2, 3)


def responses(cv: float, alike: float, seed: int) -> np.ndarray:
    """Return [RANKS, EACH] lognormal tokens; the share `alike` of their logarithm's variance is between prompts."""
    draw, sigma = np.random.default_rng(seed), np.sqrt(np.log(1 + cv * cv))
    prompt, own = draw.standard_normal((RANKS, EACH // 16, 1)), draw.standard_normal((RANKS, EACH // 16, 16))
    normal = (np.sqrt(alike) * prompt + np.sqrt(1 - alike) * own).reshape(RANKS, EACH)
    return np.clip(np.exp(np.log(MEAN) - sigma * sigma / 2 + sigma * normal), 1, LONGEST).astype(np.int64)


def simulate(cv: float, alike: float, seed: int, moving: bool) -> dict[str, float]:
    """Simulate a rollout; return seconds of decoding, of moves and of the tail, and bytes.

    The tail are the steps after three quarters of the requests have ended.
    """
    sizes = PROMPT + responses(cv, alike, seed)
    now = np.full_like(sizes, PROMPT)  # tokens in KV
    total = tail = moved_s = moved_bytes = 0.0
    step = 0
    while (alive := sizes > 0).any():
        if moving and step and step % STEPS == 0:
            moved_s += AGREE_S
            lengths = np.where(alive, now, 0)
            state = InstanceState(lengths, KV_BLOCKS - (-(-lengths // BLOCK)).sum(1))
            made = plan_moves(state, TIERS, BLOCK, STEPS, COST)
            if made.moves:
                now, sizes, blocks = _apply(made, now, sizes)
                moved_s += COST.moves_s(int(blocks.max()))
                moved_bytes += made.blocks * BLOCK_BYTES
                alive = sizes > 0
        loads = alive.sum(1)
        seconds = step_s(find_tier(int(loads.max()), TIERS))
        total += seconds
        tail += seconds if loads.sum() < RANKS * EACH / 4 else 0.0
        now = now + alive
        sizes = np.where(now >= sizes, 0, sizes)
        step += 1
    return {"decode": total, "moves": moved_s, "tail": tail, "GB": moved_bytes / 1e9}


def _apply(made: MovePlan, now: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return both arrays with requests at their receivers, and the blocks moved by rank; free places have size 0."""
    now, sizes, blocks = now.copy(), sizes.copy(), np.zeros(len(now), np.int64)
    for move in made.moves:
        places = np.flatnonzero(sizes[move.receiver] == 0)[: len(move.requests)]
        held = list(move.requests)
        now[move.receiver, places], sizes[move.receiver, places] = now[move.donor, held], sizes[move.donor, held]
        count = int((-(-now[move.donor, held] // BLOCK)).sum())
        blocks[move.donor] += count
        blocks[move.receiver] += count
        sizes[move.donor, held] = 0
    return now, sizes, blocks


def planning(lengths: np.ndarray, free: int) -> float:
    """Return the median CPU milliseconds of a plan for ranks with these lengths."""
    state = InstanceState(lengths, np.full(len(lengths), free))
    seconds = []
    for _ in range(50):
        begin = time.process_time()
        plan_moves(state, TIERS, BLOCK, STEPS, COST)
        seconds.append(time.process_time() - begin)
    return round(1000 * statistics.median(seconds), 3)


def figures() -> Iterator[dict[str, Any]]:
    """Return all figures, within a minute."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(200, 4096, (256, EACH))
    tail = np.where(draw.random((256, EACH)) < draw.uniform(0.35, 0.55, (256, 1)), lengths, 0)
    yield figure("planning 256 ranks x 64 in the tail", planning(tail, 1000), "ms", 1.0)
    for cv, alike in tqdm(CASES, desc="rebalance", unit="case"):
        without, moved = ([simulate(cv, alike, seed, moving) for seed in SEEDS] for moving in (False, True))
        mean = [{key: statistics.mean(run[key] for run in runs) for key in runs[0]} for runs in (without, moved)]
        peer = {way: {k: round(v, 3) for k, v in of.items()} for way, of in zip(("without", "with"), mean, strict=True)}
        ratio = (mean[1]["decode"] + mean[1]["moves"]) / mean[0]["decode"]
        name = f"modelled rollout seconds with / without, lognormal lengths of cv {cv}, alike {alike}"
        yield figure(name, round(ratio, 4), "", 1.0, peer)


if __name__ == "__main__":
    sys.exit(print_report("rebalance", figures()))
