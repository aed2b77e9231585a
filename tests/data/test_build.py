"""The preparation script as users run it, and its tables as verl reads them."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl_patches.rewards.learnable import KINDS

DATA = Path(__file__).resolve().parents[2] / "data"
SAMPLE = DATA / "deepscaler_sample.json"


@pytest.fixture
def run(capsys, monkeypatch):
    """`run(*arguments)`: exit code of the script and what it printed."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    main = runpy.run_path(str(DATA / "prepare_deepscaler.py"))["main"]
    return lambda *arguments: (main([str(argument) for argument in arguments]), capsys.readouterr())


def read(path):
    return pyarrow.parquet.read_table(path).to_pylist()


def test_the_sample(run, tmp_path):
    code, printed = run(SAMPLE, "-o", tmp_path / "out", "--test-size", 32, "--json")
    report = json.loads(printed.out)
    assert (code, report["read"], report["train"], report["test"], report["bad"]) == (0, 312, 280, 32, [])
    train, test = read(tmp_path / "out" / "train.parquet"), read(tmp_path / "out" / "test.parquet")
    by_problem = {row["problem"]: row["answer"] for row in json.loads(SAMPLE.read_text())}
    for row in train + test:
        assert [message["role"] for message in row["prompt"]] == ["user"]
        problem, _, rest = row["prompt"][0]["content"].partition(" Let's think step by step")
        assert rest.endswith("\\boxed{}.")
        assert row["reward_model"] == {"style": "rule", "ground_truth": by_problem.pop(problem)}
        assert row["extra_info"]["answer"] == row["reward_model"]["ground_truth"]
        line = int(row["extra_info"]["origin"].removeprefix("deepscaler_sample.json:"))
        assert json.dumps(problem) in SAMPLE.read_text().split("\n")[line]
    assert not by_problem


def test_bad_rows_are_named_and_nothing_is_written(run, tmp_path):
    source, out = tmp_path / "rows.json", tmp_path / "out"
    source.write_text('[{"problem": "p", "answer": "1"},\n{"problem": "q"},\n{"problem": "r", "answer": "2"}]')
    code, printed = run(source, SAMPLE, "-o", out)
    assert code == 1 and "nothing written" in printed.err and not out.exists()
    assert f'{source}:2: expected "answer" to be a string, found NoneType' in printed.err
    code, printed = run(source, "-o", out, "--skip-bad", "--test-size", 1, "--json")
    assert (code, len(json.loads(printed.out)["bad"]), len(read(out / "train.parquet"))) == (0, 1, 1)


