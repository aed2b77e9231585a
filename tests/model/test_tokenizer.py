"""Test tokenizers that are code in the model's folder (Moonlight, Kimi-K2): the key, data, configurations, exports."""

import builtins
import functools
import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from omegaconf import OmegaConf
from verl.utils import hf_processor
from verl.utils.dataset.rl_dataset import RLHFDataset

from tests.code_tokenizer import FILE, SYSTEM, make_code_model
from tests.runs import composed
from tests.tools.data.cases import make
from tests.weights.cases import as_value_model, run
from verl_patches.errors import ConfigError
from verl_patches.layout.model_folder import tokenizer_code
from verl_patches.layout.parallel import parse_layout
from verl_patches.run.files import folder_checks, reward_folder_checks, with_required_files
from verl_patches.step.objectives.dataset import FixedDataset
from verl_patches.step.rows import check_rl_rows
from verl_patches.tools.data.sources import read_tokenizer
from verl_patches.worker.remote_code import load_if_trusted

TINY, TRUST = "deepseekv3_tiny_cpu", "recipe.trust_remote_code=true"
KEYS = ("data.trust_remote_code", "actor_rollout_ref.model.trust_remote_code")
ROW = "model.trusted_tokenizer"
ASKED = "What is the sum of 1 and 1?"
USER = {"role": "user", "content": ASKED}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"a": 1}}}]
CALL = {"id": "functions.add:0", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TALK = [USER, {"role": "assistant", "content": "I add.", "tool_calls": [CALL]}]
TALK += [{"role": "tool", "tool_call_id": CALL["id"], "name": "add", "content": "2"}]
TALK += [{"role": "assistant", "content": "It is 2."}]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Keep copies of the code that transformers makes out of the home folder, and refuse its question."""
    cache = str(tmp_path_factory.mktemp("modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", cache)
    monkeypatch.syspath_prepend(cache)
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("transformers asked on the terminal"))


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory):
    return make_code_model(tiny_model, tmp_path_factory.mktemp("code") / "model")


@pytest.mark.parametrize("line", ["pypi", "a3"])
def test_one_key_becomes_verls_two_and_switches_the_rows_on(line):
    for overrides, is_on in (([TRUST], True), ([], False)):
        found = composed(TINY, [f"recipe.line={line}", *overrides])
        assert [bool(OmegaConf.select(found.verl, key)) for key in KEYS] == [is_on] * 2
        assert (ROW in found.rows) is is_on


def test_code_is_not_run_without_the_key_which_the_refusals_name(folder, tiny_model, tmp_path):
    def details(*overrides, model=folder):
        given = with_required_files(composed(TINY, [f"actor_rollout_ref.model.path={model}", *overrides]))
        return {check.name: check.detail for check in folder_checks(given) if not check.ok}

    poisoned = make_code_model(tiny_model, tmp_path / "poisoned")
    (poisoned / FILE).write_text("raise SystemExit('ran')")
    words = f"the tokenizer is Python code, {FILE}; read it, then set recipe.trust_remote_code=true"
    with pytest.raises(ConfigError, match=words):
        read_tokenizer(poisoned, False)
    assert words in details(model=poisoned)["model folder"] and details(TRUST) == {}
    with pytest.raises(SystemExit, match="ran"):  # control
        read_tokenizer(poisoned, True)
    (poisoned / FILE).unlink()
    assert f"names {FILE} as the tokenizer's code, which is missing" in details(TRUST, model=poisoned)["model folder"]
    with pytest.raises(ConfigError, match="set recipe.trust_remote_code=true .in the file of `data build`: trust_rem"):
        make(tmp_path, [{"messages": TALK}], "instruction", tokenizer_name_or_path=str(folder))


def edit_json(path, **changes):
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | changes))


@pytest.mark.parametrize("file", ["processor_config.json", "preprocessor_config.json", "config.json"])
def test_a_processors_code_is_refused_and_not_run(tiny_model, tmp_path, file):
    poisoned = make_code_model(tiny_model, tmp_path / "poisoned")
    (poisoned / "proc_code.py").write_text("raise SystemExit('ran')")
    edit_json(poisoned / file, auto_map={"AutoProcessor": "proc_code.P"})
    with pytest.raises(SystemExit, match="ran"):  # control: verl's call
        hf_processor(poisoned, trust_remote_code=True)
    with pytest.raises(ConfigError, match=rf"/{file}: auto_map names Python code for AutoProcessor, expected none"):
        read_tokenizer(poisoned, True)
    edit_json(poisoned / file, auto_map={})
    assert read_tokenizer(poisoned, True)


def test_code_of_another_repository_is_refused(tiny_model, tmp_path):
    model = make_code_model(tiny_model, tmp_path / "model")
    names = [f"org/tiny-1.5--{FILE[:-3]}.TinyTokenizer", None]
    edit_json(model / "tokenizer_config.json", auto_map={"AutoTokenizer": names})
    words = f"copy {FILE} of org/tiny-1.5 into the folder and remove org/tiny-1.5--"
    with pytest.raises(ConfigError, match=words):
        read_tokenizer(model, True)
    with pytest.raises(ConfigError, match=words):
        load_if_trusted(lambda *_, **__: None)(None, model, trust_remote_code=True)


def test_code_that_config_json_names_is_found_where_the_tokenizers_file_names_no_class(tiny_model, tmp_path):
    model = make_code_model(tiny_model, tmp_path / "model")
    edit_json(model / "config.json", auto_map=(names := {"AutoTokenizer": [f"{FILE[:-3]}.TinyTokenizer", None]}))
    edit_json(model / "tokenizer_config.json", auto_map={})
    assert tokenizer_code(model) == []  # control: tokenizer_class counts
    edit_json(model / "tokenizer_config.json", tokenizer_class=None)
    assert tokenizer_code(model) == names["AutoTokenizer"][:1]
    assert type(read_tokenizer(model, True)).__name__ == "TinyTokenizer"
    with pytest.raises(ConfigError, match=f"the tokenizer is Python code, {FILE}"):
        read_tokenizer(model, False)


def test_a_reward_models_vocabulary_is_compared_and_its_code_needs_the_key(folder, tmp_path):
    as_value_model(folder, model := tmp_path / "model", 0)

    def detail(*overrides):
        rewards = f"recipe.rewards=[{{name: reward_model, path: {model}}}]"
        given = composed(TINY, [f"actor_rollout_ref.model.path={folder}", rewards, *overrides])
        (check,) = reward_folder_checks(with_required_files(given))
        return "" if check.ok else check.detail

    assert "set recipe.trust_remote_code=true" in detail() and detail(TRUST) == ""
    words = (model / "tiktoken.model").read_text().splitlines(keepends=True)
    (model / "tiktoken.model").write_text("".join(words[:-1]))
    assert "the vocabulary in tiktoken.model differs" in detail(TRUST)


WORKER = """
import sys
from verl_patches import prelude_patch
import verl.utils, verl.utils.tokenizer
from verl.utils import hf_processor, hf_tokenizer
from verl_patches.layout.model_folder import edit_for_vllm
from verl_patches.worker.remote_code import trusts_code

for trusted in (False, True):
    trusts_code.value = trusted
    for given in ({}, {"trust_remote_code": False}):
        try:
            print(type(hf_tokenizer(sys.argv[1], **given)).__name__)
        except ValueError as error:
            print("requires you to execute" in str(error))
    print(hf_processor(sys.argv[1]))
trusts_code.value = False
print(type(hf_tokenizer(sys.argv[1], trust_remote_code=True)).__name__)
from transformers import AutoConfig
for folder in sys.argv[1:]:
    for given in ({}, {"trust_remote_code": False}, {"trust_remote_code": True}):
        config = AutoConfig.from_pretrained(folder, **given)
        print(type(config).__name__, edit_for_vllm(config).model_type, config._name_or_path == folder)
"""


@pytest.fixture(scope="module")
def kimi(tiny_model, tmp_path_factory):
    folder = make_code_model(tiny_model, tmp_path_factory.mktemp("code") / "kimi")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "kimi_k2"}))
    return folder


def test_verl_loads_the_code_in_workers_of_a_run_with_the_key_and_never_asks(run_python, folder, kimi, tmp_path):
    """Check line a3's calls too, which pass nothing; the last tokenizer is the controller's, which passes data's key.

    A configuration of the family is transformers' class with and without the key, though config.json names code for it.
    """
    given = {"patches": "line=pypi,platform=cpu", "env": {"HF_MODULES_CACHE": str(tmp_path)}}
    done = run_python(WORKER, folder, kimi, **given).check()
    found = done.out.split()
    assert found[:7] == ["True", "True", "None", *["TinyTokenizer"] * 2, "None", "TinyTokenizer"]
    assert found[7:] == ["DeepseekV3Config", "deepseek_v3", "True"] * 6
    assert "Do you wish" not in done.out + done.err


def test_one_process_at_a_time_copies_and_imports_the_code(folder, monkeypatch, tmp_path):
    """Check with threads, whose locks are as apart as those of processes: a second one inside would find the mark."""
    mark = tmp_path / "mark"

    def copy(*_):
        mark.touch(exist_ok=False)
        time.sleep(0.01)
        mark.unlink()

    monkeypatch.setattr("transformers.dynamic_module_utils.get_class_from_dynamic_module", copy)
    load = functools.partial(load_if_trusted(lambda *_, trust_remote_code: trust_remote_code), None)
    with ThreadPoolExecutor(8) as threads:
        assert [*threads.map(functools.partial(load, trust_remote_code=True), [folder] * 8)] == [True] * 8
    mark.touch()
    with pytest.raises(FileExistsError):  # control
        load(folder, trust_remote_code=True)
    assert load(folder) is False


def test_sft_data_is_built_and_trained_as_the_template_writes_it(folder, tmp_path):
    """Check the default system turn, one of the row, tools, a call, a tool's result, and the end token."""
    keys = {"tokenizer_name_or_path": str(folder), "trust_remote_code": True, "shuffle": False, "dedupe": False}
    system = {"role": "system", "content": "Be brief."}
    talks = [[USER, TALK[-1]], [system, *TALK[:2]], TALK]
    rows = [{"messages": messages, "tools": None if messages is talks[0] else TOOLS} for messages in talks]
    other = {"messages": [{**USER, "content": "Other?"}, TALK[-1]]}
    code, report = make(tmp_path, [other, *rows], "instruction", test_size=1, **keys)
    assert code == 0 and report["bad"]["rows"] == 0
    tokenizer, config = read_tokenizer(folder, True), {"max_prompt_length": 512, "max_response_length": 128}
    config |= {"truncation": "error", "cache_dir": str(tmp_path)}
    whole = OmegaConf.create({"data": config, "recipe": {"objective": {"name": "sft"}}})
    data = FixedDataset(str(tmp_path / "out" / "train.parquet"), tokenizer, whole.data)
    found = [(row["raw_prompt_ids"], row["tools_kwargs"]["responses"][0]) for row in (data[n] for n in range(3))]
    for (prompt, response), row in zip(found, rows, strict=True):
        whole = tokenizer.apply_chat_template(row["messages"], tools=row["tools"])
        assert [*prompt, *response] == [*whole, tokenizer.eos_token_id]
    texts = [tuple(map(tokenizer.decode, pair)) for pair in found]
    ask, start = f"<|im_user|>user<|im_middle|>{ASKED}<|im_end|>", "<|im_assistant|>assistant<|im_middle|>"
    call = 'I add.<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|im_end|>'
    default, brief = (f"<|im_system|>system<|im_middle|>{text}<|im_end|>" for text in (SYSTEM, "Be brief."))
    tools = f"<|im_system|>tool_declare<|im_middle|>{json.dumps(TOOLS)}<|im_end|>"
    result = "<|im_system|>add<|im_middle|>## Return of functions.add:0\n2<|im_end|>"
    assert texts == [
        (default + ask + start, "It is 2.<|im_end|>[EOS]"),
        (tools + brief + ask + start, f"{call}[EOS]"),
        (tools + default + ask + start + call + result + start, "It is 2.<|im_end|>[EOS]"),
    ]
    nameless = [{**TALK[1], "tool_calls": [{**CALL, "id": "c1"}]}]
    report = make(tmp_path, [{"messages": [USER, *nameless]}] * 3, "instruction", out="b", **keys)[1]
    assert "changes the function 'add' of tool_calls (the template writes only" in next(iter(report["bad"]["shown"]))


def test_rl_data_is_built_checked_and_tokenized(folder, tmp_path, monkeypatch):
    records = [{"problem": f"What is {n} + 1?", "answer": n + 1} for n in range(4)]
    keys = {"tokenizer_name_or_path": str(folder), "trust_remote_code": True, "prompt_type": "model"}
    code, report = make(tmp_path, records, test_size=1, shuffle=False, workers=2, **keys)
    start = "<|im_assistant|>assistant<|im_middle|>"
    shown = (
        f"<|im_system|>system<|im_middle|>{SYSTEM}<|im_end|><|im_user|>user<|im_middle|>What is 1 + 1?<|im_end|>{start}"
    )
    assert code == 0 and report["example"]["prompt"] == shown
    name = "_read_files_and_tokenize"
    monkeypatch.setattr(RLHFDataset, name, check_rl_rows(getattr(RLHFDataset, name)))
    section = {"train_files": str(tmp_path / "out" / "train.parquet"), "train_batch_size": 1, "truncation": "error"}
    section |= {"cache_dir": str(tmp_path), "max_prompt_length": 128, "filter_overlong_prompts": True}
    config = OmegaConf.create({"data": section, "recipe": {"rewards": [{"name": "maths"}]}})
    tokenizer = read_tokenizer(folder, True)
    data = RLHFDataset([section["train_files"]], tokenizer, config.data)
    first = data[0]
    assert len(data) == 3 and tokenizer.decode(first["raw_prompt_ids"]) == shown
    assert first["input_ids"][first["attention_mask"].bool()].tolist() == first["raw_prompt_ids"]


def test_exports_carry_the_code(folder, tmp_path):
    run(folder, tmp_path / "megatron", parse_layout("tp2 ep2 @4"), line="pypi")
    run(tmp_path / "megatron", tmp_path / "back")
    assert read_tokenizer(tmp_path / "back", True).encode(ASKED) == read_tokenizer(folder, True).encode(ASKED)
    assert (tmp_path / "back" / "configuration_tiny.py").is_file()
