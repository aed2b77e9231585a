"""The reader of YAML files: one sentence with file and line for what is not read, and bounds before expansion."""

import re

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_patches.errors import ConfigError
from verl_patches.yaml_files import MAX_BYTES, MAX_DEPTH, MAX_VALUES, parse_yaml, read_yaml

AFTER = "\n\tan error behind it"  # is not reached


def nested(levels):
    return "a: " + "[" * (levels - 1) + "]" * (levels - 1)


BAD = {
    "tab": ("a:\n\tb: 1\n", 2, "spaces, found a tab"),
    "duplicate": ("a: 1\nb: 2\na: 3\n", 3, "YAML, found duplicate key a"),
    "duplicate inside": ("a:\n  b: {c: 1,\n    c: 2}\n", 3, "YAML, found duplicate key c"),
    "duplicate in quotes": ("a: 1\n'a': 2\n", 2, "YAML, found duplicate key a"),
    "duplicate of two lines": ('"a\\n\\e": 1\n"a\\n\\e": 2\n', 2, r"YAML, found duplicate key a \x1b"),
    "tag": ("a: 1\nb: !home x\n", 2, "a plain value, found the tag !home"),
    "python tag": ("a: !!python/object/apply:os.system [ls]\n", 1, "a plain value, found the tag !!python"),
    "binary": ("a: !!binary aGY=\n", 1, "a plain value, found the tag !!binary"),
    "alias": ("a: &x {b: 1}\nc: *x\n", 2, "a value, found *x, an alias"),
    "alias inside of its anchor": ("&x [*x]\n", 1, "a value, found *x"),
    "two documents": ("a: 1\n---\nb: 2\n", 2, "the end of the file, found another document"),
    "bytes": (b"a: 1\nb: caf\xe9\n", 2, "text in UTF-8, found byte 0xe9"),
    "utf-16": ("a: 1\n".encode("utf-16"), 1, "text in UTF-8, found byte 0xff"),
    "nul": ("a: 1\nb: \x00\n", 2, "text, found the character U+0000"),
    "colons": ("a: 1\nb: c: d\n", 2, "YAML, found mapping values"),
    "open bracket": ("a: [1, 2\n", 2, "',' or ']', found '<stream end>'"),
    "open quote": ("a: 'x\n", 2, "YAML, found unexpected end of stream"),
    "number": ("a: 1\nb: " + "9" * 5000 + "\n", 2, "YAML, found Exceeds the limit"),
    "key of a list": ("? [a]\n: 1\n", 1, "YAML, found unhashable key"),
    "deep list": (nested(MAX_DEPTH + 1) + AFTER, 1, f"at most {MAX_DEPTH} levels, found more"),
    "deep section": ("{a: " * 100_000, 1, f"at most {MAX_DEPTH} levels"),
    "deep blocks": ("- " * 100_000, 1, f"at most {MAX_DEPTH} levels"),
    "many values": ("a: [" + "1," * MAX_VALUES + "1]" + AFTER, 1, f"at most {MAX_VALUES} values"),
}


@pytest.mark.parametrize(("text", "line", "message"), BAD.values(), ids=BAD)
def test_what_is_not_read_is_refused_in_one_line_with_file_and_line(tmp_path, text, line, message):
    path = tmp_path / "bad.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as error:
        read_yaml(path)
    assert str(error.value).startswith(f"{path}:{line}: expected {message}")
    assert "\n" not in str(error.value)


def test_the_bounds_are_where_they_are_said_to_be(tmp_path):
    assert parse_yaml(nested(MAX_DEPTH), "f")
    assert len(parse_yaml("[" + "1," * (MAX_VALUES - 1) + "]", "f")[0]) == MAX_VALUES - 1
    path = tmp_path / "long.yaml"
    path.write_text("#" * MAX_BYTES)
    assert read_yaml(path) is None
    path.write_text("#" * MAX_BYTES + "\n")
    with pytest.raises(ConfigError, match=f"long.yaml.*{MAX_BYTES}"):
        read_yaml(path)


def test_a_file_that_is_not_there_is_named(tmp_path):
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match=re.escape(str(path))):
            read_yaml(path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("# nothing\n", None),
        ("\ufeffa: 1", {"a": 1}),
        ("a: !!str 1\nb: ! c\n", {"a": "1", "b": "c"}),
        ("a: 1e3\nb: 2001-01-01\nc: no\nd: ~\n", {"a": 1000.0, "b": "2001-01-01", "c": False, "d": None}),  # Hydra's
        ("a: {x: 1}\nb: {x: 1}", {"a": {"x": 1}, "b": {"x": 1}}),
        ("a: 日本\n", {"a": "日本"}),
    ],
)
def test_plain_yaml_is_read_as_hydra_reads_it(text, value):
    assert next(iter(parse_yaml(text, "f")), None) == value


def test_several_documents_are_read_where_they_are_expected():
    assert parse_yaml("a: 1\n---\nb: 2\n", "f", documents=2) == [{"a": 1}, {"b": 2}]
    with pytest.raises(ConfigError, match="f:3: expected the end of the file"):
        parse_yaml("a: 1\n---\n---\n", "f", documents=2)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text("abc:#-[]{}&*!|>'\"%@` \n", max_size=8),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text("ab", min_size=1), children, max_size=4),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(VALUES)
def test_what_yaml_writes_is_read_back(value):
    assert parse_yaml(yaml.safe_dump(value), "f") == [value]


@settings(max_examples=300, deadline=None)
@given(st.text("ab:-[]{}&*!|>'\"%@`,? \n\t<~1#.", max_size=24) | st.binary(max_size=24))
def test_any_text_is_read_or_refused(text):
    try:
        parse_yaml(text, "f")
    except ConfigError as error:
        assert re.match(r"f:\d+: expected .+, found .+", str(error)) and "\n" not in str(error)
