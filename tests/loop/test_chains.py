"""Test the chains of scripts/chains.py with two steps a run: each command reads the output of the one before.

generate, chat and eval are tested on their GRPO run, which saves and validates in both steps: its own validations and
transformers are the references.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import chains
import pytest
import torch
from loop_runs import ROOT, STREAMS
from omegaconf import OmegaConf
from pyarrow import parquet
from safetensors.torch import load_file

from tests.near_ties import near_ties
from tests.tools.inference.reference import greedy_texts
from tests.weights.cases import copy_in_fp8
from verl_patches.rewards.learnable import DATA_SOURCE
from verl_patches.weights.convert import convert
from verl_patches.weights.plan import plan_conversion
from verl_patches.weights.source import open_source

pytestmark = pytest.mark.slow
STEPS, TOKENS = 2, 12
MESSAGES = [{"role": "user", "content": "A B C D"}]
PROMPTS = ["small a b", [{"role": "user", "content": "1 2 3"}], MESSAGES, "x " * 40]
SAMPLED = ("--n", "2", "--seed", "7", "--max-tokens", TOKENS)
GREEDY = ("--temperature", "0", "--max-tokens", TOKENS)
DP2 = ("recipe.rollout.data_parallel_size=2", "recipe.rollout.enable_expert_parallel=true")


def call(words, env):
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=env, **STREAMS, timeout=600)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-5000:]}"


def in_each_step(words):
    """Return the words of a run, changed so that it saves and validates in each step."""
    return [re.sub(r"(trainer\.(save|test)_freq)=\d+", r"\1=1", word) for word in words]


@pytest.fixture(scope="module")
def chain(warm, tmp_path_factory):
    """Run sft_grpo, and rollouts_sft on the same GRPO run; return their folders and `engines`, commands left to run."""
    folder, env = tmp_path_factory.mktemp("chain"), {**os.environ, "PYTHONPATH": str(ROOT)}
    engines = []  # eval and generate
    for commands in (chains.sft_grpo, chains.best_sft):
        for words in commands(folder, STEPS):
            if {"eval", "generate"} & {*words[2:3]}:
                engines.append(words[2:])
            else:
                words = in_each_step(words) if "algo=grpo" in words else words
                call(words, warm(env) if "smoke" in words else env)
    runs = {name: OmegaConf.load(folder / name / "latest" / "config.yaml") for name in ("sft", "grpo", "sft_of_best")}
    saved = {name: folder / name / "latest" / "checkpoints" / f"global_step_{STEPS}" for name in runs}
    base = chains.base_model(folder / "sft")
    return SimpleNamespace(folder=folder, runs=runs, saved=saved, hf=folder / "hf", base=base, engines=engines)


@pytest.fixture(scope="module")
def used(chain, tmp_path_factory):
    """Run generate, chat and eval in one process, which imports vLLM once; return their files and output."""
    run, saved, folder = chain.folder / "grpo", chain.saved["grpo"], tmp_path_factory.mktemp("use")
    hf, fp8, prompts, out = folder / "hf", folder / "fp8", folder / "prompts.jsonl", folder / "out"
    convert(plan_conversion(open_source(saved)), folder / "saved")
    copy_in_fp8(folder / "saved", fp8)
    convert(plan_conversion(open_source(fp8)), hf)  # in bf16, with equal values
    prompts.write_text("".join(json.dumps({"prompt": prompt, "other": 1}) + "\n" for prompt in PROMPTS))
    val = "actor_rollout_ref.rollout.val_kwargs"
    of_hf = [f"data.val_files={chain.runs['grpo'].data.val_files}", f"{val}.n=4", f"{val}.do_sample=true"]
    of_hf += [f"{val}.temperature=1.0", "recipe.rewards=[{name: learnable},{name: format,weight: 0}]"]
    commands = [
        ["generate", fp8, prompts, out / "greedy.jsonl", *GREEDY, "--json"],
        ["generate", run, prompts, out / "whole.jsonl", *SAMPLED, "--json"],
        ["chat", fp8, *GREEDY, "--json"],
        ["eval", run, out / "ranks", *DP2, "--json"],
        ["eval", hf, out / "hf", *of_hf],
        *chain.engines,
    ]
    home = folder / "home"
    home.mkdir()
    words = json.dumps([list(map(str, command)) for command in commands])
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(home), "TMPDIR": str(home)}
    streams = {"input": "A B C D\n\nmore\n/new\nA B C D\n", "capture_output": True, "text": True}
    job = [sys.executable, str(ROOT / "tests/loop/use_job.py"), words]
    done = subprocess.run(job, cwd=folder, env=env, **streams)
    assert done.returncode == 0, done.stderr[-5000:]
    left = [path for path in home.rglob("*") if path.is_file()]
    evals = {of: chain.folder / f"eval_{of}" for of in ("base", "sft", "grpo", "sft_of_best")}
    return SimpleNamespace(hf=hf, out=out, text=done.stdout, left=left, folder=folder, evals=evals, saved=saved)


def read_rows(path):
    return parquet.read_table(path).to_pylist()


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_tensors(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@torch.no_grad()
def log_prob_error(folder, recording):
    """Return the mean |recorded log-prob - transformers' with the weights of `folder`| of the sampled tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32, attn_implementation="eager").eval()
    found, (inputs, masks) = [], (recording[name][:8] for name in ("input_ids", "attention_mask"))
    comparable = near_ties(model, inputs, masks).comparable
    for row, (ids, mask) in enumerate(zip(inputs, masks.bool(), strict=True)):
        expected = recording["rollout_log_probs"][row]
        count = mask[-len(expected) :].sum()
        logits = model(ids[mask][None], use_cache=False).logits[0, -1 - count : -1].log_softmax(-1)
        sampled = logits.gather(-1, ids[mask][-count:, None])[:, 0]
        found.append((sampled - expected[:count]).abs()[comparable[row][mask][-1 - count : -1]])
    return torch.cat(found).mean().item()


