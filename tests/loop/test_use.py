"""generate, chat and eval of a run with two checkpoints; its own validations and transformers are the references."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import yaml
from loop_runs import ROOT

from tests.inference.reference import greedy_texts
from verl_patches.weights.convert import convert
from verl_patches.weights.plan import plan_conversion
from verl_patches.weights.source import open_source

pytestmark = pytest.mark.slow
TOKENS, SEEN = 12, "verl_patches/same_kind"
MESSAGES = [{"role": "user", "content": "A B C D"}]
PROMPTS = ["small a b", [{"role": "user", "content": "1 2 3"}], MESSAGES, "x " * 40]
SAMPLED = ("--n", "2", "--seed", "7", "--max-tokens", TOKENS)
GREEDY = ("--temperature", "0", "--max-tokens", TOKENS)
DP2 = ("recipe.rollout.dp=2", "recipe.rollout.expert_parallel=true")


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def used(smoke, tmp_path_factory):
    """What all commands left and printed, each called once."""
    run = smoke("--learn", "--steps", "2", "trainer.save_freq=1", "trainer.test_freq=1")
    folder, saved = tmp_path_factory.mktemp("use"), run.folder / "checkpoints" / "global_step_2"
    hf, fp8, prompts, out = folder / "hf", folder / "fp8", folder / "prompts.jsonl", folder / "out"
    convert(plan_conversion(open_source(saved), dtype="fp8"), fp8)
    convert(plan_conversion(open_source(fp8)), hf)  # in bf16, with equal values
    prompts.write_text("".join(json.dumps({"prompt": prompt, "other": 1}) + "\n" for prompt in PROMPTS))
    (data,) = yaml.safe_load((run.folder / "config.yaml").read_text())["data"]["val_files"]
    val = "actor_rollout_ref.rollout.val_kwargs"
    of_hf = [f"data.val_files={data}", "recipe.rewards=[{name: learnable},{name: format,weight: 0}]"]
    of_hf += [f"{val}.n=4", f"{val}.do_sample=true", f"{val}.temperature=1.0"]
    commands = [
        ["generate", fp8, prompts, out / "greedy.jsonl", *GREEDY, "--json"],
        ["generate", run.folder, prompts, out / "whole.jsonl", *SAMPLED, "--json"],
        ["cut", "generate", saved, prompts, out / "cut.jsonl", *SAMPLED],
        ["generate", saved, prompts, out / "cut.jsonl", *SAMPLED, "--json"],
        ["chat", fp8, *GREEDY, "--json"],
        ["eval", run.folder, out / "run", "--json"],
        ["eval", hf, out / "hf", *of_hf],
        ["eval", run.folder, out / "ranks", *DP2],
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
    return SimpleNamespace(run=run, saved=saved, hf=hf, out=out, text=done.stdout, left=left, folder=folder)


def printed(text):
    """The JSON values that a text begins with, and what follows."""
    values, decoder = [], json.JSONDecoder()
    while (text := text.lstrip()).startswith("{"):
        value, end = decoder.raw_decode(text)
        values.append(value)
        text = text[end:]
    return values, text


def test_greedy_responses_of_a_folder_in_fp8_are_those_of_transformers_in_bf16_values(used):
    lines = lines_of(used.out / "greedy.jsonl")
    assert [line["prompt"] for line in lines] == PROMPTS and [line["row"] for line in lines] == [0, 1, 2, 3]
    found = [(line["responses"][0]["tokens"], line["responses"][0]["text"]) for line in lines]
    assert found == greedy_texts(used.hf, PROMPTS, TOKENS)


def test_an_eval_is_the_validation_of_the_same_checkpoint(used):
    """Bit for bit the trainer's mean@n, in another process, from the files; the two checkpoints differ."""
    report = json.loads((used.out / "run" / "eval.json").read_text())
    means = [step["sources"][SEEN]["mean"] for step in report["steps"]]
    expected = [step["val"]["metrics"][f"val-core/{SEEN}/reward/mean@1"] for step in used.run.steps]
    assert [step["step"] for step in report["steps"]] == [1, 2] and expected[0] != expected[1]
    assert means == pytest.approx(expected, abs=1e-12) == [step["score"] for step in report["steps"]]
    assert (used.out / "run" / "accuracy.png").read_bytes()[1:4] == b"PNG"
    for step in report["steps"]:
        of = step["sources"][SEEN]
        assert of["low"] < of["mean"] < of["high"] and of["prompts"] == 30 and "bootstrap" in of["interval"]
    lines = lines_of(used.out / "run" / "responses.jsonl")
    assert [(line["step"], line["row"]) for line in lines] == [(step, row) for step in (1, 2) for row in range(30)]
    wrong = [line["row"] for line in lines if line["step"] == 2 and line["responses"][0]["value"] < 1]
    assert [each["row"] for each in report["steps"][1]["wrong"]] == wrong


def test_an_output_that_was_cut_goes_on_as_if_it_had_not_been(used):
    assert (used.out / "cut.jsonl").read_bytes() == (used.out / "whole.jsonl").read_bytes()
    (a, b), *_ = [line["responses"] for line in lines_of(used.out / "whole.jsonl")]
    assert a["text"] != b["text"] and not list(used.out.rglob("*.partial"))
    (first, second, third, *_), _ = printed(used.text)
    assert [each["kept"] for each in (first, second, third)] == [0, 0, 2]
    assert second["model"] == third["model"] == str(used.saved) and second["rows"] == third["rows"] == 4


def test_a_chat_answers_with_what_was_said_before_until_it_is_told_to_forget(used):
    values, text = printed(used.text)
    first, second, again = values[3:6]
    assert [each["message"] for each in (first, second, again)] == ["A B C D", "more", "A B C D"]
    assert first["text"] == again["text"] == lines_of(used.out / "greedy.jsonl")[2]["responses"][0]["text"]
    assert second["prompt_tokens"] > first["prompt_tokens"] + first["tokens"]
    assert values[6] == json.loads((used.out / "run" / "eval.json").read_text())
    assert len(values) == 7 and "mean@4" in text and "WARNING" not in used.text


def test_a_folder_is_scored_by_the_rewards_that_are_given(used):
    lines = lines_of(used.out / "hf" / "responses.jsonl")
    for line in lines:
        assert len(line["responses"]) == 4 and line["data_source"] == SEEN and line["step"] == 0
        for each in line["responses"]:
            assert (
                each["value"] == each["reward"] == pytest.approx(each["reward/learnable"])
                and each["reward/format"] == 0
            )
    of = json.loads((used.out / "hf" / "eval.json").read_text())["steps"][0]["sources"][SEEN]
    assert of["n"] == 4 and of["pass"] == {}  # a share of right symbols is not right or wrong


def test_an_eval_on_two_ranks_is_that_of_one(used):
    """Of both checkpoints, whose engines are on Ray."""
    for name in ("eval.json", "responses.jsonl"):
        assert (used.out / "ranks" / name).read_bytes() == (used.out / "run" / name).read_bytes()


def test_nothing_is_written_beside_the_output(used):
    assert [
        path for path in used.left if "matplotlib" not in path.parts
    ] == []  # its list of fonts, as of every picture
    assert {path.name for path in used.folder.iterdir()} == {"hf", "fp8", "prompts.jsonl", "out", "home"}
    outputs = {"greedy.jsonl", "whole.jsonl", "cut.jsonl", "run", "hf", "ranks"}
    assert {path.name for path in used.out.iterdir()} == outputs
