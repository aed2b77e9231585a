"""Test fixed data as a dataset of verl: token ids of responses, truncation, rows that are refused by file and row."""

import pyarrow as pa
import pytest
import torch
from omegaconf import OmegaConf
from pyarrow import parquet

from verl_patches.errors import ConfigError
from verl_patches.model.tiny import _make_tokenizer, tiny_config
from verl_patches.step.objectives.dataset import FixedDataset

PROMPT = [{"role": "user", "content": "a b"}]
ANSWER = {"role": "assistant", "content": "xyz"}


@pytest.fixture(scope="module")
def tokenizer():
    return _make_tokenizer(tiny_config())


@pytest.fixture
def make(tmp_path, tokenizer):
    """Return make(objective, rows, **data) -> the dataset of these rows, {column: values} in one file."""

    def build(name, columns, **data):
        columns = {"prompt": [PROMPT] * len([*columns.values()][-1]), **columns}
        table = pa.table({name: values for name, values in columns.items() if values is not None})
        parquet.write_table(table, tmp_path / "d.parquet")
        config = {"max_prompt_length": 32, "max_response_length": 8, "truncation": "error", "cache_dir": str(tmp_path)}
        config |= {"filter_overlong_prompts": True, "filter_overlong_prompts_workers": 1, **data}
        whole = OmegaConf.create({"data": config, "recipe": {"objective": {"name": name}}})
        return FixedDataset(str(tmp_path / "d.parquet"), tokenizer, whole.data)

    return build


def test_responses_are_text_and_the_end_token(make, tokenizer):
    rows = make("dpo", {"chosen": ["xyz", "q"], "rejected": ["1 2", "w"], "data_source": ["s", "s"]})
    row = rows[0]
    texts = [tokenizer.decode(ids) for ids in row["tools_kwargs"]["responses"]]
    assert texts == [text + tokenizer.eos_token for text in ("xyz", "1 2")]
    assert row["data_source"] == "s" and not {"chosen", "rejected", "prompt"} & row.keys()
    whole = tokenizer.apply_chat_template(PROMPT, add_generation_prompt=True)
    assert row["input_ids"][row["attention_mask"].bool()].tolist() == whole == row["raw_prompt_ids"]
    scored = make("rm", {"chosen": ["xyz"], "rejected": ["1 2"]})[0]["tools_kwargs"]["responses"]
    assert scored == [[*ids, tokenizer.eos_token_id] for ids in row["tools_kwargs"]["responses"]]
    found = make("kto", {"response": ["xy"], "label": [True]})[0]["tools_kwargs"]
    assert found["label"] is True and len(found["responses"]) == 1


def test_the_end_token_is_on_both_sides_of_a_pair(make, tokenizer):
    """Check each side on its own, also of a template whose end token is followed by text, and of one without any."""
    end, whole = tokenizer.eos_token_id, tokenizer.chat_template
    for template in (
        whole,
        whole.replace("{{ eos_token }}", "{{ eos_token }}\n"),
        whole.replace("{{ eos_token }}", ""),
    ):
        tokenizer.chat_template = template
        try:
            for name, ends in (("dpo", 1), ("rm", 2)):
                row = make(name, {"chosen": ["xyz"], "rejected": ["1 2"]})[0]
                sides = [tokenizer.encode(text, add_special_tokens=False) for text in ("xyz", "1 2")]
                assert row["tools_kwargs"]["responses"] == [[*ids, *[end] * ends] for ids in sides]
        finally:
            tokenizer.chat_template = whole


def test_conversations_are_trained_as_prompt_and_response_are(make, tokenizer):
    """Check ids and limits; a null, which parquet has in each message, is no field that a template could leave out."""
    plain = make("sft", {"response": ["xyz", "q"]})
    messages = [[*PROMPT, {**ANSWER, "tool_calls": None}], [{**PROMPT[0], "content": "b " * 40}, ANSWER]]
    rows = make("sft", {"prompt": None, "messages": messages, "tools": [None, None]})
    assert len(rows) == 1 and rows[0]["tools_kwargs"] == plain[0]["tools_kwargs"]
    assert rows[0]["raw_prompt_ids"] == plain[0]["raw_prompt_ids"] and "messages" not in rows[0]
    assert torch.equal(rows[0]["input_ids"], plain[0]["input_ids"])
    with pytest.raises(
        ConfigError, match="row 1: the prompt has [0-9]+ tokens; expected at most data.max_prompt_length"
    ):
        make("sft", {"prompt": None, "messages": messages}, filter_overlong_prompts=False)
    cut = make("sft", {"prompt": None, "messages": messages}, filter_overlong_prompts=False, truncation="left")
    assert len(cut[1]["raw_prompt_ids"]) == 32 and tokenizer.decode(cut[1]["raw_prompt_ids"]).endswith("<|assistant|>")


