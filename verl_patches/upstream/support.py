"""Find configuration keys that a line does not support, by configs/upstream.yaml."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_patches.errors import Check
from verl_patches.spec import RunSpec
from verl_patches.upstream.pins import Unsupported, load_pins


def refused_keys(run: RunSpec) -> list[tuple[Unsupported, Any]]:
    """Return (entry of the pin file, value) of every key of a run that its line does not support."""
    keys = []
    for entry in load_pins().unsupported_on(run.line):
        value = OmegaConf.select(run.verl, entry.key)
        if value is not None and value not in entry.neutral:
            keys.append((entry, OmegaConf.to_container(value) if OmegaConf.is_config(value) else value))
    return keys


def key_refusal(config: DictConfig, key: str) -> str | None:
    """Return why the pin file refuses a key or a section above it; None if it accepts both."""
    for entry in load_pins().unsupported_on(config.recipe.line):
        if f"{key}.".startswith(f"{entry.key}."):
            return refusal_text(entry, OmegaConf.select(config, entry.key), config.recipe.line)
    return None


def support_checks(run: RunSpec) -> Iterator[Check]:
    """Refuse keys that the run's line does not support; a planned key is a note, which allows only a dry run."""
    for entry, value in refused_keys(run):
        text = refusal_text(entry, value, run.line)
        planned = f"a start is refused: {text}"
        yield Check(f"line {run.line}", entry.planned, planned if entry.planned else text, note=entry.planned)


def refusal_text(entry: Unsupported, value: Any, line: str) -> str:
    """Return one sentence: the key and its value, why the line does not support it, what to set instead."""
    neutral = " or ".join("null" if word is None else str(word) for word in entry.neutral)
    return f"{entry.key} is {value}, line {line} supports {neutral} only: {entry.why}. Instead: {entry.instead}"
