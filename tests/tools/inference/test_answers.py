"""Test prompts from files, their refusals, and chat templates."""

import json

import pyarrow
import pytest
from pyarrow.parquet import write_table

from verl_patches.errors import ConfigError
from verl_patches.tools.data.sources import read_tokenizer, render_chat
from verl_patches.tools.inference.model import read_prompts

USER = {"role": "user", "content": "1 2 3"}


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return read_tokenizer(tiny_model, False)


@pytest.fixture
def write(tmp_path):
    def write(*lines, name="p.jsonl"):
        path = tmp_path / name
        path.write_bytes(
            b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)
        )
        return path

    return write


def test_prompts_are_messages_or_text_from_both_kinds_of_files(tokenizer, write, tmp_path):
    given = [{"prompt": [USER], "other": {"a": 1}}, {"prompt": [USER, USER]}]
    path, table = write(*given, b"\n", {"prompt": "1 2 3", "more": 2}), tmp_path / "p.parquet"
    write_table(pyarrow.Table.from_pylist(given), table)
    found, left_out = read_prompts([path, table], "prompt", tokenizer, 100)
    assert [prompt.number for prompt in found] == [0, 1, 2, 3, 4] and left_out == 0
    assert tokenizer.decode(found[0].tokens) == "<|begin|><|user|>1 2 3<|assistant|>"
    assert found[0].tokens == found[3].tokens
    assert found[2].tokens == tokenizer("1 2 3")["input_ids"]
    assert found[0].row == {"prompt": [USER], "other": {"a": 1}} and found[2].row == {"prompt": "1 2 3", "more": 2}


def test_long_prompts_are_refused_or_left_out_with_their_rows_numbers_kept(tokenizer, write):
    path = write({"prompt": "1"}, {"prompt": "1 2 3 4 5 6 7 8"}, {"prompt": "2"})
    with pytest.raises(ConfigError, match=r"p\.jsonl:2: column prompt: .*at most 4 tokens, found 1\d"):
        read_prompts([path], "prompt", tokenizer, 4)
    prompts, left_out = read_prompts([path], "prompt", tokenizer, 4, skip=True)
    assert [prompt.number for prompt in prompts] == [0, 2] and left_out == 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"text": "1"}, "p.jsonl:2: column prompt: expected text or a list of messages, each with role and content"),
        ({"prompt": [{"role": "user", "content": [1]}]}, "role and content"),
        (b'{"prompt": \n', "p.jsonl:2: column prompt: expected a JSON object, found invalid JSON"),
    ],
)
def test_a_bad_row_is_refused_by_file_and_line(tokenizer, write, line, words):
    path = write({"prompt": "1"}, line)
    with pytest.raises(ConfigError) as error:
        read_prompts([path], "prompt", tokenizer, 100)
    assert words in str(error.value) and len(str(error.value)) < 1000


def test_files_that_hold_no_prompts_are_refused(tokenizer, write, tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    write_table(pyarrow.table({"other": [1, 2]}), tmp_path / "other.parquet")
    for name, words in (
        ("p.txt", "p.txt: expected a readable file; found FileNotFoundError"),
        ("a.parquet", "a.parquet is cut off or of another format"),
        ("other.parquet", "other.parquet:1: column"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_prompts([tmp_path / name], "prompt", tokenizer, 100)
    with pytest.raises(ConfigError, match="empty.jsonl is empty"):
        read_prompts([write(name="empty.jsonl")], "prompt", tokenizer, 100)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("a\n{{ raise_exception('no') }}", r"/tokenizer_config.json, chat_template:2: TemplateError: no"),
        (None, "chat_template is not set"),
    ],
)
def test_a_template_that_fails_is_refused(tokenizer, write, monkeypatch, template, words):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(ValueError, match=words):
        render_chat(tokenizer, [USER])
    with pytest.raises(ConfigError, match=f"p.jsonl:1: column prompt: .*{words}"):
        read_prompts([write({"prompt": [USER]})], "prompt", tokenizer, 100)
