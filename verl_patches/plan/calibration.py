"""Hold the published rows that the step model is fitted to, and compute its error on each; no torch.

docs/plan.md has all rows: the public recipe's runs on 256 dies, one with random weights and forced responses of 3072
tokens and two with true weights, and its single measurements. A row fixes at most one constant, with which the model
reproduces its figure. The other rows check the model: their errors are the range of a figure (`likely_range`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from verl_patches.layout.inventory import read_model_shape
from verl_patches.layout.parallel import ParallelLayout, rollout_layout
from verl_patches.plan.step_model import Constants, Lengths, Offload, StepInput, SyncTraffic, decode_s, step_time
from verl_patches.run.resolve import CONFIGS_DIR

MEAN_PROMPT = 75.0  # mean tokens of a prompt, random weights; published with 796.8 s, where the phases' sum is 801.29
DECODE_MS = {64: 76, 32: 67, 16: 61, 8: 57, 4: 55, 2: 54, 1: 54}
_DECODE_CONTEXT = MEAN_PROMPT + 3072 / 2  # context of the decode rows; not published
_PUBLISHED_COLLECTIVES, _PUBLISHED_SYNC_BYTES = 3100, 73.9e9

CONSTANTS = Constants(
    train_efficiency=0.2902,
    decode_layer_s=4.933e-4,
    engine_step_s=0.02247,
    driver_bytes_per_s=7.56e8,
    collective_s=3.342e-3,
    empty_cache_s=0.3456,
    reward_s=5.444e-7,
    advantage_s=7.47e-9,
    train_load=1.156,
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


def true_weights(constants: Constants = CONSTANTS) -> StepInput:
    """Return the run with true weights of hicann/cann-recipes-train 93819a7, of 1,576.6 tokens in the mean.

    The tensor cache is on in its script. Its DP ranks synchronise over Gloo, as vllm-ascend v0.9.1rc2 does, which the
    page names for this run.
    """
    load, lengths = (constants.train_load, 1.0), Lengths(77.8, 3072, 1637.0)
    return replace(published_run(), rollout=rollout_layout(2, 64, 2), lengths=lengths, dp_sync="gloo", expert_load=load)


def earlier_true_weights(constants: Constants = CONSTANTS) -> StepInput:
    """Return the run with true weights of revision 10871f73, of 2,553 tokens in the mean, before most optimizations.

    The page names verl's PR 3427 for it, which recomputes 8 layers, sends a batch once to each replica and has neither
    tensor cache nor the recipe's weight sync; that verl's own sync is not modelled, the recipe's is taken.
    """
    run = replace(true_weights(constants), rollout=rollout_layout(1, 128, 2), lengths=Lengths(75.0, 3072, 3357.0))
    return replace(run, tensor_cache=False, copies=1, recompute_layers=8, old_micro_batch=4)


def run_without_cache() -> StepInput:
    """Return the published run without the tensor cache."""
    return replace(published_run(), tensor_cache=False)


@dataclass(frozen=True)
class PublishedRow:
    """Describe one published figure: how the model predicts it, and the constant that it fixes, if any.

    phase: the phase of a step whose range the row belongs to, "total", or empty for parts of a phase.
    """

    name: str
    quoted_s: float
    predict: Callable[[Constants], float]
    fixes: str | None = None
    phase: str = ""


def _phase_rows(
    name: str, run: Callable[[Constants], StepInput], quoted: Mapping[str, float], fixes: Mapping[str, str]
) -> Iterator[PublishedRow]:
    """Yield the rows of a run's quoted phases, or "total"; `fixes` maps phases to constants."""

    def predict(phase: str) -> Callable[[Constants], float]:
        def predicted(constants: Constants) -> float:
            seconds = step_time(run(constants), constants)
            return sum(seconds.values()) if phase == "total" else seconds[phase]

        return predicted

    for phase, seconds in quoted.items():
        yield PublishedRow(f"{name}{phase}", seconds, predict(phase), fixes.get(phase), phase)


