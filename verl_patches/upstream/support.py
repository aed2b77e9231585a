"""Find configuration keys that a line does not support, by configs/upstream.yaml."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_patches.errors import Check
from verl_patches.spec import RunSpec
from verl_patches.upstream.pins import Unsupported, load_pins
from verl_patches.values import unknown_key

_ENGINE_KEYS = "actor_rollout_ref.rollout.engine_kwargs.vllm"  # keywords of vLLM's LLM(...)


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
    """Refuse keys that the run's line does not support, and keywords that vLLM's engine does not have."""
    for entry, value in refused_keys(run):
        yield Check(f"line {run.line}", False, refusal_text(entry, value, run.line))
    known = vllm_arguments()
    for keyword in OmegaConf.select(run.verl, _ENGINE_KEYS) or ():
        if known and keyword not in known:
            why = unknown_key(keyword, known, "the installed vLLM has no such argument")
            yield Check("engine_kwargs", False, f"{_ENGINE_KEYS}.{keyword}: {why}")


@functools.cache
def vllm_arguments() -> dict[str, None]:
    """Return the arguments of vLLM's LLM and of its EngineArgs, from the installed source; {} without vLLM."""
    spec, names = importlib.util.find_spec("vllm"), dict[str, None]()
    for folder in (spec and spec.submodule_search_locations) or ():
        for file, class_name in (("engine/arg_utils.py", "EngineArgs"), ("entrypoints/llm.py", "LLM")):
            tree = ast.parse(Path(folder, file).read_text())
            body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
            for node in body:
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    names[node.target.id] = None
                elif isinstance(node, ast.FunctionDef) and node.name == "__init__":
                    names |= dict.fromkeys(word.arg for word in node.args.args[1:])
    return names


def refusal_text(entry: Unsupported, value: Any, line: str) -> str:
    """Return one sentence: the key and its value, why the line does not support it, what to set instead."""
    neutral = " or ".join("null" if word is None else str(word) for word in entry.neutral)
    return f"{entry.key} is {value}, line {line} supports {neutral} only: {entry.why}. Instead: {entry.instead}"
