"""Test each handler's rows, the values of prompt_type, and that a run accepts the files unchanged."""

import json

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from tests.conftest import ROOT
from tests.runs import composed
from tests.tools.data.cases import HELLO, HI, NO, RECORDS, make, read, say
from verl_patches.errors import ConfigError
from verl_patches.tools.data.build import RESULT_COLUMNS, make_result
from verl_patches.tools.data.handlers import (
    CONVERSATION_COLUMNS,
    HANDLERS,
    conversation_row,
    parquet_schema,
    read_template,
)
from verl_patches.tools.data.settings import Settings, read_settings

USED_BY = {
    "maths": ["grpo", "ppo", "dapo"],
    "gsm8k": ["grpo", "ppo"],
    "instruction": ["sft"],
    "text": ["sft"],
    "preference": ["dpo", "ipo", "rm"],
    "labelled": ["kto"],
    "process": ["prm"],
}


def user(text):
    return [{"role": "user", "content": text}]


def build_row(folder, handler, record, **keys):
    """Return the row of a record, which is in train: the first file is large enough for the others."""
    others = [RECORDS[handler](n) for n in range(100, 103)]
    make(folder, [*others[:1], record, *others[1:]], handler, shuffle=False, test_size=1, **keys)
    return read(folder / "out")[0]


def test_the_columns_of_each_handler(tmp_path):
    row = build_row(tmp_path, "maths", {"question": "1?", "answer": 0.5, "solution": "x"})
    assert (row["prompt"], row["data_source"], row["ability"]) == (user("1?"), "maths", "math")
    assert row["reward_model"] == {"style": "rule", "ground_truth": "0.5"}
    extra = {"index": 0, "split": "train", "answer": "0.5", "solution": "x", "origin": "rows.jsonl:2"}
    assert row["extra_info"] == extra
    row = build_row(tmp_path, "gsm8k", RECORDS["gsm8k"](1))
    assert (row["reward_model"]["ground_truth"], row["extra_info"]["solution"]) == ("1000", "so\n#### 1,000")
    row = build_row(tmp_path, "instruction", RECORDS["instruction"](3))
    assert (row["prompt"], row["response"]) == (user("Say 3.\nLoud."), "3!")
    row = build_row(tmp_path, "instruction", RECORDS["instruction"](2))
    assert (row["prompt"], row["response"]) == ([HI, HELLO, say(2)], "2!")
    sharegpt = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    row = build_row(tmp_path, "instruction", {"conversations": sharegpt, "system": "Be brief."})
    assert (row["prompt"], row["response"]) == ([{"role": "system", "content": "Be brief."}, HI], "Hello")
    for number in (1, 2):
        row = build_row(tmp_path, "preference", RECORDS["preference"](number))
        assert (row["prompt"], row["rejected"]) == ([say(number)], "no")
    row = build_row(tmp_path, "labelled", RECORDS["labelled"](2))
    assert (row["prompt"], row["response"], row["label"]) == ([say(2)], "2!", True)
    row = build_row(tmp_path, "process", RECORDS["process"](1))
    assert (row["steps"], row["labels"]) == (["one", "two"], [1.0, 0.5])
    row = build_row(tmp_path, "text", {"content": "raw"})
    assert row["text"] == "raw" and "prompt" not in row


CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
TOOLS = [{"type": "function", "function": {"name": "weather"}}]


