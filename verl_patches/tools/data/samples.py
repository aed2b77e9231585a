"""Read a run's recorded responses one by one, as people look at them (step/replay/recording.py has the files)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open

from verl_patches.errors import ConfigError
from verl_patches.rewards.parts import REWARD_PREFIX
from verl_patches.tools.data.from_rollouts import load_tensors, recorded_run, run_tokenizer, scored_steps
from verl_patches.values import loading_errors


def read_samples(run: Path, step: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the samples of a step, the newest by default, in the order of its rows; `run` is the folder of a start.

    {step, sample: its row, reward, parts: {label: score} of the reward, tokens: of the response, cut: whether they
    reach the length limit, dlogp: {mean, max} of |vLLM's log-prob - the actor's| over them in nats or None, prompt,
    response, uid, and TEXT_COLUMNS where they are recorded}. Raises ConfigError for a step that is not recorded.
    """
    spec = recorded_run(run)
    steps, tokenizer = scored_steps(run, spec), run_tokenizer(spec)
    number = max(steps) if step is None else step
    if number not in steps:
        text = f"expected a step that is recorded, {min(steps)} to {max(steps)}, found {step}"
        raise ConfigError(f"samples: --step: {text}; give one of them, or leave it out for the newest")
    folder, names = steps[number], ("prompts", "responses", "attention_mask")
    prompts, responses, masks = load_tensors(folder / f"step_{number}.safetensors", *names)
    scores, width = folder / f"scores_{number}.safetensors", prompts.shape[1]
    with loading_errors(f"{scores}: expected a recording (record the run again)"), safe_open(scores, "pt") as file:
        columns = {name: file.get_tensor(name).tolist() for name in file.keys()}
        columns |= {name: json.loads(text) for name, text in (file.metadata() or {}).items()}
    for row, mask in enumerate(masks.bool()):
        ids, found = responses[row][mask[width:]].tolist(), {name: values[row] for name, values in columns.items()}
        yield {
            "step": number,
            "sample": row,
            "reward": found.pop("score"),
            "parts": _take_prefixed(found, REWARD_PREFIX),
            "tokens": len(ids),
            "cut": len(ids) == responses.shape[1],
            "dlogp": _take_prefixed(found, "dlogp/") or None,
            "prompt": tokenizer.decode(prompts[row][mask[:width]].tolist()),
            "response": tokenizer.decode(ids),
            "uid": bytes(found.pop("uid")).hex(),
            **found,
        }


def _take_prefixed(found: dict[str, Any], prefix: str) -> dict[str, float]:
    """Remove the values whose names begin with `prefix`, and return them without it."""
    return {name.removeprefix(prefix): found.pop(name) for name in [*found] if name.startswith(prefix)}
