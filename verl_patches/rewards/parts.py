"""Read the parts of a run's reward, name them in batches and metrics, and compute the penalty of long responses.

No torch.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_patches.errors import ConfigError
from verl_patches.recipe import REWARD_KEYS, Part, Reward
from verl_patches.values import field_types, unknown_key, value_faults

SHORT_FORM = "custom_reward_function"  # verl's section: short for one entry of name python in recipe.rewards
# REWARD_PREFIX + a part's label names its scores in verl's reward_extra_info, and their mean in metrics
REWARD_PREFIX = "reward/"
SECONDS = "reward_seconds"  # column of a batch: seconds that all parts took for each sample
TIMED_OUT = "timed_out"  # key of a python entry with timeout_s: 1.0 for a sample that took more
RM_SCORES = "rm_scores"  # [B, M] fp32 in a batch: scores of the M reward models, in the order of their entries


def reward_parts(config: DictConfig) -> tuple[Part, ...]:
    """Return the parts of a run's reward in order; without any key that names one, verl's own score by data source.

    The parts are those of recipe.rewards, or else verl's section custom_reward_function. Raises ConfigError that lists
    every fault of the entries, or if both name a reward.
    """
    values = (OmegaConf.select(config, key) for key in ("recipe.rewards", SHORT_FORM))
    listed, short = (OmegaConf.to_container(value) if OmegaConf.is_config(value) else value for value in values)
    short = short or {}
    if listed is None:
        if not short.get("path"):
            return (Part("data.reward_fn_key", "data_source", Reward("data_source")),)
        kwargs, function = dict(short.get("reward_kwargs") or {}), short.get("name") or "compute_score"
        return (Part(SHORT_FORM, "python", Reward("python", path=short["path"], function=function, kwargs=kwargs)),)
    entries = {f"recipe.rewards[{number}]": entry for number, entry in enumerate(listed)}
    faults = [fault for where, entry in entries.items() for fault in _faults(where, entry)]
    if short.get("path"):
        faults.append(
            f"{SHORT_FORM}.path and recipe.rewards are both given; expected one of them (the first is short for one "
            f"entry of name python): set {SHORT_FORM}.path=null, or recipe.rewards=null"
        )
    if faults:
        raise ConfigError("Invalid rewards:\n  " + "\n  ".join(faults))
    counts = Counter(entry["name"] for entry in entries.values())
    parts = []
    for number, (where, entry) in enumerate(entries.items()):
        name = entry["name"]
        label = f"{name}_{number}" if counts[name] > 1 else name
        parts.append(Part(where, label, Reward(**entry)))
    return tuple(parts)


def _faults(where: str, entry: Mapping[str, Any]) -> list[str]:
    """Return the faults of one entry: its name, a value, or a key that its name does not take."""
    types = {f"{where}.{key}": kind for key, kind in field_types(Reward).items()}
    faults = value_faults(types, {f"{where}.{key}": value for key, value in {"name": None, **entry}.items()})
    if any(fault.startswith(f"{where}.name ") for fault in faults):
        return faults
    known = dict.fromkeys(("name", "weight", *REWARD_KEYS[entry["name"]]))
    hint = f"{entry['name']} takes {', '.join(known)}"
    faults += [f"{where}: {unknown_key(key, known, hint)}" for key in entry if key not in known]
    files = {"python": "the Python file that defines the function"}
    files["reward_model"] = "a checkpoint of algo=rm, or another folder with score.weight"
    if entry["name"] in files and entry.get("path") is None:
        faults.append(f"{where}.path is missing; expected {files[entry['name']]}")
    return faults


def length_penalty(tokens: int, longest: int, buffer: int) -> float:
    """Return DAPO's penalty of a response of `tokens` tokens, in -1..0 (arXiv:2503.14476, eq. 13).

    0 up to `longest - buffer`, then linear to -1 at `longest`.
    """
    return max(min((longest - buffer - tokens) / buffer, 0.0), -1.0)


def part_means(columns: Mapping[str, Any]) -> dict[str, float]:
    """Return {label, or label/KEY: mean over the batch} of the parts and their other numbers, from verl's columns.

    Values that are not finite are left out.
    """
    named = {name.removeprefix(REWARD_PREFIX): c for name, c in columns.items() if name.startswith(REWARD_PREFIX)}
    finite = {name: [value for value in column if math.isfinite(value)] for name, column in named.items()}
    return {name: statistics.fmean(values) for name, values in finite.items() if values}


def slowest_sample(columns: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return {sample: row, uid, data_source, seconds} of the sample that took longest; None without SECONDS."""
    seconds = columns.get(SECONDS)
    if seconds is None:
        return None
    row = max(range(len(seconds)), key=lambda row: seconds[row])
    uid, source = (None if name not in columns else str(columns[name][row]) for name in ("uid", "data_source"))
    return {"sample": row, "uid": uid, "data_source": source, "seconds": round(float(seconds[row]), 4)}
