"""Read a run's recorded responses one by one, as people look at them (step/replay/recording.py has the files)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl_patches.errors import ConfigError
from verl_patches.rewards.parts import REWARD_PREFIX
from verl_patches.step.replay.recording import load_rows
from verl_patches.tools.data.from_rollouts import recorded_run, run_tokenizer, scored_steps


def read_samples(run: Path, step: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the samples of a step, the newest by default, in the order of its rows; `run` is the folder of a start.

    {step, sample: its row, reward, parts: {label: score} of the reward, tokens: of the response, cut: whether they
    reach the length limit, dlogp: {mean, max} of |vLLM's log-prob - the actor's| over them in nats or None, prompt,
    response, uid, and TEXT_COLUMNS where they are recorded}. Raises ConfigError for a step that is not recorded.
    """
    spec = recorded_run(run)
    steps, tokenizer = scored_steps(run), run_tokenizer(spec)
    number = max(steps) if step is None else step
    if number not in steps:
        text = f"expected a step that is recorded, {min(steps)} to {max(steps)}, found {step}"
        raise ConfigError(f"samples: --step: {text}; give one of them, or leave it out for the newest")
    for row, found in enumerate(load_rows(steps[number], number)):
        sample = {"step": number, "sample": row, "reward": found.pop("score"), "tokens": len(found["response"])}
        sample |= {"parts": _take_prefixed(found, REWARD_PREFIX), "dlogp": _take_prefixed(found, "dlogp/") or None}
        texts = {name: tokenizer.decode(found[name]) for name in ("prompt", "response")}
        yield {**sample, **found, **texts}


def _take_prefixed(found: dict[str, Any], prefix: str) -> dict[str, float]:
    """Remove the values whose names begin with `prefix`, and return them without it."""
    return {name.removeprefix(prefix): found.pop(name) for name in [*found] if name.startswith(prefix)}