def test_rows_with_more_than_texts_become_conversations(tmp_path):
    """Check calls, tools and reasoning of OpenAI's and ShareGPT's schemas; all rows of a file get the same columns."""
    openai = [HI, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    openai += [{"role": "tool", "tool_call_id": "c1", "content": "4 C"}, {**HELLO, "reasoning_content": "Cold."}]
    call = {"from": "function_call", "value": json.dumps(CALL["function"])}
    sharegpt = [{"from": "human", "value": "Hi"}, call, {"from": "observation", "value": "4 C"}]
    sharegpt += [{"from": "gpt", "value": "Hello"}]
    for record, number in (({"messages": openai, "tools": TOOLS}, 2), ({"conversations": sharegpt}, 1)):
        tools = {"tools": json.dumps([TOOLS[0]["function"]])} if number == 1 else {}
        row = build_row(tmp_path, "instruction", {**record, **tools, "system": "Be brief."})
        found = [{name: one[name] for name in one if one[name] is not None} for one in row["messages"]]
        assert json.loads(row["tools"]) == TOOLS and not {"prompt", "response"} & row.keys()
        assert [one["role"] for one in found] == ["system", "user", "assistant", "tool", "assistant"]
        (made,) = json.loads(found[2]["tool_calls"])
        assert made["function"] == CALL["function"] and row["messages"][2]["content"] is None
        assert found[4].get("reasoning_content") == ("Cold." if number == 2 else None)
        assert read(tmp_path / "out")[-1]["messages"][-1]["content"].endswith("!")  # a row of texts
        assert read(tmp_path / "out")[-1]["tools"] is None


def test_pairs_of_several_turns_keep_all_turns_before_the_last(tmp_path):
    """Check a prompt column that the messages go on from, and one beside answers alone."""
    talk = [say(1), HELLO, say(2)]
    for prompt in ("Say 1.", [say(1)], talk):
        row = build_row(tmp_path, "preference", {"prompt": prompt, "chosen": [*talk, HELLO], "rejected": [*talk, NO]})
        assert (row["prompt"], row["chosen"], row["rejected"]) == (talk, "Hello", "no")
    row = build_row(tmp_path, "preference", {"prompt": "Say 1.", "chosen": [HELLO], "rejected": [NO]})
    assert (row["prompt"], row["chosen"], row["rejected"]) == ([say(1)], "Hello", "no")
    brief = {"role": "system", "content": "Be brief."}
    record = {"prompt": "Say 1.", "chosen": [brief, say(1), HELLO], "rejected": "no"}
    assert build_row(tmp_path, "preference", record)["prompt"] == [brief, say(1)]
    row = build_row(tmp_path, "labelled", {"prompt": "Say 1.", "response": [*talk, HELLO], "label": 1})
    assert (row["prompt"], row["response"]) == (talk, "Hello")


def test_nested_columns_are_read_and_so_are_columns_with_a_dot(tmp_path):
    keys = {"map_keys": {"response": "reward_model.ground_truth", "solution": "extra_info.note"}}
    for extra in ({"reward_model": {"ground_truth": '["2"]'}}, {"reward_model.ground_truth": "2"}):
        rows = [{"prompt": [say(n)], "extra_info": {"note": "n"}, **extra} for n in range(4)]
        make(tmp_path, rows, "maths", **keys)
        (row, *_) = read(tmp_path / "out")
        assert (row["reward_model"]["ground_truth"], row["extra_info"]["solution"]) == ("2", "n")
    code, report = make(tmp_path, [{"prompt": "p", "reward_model": {"style": "rule"}}] * 2, out="b", **keys)
    assert code == 1 and "expected response in column reward_model.ground_truth" in next(iter(report["bad"]["shown"]))


def test_map_keys_and_additional_keys(tmp_path):
    record = {"q": "1?", "a": "2", "level": 3, "tags": ["x", {"y": None}], "note": "n"}
    keys = {"map_keys": {"prompt": "q", "query": "", "response": "a", "system": ""}, "data_source": "mine"}
    (tmp_path / "rows").mkdir()
    records = [{**record, "q": f"{n}?"} for n in range(4)]
    make(tmp_path, records, "maths", dataset_additional_keys=["level", "tags", "note"], shuffle=False, **keys)
    row = read(tmp_path / "out")[0]
    assert (row["data_source"], row["reward_model"]["ground_truth"]) == ("mine", "2")
    extra = {name: row["extra_info"][name] for name in ("level", "tags", "note")}
    assert extra == {"level": "3", "tags": '["x", {"y": null}]', "note": "n"}
    code, report = make(tmp_path, records, "maths", dataset_additional_keys=["gone"], out="b", **keys)
    assert code == 1 and "expected a column gone, found a, level" in next(iter(report["bad"]["shown"]))


SYSTEM = {"role": "system", "content": "a"}


@pytest.mark.parametrize(("handler", "record", "message"), [
    ("maths", {"problem": "p", "answer": True}, "the answer to be text, found True"),
    ("maths", {"problem": "p", "answer": "9" * 513}, "513 characters; expected 1 to 512"),
    ("gsm8k", {"question": "p", "answer": "42"}, "#### 42"),
    ("instruction", {"messages": [HI]}, "the last message of messages to have role assistant, found user"),
    ("preference", {"prompt": "p", "chosen": "a", "rejected": "a"}, "to differ"),
    ("preference", {"chosen": [say(1), HELLO], "rejected": [say(2), NO]}, "expected the same prompt before"),
    ("preference", {"prompt": "p", "tools": TOOLS, "chosen": "a", "rejected": "b"}, "texts alone, found tools"),
    ("instruction", {"messages": [HI, {**NO, "weight": 0}]}, "found 'weight'"),
    ("instruction", {"messages": [HI, {**NO, "tool_calls": [{"id": "c"}]}]}, "a function with a name"),
    ("instruction", {"messages": [HI, HELLO, NO]}, "the prompt to have role user or tool, found assistant"),
    ("instruction", {"messages": [SYSTEM, {**SYSTEM, "content": "b"}, HI, NO]}, "expected one system message"),
    ("maths", {"problem": "p", "answer": ["1", "2"]}, "expected one answer, found a list of 2"),
    ("labelled", {"prompt": "p", "response": "r", "label": 2}, "label to be true or false, found 2"),
    ("process", {"prompt": "p", "steps": ["a"], "labels": [1, 0]}, "a label for each of 1 steps, found 2"),
])  # fmt: skip
def test_a_bad_record_is_named_in_one_sentence(tmp_path, handler, record, message):
    code, report = make(tmp_path, [RECORDS[handler](n) for n in range(4)] + [record], handler)
    assert code == 1 and report["bad"]["rows"] == 1
    (sentence,) = report["bad"]["shown"]
    assert sentence.startswith("rows.jsonl:5: ") and message in sentence and "\n" not in sentence


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["\ud800", "\0"])
)
MESSAGE = st.dictionaries(
    st.sampled_from(["role", "content", "from", "value"]), st.sampled_from(["user", "gpt", 1, ""])
)
VALUES = st.recursive(SCALARS | MESSAGE, lambda inner: st.lists(inner, max_size=3), max_leaves=5)


