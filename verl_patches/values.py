"""Types and bounds of values that users give, and sentences about values that break them. No torch."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

LARGEST = 2**63 - 1  # of an integer in torch; sentences do not name it where a value is below
Count = Annotated[int, Field(ge=1, le=LARGEST, strict=True)]
Natural = Annotated[int, Field(ge=0, le=LARGEST, strict=True)]
Interval = Annotated[int, Field(ge=-1, le=LARGEST, strict=True)]  # a number of steps; -1 and 0 switch it off
Seed = Annotated[int, Field(ge=0, le=2**32 - 1, strict=True)]  # numpy's
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Factor = Annotated[float, Field(ge=1, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]  # of a running mean
Probability = Annotated[float, Field(gt=0, le=1)]
Text = Annotated[str, Field(min_length=1)]
Port = Annotated[int, Field(ge=1024, le=65535)]
# of a folder: no "/", and not "." or "-x", which commands would read in another way
Name = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9_][^/\x00-\x1f]*$", description="a plain folder name, such as smoke-ep2")
]


def printable(text: str, keep: str = "") -> str:
    """A text of unknown origin for a terminal or a file: control characters but `keep` as escapes, such as \\x1b."""
    if text.isprintable():
        return text
    return "".join(char if char in keep or _is_shown(char) else char.encode("unicode_escape").decode() for char in text)


def _is_shown(char: str) -> bool:
    return char.isprintable() or unicodedata.category(char) == "Zs"


def value_faults(schema: Any, values: Mapping[str, Any], prefix: str = "", may_lack: bool = False) -> list[str]:
    """One sentence for each key of `values` that `schema`, a pydantic model or a dataclass, does not allow.

    With `may_lack` a key that is missing is no fault.
    """
    adapter = TypeAdapter(schema)
    try:
        adapter.validate_python(values)
    except ValidationError as error:
        root = adapter.json_schema()
        errors = [fault for fault in error.errors() if not (may_lack and fault["type"] == "missing")]
        keys = dict.fromkeys(_key_of(fault["loc"], root) for fault in errors)
        return [_fault(key, values, root, prefix) for key in keys]
    return []


def value_words(schema: Any, key: str) -> str:
    """What `schema` allows for one of its keys, in words."""
    root = TypeAdapter(schema).json_schema()
    return _words(root["properties"][key], root)


def _key_of(location: Sequence[str | int], root: Mapping[str, Any]) -> tuple[str, ...]:
    """The key of an error; behind it pydantic gives alternatives of a union and indices of lists."""
    key, node = (), root
    for part in location:
        node = _keys_of(node, root).get(part)
        if node is None:
            break
        key = (*key, part)
    return key


def _fault(key: tuple[str, ...], values: Any, root: Mapping[str, Any], prefix: str) -> str:
    node: Mapping[str, Any] = root
    for part in key:
        node = _keys_of(node, root)[part]
        values = values.get(part, _ABSENT) if isinstance(values, Mapping) else _ABSENT
    found = "missing" if values is _ABSENT else "null" if values is None else repr(values)
    below = f", below {LARGEST}" if isinstance(values, int) and values > LARGEST else ""
    return f"{prefix}{'.'.join(key)} is {found}; expected {_words(node, root)}{below}"


def _keys_of(node: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of a section, which may be null; empty for other values."""
    choices = [_resolved(choice, root) for choice in node.get("anyOf", [node])]
    return next((choice["properties"] for choice in choices if "properties" in choice), {})


def _resolved(node: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    return root["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node


def _words(node: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    """What a JSON schema allows, in words."""
    node = _resolved(node, root)
    if "pattern" in node:
        return node["description"]
    if "const" in node or "enum" in node:
        return " or ".join(repr(value) for value in node.get("enum", [node.get("const")]))
    if "anyOf" in node:
        return " or ".join(_words(choice, root) for choice in node["anyOf"])
    if node.get("type") == "array":
        return f"a list, each {_words(node['items'], root)}"
    node = {name: bound for name, bound in node.items() if bound != LARGEST}
    bounds = [f"{sign} {node[name]}" for name, sign in _BOUNDS.items() if name in node]
    if "minimum" in node and "maximum" in node:
        bounds = [f"from {node['minimum']} to {node['maximum']}"]
    return " ".join([_TYPES.get(node.get("type"), "a value"), " and ".join(bounds)]).strip()


_ABSENT = object()
_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
_TYPES = {"integer": "a whole number", "number": "a number", "string": "text", "boolean": "true or false"}
_TYPES |= {"null": "null", "object": "a section"}
