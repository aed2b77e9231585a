"""YAML that users write, read as Hydra reads it, but within bounds that are checked before anything is built.

Stricter than YAML: plain values only, no aliases, no key twice, UTF-8.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NoReturn

import yaml

from verl_patches.errors import ConfigError
from verl_patches.values import printable

MAX_BYTES = 2**20
MAX_DEPTH = 32  # of lists and sections inside each other
MAX_VALUES = 50_000  # keys and values
_CORE = "tag:yaml.org,2002:"
_PLAIN = {f"{_CORE}{name}" for name in ("str", "int", "float", "bool", "null", "seq", "map")}


def read_yaml(path: Path) -> Any:
    """The value of the one document of a file, None for an empty file.

    Raises ConfigError, "FILE:LINE: expected ..., found ...", for a file that is not there, that is not YAML in UTF-8,
    or that is beyond a bound.
    """
    return next(iter(parse_yaml(head_of(path), str(path))), None)


def head_of(path: Path, expected: str = "a YAML file") -> bytes:
    """The file's first MAX_BYTES and, where it is longer, one byte more; ConfigError where it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: expected {expected}, found: {error.strerror}") from None


def parse_yaml(text: str | bytes, source: str, documents: int = 1) -> list[Any]:
    """The values of at most `documents` documents of a text; as read_yaml, which names `source` as the file."""
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{source}: expected at most {MAX_BYTES} bytes, found more")
    if isinstance(text, bytes):
        try:
            text = text.decode()
        except UnicodeDecodeError as error:
            line = text.count(b"\n", 0, error.start) + 1
            found = f"byte 0x{text[error.start]:02x}"
            raise ConfigError(f"{source}:{line}: expected text in UTF-8, found {found}") from None
    try:
        _check(text, source, documents)
        return list(yaml.load_all(text, _loader()))
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}:{printable(_explain(error, text))}") from None


@functools.cache
def _loader() -> type[yaml.SafeLoader]:
    """Hydra's loader; a value that looks like a number and is none is an error with its line."""
    from omegaconf._utils import get_yaml_loader

    class Loader(get_yaml_loader()):
        def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
            try:
                return super().construct_object(node, deep)
            except ValueError as error:
                raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from None

    return Loader


def _explain(error: yaml.YAMLError, text: str) -> str:
    """PyYAML's error as "LINE: expected ..., found ..."."""
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        return f"{line}: expected text, found the character U+{ord(text[error.position]):04X}"
    mark = error.problem_mark or error.context_mark
    problem = " ".join((error.problem or error.context or "").split())
    if "'\\t'" in problem:
        return f"{mark.line + 1}: expected spaces, found a tab"
    expected, but, found = (
        problem.replace(", but got ", ", but found ").removeprefix("expected ").partition(", but found ")
    )
    return f"{mark.line + 1}: expected {expected if but else 'YAML'}, found {found or problem.removeprefix('found ')}"


def _check(text: str, source: str, documents: int) -> None:
    """ConfigError for what this module does not read. The parser's events come one by one, so nothing is built."""
    depth = values = 0

    def refuse(expected: str, found: str) -> NoReturn:
        raise ConfigError(f"{source}:{event.start_mark.line + 1}: expected {expected}, found {printable(found)}")

    for event in yaml.parse(text, _loader()):
        if isinstance(event, yaml.DocumentStartEvent):
            documents -= 1
            if documents < 0:
                refuse("the end of the file", "another document")
        elif isinstance(event, yaml.AliasEvent):
            refuse("a value", f"*{event.anchor}, an alias: write out what it stands for")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent):
            values += 1
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
            if event.tag not in (None, "!", *_PLAIN):
                refuse("a plain value", f"the tag {event.tag.replace(_CORE, '!!')}")
            if values > MAX_VALUES:
                refuse(f"at most {MAX_VALUES} values", "more")
            if depth > MAX_DEPTH:
                refuse(f"at most {MAX_DEPTH} levels", "more")
