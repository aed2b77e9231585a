"""YAML files of users: one sentence with file and line for what cannot be read, and values as Hydra has them."""

import re

import pytest

from verl_patches.errors import ConfigError
from verl_patches.values import parse_yaml, read_yaml

BAD = {
    "tab": ("a:\n\tb: 1\n", ":2: expected YAML, found a syntax error"),
    "duplicate": ("a: 1\nb: 2\na: 3\n", ":3: expected YAML, found a syntax error (found duplicate key a)"),
    "python tag": ("a: !!python/object/apply:os.system [ls]\n", ":1: expected YAML, found a syntax error"),
    "list": ("- a\n", ": expected lines of KEY: VALUE, found a list"),
}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD)
def test_what_is_not_read_is_refused_in_one_line_with_file_and_line(tmp_path, text, message):
    path = tmp_path / "bad.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=f"^{re.escape(f'{path}{message}')}.*$"):
        read_yaml(path)


def test_a_file_that_is_not_there_is_named(tmp_path):
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match=re.escape(f"{path}: expected a YAML file, found: ")):
            read_yaml(path)


def test_plain_yaml_is_read_as_hydra_reads_it(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("# nothing\n")
    assert read_yaml(path) == {}
    path.write_text("a: 1e3\nb: 2001-01-01\nc: no\nd: ~\ne: 日本\n")
    assert read_yaml(path) == {"a": 1000.0, "b": "2001-01-01", "c": False, "d": None, "e": "日本"}
    assert parse_yaml("a: 1\n---\nb: 2\n", "f") == [{"a": 1}, {"b": 2}] and parse_yaml("", "f") == []