@pytest.mark.parametrize("truncation", ["left", "right"])
def test_raw_text_begins_with_its_first_token(make, tokenizer, truncation):
    """Check continued pre-training, which needs no column that names the objective's own ones."""
    text = "abcdefghijkl"
    row = make("sft", {"prompt": None, "text": [text, "z"]}, truncation=truncation)[0]
    ids = [*tokenizer.encode(text), tokenizer.eos_token_id]
    kept = ids[-9:] if truncation == "left" else ids[:9]
    assert len(ids) > 9
    assert row["input_ids"][-1] == kept[0] and int(row["attention_mask"].sum()) == 1
    assert row["tools_kwargs"]["responses"] == [kept[1:]]


@pytest.mark.parametrize("truncation", ["left", "right"])
def test_a_long_response_is_cut_on_the_side_of_the_key(make, tokenizer, truncation):
    (ids,) = make("sft", {"response": ["abcdefghijkl"]}, truncation=truncation)[0]["tools_kwargs"]["responses"]
    whole = [*tokenizer.encode("abcdefghijkl", add_special_tokens=False), tokenizer.eos_token_id]
    assert ids == (whole[-8:] if truncation == "left" else whole[:8]) and len(whole) > 8


@pytest.mark.parametrize(("truncation", "kept"), [("right", {2: 1.0, 5: 0.0}), ("left", {1: 0.0, 7: 0.5})])
def test_marks_of_steps_move_with_the_cut(make, tokenizer, truncation, kept):
    """Check marks, which are behind a step's last token: verl's value of a token is that of the text before it."""
    steps, labels = [["12", "345", "678901"]], [[1.0, 0.0, 0.5]]  # digits are tokens of their own
    found = make("prm", {"steps": steps, "labels": labels}, truncation=truncation)[0]["tools_kwargs"]
    assert found["marks"] == kept
    assert len(found["responses"][0]) == 8


MISSING = "row 1: {} is null; expected {}"


@pytest.mark.parametrize(("name", "columns", "words"), [
    ("dpo", {"chosen": ["x"]}, "d.parquet: dpo needs the columns prompt, chosen, rejected; found prompt, chosen"),
    ("sft", {"answer": ["x"]}, "sft needs the columns prompt, response or messages or text; found prompt, answer"),
    ("sft", {"response": ["x", None]}, MISSING.format("response", "text, not empty")),
    ("sft", {"response": ["x", ""]}, "row 1: response is ''; expected text, not empty"),
    ("kto", {"response": ["x", "y"], "label": [1, 0]}, "row 0: label is 1; expected true or false"),
    ("kto", {"response": ["x", "y"], "label": [True, None]}, MISSING.format("label", "true or false")),
    ("prm", {"steps": [["x"]], "labels": [[2.0]]}, r"row 0: labels is \[2.0\]; expected a list of true or false"),
    ("prm", {"steps": [["x", "y"]], "labels": [[1.0]]}, "row 0: found 2 steps and 1 labels; expected a label"),
    ("sft", {"response": ["x", "y"], "tools": [None, "[{}]"]}, "row 1: the chat template leaves out .* tools"),
    ("sft", {"prompt": None, "text": ["x"], "tools": ["[{}]"]}, "row 0: raw text is trained without tools"),
    ("sft", {"prompt": None, "messages": [[*PROMPT, ANSWER], PROMPT]}, "row 1: .* role assistant, found user"),
    ("sft", {"prompt": None, "messages": [[*PROMPT, ANSWER]], "tools": ["{"]}, "row 0: expected tools to be JSON"),
    ("sft", {"prompt": None, "messages": [[*PROMPT, ANSWER]], "tools": ["[{}]"]}, "row 0: .* or changes tools"),
    ("sft", {"response": ["x", "abcdefghijkl"]}, "row 1: a response has 1[0-9] tokens .*max_response_length, 8"),
])  # fmt: skip
def test_a_wrong_row_is_refused_by_file_and_row(make, name, columns, words):
    with pytest.raises(ConfigError, match=words):
        make(name, columns)


def test_another_truncation_is_refused(make):
    with pytest.raises(ConfigError, match="data.truncation is middle; expected error or left or right"):
        make("sft", {"response": ["x"]}, truncation="middle")


def test_a_resumed_dataset_reads_its_files_again(make):
    rows = make("sft", {"response": ["x", "y"]})
    state = rows.__getstate__()
    assert "dataframe" not in state
    copy = object.__new__(FixedDataset)
    copy.__dict__.update(state)
    copy.resume_dataset_state()
    assert copy[1]["tools_kwargs"] == rows[1]["tools_kwargs"] and torch.equal(
        copy[1]["input_ids"], rows[1]["input_ids"]
    )
