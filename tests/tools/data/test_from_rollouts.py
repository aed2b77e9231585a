"""Test data of recorded rollouts: the choice, its order, its recording; that runs accept it; and the samples shown.

tests/loop/test_smoke.py makes such data from a real run.
"""

import json
import shlex
import shutil
import uuid

import numpy as np
import pyarrow as pa
import pytest
import torch
from omegaconf import OmegaConf
from pyarrow import parquet
from typer.testing import CliRunner

from tests.runs import composed
from verl_patches.__main__ import app
from verl_patches.errors import ConfigError, RecipeError
from verl_patches.run.environment import CONFIG_FILE, FACTS_FILE
from verl_patches.run.resolve import changed_run
from verl_patches.spec import read_run
from verl_patches.step.objectives.dataset import FixedDataset
from verl_patches.step.replay.recording import save_scores, save_step
from verl_patches.tools.data.from_rollouts import Choice, write_rollout_data
from verl_patches.weights.run_folders import take_start

PROMPTS = ["one two", "three", "four", "never sampled"]
P_WIDTH, R_WIDTH = 40, 12
# step -> (prompt, response, score, whether it ends with the end token) of each row, as they were sampled
STEPS = {
    1: [
        (0, "good", 1.0, True), (0, "bad", 0.1, True), (0, "fair", 0.7, False), (0, "good", 1.0, True),
        (1, "same", 0.7, True), (1, "other", 0.7, True), (1, "", 0.7, True), (1, "last", 0.7, False),
    ],
    2: [
        (2, "x", 0.2, True), (2, "y", 0.9, True), (2, "z", 0.9, True), (2, "w", 0.3, True),
        (0, "good", 1.0, True), (0, "low", 0.0, True), (0, "mid", 0.5, True), (0, "mid", 0.5, True),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture
def run(tmp_path, tiny_model, tokenizer):
    """Make the folder of a run with these steps; the rows of scores are in another order, as verl balances them."""
    rows = [
        {
            "data_source": "made",
            "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": text}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(number)},
        }
        for number, text in enumerate(PROMPTS)
    ]
    file = tmp_path / "train.parquet"
    parquet.write_table(pa.Table.from_pylist(rows), file)
    folder = tmp_path / "run" / take_start([tmp_path / "run"], None, None)
    settings = {
        "data.train_files": [str(file)],
        "data.max_prompt_length": P_WIDTH,
        "data.max_response_length": R_WIDTH,
        "actor_rollout_ref.model.path": str(tiny_model),
    }
    save(folder, composed("deepseekv3_tiny_cpu", [f"{key}={value}" for key, value in settings.items()]))
    for step, sampled in STEPS.items():
        record(folder, step, sampled, rows, tokenizer)
    return folder


def save(folder, spec):
    """Write the configuration and the facts of a run, as the launcher does."""
    OmegaConf.save(spec.verl, folder / CONFIG_FILE)
    (folder / FACTS_FILE).write_text(spec.text())


def read_spec(folder):
    return read_run((folder / FACTS_FILE).read_text(), OmegaConf.load(folder / CONFIG_FILE))


def record(folder, step, sampled, rows, tokenizer, prompt=None):
    count, end, pad = len(sampled), tokenizer.eos_token_id, tokenizer.pad_token_id
    prompts, responses = torch.full((count, P_WIDTH), pad), torch.full((count, R_WIDTH), pad)
    mask = torch.zeros(count, P_WIDTH + R_WIDTH, dtype=torch.int64)
    for row, (number, text, _, finished) in enumerate(sampled):
        ids = prompt or tokenizer.apply_chat_template(rows[number]["prompt"], add_generation_prompt=True)[-P_WIDTH:]
        own = tokenizer.encode(text, add_special_tokens=False) + [end] * finished
        assert len(own) <= R_WIDTH
        prompts[row, P_WIDTH - len(ids) :], responses[row, : len(own)] = torch.tensor(ids), torch.tensor(own)
        mask[row, P_WIDTH - len(ids) : P_WIDTH + len(own)] = 1
    tensors = {"prompts": prompts, "responses": responses, "attention_mask": mask}
    save_step(folder / "rollouts", step, tensors)
    uids = [str(uuid.UUID(int=1000 * step + number)) for number, *_ in sampled]
    order = torch.randperm(count)
    columns = {"uid": np.array(uids, dtype=object)[order.numpy()], "reward/made": [sampled[row][2] for row in order]}
    columns |= {"gold": [sampled[row][0] or None for row in order], "data_source": ["made"] * count}
    columns |= {f"dlogp/{name}": order * scale for name, scale in (("mean", 1e-3), ("max", 1e-2))}
    save_scores(folder / "rollouts", step, order, torch.tensor([sampled[row][2] for row in order]), columns)