@settings(max_examples=60)
@given(st.data())
def test_any_record_ends_as_a_row_of_the_schema_or_a_sentence(data):
    name = data.draw(st.sampled_from(sorted(HANDLERS)))
    columns = sorted({column for columns in HANDLERS[name].fields.values() for column in columns})
    records = data.draw(st.lists(VALUES | st.dictionaries(st.sampled_from(columns), VALUES), max_size=6))
    given = Settings(input="x", handler_name=name, output_prefix="x", dataset_additional_keys=columns[:1])
    found = [make_result(given, f"f:{number}", record) for number, record in enumerate((*records, RECORDS[name](1)))]
    assert len(found) == len(records) + 1
    for row in found:
        assert row.keys() == RESULT_COLUMNS.keys()
        reason, sentence = row["reason"], row["sentence"]
        assert (reason == "bad" and sentence) if row["text"] is None else reason in (None, "sentences")
    made = [json.loads(row["text"]) for row in found if row["text"]]
    talks = any(row["conversation"] for row in found)
    schema = parquet_schema(CONVERSATION_COLUMNS if talks else HANDLERS[name].columns, columns[:1])
    made = [*map(conversation_row, made)] if talks else made
    assert pyarrow.Table.from_pylist(made, schema).to_pylist() == made


# ---- a run takes the files as they are


