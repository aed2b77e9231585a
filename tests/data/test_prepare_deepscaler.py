"""The preparation script as users run it, and its tables as verl reads them."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet
import pytest

DATA = Path(__file__).resolve().parents[2] / "data"
SAMPLE = DATA / "deepscaler_sample.json"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("prepare_deepscaler", DATA / "prepare_deepscaler.py")
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


@pytest.fixture
def run(script, capsys):
    def run(*arguments):
        code = script.main([str(argument) for argument in arguments])
        return code, capsys.readouterr()

    return run


def read(path):
    return pyarrow.parquet.read_table(path).to_pylist()


def test_the_sample(run, tmp_path):
    code, said = run(SAMPLE, "-o", tmp_path / "out", "--test-size", 32, "--json")
    assert code == 0
    report = json.loads(said.out)
    assert (report["read"], report["train"], report["test"], report["bad"]) == (312, 280, 32, [])
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


def test_the_seed_decides_the_order(run, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert run(SAMPLE, "-o", tmp_path / name, "--seed", seed)[0] == 0
    tables = {name: (tmp_path / name / "train.parquet").read_bytes() for name in "abc"}
    assert tables["a"] == tables["b"] != tables["c"]


def test_bad_rows_are_named_and_nothing_is_written(run, tmp_path):
    source = tmp_path / "rows.json"
    source.write_text(
        '[\n  {"problem": "p", "answer": "1"},\n  {"problem": "q"},\n  {"problem": "r", "answer": "2"}\n]'
    )
    code, said = run(source, SAMPLE, "-o", tmp_path / "out")
    assert code == 1
    assert f'{source}:3: expected "answer" to be a string, found NoneType' in said.err
    assert "nothing written" in said.err
    assert not (tmp_path / "out").exists()
    code, said = run(source, "-o", tmp_path / "out", "--skip-bad", "--test-size", 1, "--json")
    assert code == 0
    assert len(json.loads(said.out)["bad"]) == 1
    assert len(read(tmp_path / "out" / "train.parquet")) == 1


def test_gsm8k_and_repeated_problems(run, tmp_path):
    source = tmp_path / "train.jsonl"
    rows = [{"question": f"Q{i % 4}?", "answer": f"so\n#### {i}"} for i in range(5)]
    source.write_text("\n".join(json.dumps(row) for row in rows))
    code, said = run(source, "-o", tmp_path / "out", "--test-size", 1, "--json", "--instruction", "")
    assert code == 0
    assert json.loads(said.out)["repeated"] == ["train.jsonl:5"]
    both = read(tmp_path / "out" / "train.parquet") + read(tmp_path / "out" / "test.parquet")
    assert sorted((r["prompt"][0]["content"], r["reward_model"]["ground_truth"]) for r in both) == [
        (f"Q{i}?", str(i)) for i in range(4)
    ]
    assert {r["data_source"] for r in both} == {"openai/gsm8k"}


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
    code, said = run(*arguments, "-o", tmp_path / "out")
    assert (code, message in said.err) == (2, True)
    code, said = run(*arguments, "-o", tmp_path / "out", "--json")
    assert (code, message in json.loads(said.out)["error"]) == (2, True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments", [[], [SAMPLE, "--learnable", "9"], [SAMPLE, "--tokenizer", "x"], [SAMPLE, "--max-prompt-length", "9"]]
)
def test_the_parser_refuses_what_does_not_go_together(run, tmp_path, arguments):
    with pytest.raises(SystemExit) as end:
        run(*arguments, "-o", tmp_path / "out")
    assert end.value.code == 2


def test_files_are_replaced_only_when_told(run, tmp_path):
    assert run("--learnable", 9, "-o", tmp_path)[0] == 0
    before = (tmp_path / "train.parquet").read_bytes()
    code, said = run(SAMPLE, "-o", tmp_path)
    assert (code, "exist already" in said.err) == (2, True)
    assert (tmp_path / "train.parquet").read_bytes() == before
    assert run(SAMPLE, "-o", tmp_path, "--overwrite")[0] == 0
    assert (tmp_path / "train.parquet").read_bytes() != before


def test_as_a_program(tmp_path):
    command = [sys.executable, str(DATA / "prepare_deepscaler.py"), "--learnable", "12", "-o", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=True)
    assert done.stdout.startswith("12 train rows -> ")
    assert len(read(tmp_path / "train.parquet")) == 12


@pytest.mark.slow
def test_long_prompts_are_reported_and_dropped_and_verl_reads_the_rest(run, tmp_path, tiny_model, monkeypatch):
    options = ["--tokenizer", tiny_model, "--max-prompt-length"]
    code, said = run(SAMPLE, "-o", tmp_path / "all", *options, 1024, "--json")
    assert (code, json.loads(said.out)["too_long"]) == (0, [])
    code, said = run(SAMPLE, "-o", tmp_path / "short", *options, 90, "--json")
    report = json.loads(said.out)
    assert code == 0
    assert 20 < len(report["too_long"]) < 292
    assert all(item["tokens"] > 90 for item in report["too_long"])
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
def test_verls_reward_manager_pays_what_the_reward_says(tiny_model):
    """verl's own loader and manager, on responses written here."""
    import torch
    from omegaconf import OmegaConf
    from transformers import AutoTokenizer
    from verl import DataProto
    from verl.trainer.ppo.reward import compute_reward, load_reward_manager

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    maths = DATA.parent / "verl_patches" / "rewards" / "maths.py"
    config = OmegaConf.create(
        {
            "reward_model": {"reward_manager": "naive"},
            "data": {"reward_fn_key": "data_source"},
            "custom_reward_function": {
                "path": str(maths),
                "name": "compute_score",
                "reward_kwargs": {"format_weight": 0.25},
            },
        }
    )
    responses = tokenizer(
        ["it is \\boxed{0.5}.", "it is \\boxed{2}, no, \\boxed{3}", "1/2"], padding=True, return_tensors="pt"
    )
    ids, mask = responses.input_ids, responses.attention_mask
    prompt = torch.full((3, 2), tokenizer.bos_token_id)
    data = DataProto.from_dict(
        tensors={"prompts": prompt, "responses": ids, "attention_mask": torch.cat([torch.ones_like(prompt), mask], 1)},
        non_tensors={
            "data_source": ["d"] * 3,
            "reward_model": [{"ground_truth": "1/2"}] * 3,
            "extra_info": [{"index": i} for i in range(3)],
        },
    )
    rewards, extra = compute_reward(data, load_reward_manager(config, tokenizer, num_examine=0))
    assert rewards.sum(-1).tolist() == [1.0, 0.25, 0.0]
    assert dict(extra) == {"score": [1.0, 0.25, 0.0], "acc": [1.0, 0.0, 0.0], "format": [1.0, 1.0, 0.0]}
