"""Read a validation's score from verl's metrics, and add what verl lacks: pass@k, samples in TensorBoard.

verl's RayPPOTrainer._validate gives val-core/SOURCE/VARIABLE/mean@n, and for n > 1 also best@n/mean, a bootstrap with
replacement. VARIABLE is acc if the reward function returns it, else reward.
"""

from __future__ import annotations

import functools
import math
import os
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_MEAN_METRIC = re.compile(r"val-core/.+/mean@\d+")
_RECORDED_METRIC = re.compile(r"val-core/.+/(mean|best|maj)@\d+(/mean)?|val-\w+/.+/pass@\d+")


def read_validation(metrics: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return {score, metrics} of the validation in verl's metrics of a step; None if the step did not validate.

    score: mean over data sources of mean@n of each source's core variable. metrics: {name: value} of mean, best and maj
    of core variables, and pass@k; all others are in metrics.jsonl only.
    """
    means = [float(value) for name, value in metrics.items() if _MEAN_METRIC.fullmatch(name)]
    if not means:
        return None
    recorded = {name: float(value) for name, value in metrics.items() if _RECORDED_METRIC.fullmatch(name)}
    return {"score": statistics.fmean(means), "metrics": recorded}


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the unbiased estimate that one of k responses is correct, from `correct` of n: 1 - C(n - c, k) / C(n, k).

    Source: arXiv:2107.03374. n >= k. verl's best@k bootstrap draws with replacement, so it is below this estimate.
    """
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def with_pass_at_k(process_validation_metrics: Callable) -> Callable:
    """Wrap verl's process_validation_metrics: add pass@k for core variables that are 0 or 1.

    k is 1, 2, 4, ... below n, and n, the responses of a prompt (rollout.val_kwargs.n). Nothing is added for n = 1.
    """

    @functools.wraps(process_validation_metrics)
    def process(data_sources: Sequence[str], sample_inputs: Sequence[str], infos_dict: Mapping, *args, **kwargs) -> Any:
        found = process_validation_metrics(data_sources, sample_inputs, infos_dict, *args, **kwargs)
        core = "acc" if infos_dict.get("acc") else "reward"
        prompt_values = defaultdict(list)
        for source, prompt, value in zip(data_sources, sample_inputs, infos_dict.get(core, ()), strict=False):
            prompt_values[source, prompt].append(value)
        not_binary = {source for (source, _), given in prompt_values.items() if not {*given} <= {0, 1}}
        values = defaultdict(list)
        for (source, _), given in prompt_values.items():
            n = len(given)
            if n > 1 and source not in not_binary:
                for k in {*(1 << power for power in range(n.bit_length())), n}:
                    values[source, k].append(pass_at_k(n, int(sum(given)), k))
        for (source, k), estimates in values.items():
            found[source][core][f"pass@{k}"] = statistics.fmean(estimates)
        return found

    return process


def add_tensorboard_samples(logger: Any) -> None:
    """Let verl's logger of validation samples (trainer.log_val_generations) write to a TensorBoard folder of its own.

    A reader of TensorBoard's files reads on in the newest file of a folder, so that samples beside the scalars, as
    verl 0.4.0 writes them, would hide later scalars.
    """
    original = logger.log

    def log(loggers: Sequence[str], samples: Sequence[tuple[str, str, float]], step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        original([name for name in loggers if name != "tensorboard"], samples, step)
        if "tensorboard" in loggers:
            texts = (
                f"**Input:** {given}\n\n**Output:** {made}\n\n**Score:** {score}" for given, made, score in samples
            )
            with SummaryWriter(os.path.join(os.environ.get("TENSORBOARD_DIR", "tensorboard_log"), "val")) as writer:
                writer.add_text("val/generations", "\n\n---\n\n".join(texts), step)

    logger.log = log
