"""Read and check the values that users give: YAML files, types with bounds, their faults, and secrets. No torch."""

from __future__ import annotations

import difflib
import functools
import re
import traceback
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf._utils import get_yaml_loader  # yaml.SafeLoader that reads 1e-3 as a number and refuses duplicate keys
from omegaconf.errors import OmegaConfBaseException
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from verl_patches.errors import ConfigError, locate_error

Count = Annotated[int, Field(ge=1, strict=True)]
Natural = Annotated[int, Field(ge=0, strict=True)]
Interval = Annotated[int, Field(ge=-1, strict=True)]  # a number of steps; -1 and 0 switch it off
Seed = Annotated[int, Field(ge=0, le=2**32 - 1, strict=True)]  # numpy's
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Factor = Annotated[float, Field(ge=1, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]  # decay of a running mean
Probability = Annotated[float, Field(gt=0, le=1)]
Text = Annotated[str, Field(min_length=1)]
Port = Annotated[int, Field(ge=1024, le=65535)]
# a folder's name: no "/", and not "." or "-x", which commands would read as another folder or as an option
Name = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9_][^/\x00-\x1f]*$", description="a plain folder name, such as smoke-ep2")
]
RayAddress = Annotated[
    str,
    Field(
        pattern=r"^(auto|([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):0*([1-9]\d{0,3}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d{2}|655[0-2]\d|6553[0-5]))$",
        description="auto or HOST:PORT, such as 10.0.0.1:6379",
    ),
]
Dotted = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$", description="package.module.function")]


