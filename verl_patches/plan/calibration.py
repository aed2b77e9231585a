"""Hold the published rows that the step model is fitted to, and compute its error on each; no torch.

docs/plan.md has all rows: the public recipe's run on 256 dies (random weights, forced responses of 3072 tokens) and its
single measurements. A row fixes at most one constant, with which the model reproduces its figure; the other rows check
the model.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from verl_patches.layout.inventory import read_model_shape
from verl_patches.layout.parallel import ParallelLayout, rollout_layout
from verl_patches.plan.step_model import Constants, Lengths, Offload, StepInput, SyncTraffic, decode_s, step_time
from verl_patches.run.resolve import CONFIGS_DIR

TOTAL_S = 801.29  # sum of the published phases
# mean tokens of a prompt: 250.2 tokens/s of each of 128 cards over the step's seconds, less 3072 of its response
MEAN_PROMPT = 250.2 * 128 * TOTAL_S / (512 * 16) - 3072
DECODE_MS = {64: 76, 32: 67, 16: 61, 8: 57, 4: 55, 2: 54, 1: 54}
_DECODE_CONTEXT = MEAN_PROMPT + 3072 / 2  # context of the decode rows; not published
_PUBLISHED_COLLECTIVES, _PUBLISHED_SYNC_BYTES = 3100, 73.9e9

CONSTANTS = Constants(
    train_efficiency=0.2884,
    decode_layer_s=4.934e-4,
    engine_step_s=0.02259,
    driver_bytes_per_s=7.56e8,
    collective_s=3.342e-3,
    empty_cache_s=0.3456,
    reward_s=5.444e-7,
    advantage_s=7.47e-9,
)


@functools.cache
def published_run() -> StepInput:
    """Return the run of the published rows.

    Recomputed layers are not published for random weights: the fewest of "4 to 8 a stage" are taken. `offload` follows
    from verl's own memory schedule (memory/schedule.py) on the worst die. No pass computes old log-probs.
    """
    layers = (7, 7, 8, 8, 8, 8, 8, 7)
    train = ParallelLayout(256, tp=4, pp=8, ep=32, etp=1, layers_per_stage=layers)
    return StepInput(
        model=read_model_shape(CONFIGS_DIR / "model" / "deepseekv3_671b.json"),
        train=train,
        rollout=rollout_layout(1, 128, 2),
        lengths=Lengths(MEAN_PROMPT, 3072),
        prompts=512,
        samples=16,
        micro_batch=1,
        ref_micro_batch=8,
        recompute_layers=4,
        moe_alltoall_overlap_comm=True,
        swap_optimizer=True,
        tensor_cache=True,
        copies=train.tp * train.pp,
        sync=SyncTraffic(_PUBLISHED_SYNC_BYTES, _PUBLISHED_SYNC_BYTES, _PUBLISHED_COLLECTIVES),
        offload=Offload(47.15e9, 47.15e9, 105.2e9, 13),
    )


def run_without_cache() -> StepInput:
    """Return the published run without the tensor cache."""
    return replace(published_run(), tensor_cache=False)


@dataclass(frozen=True)
class PublishedRow:
    """Describe one published figure: how the model predicts it, and the constant that it fixes, if any."""

    name: str
    quoted_s: float
    predict: Callable[[Constants], float]
    fixes: str | None = None


def _phase_s(name: str, run: Callable[[], StepInput] = published_run) -> Callable[[Constants], float]:
    return lambda constants: step_time(run(), constants)[name]


def _decode_s(batch: int) -> Callable[[Constants], float]:
    return lambda constants: decode_s(published_run(), batch, _DECODE_CONTEXT, batch, constants)


def _total_s(constants: Constants) -> float:
    return sum(step_time(published_run(), constants).values())


def _saved_s(phase: str) -> Callable[[Constants], float]:
    def predict(constants: Constants) -> float:
        return step_time(run_without_cache(), constants)[phase] - step_time(published_run(), constants)[phase]

    return predict


PUBLISHED_ROWS = (
    *(PublishedRow(f"decode step, batch {batch}", ms / 1e3, _decode_s(batch), "decode_layer_s" if batch == 1 else None)
      for batch, ms in DECODE_MS.items()),
    PublishedRow("rollout", 318.27, _phase_s("rollout"), "engine_step_s"),
    PublishedRow("ref", 104.7, _phase_s("ref"), "train_efficiency"),
    PublishedRow("reward", 13.7, _phase_s("reward"), "reward_s"),
    PublishedRow("advantage", 0.188, _phase_s("advantage"), "advantage_s"),
    PublishedRow("update", 328.8, _phase_s("update")),
    PublishedRow("reshard", 11.18, _phase_s("reshard"), "collective_s"),
    PublishedRow("offload", 24.45, _phase_s("offload"), "empty_cache_s"),
    PublishedRow("total of the phases", TOTAL_S, _total_s),
    PublishedRow("update, saved by the tensor cache", 400.9 - 334.15, _saved_s("update"), "driver_bytes_per_s"),
    PublishedRow("update, no tensor cache", 400.9, _phase_s("update", run_without_cache)),
    PublishedRow("update, tensor cache (second series)", 334.15, _phase_s("update")),
    PublishedRow("ref, no tensor cache", 156.8, _phase_s("ref", run_without_cache)),
    PublishedRow("ref, tensor cache (second series)", 105.06, _phase_s("ref")),
)  # fmt: skip


def fitted_constants(run: StepInput, measured: Mapping[str, float]) -> dict[str, float]:
    """Return the constants with which the model gives the measured seconds of a run's phases, one for each phase.

    A phase that was not measured, or that no value of its constant explains, keeps the quoted one.
    """
    fixed = {row.name: row.fixes for row in PUBLISHED_ROWS if row.fixes and row.name in step_time(run, CONSTANTS)}
    found: dict[str, float] = {}
    for phase, name in fixed.items():
        low, high = (getattr(CONSTANTS, name) * factor for factor in (1e-4, 1e4))

        def excess(value: float, phase: str = phase, name: str = name) -> float:
            return step_time(run, replace(CONSTANTS, **{name: value}))[phase] - measured.get(phase, 0.0)

        if excess(low) * excess(high) >= 0 or not measured.get(phase):
            continue
        rises = excess(high) > 0
        for _ in range(60):
            middle = math.sqrt(low * high)
            low, high = (low, middle) if (excess(middle) > 0) == rises else (middle, high)
        found[name] = middle
    return found


def calibration_errors(constants: Constants = CONSTANTS) -> list[dict[str, Any]]:
    """Return [{row, quoted_s, modelled_s, error, fixes}] of all rows; error is a share of the quoted figure."""
    figures = []
    for row in PUBLISHED_ROWS:
        modelled = row.predict(constants)
        error = modelled / row.quoted_s - 1
        values = {"quoted_s": row.quoted_s, "modelled_s": round(modelled, 4), "error": round(error, 4)}
        figures.append({"row": row.name, **values, "fixes": row.fixes})
    return figures
