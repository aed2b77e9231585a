"""Reading: three kinds of file, folders, HF datasets and remote files; bad rows by line, bounded by size and depth."""

import json
import sys

import datasets
import pyarrow as pa
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from verl_patches.data import sources
from verl_patches.data.settings import Settings
from verl_patches.errors import ConfigError

REGISTERED = sys.modules["fsspec.registry"]._registry  # fsspec gives no way to take one out again
ROW = {"problem": "What is 1 + 1?", "answer": "2"}


def read(path, scratch=None, **keys):
    """(line, value or sentence) of all records below `path`."""
    settings = Settings(input=str(path), handler_name="maths", output_prefix="x", **keys)
    found = []
    for source in sources.sources_of(settings, scratch or path.parent / "scratch"):
        for chunk in sources.chunks_of(source):
            for line, value in chunk:
                if isinstance(value, bytes):
                    try:
                        found.append((line, sources.parse(value)))
                    except ValueError as error:
                        found.append((line, str(error)))
                elif isinstance(value, ValueError):
                    found.append((line, str(value)))
                else:
                    found += enumerate(value.to_pylist(), line)
    return found


def write(folder, text, name="rows.json"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize("indent", [None, 0, 2, 7])
@pytest.mark.parametrize("block", [1, 2, 7, 1 << 20])
def test_json_lists_however_they_are_printed(tmp_path, monkeypatch, indent, block):
    """Also where a block ends inside a row, a number or an escape."""
    monkeypatch.setattr(sources, "_BLOCK", block)
    monkeypatch.setattr(sources._Text.more, "__defaults__", (block,))
    rows = [ROW, 12345, {**ROW, "problem": 'Brackets ] and , in "text"\n \u00fc'}, -1.5e3, "text", None, [1, [2]], {}]
    path = write(tmp_path, "\n\n" + json.dumps(rows, indent=indent) + "\n")
    found = read(path)
    assert [row for _, row in found] == rows
    if indent == 2:
        lines = path.read_text().split("\n")
        assert all(lines[line - 1].startswith("  ") and lines[line - 1][2] not in " }]" for line, _ in found)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=8), st.integers(1, 9))
def test_any_list_is_read_as_json_reads_it(tmp_path_factory, value, block):
    path = write(tmp_path_factory.mktemp("any"), json.dumps([value, value], ensure_ascii=False))
    with path.open(encoding="utf-8", newline="") as file:
        text = sources._Text(file)
        text.more(block)
        text.take("[", "")
        assert json.loads(text.value()) == value


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ('[\n {"problem": "a"},\n {"problem": oops}\n]', 3, "not JSON"),
        ('[\n {"problem": "a"}\n {"problem": "b"}]', 3, 'expected ","'),
        ('[\n {"problem": "a"},\n]', 3, "not JSON"),
        ('[\n {"problem": "a"}\n', 3, "not JSON"),
        ('[\n {"problem": "a"}]\n\n x', 4, "nothing behind the list"),
        ("7", 1, "expected a JSON list"),
        ("", 1, "expected a JSON list"),
        ("[" * 1_000_000, 1, "recursion"),
        ('[{"a": ' + "9" * 5000 + "}]", 1, "Exceeds the limit"),
        ('[{"a": NaN}]', 1, "not JSON: NaN"),
        (b'[\n{"a": "\xff"}]', 1, "utf-8"),
    ],
)
def test_broken_json_is_named_by_line(tmp_path, text, line, message):
    found = read(write(tmp_path, text))
    assert found[-1][0] == line and message in found[-1][1], found[-1]
    assert all(isinstance(row, dict) for _, row in found[:-1])


def test_an_empty_list_has_no_rows(tmp_path):
    assert read(write(tmp_path, " [ ] \n")) == []


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_json_lines(tmp_path, name):
    deep = b"[" * 1_000_000
    lines = [b"\xef\xbb\xbf" + json.dumps(ROW).encode(), b"", b"{broken", b'{"a": "\xff"}', b'{"a": Infinity}', b"{}\r"]
    text = b"\n".join([*lines, *([] if name == "rows.json" else [deep]), json.dumps(ROW).encode()])
    found = read(write(tmp_path, text, name))
    assert (found[0], found[-1][1]) == ((1, ROW), ROW)
    assert [line for line, _ in found[1:5]] == [3, 4, 5, 6] and found[4][1] == {}
    words = ("not JSON", "utf-8", "not JSON: Infinity")
    assert all(word in sentence for word, (_, sentence) in zip(words, found[1:], strict=False))
    assert name == "rows.json" or "too deep" in found[5][1]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_row_beyond_the_bound_is_refused_by_size(tmp_path, monkeypatch, name):
    """The reader holds no more of it than a block; a row of just that size is read."""
    monkeypatch.setattr(sources, "MAX_ROW_BYTES", 1000)
    large, fits = json.dumps({"a": "x" * 5000}), json.dumps({"a": "x" * (1000 - 10)})
    rows = [fits, large, fits] if name == "rows.jsonl" else [fits, large]
    text = "\n".join(rows) if name == "rows.jsonl" else f"[{','.join(rows)}]"
    found = read(write(tmp_path, text, name))
    assert [len(row["a"]) if isinstance(row, dict) else row for _, row in found][:1] == [990]
    assert "MiB" in found[1][1]
    assert name == "rows.json" or found[2][1] == json.loads(fits)


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
        read(tmp_path / name if "nobody" not in name else type(tmp_path)(name), tmp_path / "scratch")
    assert "\n" not in str(error.value)
    assert {path.name for path in tmp_path.iterdir()} - {"scratch"} == before


def test_a_row_group_beyond_the_bound_is_refused(tmp_path, monkeypatch):
    parquet.write_table(pa.table({"problem": ["x" * 5000]}), tmp_path / "a.parquet")
    assert len(read(tmp_path / "a.parquet")) == 1
    monkeypatch.setattr(sources, "MAX_GROUP_BYTES", 10)
    with pytest.raises(ConfigError, match="row group"):
        read(tmp_path / "a.parquet")


def of_url(url, scratch):
    return list(sources.sources_of(Settings(input=url, handler_name="maths", output_prefix="x"), scratch))


class Bucket(MemoryFileSystem):
    """A store for s3://, in memory."""

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
        found = of_url(url, tmp_path / str(number))
        assert [source.name for source in found] == [f"{name}.jsonl" for name in names]
        assert json.loads(next(found[0].items())[1])["answer"] == f"{names[0]}.jsonl"
    with pytest.raises(ConfigError, match="s3://bucket/none"):
        of_url("s3://bucket/none", tmp_path)


def test_without_its_package_an_address_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ConfigError, match="s3fs is not installed: pip install s3fs"):
        of_url("s3://bucket/rows.jsonl", tmp_path)


@pytest.mark.parametrize("url", ["s3://AKIAABCDEFGHIJKLMNOP:secret@bucket/x", "s3://user:word@bucket/x.json"])
def test_credentials_in_an_address_are_refused_and_not_shown(tmp_path, url):
    with pytest.raises(ConfigError, match="from the environment alone") as error:
        of_url(url, tmp_path)
    assert "bucket" not in str(error.value)