def test_sft_trains_on_the_rows_that_were_built(chain):
    records = {each["prompt"]: each for each in read_lines(chain.folder / "records.jsonl")}
    for name, column in (("answers", "response"), ("prompts", None)):
        rows = read_rows(chain.folder / name / "train.parquet") + read_rows(chain.folder / name / "test.parquet")
        assert {row["prompt"][-1]["content"] for row in rows} == {*records} and len(rows) == len(records)
        for row in rows:
            record = records[row["prompt"][-1]["content"]]
            assert (
                row[column] == record["response"] if column else row["reward_model"]["ground_truth"] == record["answer"]
            )
    assert chain.runs["sft"].data.train_files == str(chain.folder / "answers" / "train.parquet")
    assert read_lines(chain.folder / "sft" / "latest" / "metrics.jsonl")[-1]["objective/loss"] > 0


def test_the_export_has_the_weights_that_sft_has_left(chain):
    from verl_patches.reshard.region import Region
    from verl_patches.weights.reader import WeightReader

    source, exported, base = open_source(chain.saved["sft"]), read_tensors(chain.hf), read_tensors(chain.base)
    assert exported.keys() == source.tensors.keys() == base.keys()
    changed = 0
    with WeightReader(source) as reader:
        for name, tensor in source.tensors.items():
            read = torch.empty(tensor.shape)
            reader.copy(Region(name, 0, 0, tensor.shape[0]), read)
            assert torch.equal(read, exported[name].float()), name
            changed += not torch.equal(exported[name], base[name])
    assert changed > len(base) / 2  # the control


def test_grpo_starts_from_the_export(chain):
    """Compare the first responses' log-probs with transformers' for these weights; the base's must differ."""
    recording = load_file(chain.folder / "grpo" / "latest" / "rollouts" / "step_1.safetensors")
    assert log_prob_error(chain.hf, recording) < 1e-4 < 1e-2 < log_prob_error(chain.base, recording)
    steps = json.loads((chain.folder / "grpo" / "latest" / "summary.json").read_text())["steps"]
    assert len(steps) == STEPS and all(step["logprob_delta"]["mean"] < 1e-4 for step in steps)
    assert chain.runs["grpo"].data.train_files == str(chain.folder / "prompts" / "train.parquet")


def test_evals_are_the_validations_of_the_weights_that_each_step_has_left(chain, used):
    """Compare with the trainer's mean@1, in another process, from the files."""
    metric = f"val-core/{DATA_SOURCE}/reward/mean@1"
    before, *validated = (line[metric] for line in read_lines(chain.folder / "grpo" / "latest" / "metrics.jsonl"))
    reports = {of: json.loads((folder / "eval.json").read_text())["steps"] for of, folder in used.evals.items()}
    assert [step["score"] for step in reports["sft"]] == pytest.approx([before], abs=1e-12)
    steps = reports["grpo"]
    assert [step["step"] for step in steps] == [1, 2] and validated[0] != validated[1]
    assert [step["score"] for step in steps] == pytest.approx(validated, abs=1e-12)
    for step in (step for found in reports.values() for step in found):
        of = step["sources"][DATA_SOURCE]
        assert of["mean"] == step["score"] and of["low"] < of["mean"] < of["high"]
        assert of["prompts"] == 30
    assert len({found[-1]["score"] for found in reports.values()}) == 4  # the control: other weights, other scores
    lines = read_lines(used.evals["grpo"] / "responses.jsonl")
    assert [(line["step"], line["row"]) for line in lines] == [(step, row) for step in (1, 2) for row in range(30)]


