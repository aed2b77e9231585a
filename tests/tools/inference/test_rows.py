"""Test prompts from files and their refusals, chat templates, and outputs that go on after a kill."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest
from pyarrow.parquet import write_table

from verl_patches.errors import ConfigError
from verl_patches.tools.data.sources import prompt_tokens, read_tokenizer, render_chat
from verl_patches.tools.inference.rows import read_prompts, resumable_output

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
    found, left_out = read_prompts([path, table], "prompt", tokenizer, 100, columns=["other"])
    assert [prompt.number for prompt in found] == [0, 1, 2, 3, 4] and left_out == 0
    assert tokenizer.decode(found[0].tokens) == "<|begin|><|user|>1 2 3<|assistant|>"
    assert found[0].tokens == found[3].tokens
    assert found[2].tokens == tokenizer("1 2 3")["input_ids"]
    assert found[0].row == {"prompt": [USER], "other": {"a": 1}} and found[2].row == {"prompt": "1 2 3"}


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
        (b'{"prompt": \n', "p.jsonl:2: expected a JSON object, found invalid JSON"),
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
        ("p.txt", "expected a file that ends in .json, .jsonl, .parquet, found no file"),
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


OWN_TOKENIZER = """
from transformers import PreTrainedTokenizerFast

class Own(PreTrainedTokenizerFast):
    def __call__(self, text, **options):
        return {}["input"]
"""


def test_an_error_of_a_models_own_tokenizer_names_its_line(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path / "cache"))
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": [None, "tokenization_own.Own"]}, "tokenizer_class": "Own"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "tokenization_own.py").write_text(OWN_TOKENIZER)
    with pytest.raises(
        ValueError, match=r"text that the tokenizer takes; found .*/tokenization_own.py:6: KeyError: 'input'$"
    ):
        prompt_tokens(read_tokenizer(folder, True), "text")
    (folder / "tokenization_own.py").write_text("\n" + "missing\n")
    with pytest.raises(ConfigError, match=r"found .*/tokenization_own.py:2: NameError: name 'missing'"):
        read_tokenizer(folder, True)


WRITE = """
import os, signal, sys
from pathlib import Path
from verl_patches.tools.inference.rows import resumable_output
with resumable_output(Path(sys.argv[1]), {"n": 1}) as lines:
    for number in range(lines.count, 5):
        if number == 3 and sys.argv[2] == "kill":
            lines._file.write(b'{"number": 3')
            os.kill(os.getpid(), signal.SIGKILL)
        lines.add({"number": number, "by": sys.argv[2]})
"""


def test_an_output_goes_on_after_kill_9_and_has_its_name_when_it_is_whole(tmp_path):
    output = tmp_path / "new" / "out.jsonl"
    command = [sys.executable, "-c", WRITE, str(output)]
    assert subprocess.run([*command, "kill"]).returncode == -signal.SIGKILL
    (partial,) = output.parent.iterdir()
    assert partial != output and partial.read_bytes().endswith(b'{"number": 3')
    subprocess.run([*command, "second"], check=True)
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["number"] for line in found] == [0, 1, 2, 3, 4]
    assert [line["by"] for line in found] == ["kill"] * 3 + ["second"] * 2 and not partial.exists()
    before = output.read_bytes()
    with pytest.raises(ConfigError, match="expected a new file"), resumable_output(output, {"n": 1}):
        pass
    assert output.read_bytes() == before and [path.name for path in output.parent.iterdir()] == ["out.jsonl"]


def test_other_settings_begin_anew_and_another_writer_is_refused(tmp_path):
    output = tmp_path / "out.jsonl"
    with pytest.raises(KeyError), resumable_output(output, {"n": 1, "model": "a"}) as lines:
        lines.add({"row": 0})
        with (
            pytest.raises(ConfigError, match="another process is writing it"),
            resumable_output(output, {"n": 1, "model": "a"}),
        ):
            pass
        raise KeyError
    (partial,) = tmp_path.iterdir()
    with pytest.raises(KeyError), resumable_output(output, {"n": 2, "model": "a"}) as lines:
        assert lines.count == 0
        raise KeyError
    assert partial.read_bytes() == b'{"row": 0}\n' and not output.exists()
    with resumable_output(output, {"n": 1, "model": "a"}) as lines:
        assert lines.count == 1 and list(lines.read()) == [{"row": 0}]
    assert output.read_bytes() == b'{"row": 0}\n' and not partial.exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"), resumable_output(tmp_path / "file" / "out.jsonl", {}):
        pass