def made(run, tmp_path, name="out", **choice):
    report = write_rollout_data(run, tmp_path / name, Choice(**choice))
    return parquet.read_table(tmp_path / name / "train.parquet").to_pylist(), report


def texts(rows, *columns):
    return [(row["prompt"][-1]["content"], *(row[name] for name in columns)) for row in rows]


def test_the_best_of_each_prompt(run, tmp_path):
    """Check that of equal rewards the first is taken, no row twice, with the data's gold answer and source."""
    rows, report = made(run, tmp_path)
    assert texts(rows, "response") == [("one two", "good"), ("three", "same"), ("four", "y")]
    assert rows[0]["prompt"][0] == {"role": "system", "content": "s"} and rows[2]["reward_model"]["ground_truth"] == "2"
    assert (rows[0]["data_source"], rows[0]["ability"]) == ("made", "math")
    uid = uuid.UUID(int=2002).hex
    assert rows[2]["extra_info"]["origin"] == f"run, step 2, uid {uid}, reward 0.9"
    assert (report["prompts"], report["responses"], report["rows"]) == (4, 16, 3)
    left_out = {"empty": 1, "not among the best": 9, "repeated": 3}
    assert report["left_out"] == left_out and sum(left_out.values()) + 3 == 16


def test_best_of_n_and_threshold(run, tmp_path):
    rows, _ = made(run, tmp_path, best=2, threshold=0.7)
    of_two = {"one two": ("good", "fair"), "three": ("same", "other"), "four": ("y", "z")}
    expected = [(prompt, response) for prompt, responses in of_two.items() for response in responses]
    assert texts(rows, "response") == expected  # 0.7 is 0.69999999 in fp32


def test_conditional_sft_tags_the_last_message(run, tmp_path):
    rows, report = made(run, tmp_path, kind="conditional")
    assert texts(rows, "response")[:3] == [
        ("one two <rm_score>: 1.00 ", "good"),
        ("one two <rm_score>: 0.70 ", "fair"),
        ("one two <rm_score>: 0.10 ", "bad"),
    ]
    assert len(rows) == 12 and all(row["prompt"][0]["content"] == "s" for row in rows)
    rows, _ = made(run, tmp_path, "t", kind="conditional", threshold=1.0)
    assert texts(rows, "response") == [("one two <rm_score>: 1.00 ", "good")]


def test_pairs_are_the_best_against_the_worst_with_a_margin(run, tmp_path):
    rows, report = made(run, tmp_path, kind="pairs", margin=0.7)
    assert texts(rows, "chosen", "rejected") == [
        ("one two", "good", "bad"),
        ("four", "y", "x"),  # 0.9 - 0.2
        ("one two", "good", "low"),
    ]
    assert report["left_out"]["prompts within the margin"] == 1  # equal rewards are no pair
    rows, report = made(run, tmp_path, "m", kind="pairs", margin=0.95, threshold=0.95)
    assert texts(rows, "chosen", "rejected") == [("one two", "good", "low")]
    assert report["left_out"]["prompts below the threshold"] == 2


