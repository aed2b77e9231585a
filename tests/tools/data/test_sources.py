"""Test reading of three kinds of file, folders, HF datasets and remote files; bad rows are named by line."""

import json
import sys

import datasets
import pyarrow as pa
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow import parquet

from verl_patches.errors import ConfigError
from verl_patches.tools.data import sources
from verl_patches.tools.data.settings import Settings

REGISTERED = sys.modules["fsspec.registry"]._registry  # fsspec gives no way to take one out again
ROW = {"problem": "What is 1 + 1?", "answer": "2"}


def read(path, **keys):
    """Return (line, value or sentence) of all records below `path`."""
    settings = Settings(input=str(path), handler_name="maths", output_prefix="x", **keys)
    rows = [row for source in sources.input_sources(settings, path.parent) for row in source.rows()]
    return [(line, str(value) if isinstance(value, ValueError) else value) for line, value in rows]


def write(folder, text, name="rows.json"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_json_lists(tmp_path):
    rows = [ROW, 12345, {**ROW, "problem": 'Brackets ] and , in "text"\n \u00fc'}, -1.5e3, "text", None, [1, [2]], {}]
    text = "\ufeff\n\n" + json.dumps(rows, indent=2, ensure_ascii=False) + "\n"
    assert read(write(tmp_path, text)) == list(enumerate(rows, 1))


@pytest.mark.parametrize(
    ("text", "message"),
    [('[\n {"problem": oops}\n]', "invalid JSON: Expecting value at character 16"), (b'[\n{"a": "\xff"}]', "utf-8")],
)
def test_a_broken_list_is_refused_as_a_whole(tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as error:
        read(path)
    assert str(path) in str(error.value) and len(str(error.value)) < 600


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_json_lines(tmp_path, name):
    deep = b"[" * 1_000_000
    lines = [b"\xef\xbb\xbf" + json.dumps(ROW).encode(), b"", b"{broken", b'{"a": "\xff"}', b'{"a": Infinity}', b"{}\r"]
    text = b"\n".join([*lines, *([] if name == "rows.json" else [deep]), json.dumps(ROW).encode()])
    found = read(write(tmp_path, text, name))
    assert (found[0], found[-1][1]) == ((1, ROW), ROW)
    assert [line for line, _ in found[1:5]] == [3, 4, 5, 6] and found[4][1] == {}
    words = ("invalid JSON", "utf-8", "invalid JSON: Infinity")
    assert all(word in sentence for word, (_, sentence) in zip(words, found[1:], strict=False))
    assert name == "rows.json" or "too deep" in found[5][1]


def test_a_text_of_parquet_that_is_not_utf8_is_refused(tmp_path):
    values = pa.array([b"a", b"\xff"])
    text = pa.Array.from_buffers(pa.string(), len(values), values.buffers())
    parquet.write_table(pa.table({"problem": text}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"a\.parquet: expected a readable file; found UnicodeDecodeError"):
        read(tmp_path / "a.parquet")


def test_parquet_folders_and_datasets(tmp_path):
    rows = [{**ROW, "answer": str(number)} for number in range(600)]
    folder = tmp_path / "folder"
    folder.mkdir()
    parquet.write_table(pa.Table.from_pylist(rows[:300]), folder / "a.parquet")
    write(folder, "\n".join(map(json.dumps, rows[300:])), "b.jsonl")
    write(folder, "no rows", "README.md")
    assert [row for _, row in read(folder)] == rows
    assert [line for line, _ in read(folder)] == [*range(1, 301), *range(1, 301)]
    dataset = datasets.Dataset.from_list(rows)
    dataset.save_to_disk(str(tmp_path / "saved"))
    assert read(tmp_path / "saved") == list(enumerate(rows, 1))
    datasets.DatasetDict({"train": dataset, "test": dataset.select(range(3))}).save_to_disk(str(tmp_path / "splits"))
    assert len(read(tmp_path / "splits", input_split="test")) == 3
    with pytest.raises(ConfigError, match="input_split to be train or test, found dev"):
        read(tmp_path / "splits", input_split="dev")


@pytest.mark.parametrize("name", ["missing.json", "rows.csv", "empty/", "broken.parquet", "nobody/nothing-there"])
def test_what_cannot_be_read_is_refused_in_one_sentence(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "a,b", "rows.csv")
    write(tmp_path, "PAR1 no", "broken.parquet")
    (tmp_path / "empty").mkdir()
    before = {path.name for path in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match=name.split("/")[0]) as error:
        read(tmp_path / name if "nobody" not in name else type(tmp_path)(name))
    assert "\n" not in str(error.value)
    assert {path.name for path in tmp_path.iterdir()} == before


def read_url(url, scratch):
    return list(sources.input_sources(Settings(input=url, handler_name="maths", output_prefix="x"), scratch))


class Bucket(MemoryFileSystem):
    """Stand in for s3:// with a store in memory."""

    protocol = ("s3",)
    store, pseudo_dirs = {}, [""]

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("s3://", "memory://"))


def test_remote_files_are_read_through_fsspec(tmp_path, monkeypatch):
    monkeypatch.setitem(REGISTERED, "s3", Bucket)
    bucket = Bucket()
    for name in ("b.jsonl", "a.jsonl", "README"):
        bucket.pipe(f"/bucket/rows/{name}", json.dumps({**ROW, "answer": name}).encode())
    for number, (url, names) in enumerate([("s3://bucket/rows", "ab"), ("s3://bucket/rows/b.jsonl", "b")]):
        found = read_url(url, tmp_path / str(number))
        assert [source.name for source in found] == [f"{name}.jsonl" for name in names]
        assert next(found[0].rows())[1]["answer"] == f"{names[0]}.jsonl"
    with pytest.raises(ConfigError, match="s3://bucket/none"):
        read_url("s3://bucket/none", tmp_path)


def test_credentials_in_an_address_are_refused_and_not_shown(tmp_path):
    with pytest.raises(ConfigError, match="pass credentials in environment variables") as error:
        read_url("s3://user:word@bucket/x.json", tmp_path)
    assert "bucket" not in str(error.value)
