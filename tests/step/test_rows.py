"""Test the check of all rows: what is refused by file and row, dropped and counted, and what verl then reads."""

import functools
import re

import pyarrow as pa
import pytest
from omegaconf import OmegaConf
from pyarrow import parquet
from verl.utils.dataset.rl_dataset import RLHFDataset

from verl_patches.errors import ConfigError
from verl_patches.model.tiny import _make_tokenizer, tiny_config
from verl_patches.step import rows as step_rows
from verl_patches.step.rows import check_rl_rows

BOXED = " Let's think step by step and output the final answer within \\boxed{}."


@pytest.fixture(scope="module")
def tokenizer():
    return _make_tokenizer(tiny_config())


@pytest.fixture
def checked(monkeypatch):
    """Apply the row of the catalogue to verl's class."""
    name = "_read_files_and_tokenize"
    monkeypatch.setattr(RLHFDataset, name, check_rl_rows(getattr(RLHFDataset, name)))


@pytest.fixture
def read(tmp_path, tokenizer, checked):
    """Return read(*files, ...) -> the dataset of files, each a list of rows, as a run for training has it."""

    def build(*files, skips=False, rewards=({"name": "maths"},), batch=1, kind=RLHFDataset, **data):
        paths = [str(tmp_path / f"{number}.parquet") for number in range(len(files))]
        for path, rows in zip(paths, files, strict=True):
            parquet.write_table(pa.Table.from_pylist(rows), path)
        section = {"train_files": paths, "train_batch_size": batch, "max_prompt_length": 64, "truncation": "error"}
        section |= {"cache_dir": str(tmp_path), "filter_overlong_prompts": True, **data}
        recipe = {"rewards": [*rewards], "data": {"skip_bad_rows": skips}}
        return kind(paths, tokenizer, OmegaConf.create({"data": section, "recipe": recipe}).data)

    return build


def row(number=0, text=None, gold="1", **columns):
    prompt = [{"role": "user", "content": text or f"{number}+1?"}]
    columns = {"prompt": prompt, "extra_info": {"index": number}, **columns}
    return {"data_source": "x", "reward_model": {"style": "rule", "ground_truth": gold}, **columns}