def test_equal_recordings_give_equal_bytes(run, tmp_path):
    made(run, tmp_path, "a", kind="pairs")
    made(run, tmp_path, "b", kind="pairs")
    for name in ("train.parquet", "manifest.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    assert manifest["run"] == {"name": "run", "start": "0001", "steps": [1, 2]}
    assert manifest["settings"]["kind"] == "pairs"
    assert str(tmp_path) not in json.dumps(manifest)


def test_a_run_takes_the_pairs(run, tmp_path, tokenizer, tiny_model):
    """Check the printed command and the run's dataset.

    A chain of tests/loop trains on `best`.
    """
    save(run, changed_run(read_spec(run), {"data.max_response_length": 2}))
    _, report = made(run, tmp_path, kind="pairs")
    file, longest = str(tmp_path / "out" / "train.parquet"), report["longest_tokens"]
    words = shlex.split(report["command"])
    assert words[:4] == ["bash", "scripts/smoke.sh", "algo=dpo", f"data.train_files={file}"]
    assert words[4:] == [f"data.max_prompt_length={P_WIDTH}", f"data.max_response_length={longest['response']}"]

    overrides = ["algo=dpo", f"data.train_files=[{file}]", f"data.val_files=[{file}]", "data.train_batch_size=2"]
    overrides += ["actor_rollout_ref.actor.ppo_mini_batch_size=2", f"actor_rollout_ref.model.path={tiny_model}"]
    config = composed("deepseekv3_tiny_cpu", overrides).verl.data
    data = OmegaConf.merge(config, OmegaConf.from_dotlist(words[4:]).data, {"cache_dir": str(tmp_path)})

    def read(name, **changes):
        whole = {"data": OmegaConf.merge(data, changes), "recipe": {"objective": {"name": name}}}
        return FixedDataset([file], tokenizer, OmegaConf.create(whole).data)

    row = read("dpo")[0]
    with pytest.raises(ConfigError, match=f"a response has {longest['response']} tokens"):
        read("dpo", max_response_length=longest["response"] - 1)
    text = tokenizer.decode(row["tools_kwargs"]["responses"][0], skip_special_tokens=True)
    assert text == "good" and tokenizer.decode(row["raw_prompt_ids"]).count("one two") == 1
    with pytest.raises(ConfigError, match="kto needs the columns"):  # the control
        read("kto")


@pytest.mark.parametrize("truncation", ["left", "middle", "right"])
def test_a_prompt_that_was_cut_is_found(run, tmp_path, tokenizer, truncation):
    """Cut a prompt as verl's postprocess_data does (verl/utils/torch_functional.py)."""
    whole = tokenizer.apply_chat_template([{"role": "user", "content": "b" * 60}], add_generation_prompt=True)
    cut = {"left": whole[-P_WIDTH:], "right": whole[:P_WIDTH], "middle": whole[: P_WIDTH // 2] + whole[-P_WIDTH // 2 :]}
    rows = [{"prompt": [{"role": "user", "content": "b" * 60}]}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    for path in (run / "rollouts").iterdir():
        path.unlink()
    record(run, 1, [(0, "good", 1.0, True)], rows, tokenizer, cut[truncation])
    for setting in ("left", "middle", "right"):
        save(run, changed_run(read_spec(run), {"data.truncation": setting}))
        if setting == truncation:
            assert len(made(run, tmp_path)[0]) == 1
        else:
            with pytest.raises(ConfigError, match="expected all 1 recorded prompts, found 0"):
                made(run, tmp_path, setting)


# ---- what is refused


def remove(run, name):
    (run / "rollouts" / name).unlink()


def test_a_run_that_recorded_nothing_says_what_to_set(run, tmp_path):
    for path in (run / "rollouts").iterdir():
        path.unlink()
    with pytest.raises(ConfigError, match="found none; .*recipe.rollout.record=true"):
        made(run, tmp_path)
    (run / FACTS_FILE).unlink()
    with pytest.raises(
        ConfigError, match="the folder of a run, with config.yaml and facts.json; found FileNotFoundError"
    ):
        made(run, tmp_path)


def test_steps_without_scores_are_left_out(run, tmp_path):
    """Use a recording of an earlier version, or of a run that ended between a rollout and its update."""
    remove(run, "scores_2.safetensors")
    assert made(run, tmp_path)[1]["steps"] == 1
    remove(run, "scores_1.safetensors")
    with pytest.raises(ConfigError, match="found 2 steps without rewards"):
        made(run, tmp_path, "b")


def test_steps_of_the_starts_that_it_came_from_count_up_to_the_one_gone_on_after(run, tmp_path):
    """Let start 2 go on after step 1 and end before its step 2 had scores: step 2 of start 1 is not the run's."""
    second = run.parent / take_start([run.parent], ("0001", 1), None)
    save(second, read_spec(run))
    (second / "rollouts").mkdir()
    shutil.copy(run / "rollouts/step_2.safetensors", second / "rollouts")
    done = CliRunner().invoke(app, ["data", "from-rollouts", str(run.parent), "-o", str(tmp_path / "new")])
    assert done.exit_code == 0, done.output
    manifest = json.loads((tmp_path / "new" / "manifest.json").read_text())
    assert manifest["run"] == {"name": "run", "start": "0002", "steps": [1]}
    shutil.copy(run / "rollouts/scores_2.safetensors", second / "rollouts")
    assert made(second, tmp_path, "later")[1]["steps"] == 2


def test_a_damaged_recording_or_lost_data_is_one_sentence_and_nothing_is_written(run, tmp_path):
    scores = run / "rollouts" / "scores_1.safetensors"
    content = scores.read_bytes()
    scores.write_bytes(content[:-3])
    with pytest.raises(ConfigError, match=str(scores)):
        made(run, tmp_path)
    scores.write_bytes(content)
    with pytest.raises(RecipeError, match="found none among 16 responses"):
        made(run, tmp_path, threshold=2.0)
    (tmp_path / "train.parquet").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"train.parquet is cut off"):
        made(run, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "train.parquet"]


# ---- samples


def samples(run, *options):
    done = CliRunner().invoke(app, ["samples", str(run), *options])
    return done.exit_code, done.output


def shown(run, *options):
    """Return the sample numbers and the responses that the command prints, in order."""
    code, output = samples(run, *options, "--json")
    found = json.loads(output)
    assert code == (0 if found else 1), output  # 1: nothing is as the options say
    return [(one["sample"], one["response"].removesuffix("<|end|>")) for one in found]


def test_a_sample_has_its_prompt_gold_answer_parts_and_gap(run):
    code, output = samples(run, "--step", "2", "--sample", "1", "--json")
    (one,) = json.loads(output)
    assert code == 0 and "four" in one["prompt"] and one["response"].startswith("y")
    expected = {"step": 2, "sample": 1, "tokens": 2, "cut": False, "uid": uuid.UUID(int=2002).hex}
    assert one.items() >= {**expected, "gold": "2", "data_source": "made"}.items()
    numbers = {**one["dlogp"], "reward": one["reward"], **one["parts"]}
    assert numbers == pytest.approx({"mean": 1e-3, "max": 1e-2, "reward": 0.9, "made": 0.9})
    code, output = samples(run, "--step", "1")
    assert code == 0 and output.count("--- response ---") == len(STEPS[1])
    first = output.split("step 1, sample 1")[0]
    for text in ("sample 0: reward 1, ", "reward/made  1\n", "mean 0.00e+00", "gold         -\n", "one two", "good"):
        assert text in first, text


def test_samples_are_chosen_and_ordered(run, tokenizer):
    assert [row for row, _ in shown(run)] == [*range(8)] and shown(run)[0] == (0, "x")  # the newest step
    assert shown(run, "--best")[:3] == [(4, "good"), (1, "y"), (2, "z")]  # of equal rewards the first row
    assert shown(run, "--worst")[:2] == [(5, "low"), (0, "x")]
    assert shown(run, "--grep", "mid") == [(6, "mid"), (7, "mid")]
    assert [row for row, _ in shown(run, "--grep", "one two", "--worst")] == [5, 6, 7, 4]  # in the prompt
    assert shown(run, "--cut") == []
    record(run, 3, [(0, "1" * (R_WIDTH - 1), 0.0, True), (0, "1" * R_WIDTH, 0.0, False)], [], tokenizer, [5])
    assert [row for row, _ in shown(run, "--cut")] == [0, 1]  # both have as many tokens as the limit allows


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (["--step", "3"], ConfigError, "1 to 2, found 3"),
        (["--best", "--worst"], ConfigError, "found both"),
        (["--grep", "no such"], RecipeError, "no response"),
    ],
)
def test_samples_that_are_not_there_are_one_sentence(run, options, error, words):
    with pytest.raises(error, match=words):
        CliRunner().invoke(app, ["samples", str(run), *options], catch_exceptions=False)
