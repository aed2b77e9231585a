"""Find configuration keys and shell variables that a line does not support, by configs/upstream.yaml."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_patches.errors import Check, ConfigError
from verl_patches.patching.report import Finding
from verl_patches.patching.switches import PATCHES_VAR, nearest_text, parse_switches
from verl_patches.spec import RunSpec
from verl_patches.upstream.pins import Pins, Unsupported, load_pins
from verl_patches.values import is_secret_value, is_secret_variable, unknown_key

# an unlisted variable with such a prefix is reported, as its name may be misspelled
_PREFIXES = ("VERL_", "VLLM_", "HCCL_", "ASCEND_", "TORCH_NPU_", "PYTORCH_NPU_", "MINDSPEED_")
_ENGINE_PREFIX = "actor_rollout_ref.rollout.engine_kwargs.vllm."


def refused_keys(run: RunSpec) -> list[tuple[Unsupported, Any]]:
    """Return (entry of the pin file, value) of every key of a run that its line does not support.

    Keywords of vLLM's engine that the pin file does not list get an entry made here.
    """
    keys, entries = [], load_pins().unsupported_on(run.line)
    for entry in (*entries, *_engine_entries(run.line, run.engine, {entry.key for entry in entries})):
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


def _engine_entries(line: str, engine: Mapping[str, Any], listed: Collection[str]) -> Iterator[Unsupported]:
    """Yield entries for keywords of vLLM's engine that verl itself passes, or that the installed vLLM lacks."""
    given = load_pins().given_by_verl
    for keyword in engine:
        if (key := f"{_ENGINE_PREFIX}{keyword}") in listed:
            continue
        if keyword in given.keywords:
            decides = given.keywords[keyword]
            why = f"verl already passes this keyword to vLLM ({given.at[line]}), and passing it twice is a TypeError"
            instead = f"set {decides}" if "." in decides else f"leave it unset, verl always passes {decides}"
        elif (arguments := engine_arguments()) and keyword not in arguments:
            why, instead = "the installed vLLM has no such argument", unknown_key(keyword, arguments, "remove it")
        else:
            continue
        yield Unsupported(key=key, lines=(line,), neutral=(None,), why=why, instead=instead)


@functools.cache
def engine_arguments() -> dict[str, None]:
    """Return the arguments of vLLM's LLM and of its EngineArgs, from the installed source; {} without vLLM."""
    spec, names = importlib.util.find_spec("vllm"), dict[str, None]()
    for folder in (spec and spec.submodule_search_locations) or ():
        for file, name in (("engine/arg_utils.py", "EngineArgs"), ("entrypoints/llm.py", "LLM")):
            tree = ast.parse(Path(folder, file).read_text())
            body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
            init = next((node for node in body if isinstance(node, ast.FunctionDef) and node.name == "__init__"), None)
            targets = (node.target for node in body if isinstance(node, ast.AnnAssign))
            fields = (target.id for target in targets if isinstance(target, ast.Name))
            if init is not None:
                fields = (word.arg for word in init.args.args[1:])
            names |= dict.fromkeys(fields)
    return names


def support_checks(run: RunSpec) -> Iterator[Check]:
    """Refuse keys that the run's line does not support."""
    for entry, value in refused_keys(run):
        yield Check(f"line {run.line}", False, refusal_text(entry, value, run.line))


def refusal_text(entry: Unsupported, value: Any, line: str) -> str:
    """Return one sentence: the key and its value, why the line does not support it, what to set instead."""
    neutral = " or ".join("null" if word is None else str(word) for word in entry.neutral)
    return f"{entry.key} is {value}, line {line} supports {neutral} only: {entry.why}. Instead: {entry.instead}"


def shell_findings(
    line: str, environ: Mapping[str, str] | None = None, replaced: Collection[str] = ()
) -> list[Finding]:
    """Return a finding for each variable of `environ` (default: this process) that is listed or has a known prefix.

    It is a problem if no pin reads the variable, or if its value is not allowed on `line`, unless the launcher replaces
    it (`replaced`). It is a note if only another line reads the variable, or the pin file does not list it.
    """
    pins, variables = load_pins(), sorted((os.environ if environ is None else environ).items())
    findings = (_shell_finding(pins, line, name, value, name in replaced) for name, value in variables)
    return [finding for finding in findings if finding]


def _shell_finding(pins: Pins, line: str, name: str, given: str, replaced: bool) -> Finding | None:
    value = "(set)" if given and (is_secret_variable(name) or is_secret_value(given)) else given
    if name in pins.read_nowhere:
        return Finding(name, "problem", "shell", "unset", value, f"unset {name}: {pins.read_nowhere[name]}")
    variable = pins.environment.get(name)
    if variable is None:
        if not name.startswith(_PREFIXES):
            return None
        text = f"neither set nor checked by this recipe{nearest_text(name, pins.environment)}"
        return Finding(name, "note", "shell", "", value, text)
    if not variable.reads(line):
        return Finding(name, "note", "shell", "", value, f"line {line} does not read it ({pins.read_by(name, line)})")
    if name == PATCHES_VAR:
        try:
            parse_switches(given)
        except ConfigError as error:
            return Finding(name, "problem", "shell", variable.note, value, f"correct or unset it: {error}")
    if replaced:
        return Finding(name, "fine", "shell", "", value, "the launcher replaces it")
    if variable.accepts(given):
        return Finding(name, "fine", pins.read_by(name, line), variable.allowed_text, value)
    note = f": {variable.note}" if variable.note else ""
    todo = f"correct or unset it{note} (read by {pins.read_by(name, line)})"
    return Finding(name, "problem", "shell", variable.allowed_text, value or "an empty string", todo)
