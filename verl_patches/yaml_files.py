"""YAML that users write, read as Hydra reads it, but within bounds that are checked before anything is expanded.

Stricter than YAML: plain values only, no key twice, no alias inside its own anchor, UTF-8.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from verl_patches.errors import ConfigError
from verl_patches.values import printable

MAX_BYTES = 2**20
MAX_DEPTH = 32  # of lists and sections inside each other
MAX_VALUES = 50_000  # keys and values; what an alias stands for counts each time
_CORE = "tag:yaml.org,2002:"
_PLAIN = {f"{_CORE}{name}" for name in ("str", "int", "float", "bool", "null", "seq", "map")}


def read_yaml(path: Path) -> Any:
    """The value of the one document of a file, None for an empty file.

    Raises ConfigError, "FILE:LINE: expected ..., found ...", for a file that is not there, that is not YAML in UTF-8,
    or that is beyond a bound.
    """
    return next(iter(parse_yaml(head_of(path), str(path))), None)


def head_of(path: Path) -> bytes:
    """The file's first MAX_BYTES and, where it is longer, one byte more; ConfigError where it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: expected a YAML file, found: {error.strerror}") from None


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
        _Checked(source, documents).check(text)
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


@dataclass
class _Collection:
    """A list or section that is not closed yet. `values_before` it; `depth` of what it holds; `keys`: {key: line}."""

    is_section: bool
    anchor: str | None
    values_before: int
    depth: int = 0
    children: int = 0
    keys: dict[str, int] = field(default_factory=dict)


class _Checked:
    """Looks at the parser's events, which come one by one: nothing is built, and nothing beyond a bound is read."""

    def __init__(self, source: str, documents: int) -> None:
        self.source, self.left = source, documents
        self.open: list[_Collection] = []
        self.anchors: dict[str, tuple[int, int]] = {}  # (values, depth) of what is closed
        self.values = 0

    def check(self, text: str) -> None:
        for event in yaml.parse(text, _loader()):
            line = event.start_mark.line + 1
            if isinstance(event, yaml.DocumentStartEvent):
                if not self.left:
                    self._refuse(line, "the end of the file", "another document")
                self.left -= 1
                self.anchors = {}
            elif isinstance(event, yaml.AliasEvent):
                self._alias(event.anchor, line)
            elif isinstance(event, yaml.CollectionEndEvent):
                self._close()
            elif isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent):
                if event.tag not in (None, "!", *_PLAIN):
                    self._refuse(line, "a plain value", f"the tag {event.tag.replace(_CORE, '!!')}")
                self._count(1, 0, line)
                if isinstance(event, yaml.ScalarEvent):
                    if event.anchor:
                        self.anchors[event.anchor] = (1, 0)
                    self._child(line, event.value)
                else:
                    is_section = isinstance(event, yaml.MappingStartEvent)
                    self.open.append(_Collection(is_section, event.anchor, self.values - 1))
                    self._count(0, 0, line)

    def _alias(self, anchor: str, line: int) -> None:
        if any(collection.anchor == anchor for collection in self.open):
            self._refuse(line, "a value that ends", f"*{anchor} inside of &{anchor}")
        if anchor not in self.anchors:
            self._refuse(line, f"&{anchor} before *{anchor}", "none")
        self._count(*self.anchors[anchor], line)
        self._child(line)

    def _close(self) -> None:
        closed = self.open.pop()
        if closed.anchor:
            self.anchors[closed.anchor] = (self.values - closed.values_before, closed.depth + 1)
        if self.open:
            self.open[-1].depth = max(self.open[-1].depth, closed.depth + 1)
        self._child(0)

    def _child(self, line: int, text: str | None = None) -> None:
        """A child of the collection that is open is whole; `text` of a scalar."""
        if not self.open:
            return
        parent = self.open[-1]
        if parent.is_section and parent.children % 2 == 0 and text is not None:
            if text in parent.keys:
                self._refuse(line, "each key once", f"{text} again, after line {parent.keys[text]}")
            parent.keys[text] = line
        parent.children += 1

    def _count(self, values: int, depth: int, line: int) -> None:
        self.values += values
        if self.values > MAX_VALUES:
            self._refuse(line, f"at most {MAX_VALUES} values, aliases expanded", "more")
        if self.open:
            self.open[-1].depth = max(self.open[-1].depth, depth)
        if len(self.open) + depth > MAX_DEPTH:
            self._refuse(line, f"at most {MAX_DEPTH} levels", "more")

    def _refuse(self, line: int, expected: str, found: str) -> NoReturn:
        raise ConfigError(f"{self.source}:{line}: expected {expected}, found {printable(found)}")