def printable(text: str, keep: str = "") -> str:
    """Return a text of unknown origin for a terminal or a file: control characters except `keep` as escapes (\\x1b)."""
    if text.isprintable():
        return text
    shown = {char for char in text if char in keep or char.isprintable() or unicodedata.category(char) == "Zs"}
    return "".join(char if char in shown else char.encode("unicode_escape").decode() for char in text)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the keys and values of a YAML file, as Hydra reads it; raise ConfigError for any other file."""
    try:
        found = OmegaConf.to_container(OmegaConf.load(path))
    except OSError as error:
        raise ConfigError(f"{path}: expected a YAML file of KEY: VALUE, found: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: expected a YAML file of KEY: VALUE, found: {_one_line(error)}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: expected a YAML file of KEY: VALUE, found a {type(found).__name__}")
    return found


def parse_yaml(text: str | bytes, source: str) -> list[Any]:
    """Return the value of each document of a YAML text, as Hydra reads it; ConfigError names `source`."""
    try:
        return list(yaml.load_all(text, get_yaml_loader()))
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: expected YAML, found: {_one_line(error)}") from None


def _one_line(error: Exception) -> str:
    return printable(" ".join(str(error).split()))


def size_text(size_bytes: float) -> str:
    """Return a size with its unit: MB, GB or TB."""
    if size_bytes >= 1e12:
        return f"{size_bytes / 1e12:.2f} TB"
    if size_bytes >= 1e9:
        return f"{size_bytes / 1e9:.1f} GB"
    return f"{size_bytes / 1e6:.1f} MB"


def field_types(schema: type) -> dict[str, Any]:
    """Return {field: type with its bounds} of a dataclass."""
    return get_type_hints(schema, include_extras=True)


def value_faults(types: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    """Return one sentence for each of `values` that its type in `types` refuses; keys that `types` lacks pass."""
    checked = {key: kind for key, kind in types.items() if key in values}
    return [_fault_text(key, values[key], kind) for key, kind in checked.items() if not _is_valid(values[key], kind)]


def allowed_values_text(kind: Any) -> str:
    """Return the values that a type with bounds allows, in words."""
    return _allowed_text(_adapter(kind).json_schema())


RENAMED_KEYS = {  # keys of version 0.1 and their names since 0.2, which are verl's, Megatron's, MindSpeed's and vLLM's
    "recipe.keep_groups": "recipe.filter_groups",
    "recipe.keep_groups.metric": "recipe.filter_groups.metric",
    "recipe.keep_groups.max_batches": "recipe.filter_groups.max_num_gen_batches",
    "recipe.restart.times": "recipe.restart.max_restarts",
    "recipe.restart.without_nodes": "recipe.restart.exclude_nodes",
    "recipe.rollout.dp": "recipe.rollout.data_parallel_size",
    "recipe.rollout.expert_parallel": "recipe.rollout.enable_expert_parallel",
    "recipe.train.alltoall_overlap": "recipe.train.moe_alltoall_overlap_comm",
    "recipe.train.collective_timeout_minutes": "recipe.train.distributed_timeout_minutes",
    "recipe.train.fused_expert_wgrad": "recipe.train.gemm_gradient_accumulation_fusion",
    "recipe.train.fused_linear_wgrad": "recipe.train.gradient_accumulation_fusion",
    "recipe.train.fused_permute": "recipe.train.use_fused_moe_token_permute_and_unpermute",
    "recipe.train.fused_rmsnorm": "recipe.train.use_fused_rmsnorm",
    "recipe.train.fused_rope": "recipe.train.use_fused_rotary_pos_emb",
    "recipe.train.fused_swiglu": "recipe.train.use_fused_swiglu",
    "recipe.train.router_bias_update_rate": "recipe.train.moe_router_bias_update_rate",
}


def unknown_key(key: str, known: Mapping[str, Any], hint: str = "docs/configuration.md lists the keys") -> str:
    """Return a sentence about an unknown key, with the nearest known keys, or `hint` where none is near."""
    if key in RENAMED_KEYS:
        return f"unknown key {key}; it was renamed in version 0.2: write {RENAMED_KEYS[key]}"
    leaf = key.rpartition(".")[2]
    near = difflib.get_close_matches(key, known, n=3, cutoff=0.75)
    near += [name for name in known if f"{name.rpartition('.')[2]}_".startswith(f"{leaf}_") and name not in near]
    todo = f"did you mean {' or '.join(near[:3])}?" if near else hint
    return f"unknown key {key}; {todo}"


@functools.cache
def _adapter(kind: Any) -> TypeAdapter:
    return TypeAdapter(kind, config=ConfigDict(strict=True))


def _is_valid(value: Any, kind: Any) -> bool:
    try:
        _adapter(kind).validate_python(value)
    except ValidationError:
        return False
    return True


def _fault_text(key: str, value: Any, kind: Any) -> str:
    schema = _adapter(kind).json_schema()
    found = "null" if value is None else repr(value)
    allowed = _allowed_text(schema)
    why = f": {schema['description']}" if schema.get("description", allowed) not in allowed else ""
    return f"{key} is {found:.200}; expected {allowed}{why}"


def _allowed_text(node: Mapping[str, Any]) -> str:
    """Return the values that a JSON schema allows, in words."""
    if "pattern" in node or ("description" in node and node.get("type") == "array"):
        return node["description"]
    if "const" in node or "enum" in node:
        return " or ".join(repr(value) for value in node.get("enum", [node.get("const")]))
    if "anyOf" in node:
        return " or ".join(_allowed_text(choice) for choice in node["anyOf"])
    if node.get("type") == "array":
        return f"a list, each {_allowed_text(node['items'])}"
    if node.get("minLength") == 1:
        return "text, not empty"
    bounds = [f"{sign} {node[name]}" for name, sign in _BOUNDS.items() if name in node]
    if "minimum" in node and "maximum" in node:
        bounds = [f"from {node['minimum']} to {node['maximum']}"]
    return " ".join([_TYPES.get(node.get("type", ""), "a value"), " and ".join(bounds)]).strip()


_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
_TYPES = {"integer": "a whole number", "number": "a number", "string": "text", "boolean": "true or false"}
_TYPES |= {"null": "null", "object": "a section"}


# -- secrets, which are never written to a file or a log: found by a key's or variable's name, or by a value's form ----

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_SECRET_NAME = re.compile(  # matches a name's words in lower case, "_" before each, without numbers at the end
    r"_[a-z]*(?:secrets?|passwords?|passwd|passphrase|credentials?)(?:_|$)|_(?:authorization|bearer|cookies?)(?:_|$)"
    r"|_[a-z]*(?:api|auth|access|secret|private|signing)_?(?:keys?|token)(?:_|$)"
    r"|_(?:hf|hub|wandb|swanlab|openai|github|gitlab|aws|db|ssh|license|account|encryption|bot|refresh|session)"
    r"_?(?:keys?|token)(?:_|$)"
    r"|_(?:pass|o?auth|[a-z]*token)$|[a-z]_(?:pwd|pat)$"
)
_NO_SECRET_NAME = re.compile(  # a secret's file or path, a switch of logins, tokens of text, and words such as monkey
    r"_(?:file|path|dir|sock|authentication)$|_(?:mon|tur|don|hot)key$"
    r"|_(?:eos|bos|pad|unk|sep|cls|mask|image|video|special|start|end|stop|max|min|num|n|new|per)_?token$"
)
_HARMLESS = re.compile(  # NAME=value of a variable ($X), a switch (use_auth_token=true) or a count (n_pass=8)
    r"(?is)[^=]*=(?:\$.*|yes|no|true|false|none|null|on|off)|[^=]*(?:pass|auth|token)=-?[0-9]{1,3}(?:\.[0-9]+)?"
)
_SECRET_VALUE = re.compile(
    r"\bhf_[A-Za-z0-9]{20}|(?<![\w/.-])sk-[A-Za-z0-9_-]{20,}(?![\w/-])"  # except a folder of a path: /data/sk-NAME/x
    r"|\bgh[pousr]_[A-Za-z0-9]{30}|\bgithub_pat_\w{20}|\bglpat-[\w-]{20}"
    r"|\bxox[abprs]-[\w-]{10}|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bAIza[\w-]{35}|\beyJ[\w-]{10,}\.eyJ[\w-]{10}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY|://[^/\s:@]+:[^/\s@$]+@"
)
_ASSIGNMENT = re.compile(r"([\w.-]+)=(?=([^,;\s]+))")  # --export=NAME=value has two matches


def is_secret_variable(name: str) -> bool:
    """Return whether a name says that its value is a secret: HF_TOKEN, DB_PASS, api_key; not eos_token, prompt_key.

    A name in capitals, as variables have, is secret wherever it ends in KEY: SSH_KEY, OPENAIKEY.
    """
    words = "".join(f"_{word.lower()}" for word in _WORD.findall(name)).rstrip("_0123456789")
    found = _SECRET_NAME.search(words) or (name.isupper() and words.endswith("key"))
    return bool(found) and not _NO_SECRET_NAME.search(words)


def is_secret_value(text: str) -> bool:
    """Return whether a text holds a known kind of token, a private key, or an address with a password."""
    return _SECRET_VALUE.search(text) is not None


def is_secret(key: str, value: Any) -> bool:
    """Return whether a key of a configuration, or an option, has a secret as its value; $NAME only refers to one."""
    if not isinstance(value, str) or not value.strip():
        return False
    return is_secret_value(value) or (is_secret_variable(key) and not _HARMLESS.fullmatch(f"{key}={value}"))


def secret_options(words: Sequence[str]) -> list[str]:
    """Return the names of secrets among the words of a command: NAME=value, --name=value, --name value."""
    pairs = [(given[1], given[2]) for word in words for given in _ASSIGNMENT.finditer(word)]
    pairs += [(name, word) for name, word in zip(words, words[1:], strict=False) if re.match("-[^=]*$", name)]
    secrets = [name for name, word in pairs if word[:1] != "-" and is_secret_variable(name) and is_secret(name, word)]
    named = [name.strip("-") for name in secrets]
    return named or ["a word" for word in words if is_secret_value(word)]


def leaves(
    section: Mapping[str, Any], prefix: str = "", ends: Callable[[str], bool] = lambda key: False
) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of each leaf of nested mappings, in order.

    An empty mapping is a leaf, as is anything at a key for which `ends` is true. Lists are leaves.
    """
    for name, value in section.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and not ends(key):
            yield from leaves(value, f"{key}.", ends)
        else:
            yield key, value


@contextmanager
def loading_errors(expected: str, *places: str) -> Iterator[None]:
    """Raise ConfigError, "EXPECTED; found ...", in place of any error of a library that loads what a user named.

    A line of the user's files or folders `places` that led to the error is named.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # transformers, datasets and each store raise errors of their own
        text = printable(" ".join(f"{type(error).__name__}: {error}".split()))[:300]
        text = locate_error(text, "".join(traceback.format_exception(error)), places)
        raise ConfigError(f"{expected}; found {text}") from error