@pytest.mark.slow
@pytest.mark.parametrize("handler", HANDLERS)
def test_the_runs_dataset_reads_them_and_lengths_are_as_it_counts_them(tmp_path, tiny_model, handler):
    from transformers import AutoTokenizer
    from verl.utils.dataset.rl_dataset import RLHFDataset

    from verl_patches.step.objectives.dataset import FixedDataset

    keys = {"tokenizer_name_or_path": str(tiny_model), "seq_length": 400}
    _, report = make(tmp_path, [RECORDS[handler](n) for n in range(20)], handler, **keys)
    longest, tokenizer = report["longest_tokens"], AutoTokenizer.from_pretrained(tiny_model)
    for algorithm in USED_BY[handler]:
        name = composed("deepseekv3_tiny_cpu", [f"algo={algorithm}"]).verl.data.custom_cls.name
        kind, recipe = FixedDataset if name else RLHFDataset, {"objective": {"name": algorithm}}
        files = [str(tmp_path / "out" / f"{part}.parquet") for part in ("train", "test")]
        limits = {"max_prompt_length": longest["prompt"], "max_response_length": longest["response"] or 1}
        config = {**limits, "truncation": "error", "cache_dir": str(tmp_path), "filter_overlong_prompts_workers": 1}
        config = OmegaConf.create({"data": {**config, "filter_overlong_prompts": True}, "recipe": recipe}).data
        rows = kind(files, tokenizer, config)
        assert len(rows) == 20 and [rows[number] for number in range(20)]
        if algorithm in ("sft", "dpo", "prm", "kto") and longest["response"] > 1 and name:  # the control
            with pytest.raises(ConfigError, match="max_response_length"):
                config["max_response_length"] = longest["response"] - 2
                kind(files, tokenizer, config)


@pytest.mark.slow
def test_long_rows_are_dropped_and_reported(tmp_path, tiny_model):
    keys = {"tokenizer_name_or_path": str(tiny_model)}
    sample = ROOT / "data" / "deepscaler_sample.json"
    made = [make(tmp_path, sample, out=f"{n}", seq_length=n, prompt_type="boxed", **keys)[1] for n in (1024, 90)]
    assert made[0]["too_long"]["rows"] == 0 and 20 < made[1]["too_long"]["rows"] < 292
    assert all(text.endswith("more than 90 tokens") for text in made[1]["too_long"]["shown"])
    assert made[1]["longest_tokens"]["prompt"] <= 90 < made[0]["longest_tokens"]["prompt"]
    assert made[1]["train"] + made[1]["test"] + made[1]["too_long"]["rows"] == 312
    with pytest.raises(ConfigError, match=r"found 0 of 312 \(left out: 312 too_long\)"):
        make(tmp_path, sample, out="c", seq_length=20, **keys)
    with pytest.raises(ConfigError, match="nowhere: expected tokenizer_name_or_path to be an existing model folder"):
        make(tmp_path, sample, out="d", tokenizer_name_or_path=str(tmp_path / "nowhere"))


# ---- prompt_type


def test_prompt_types(tmp_path):
    record = RECORDS["maths"](1)
    assert build_row(tmp_path, "maths", record)["prompt"] == user(record["problem"])
    boxed = build_row(tmp_path, "maths", record, prompt_type="boxed")["prompt"][-1]["content"]
    assert boxed.startswith(record["problem"]) and boxed.endswith("\\boxed{}.")
    assert [m["role"] for m in build_row(tmp_path, "maths", record, prompt_type="think")["prompt"]] == [
        "system",
        "user",
    ]
    jinja = (
        "{% for word in tags|default(prompt) %}{{ word|trim }}{% endfor %}{% if answer %} ({{ solution }}){% endif %}"
    )
    made = build_row(tmp_path, "maths", {**record, "tags": [" a ", "b"]}, prompt_type=jinja)
    assert made["prompt"] == user("ab (Add.)")
    others = [RECORDS["maths"](n) for n in range(4)]
    code, report = make(tmp_path, others, prompt_type="{{ gone }}", out="b")
    assert code == 1 and "'gone' is undefined" in next(iter(report["bad"]["shown"]))


