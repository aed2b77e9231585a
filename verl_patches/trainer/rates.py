"""Tokens and model FLOPs of a step over its seconds, by rank, and its traces: for record, metrics.jsonl and report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_patches.layout.flops import PEAK_FLOPS_PER_S, forward_flops_of, passes
from verl_patches.layout.inventory import ModelShape, read_model_shape
from verl_patches.layout.model_folder import read_config
from verl_patches.layout.parallel import world_size
from verl_patches.log_probs.on_policy import needs_old_log_probs


class Rates:
    """Rates of the steps of one run; `layout/flops.py` has the definition of MFU.

    `model`: None where the model's folder is not here, and there are no FLOPs then. `passes`: {phase: forward passes
    that count}. `peak_flops_per_s`: None for a device without one.
    """

    def __init__(self, config: Any, ref: bool):
        recipe, actor = config.recipe, config.actor_rollout_ref.actor
        self.model, self.ranks = _model_of(config.actor_rollout_ref.model), world_size(config)
        self.passes = passes(
            rollout=recipe.rollout.replay is None,
            ref=ref,
            old_log_prob=not recipe.train.skip_old_log_prob and needs_old_log_probs(config),
            epochs=actor.ppo_epochs,
        )
        given = recipe.profile.peak_tflops
        self.peak_flops_per_s = PEAK_FLOPS_PER_S.get(recipe.platform) if given is None else given * 1e12

    def of_step(
        self, lengths: Sequence[int] | None, tokens: Mapping[str, float] | None, seconds: Mapping[str, float]
    ) -> dict[str, Any] | None:
        """{tokens_per_s_per_rank, generated_per_s_per_rank, tflops_per_s_per_rank, mfu}; None without an update.

        `lengths`: tokens of each sequence, prompt and response, without padding; `tokens`: trainer/summary.py's.
        tflops_per_s_per_rank and mfu: {step and each phase that counts: rate}, None without a model, or without a peak.
        """
        if not lengths or tokens is None or not seconds["step"]:
            return None
        found: dict[str, Any] = {"tokens_per_s_per_rank": tokens["total"] / seconds["step"] / self.ranks}
        generated = tokens["responses"] / seconds["rollout"] / self.ranks if seconds.get("rollout") else None
        found |= {"generated_per_s_per_rank": generated, "tflops_per_s_per_rank": None, "mfu": None}
        if self.model is not None:
            forward = forward_flops_of(self.model, lengths)
            counts = {**self.passes, "step": sum(self.passes.values())}
            rates = {
                phase: count * forward / seconds[phase] / self.ranks
                for phase, count in counts.items()
                if seconds.get(phase)
            }
            found["tflops_per_s_per_rank"] = {phase: rate / 1e12 for phase, rate in rates.items()}
            if self.peak_flops_per_s:
                found["mfu"] = {phase: rate / self.peak_flops_per_s for phase, rate in rates.items()}
        return found


def metrics_of(rates: Mapping[str, Any] | None) -> dict[str, float]:
    """{name: value} of a step's rates for Tracking and metrics.jsonl."""
    if rates is None:
        return {}
    found = {f"recipe/{name}": rate for name, rate in rates.items() if isinstance(rate, float)}
    for name in ("tflops_per_s_per_rank", "mfu"):
        found |= {f"recipe/{name}/{phase}": rate for phase, rate in (rates[name] or {}).items()}
    return found


def profile_of_step(workers: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """{files, faults} of a profiled step from every worker's report (worker/profile.py); None where none was."""
    found = [worker for worker in workers if worker is not None]
    return {key: [entry for worker in found for entry in worker[key]] for key in ("files", "faults")} if found else None


def said_of_profile(profile: Mapping[str, Any]) -> str:
    """One line about the traces of a step."""
    faults = profile["faults"]
    more = f"; {len(faults)} could not be written, first: {faults[0]}" if faults else ""
    return f"profiled, so its times are not comparable: {len(profile['files'])} files in profile/{more}"


def _model_of(section: Any) -> ModelShape | None:
    """Sizes as training reads them: the folder's config.json with override_config.model_config over it."""
    file = Path(section.path) / "config.json"
    if not file.is_file():
        return None
    changes = (section.get("override_config") or {}).get("model_config") or {}
    return read_model_shape({**read_config(file), **changes})