def test_generate_reads_the_grpo_checkpoint(chain, used):
    """Compare greedy responses with those that its eval has scored; the model before GRPO gives other ones."""
    made = [line["responses"][0]["text"] for line in read_lines(chain.folder / "generated.jsonl")]
    scored = {
        of: [line["responses"][0]["text"] for line in read_lines(used.evals[of] / "responses.jsonl")]
        for of in ("sft", "grpo")
    }
    assert made == scored["grpo"][-30:] != scored["sft"] and len(made) == 30


def test_the_best_recorded_responses_are_what_the_next_sft_trains_on(chain):
    rows, data = read_rows(chain.folder / "best" / "train.parquet"), chain.runs["sft_of_best"].data
    prompts = {row["prompt"][-1]["content"] for row in read_rows(chain.folder / "prompts" / "train.parquet")}
    assert {row["prompt"][-1]["content"] for row in rows} <= prompts and len(rows) == STEPS * 12
    assert data.train_files == str(chain.folder / "best" / "train.parquet")
    assert chains.base_model(chain.folder / "sft_of_best") == chain.base  # and not what GRPO has made


def parse_output(text):
    """Return the JSON values with which a text begins, and the rest."""
    values, decoder = [], json.JSONDecoder()
    while (text := text.lstrip()).startswith("{"):
        value, end = decoder.raw_decode(text)
        values.append(value)
        text = text[end:]
    return values, text


def test_greedy_responses_of_a_folder_in_fp8_are_those_of_transformers_in_bf16_values(used):
    lines = read_lines(used.out / "greedy.jsonl")
    assert [line["prompt"] for line in lines] == PROMPTS and [line["row"] for line in lines] == [0, 1, 2, 3]
    found = [(line["responses"][0]["tokens"], line["responses"][0]["text"]) for line in lines]
    assert found == greedy_texts(used.hf, PROMPTS, TOKENS)


def test_a_chat_answers_with_what_was_said_before_until_it_is_told_to_forget(used):
    values, text = parse_output(used.text)
    sampled, first, second, again = values[1:5]
    assert [each["message"] for each in (first, second, again)] == ["A B C D", "more", "A B C D"]
    assert first["text"] == again["text"] == read_lines(used.out / "greedy.jsonl")[2]["responses"][0]["text"]
    assert second["prompt_tokens"] > first["prompt_tokens"] + first["tokens"]
    assert sampled["rows"] == 4 and Path(sampled["model"]).resolve() == used.saved.resolve()
    assert values[5] == json.loads((used.out / "ranks" / "eval.json").read_text())
    assert len(values) == 6 and "mean@4" in text and "WARNING" not in used.text


def test_a_folder_is_scored_by_the_rewards_that_are_given(used):
    lines = read_lines(used.out / "hf" / "responses.jsonl")
    for line in lines:
        assert len(line["responses"]) == 4 and line["data_source"] == DATA_SOURCE and line["step"] == 0
        for each in line["responses"]:
            assert (
                each["value"] == each["reward"] == pytest.approx(each["reward/learnable"])
                and each["reward/format"] == 0
            )
    of = json.loads((used.out / "hf" / "eval.json").read_text())["steps"][0]["sources"][DATA_SOURCE]
    assert of["n"] == 4 and of["pass"] == {}  # a share of right symbols is not right or wrong


def test_an_eval_on_two_ranks_is_that_of_one(used):
    """Compare evals of both checkpoints; the two ranks' engines are on Ray."""
    for name in ("eval.json", "responses.jsonl"):
        assert (used.out / "ranks" / name).read_bytes() == (used.evals["grpo"] / name).read_bytes()


def test_nothing_is_written_beside_the_output(used):
    assert used.left == []
    assert {path.name for path in used.folder.iterdir()} == {"saved", "hf", "fp8", "prompts.jsonl", "out", "home"}
    outputs = {"greedy.jsonl", "whole.jsonl", "hf", "ranks"}
    assert {path.name for path in used.out.iterdir()} == outputs
