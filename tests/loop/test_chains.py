"""The chains of scripts/chains.py with two steps a run: what each command reads is what the one before has written."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import chains
import pytest
import torch
from loop_runs import ROOT, STREAMS
from omegaconf import OmegaConf
from pyarrow import parquet
from safetensors.torch import load_file

from verl_patches.rewards.learnable import DATA_SOURCE

pytestmark = [pytest.mark.slow, pytest.mark.full]
STEPS = 2


def call(words, env):
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=env, **STREAMS, timeout=600)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-5000:]}"


@pytest.fixture(scope="module")
def chain(warm, tmp_path_factory):
    """Folders of sft_grpo, and of what rollouts_sft makes of the same GRPO run."""
    folder, env = tmp_path_factory.mktemp("chain"), {**os.environ, "PYTHONPATH": str(ROOT)}
    engines = []  # eval and generate: in one process, which imports vLLM once
    for commands in (chains.sft_grpo, chains.best_sft):
        for words in commands(folder, STEPS):
            if {"eval", "generate"} & {*words[2:3]}:
                engines.append(words[2:])
            else:
                call(words, warm(env) if "smoke" in words else env)
    call(["tests/loop/use_job.py", json.dumps(engines)], env)
    runs = {name: OmegaConf.load(folder / name / "config.yaml") for name in ("sft", "grpo", "sft_of_best")}
    saved = {name: folder / name / "latest" / "checkpoints" / f"global_step_{STEPS}" for name in runs}
    return SimpleNamespace(folder=folder, runs=runs, saved=saved, hf=folder / "hf", base=chains.base_of(folder / "sft"))


def rows_of(path):
    return parquet.read_table(path).to_pylist()


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def tensors_of(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@torch.no_grad()
def log_prob_error(folder, recording):
    """Mean |log-prob of the recording - that of transformers with the weights of `folder`| of the sampled tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32, attn_implementation="eager").eval()
    found = []
    for ids, mask, expected in zip(
        recording["input_ids"][:8], recording["attention_mask"].bool(), recording["rollout_log_probs"], strict=False
    ):
        count = mask[-len(expected) :].sum()
        logits = model(ids[mask][None], use_cache=False).logits[0, -1 - count : -1].log_softmax(-1)
        sampled = logits.gather(-1, ids[mask][-count:, None])[:, 0]
        found.append((sampled - expected[:count]).abs().mean())
    return torch.stack(found).mean().item()


def test_sft_trains_on_the_rows_that_were_built(chain):
    records = {each["prompt"]: each for each in lines_of(chain.folder / "records.jsonl")}
    for name, column in (("answers", "response"), ("prompts", None)):
        rows = rows_of(chain.folder / name / "train.parquet") + rows_of(chain.folder / name / "test.parquet")
        assert {row["prompt"][-1]["content"] for row in rows} == {*records} and len(rows) == len(records)
        for row in rows:
            record = records[row["prompt"][-1]["content"]]
            assert (
                row[column] == record["response"] if column else row["reward_model"]["ground_truth"] == record["answer"]
            )
    assert chain.runs["sft"].data.train_files == str(chain.folder / "answers" / "train.parquet")
    assert lines_of(chain.folder / "sft" / "latest" / "metrics.jsonl")[-1]["objective/loss"] > 0


def test_the_export_has_the_weights_that_sft_has_left(chain):
    from verl_patches.reshard.region import Region
    from verl_patches.weights.reader import WeightReader
    from verl_patches.weights.source import open_source

    source, exported, base = open_source(chain.saved["sft"]), tensors_of(chain.hf), tensors_of(chain.base)
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
    """Its first responses have the log-probs that transformers gives them with these weights, not with the base's."""
    recording = load_file(chain.folder / "grpo" / "latest" / "rollouts" / "step_1.safetensors")
    assert log_prob_error(chain.hf, recording) < 1e-4 < 1e-2 < log_prob_error(chain.base, recording)
    steps = json.loads((chain.folder / "grpo" / "latest" / "summary.json").read_text())["steps"]
    assert len(steps) == STEPS and all(step["logprob_delta"]["mean"] < 1e-4 for step in steps)
    assert chain.runs["grpo"].data.train_files == str(chain.folder / "prompts" / "train.parquet")


def test_evals_are_the_validations_of_the_weights_that_each_step_has_left(chain):
    before, after = (
        line for line in lines_of(chain.folder / "grpo" / "latest" / "metrics.jsonl") if line["step"] in (0, STEPS)
    )
    metric = f"val-core/{DATA_SOURCE}/reward/mean@1"
    found = {}
    for of in ("base", "sft", "grpo", "sft_of_best"):
        report = json.loads((chain.folder / f"eval_{of}" / "eval.json").read_text())
        (step,) = report["steps"]
        found[of] = step["score"]
        assert step["sources"][DATA_SOURCE]["prompts"] == 30
    assert found["sft"] == pytest.approx(before[metric], abs=1e-9)
    assert found["grpo"] == pytest.approx(after[metric], abs=1e-9)
    assert len({*found.values()}) == 4  # the control: no two of them are of the same weights


def test_generate_reads_the_grpo_checkpoint(chain):
    """Greedily it gives the responses that its eval has scored, and other ones than the model before GRPO."""
    made = [line["responses"][0]["text"] for line in lines_of(chain.folder / "generated.jsonl")]
    scored = {
        of: [line["responses"][0]["text"] for line in lines_of(chain.folder / f"eval_{of}" / "responses.jsonl")]
        for of in ("sft", "grpo")
    }
    assert made == scored["grpo"] != scored["sft"] and len(made) == 30


def test_the_best_recorded_responses_are_what_the_next_sft_trains_on(chain):
    rows, data = rows_of(chain.folder / "best" / "train.parquet"), chain.runs["sft_of_best"].data
    prompts = {row["prompt"][-1]["content"] for row in rows_of(chain.folder / "prompts" / "train.parquet")}
    assert {row["prompt"][-1]["content"] for row in rows} <= prompts and len(rows) == STEPS * 12
    assert data.train_files == str(chain.folder / "best" / "train.parquet")
    assert chains.base_of(chain.folder / "sft_of_best") == chain.base  # and not what GRPO has made