def _total_s(tokens_per_s: float) -> float:
    """Return the seconds of a step of a series that quotes tokens/s of a card, of responses of 3039.8 tokens."""
    return round(512 * 16 * (MEAN_PROMPT + 3039.8) / 128 / tokens_per_s, 1)


RANDOM_INIT = {"rollout": 318.27, "ref": 104.7, "reward": 13.7, "advantage": 0.188, "update": 328.8, "reshard": 11.18,
               "offload": 24.45, "total": 796.8}  # fmt: skip
RANDOM_INIT_FIXES = {"rollout": "engine_step_s", "ref": "train_efficiency", "reward": "reward_s",
                     "advantage": "advantage_s", "reshard": "collective_s", "offload": "empty_cache_s"}  # fmt: skip
TRUE_WEIGHTS = {"rollout": 373.65, "ref": 144.5, "reward": 5.0, "advantage": 0.21, "update": 319.3, "reshard": 11.5,
                "offload": 5.5, "total": 859.68}  # fmt: skip
EARLIER_TRUE_WEIGHTS = {"rollout": 495.4, "old_log_prob": 134.0, "ref": 116.7, "reward": 8.4, "advantage": 0.21,
                        "update": 495.1, "reshard": 67.6, "offload": 20.3, "total": 1338.0}  # fmt: skip
PUBLISHED_ROWS = (
    *(PublishedRow(f"decode step, batch {batch}", ms / 1e3,
                   lambda constants, n=batch: decode_s(published_run(), n, _DECODE_CONTEXT, n, constants),  # type: ignore[misc]
                   "decode_layer_s" if batch == 1 else None)
      for batch, ms in DECODE_MS.items()),
    *_phase_rows("", lambda constants: published_run(), RANDOM_INIT, RANDOM_INIT_FIXES),
    PublishedRow("update, saved by the tensor cache", 400.9 - 334.15,
                 lambda constants: step_time(run_without_cache(), constants)["update"]
                 - step_time(published_run(), constants)["update"], "driver_bytes_per_s"),
    *_phase_rows("no tensor cache: ", lambda constants: run_without_cache(),
                 {"update": 400.9, "ref": 156.8, "total": _total_s(208.5)}, {}),
    *_phase_rows("tensor cache: ", lambda constants: published_run(),
                 {"update": 334.15, "ref": 105.06, "total": _total_s(238.46)}, {}),
    *_phase_rows("DP sync over Gloo: ", lambda constants: replace(published_run(), dp_sync="gloo"),
                 {"rollout": 385}, {}),
    *_phase_rows("DP sync over HCCL: ", lambda constants: published_run(), {"rollout": 322}, {}),
    *_phase_rows("true weights, 1,577 tokens: ", true_weights, TRUE_WEIGHTS, {"update": "train_load"}),
    *_phase_rows("true weights, 2,553 tokens: ", earlier_true_weights, EARLIER_TRUE_WEIGHTS, {}),
)  # fmt: skip


@functools.cache
def error_spread(phase: str) -> tuple[float, float]:
    """Return the lowest and the highest error of a phase's rows, or of "total", that fix no constant; 0 is in it."""
    rows = [row for row in PUBLISHED_ROWS if row.phase == phase and row.fixes is None]
    errors = [0.0, *(row.predict(CONSTANTS) / row.quoted_s - 1 for row in rows)]
    return min(errors), max(errors)


def likely_range(phase: str, seconds: float) -> tuple[float, float]:
    """Return the seconds between which a run would lie if the model erred on it as on the published rows.

    Phases of a critic, of which no row is published, err as a total does.
    """
    low, high = error_spread(phase if any(row.phase == phase for row in PUBLISHED_ROWS) else "total")
    return seconds / (1 + high), seconds / (1 + low)


def fitted_constants(run: StepInput, measured: Mapping[str, float]) -> dict[str, float]:
    """Return the constants with which the model gives the measured seconds of a run's phases, one for each phase.

    A phase that was not measured, or that no value of its constant explains, keeps the quoted one.
    """
    found: dict[str, float] = {}
    for phase, name in RANDOM_INIT_FIXES.items():
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