def test_a_text_that_is_no_jinja_is_refused_and_one_that_fails_is_a_bad_row():
    for text in ("{{ prompt", "{% include %}", "{% for a in prompt %}"):
        with pytest.raises(ConfigError, match="prompt_type: expected a Jinja template") as error:
            read_template(text)
        assert len(str(error.value)) < 600
    assert read_template("{% for a in prompt %}{{ prompt }}{% endfor %}").render({"prompt": "ab"}) == "abab"
    for text in ("{{ prompt.__class__.__mro__ }}", "{% include 'x' %}", "{{ n|int }}"):  # the sandbox; JSON's 1e999
        with pytest.raises(ValueError, match="prompt_type"):
            read_template(text).render({"prompt": "x", "n": float("inf")})


def test_an_unknown_prompt_type_is_refused():
    for name, message in (("boxd", "did you mean boxed"), ("other", "expected model, boxed")):
        with pytest.raises(ConfigError, match=message):
            read_template(name)


# ---- the keys


GOOD = {"input": "rows.jsonl", "handler_name": "maths", "output_prefix": "out"}


def make_settings(folder, *overrides, **keys):
    (folder / "b.yaml").write_text(json.dumps({**GOOD, **keys}))
    return read_settings(folder / "b.yaml", overrides)


def test_a_yaml_of_mindspeed_rl(tmp_path):
    keys = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_name_or_path": "m", "workers": 8, "seq_length": 1024}
    keys["map_keys"] = {"prompt": "problem", "query": "", "response": "answer", "system": ""}
    found = make_settings(tmp_path, log_interval=1000, **keys)
    assert found.handler.fields["prompt"] == ("problem",)
    assert found.handler.fields["query"] == ()
    assert make_settings(tmp_path, "prompt_type={{ prompt }} {% if a %}b{% endif %}").prompt_type.startswith(
        "{{ prompt"
    )
    assert make_settings(tmp_path, "seed=7", "input=[a.json, b.json]").inputs == ["a.json", "b.json"]


@pytest.mark.parametrize(("keys", "message"), [
    ({"sequence_length": 3}, "unknown key sequence_length; did you mean seq_length"),
    ({"handler_name": "MOSSInstructionHandler"}, "handler_name is 'MOSS.*expected one of maths, gsm8k"),
    ({"seq_length": 10}, "seq_length counts tokens: expected tokenizer_name_or_path"),
    ({"map_keys": {"promt": "q"}}, "map_keys: unknown key promt; did you mean prompt"),
    ({"dataset_additional_keys": ["origin"]}, "extra_info already has origin"),
    ({"output_prefix": "s3://b/c"}, "expected a local folder"),
    ({"prompt_type": "boxed", "handler_name": "text"}, "makes rows without a prompt"),
])  # fmt: skip
def test_wrong_keys_are_refused_in_one_sentence(tmp_path, keys, message):
    with pytest.raises(ConfigError, match=message) as error:
        make_settings(tmp_path, **keys)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "[1]", "a: *b"])
def test_a_file_that_is_no_settings_is_refused(tmp_path, text):
    (tmp_path / "b.yaml").write_text(text)
    with pytest.raises(ConfigError, match="b.yaml"):
        read_settings(tmp_path / "b.yaml")
    with pytest.raises(ConfigError, match="expected KEY=VALUE"):
        make_settings(tmp_path, "seed")