def test_gsm8k_and_repeated_problems(run, tmp_path):
    source, out = tmp_path / "train.jsonl", tmp_path / "out"
    rows = [{"question": f"Q{i % 4}?", "answer": f"so\n#### {i}"} for i in range(5)]
    source.write_text("\n".join(json.dumps(row) for row in rows))
    code, printed = run(source, "-o", out, "--test-size", 1, "--json", "--instruction", "")
    assert code == 0 and json.loads(printed.out)["repeated"] == ["train.jsonl:5"]
    both = read(out / "train.parquet") + read(out / "test.parquet")
    pairs = sorted((r["prompt"][0]["content"], r["reward_model"]["ground_truth"]) for r in both)
    assert pairs == [(f"Q{i}?", str(i)) for i in range(4)] and {r["data_source"] for r in both} == {"openai/gsm8k"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.json"], "no such file"),
        ([SAMPLE, "--test-size", "312"], "leave none to train on"),
        ([SAMPLE, "--tokenizer", "nowhere", "--max-prompt-length", "8"], "expected a folder with a tokenizer"),
        (["--learnable", "2"], "at least 3 rows"),
    ],
)
def test_wrong_use_exits_2_and_writes_nothing(run, tmp_path, arguments, message):
    code, printed = run(*arguments, "-o", tmp_path / "out")
    assert code == 2 and message in printed.err
    code, printed = run(*arguments, "-o", tmp_path / "out", "--json")
    assert code == 2 and message in json.loads(printed.out)["error"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("answers", ["paired", "unpaired"])
def test_learnable_rows_may_have_the_columns_of_fixed_data(run, tmp_path, answers):
    plain, given = tmp_path / "plain", tmp_path / "given"
    assert run("--learnable", 12, "-o", plain)[0] == run("--learnable", 12, "-o", given, "--answers", answers)[0] == 0
    rows = read(given / "train.parquet")
    assert [row["label"] for row in rows] == [answers == "paired" or at % 2 == 0 for at in range(12)]
    for row, other in zip(rows, read(plain / "train.parquet"), strict=True):
        assert {name: row[name] for name in other} == other and "label" not in other
        kind = set(KINDS[row["reward_model"]["ground_truth"]])
        assert set(row["chosen"]) <= kind and not set(row["rejected"]) & kind
        assert row["response"] == (row["chosen"] if row["label"] else row["rejected"])
        assert [set(step) <= kind for step in row["steps"]] == row["labels"]
        assert 4 <= len(row["chosen"]) <= 12 and len("".join(row["steps"])) <= 12


@pytest.mark.parametrize("arguments", [
    "", "x.json --learnable 9", "x.json --answers paired", "--learnable 9 --answers none",
    "x.json --tokenizer x", "x.json --max-prompt-length 9"
])  # fmt: skip
def test_options_that_do_not_go_together_are_refused(run, tmp_path, arguments):
    with pytest.raises(SystemExit) as end:
        run(*arguments.split(), "-o", tmp_path)
    assert end.value.code == 2


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**30), 10**30), st.floats(), st.text(max_size=12),
    st.sampled_from(["1", "so #### 3", "\\\\boxed{1}", "\\ud800"]),
)  # fmt: skip
KEYS = st.sampled_from(["problem", "answer", "question", "solution", "q"])
ROWS = st.lists(st.one_of(SCALARS, st.dictionaries(KEYS, SCALARS, max_size=4)), max_size=4)
NUMBERS = st.one_of(st.integers(-3, 9), st.floats(), st.integers(-(10**30), 10**30)).map(str)
OPTIONS = st.one_of(
    st.tuples(st.just("--test-size"), NUMBERS),
    st.tuples(st.just("--seed"), NUMBERS),
    st.tuples(st.just("--instruction"), st.text(max_size=5)),
    st.just(("--skip-bad",)),
    st.just(("--prompt-key", "problem", "--answer-key", "q")),
    st.tuples(st.just("--learnable"), NUMBERS),
)


def contents_of(rows):
    """The rows as JSON, with what JSON cannot say as null."""
    return json.dumps(rows, default=lambda value: None).encode()


ENDINGS = st.sampled_from([".json", ".jsonl", ".parquet", ".csv"])
CONTENTS = st.one_of(ROWS.map(contents_of), st.binary(max_size=30), ROWS.map(lambda rows: contents_of(rows)[:-3]))


@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=30)
@given(CONTENTS, ENDINGS, st.lists(OPTIONS, max_size=2).map(lambda pairs: [word for pair in pairs for word in pair]))
def test_any_file_and_option_ends_with_a_code(tmp_path_factory, contents, ending, options):
    """With the tables, or without any."""
    folder = tmp_path_factory.mktemp("any")
    source, out = folder / f"rows{ending}", folder / "out"
    source.write_bytes(contents)
    arguments = [] if "--learnable" in options else [str(source)]
    try:
        code = runpy.run_path(str(DATA / "prepare_deepscaler.py"))["main"]([*arguments, "-o", str(out), *options])
    except SystemExit as end:  # argparse
        code = end.code
    written = {path.name for path in out.glob("*")}
    assert (code, written) in [(0, {"train.parquet", "test.parquet"}), (1, set()), (2, set())]