USER = {"role": "user", "content": "1+1?"}
NULL_CONTENT = row(prompt=[{"role": "user", "content": None}])
ANSWERED = row(prompt=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
CALL = {"function": {"name": "add", "arguments": "{}"}}
FLAT_CALL = row(prompt=[{**USER, "tool_calls": [CALL["function"]]}])
BAD = {
    "calls": (row(prompt=[{**USER, "tool_calls": [CALL]}]), "the text of prompt leaves out or changes tool_calls;"),
    "text calls": (row(prompt=[{**USER, "tool_calls": "[]"}]), "prompt: tool_calls is '\\[\\]', which verl hands to"),
    "flat call": (FLAT_CALL, "prompt: tool_calls is .*'name': 'add'.*, which verl hands to"),
    "no call": (row(prompt=[{**USER, "tool_calls": [{"id": "c1"}]}]), "prompt: expected a function with a name in"),
    "null content": (
        NULL_CONTENT,
        "prompt: expected text or a list of messages, each with role and content, both text; f",
    ),
    "null prompt": (row(prompt=None), "prompt: expected text or a list of messages, each .* found null"),
    "assistant": (ANSWERED, "prompt ends with a message of assistant; expected a last message of user or tool"),
    "null extra_info": (row(extra_info=None), "extra_info is null; expected an object, such as"),
    "gold": (row(gold="#### 34"), r"recipe.rewards\[0\] \(maths\): the gold answer .* is '#### 34', a `####` line"),
    "null gold": (row(reward_model=None), ".*the gold answer .* is None"),
    "a name": (row(prompt=[{**USER, "name": "Ann"}]), "the text of prompt .* changes name;"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_row_is_refused_by_file_and_row_or_dropped_and_counted(read, kind):
    bad, words = BAD[kind]
    rows = [row(0), row(1), bad, row(3)]
    with pytest.raises(ConfigError, match=f"0.parquet, row 2: {words}.*recipe.data.skip_bad_rows=true drops such"):
        read(rows)
    dataset = read(rows, skips=True)
    assert [dataset[n]["index"] for n in range(len(dataset))] == [0, 1, 3]
    report = "data: 3 of 4 rows of .*0.parquet are used; bad and dropped: 1, the first is .*0.parquet, row 2: "
    assert re.match(report, dataset.row_report)


def test_tools_that_verls_prompts_leave_out_are_refused(read):
    with pytest.raises(ConfigError, match="row 1: the text of prompt leaves out or changes tools; remove it from the"):
        read([row(tools=None), row(tools='[{"name": "add"}]')])
    assert len(read([row(tools=None), row(tools="[]")])) == 2


def test_good_rows_are_those_of_verl_and_need_no_report(read, tokenizer, monkeypatch):
    files = [[row(n) for n in range(3)], [row(n) for n in range(3, 5)]]
    dataset = read(*files)
    assert dataset.row_report == "" and [dataset[n]["index"] for n in range(5)] == [0, 1, 2, 3, 4]
    state = dataset.__getstate__()
    again = object.__new__(RLHFDataset)
    again.__dict__.update(state)
    again.resume_dataset_state()
    assert len(again) == 5 and again[4]["raw_prompt_ids"] == dataset[4]["raw_prompt_ids"]


def test_prompts_over_the_limit_are_counted_and_left_out_cut_or_refused(read, monkeypatch):
    monkeypatch.setattr(step_rows, "tqdm", functools.partial(step_rows.tqdm, disable=True))  # as TQDM_DISABLE=1 does
    rows = [row(0), row(1, "1" * 90), row(2), row(3, "1" * 80)]
    dataset = read(rows)
    assert [dataset[n]["index"] for n in range(len(dataset))] == [0, 2]
    words = "data: 2 of 4 rows of .* are used; prompts over data.max_prompt_length, 64, left out: 2, the longest has 9"
    assert re.match(words, dataset.row_report) and dataset.row_report.endswith("0.parquet, row 1)")
    cut = read(rows, filter_overlong_prompts=False, truncation="left")
    assert len(cut) == 4 and "cut (data.truncation=left): 2" in cut.row_report
    with pytest.raises(ConfigError, match="row 1: the prompt has 9. tokens; .*data.max_prompt_length, 64: raise it"):
        read(rows, filter_overlong_prompts=False)
    with pytest.raises(ConfigError, match="2 of 4 rows of .* are used; expected at least 3, a batch; prompts over"):
        read(rows, batch=3)
    assert len(read(rows, batch=2)) == 2


def test_files_that_verl_cannot_join_are_refused(read):
    texts = [row(n, extra_info={"index": f"u-{n}"}) for n in range(2)]
    with pytest.raises(ConfigError, match=r"same types, in .*0.parquet, .*1.parquet; found .* key index of"):
        read([row()], texts)
    assert len(read(texts)) == 2
    without = [{name: value for name, value in row().items() if name != "extra_info"}]
    with pytest.raises(ConfigError, match="1.parquet, row 0: extra_info is null"):
        read([row()], without)
    assert len(read(without)) == 1
    with pytest.raises(ConfigError, match="0.parquet, row 0: reward_model is '1'; expected an object, such as {ground"):
        read([row(reward_model="1")])


def test_a_file_that_cannot_be_read_is_refused_with_what_is_wrong(read, tmp_path):
    dataset, file = read([row()]), tmp_path / "0.parquet"
    file.write_bytes(b"PAR1" + bytes(50) + file.read_bytes()[54:])  # the footer is whole
    with pytest.raises(ConfigError, match="same types, in .*0.parquet; found OSError: .*page header"):
        dataset._read_files_and_tokenize()


def test_images_are_refused_for_a_model_of_text(read):
    """Rebuild the schema of geo3k."""
    image = row(text="<image>Find x.", images=[{"bytes": b"PNG", "path": None}], data_source="hiyouga/geometry3k")
    with pytest.raises(ConfigError, match="0.parquet, row 0: the file has a column images, but the model reads text"):
        read([image])


def test_what_is_not_checked_is_said(read, tmp_path):
    dataset = read([row(gold=None)], rewards=[{"name": "python", "path": "own.py"}])
    assert dataset.row_report.endswith("whether gold answers can score was not checked for recipe.rewards[0] (python)")


def test_a_dataset_of_the_user_reads_what_it_likes(read):
    class Own(RLHFDataset):
        pass

    assert len(read([row(gold="#### 34")], kind=Own)) == 1
    with pytest.raises(ConfigError):  # the control
        read([row(gold="#### 34")])


def test_a_chat_template_that_refuses_a_prompt_is_told(read, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('no system message') }}")
    with pytest.raises(ConfigError, match="row 0: prompt: the chat template failed: TemplateError: no system message"):
        read([row()])