def test_as_a_program_and_files_are_replaced_only_with_overwrite(run, tmp_path):
    command = [sys.executable, str(DATA / "prepare_deepscaler.py"), "--learnable", "12", "-o", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.startswith("12 train rows -> ") and len(read(tmp_path / "train.parquet")) == 12
    code, printed = run(SAMPLE, "-o", tmp_path)
    assert code == 2 and "exist already" in printed.err and len(read(tmp_path / "train.parquet")) == 12
    assert run(SAMPLE, "-o", tmp_path, "--overwrite")[0] == 0 and len(read(tmp_path / "train.parquet")) > 200


@pytest.mark.slow
def test_long_prompts_are_reported_and_dropped_and_verl_reads_the_rest(run, tmp_path, tiny_model, monkeypatch):
    options = ("--tokenizer", tiny_model, "--json", "--max-prompt-length")
    code, printed = run(SAMPLE, "-o", tmp_path / "all", *options, 1024)
    assert (code, json.loads(printed.out)["too_long"]) == (0, [])
    code, printed = run(SAMPLE, "-o", tmp_path / "short", *options, 90)
    report = json.loads(printed.out)
    assert code == 0 and 20 < len(report["too_long"]) < 292 and all(item["tokens"] > 90 for item in report["too_long"])
    assert report["train"] + report["test"] + len(report["too_long"]) == 312

    from omegaconf import OmegaConf
    from transformers import AutoTokenizer
    from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    config = OmegaConf.create({"max_prompt_length": 90, "cache_dir": str(tmp_path / "cache")})
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    dataset = RLHFDataset(str(tmp_path / "short" / "train.parquet"), tokenizer, config)
    assert len(dataset) == report["train"]  # verl finds none too long
    longer = RLHFDataset(str(tmp_path / "all" / "train.parquet"), tokenizer, config)
    assert len(longer) < 281  # negative control: here it does
    batch = collate_fn([dataset[i] for i in range(4)])
    assert batch["input_ids"].shape == (4, 90)
    assert batch["reward_model"][0]["ground_truth"] == batch["extra_info"][0]["answer"]
    assert list(batch["index"]) == [0, 1, 2, 3]


@pytest.mark.slow
def test_verls_reward_manager_uses_the_reward(tiny_model):
    """verl's own loader and manager, with three responses."""
    import torch
    from omegaconf import OmegaConf
    from transformers import AutoTokenizer
    from verl import DataProto
    from verl.trainer.ppo.reward import compute_reward, load_reward_manager

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    maths, kwargs = DATA.parent / "verl_patches" / "rewards" / "maths.py", {"format_weight": 0.25}
    config = {
        "reward_model": {"reward_manager": "naive"},
        "data": {"reward_fn_key": "data_source"},
        "custom_reward_function": {"path": str(maths), "name": "compute_score", "reward_kwargs": kwargs},
    }
    answers = ["it is \\boxed{0.5}.", "it is \\boxed{2}, no, \\boxed{3}", "1/2"]
    responses = tokenizer(answers, padding=True, return_tensors="pt")
    prompt = torch.full((3, 2), tokenizer.bos_token_id)
    mask = torch.cat([torch.ones_like(prompt), responses.attention_mask], 1)
    data = DataProto.from_dict(
        tensors={"prompts": prompt, "responses": responses.input_ids, "attention_mask": mask},
        non_tensors={
            "data_source": ["d"] * 3,
            "reward_model": [{"ground_truth": "1/2"}] * 3,
            "extra_info": [{"index": i} for i in range(3)],
        },
    )
    rewards, extra = compute_reward(data, load_reward_manager(OmegaConf.create(config), tokenizer, num_examine=0))
    assert rewards.sum(-1).tolist() == [1.0, 0.25, 0.0]
    assert dict(extra) == {"score": [1.0, 0.25, 0.0], "acc": [1.0, 0.0, 0.0], "format": [1.0, 1.0, 0.0]}
