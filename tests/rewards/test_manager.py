"""Test the reward manager: how parts add up, and that an error in one ends the run with its name."""

import contextlib
import re
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from omegaconf import OmegaConf
from verl import DataProto
from verl.trainer.ppo import reward as verl_reward
from verl.workers.reward_manager import NaiveRewardManager

from tests.ranks import HANG_S
from verl_patches.errors import ConfigError
from verl_patches.import_alone import _input_reports
from verl_patches.rewards import manager
from verl_patches.rewards.manager import RewardError, load_parts
from verl_patches.rewards.parts import part_means, slowest_sample

LENGTHS = (4, 8, 2)  # of at most 8 tokens
NO_GOLDS = object()


class Tokenizer:
    """Tokenize each character to a token; those from 128 on are special."""

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(number) for number in ids.tolist() if number < 128 or not skip_special_tokens)


def reward_config(*entries, **more):
    section = {"data": {"reward_fn_key": "data_source", "max_response_length": 8}}
    section["recipe"] = {"rewards": None if entries == (None,) else list(entries)}
    return OmegaConf.create({**section, "reward_model": {"reward_manager": "naive"}, **more})


def make_manager(*entries, validates=0, **more):
    return load_parts(verl_reward.load_reward_manager)(
        reward_config(*entries, **more), Tokenizer(), num_examine=validates
    )


def batch(golds=("1", "1", "1"), texts=("\\boxed{1}", "\\boxed{2}", "1"), rm_scores=None, width=16, **columns):
    """Return a batch of three responses `texts`, behind prompts of 2 tokens."""
    responses, mask = torch.full((len(texts), width), 200), torch.zeros(len(texts), width + 2, dtype=torch.long)
    mask[:, :2] = 1
    for row, text in enumerate(texts):
        responses[row, : len(text)] = torch.tensor([ord(char) for char in text])
        mask[row, 2 : 2 + len(text)] = 1
    tensors = {"responses": responses, "prompts": torch.ones(len(texts), 2, dtype=torch.long), "attention_mask": mask}
    tensors |= {} if rm_scores is None else {"rm_scores": rm_scores}
    if golds is not NO_GOLDS:
        columns |= {"reward_model": [{"ground_truth": gold} for gold in golds]}
    return DataProto.from_dict(tensors=tensors, non_tensors={"data_source": ["d"] * len(texts), **columns})


def length_batch(*lengths, width=8, **more):
    return batch(golds=NO_GOLDS, texts=["x" * length for length in lengths], width=width, **more)


def python_entry(tmp_path, code, **keys):
    (tmp_path / "own.py").write_text(code)
    return {"name": "python", "path": str(tmp_path / "own.py"), **keys}


def test_one_part_gives_what_verls_manager_gives(tmp_path):
    """Compare the last token's reward and the function's columns; the short form is the entry of name python."""
    code = "def compute_score(data_source, solution_str, ground_truth, extra_info, by=1):\n"
    code += "    return {'score': by * len(solution_str), 'acc': float(solution_str == ground_truth)}\n"
    entry = python_entry(tmp_path, code, kwargs={"by": 0.3})
    short = {"path": entry["path"], "name": "compute_score", "reward_kwargs": {"by": 0.3}}
    given = reward_config(None, custom_reward_function=short)
    expected = NaiveRewardManager(Tokenizer(), 0, verl_reward.get_custom_reward_fn(given))(batch(), return_dict=True)
    for made in (make_manager(entry), make_manager(None, custom_reward_function=short)):
        found = made(batch(), return_dict=True)
        assert torch.equal(found["reward_tensor"], expected["reward_tensor"])
        columns = found["reward_extra_info"]
        assert all(value >= 0 for value in columns.pop("reward_seconds"))
        score, acc = (expected["reward_extra_info"][key] for key in ("score", "acc"))
        assert columns == {"reward/python": score, "reward/python/acc": acc, "acc": acc}
        assert torch.equal(made(batch()), expected["reward_tensor"])


def test_parts_add_up_with_their_weights_and_keep_their_own_means():
    data = batch()
    found = make_manager({"name": "maths", "format_weight": 0.0}, {"name": "format", "weight": 0.25})(data, True)
    assert found["reward_tensor"].sum(-1).tolist() == [1.25, 0.25, 0.0]
    assert found["reward_tensor"].nonzero().tolist() == [[0, 8], [1, 8]]  # the last tokens of the responses
    columns = found["reward_extra_info"]
    assert columns["reward/maths"] == columns["acc"] == [1.0, 0.0, 0.0]
    assert columns["format"] == columns["reward/format"] == [1.0, 1.0, 0.0]
    arrays = {name: np.array(values) for name, values in columns.items()}  # as verl's fit() makes them
    shares = {"maths": 1 / 3, "maths/acc": 1 / 3, "maths/format": 2 / 3, "format": 2 / 3}
    assert part_means(arrays) == pytest.approx(shares)


def test_an_earlier_part_keeps_its_columns_and_a_later_ones_numbers_are_metrics_of_their_own(tmp_path):
    """Give two parts a key `acc` in both orders: verl's validation reads the column, metrics show both parts."""
    code = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
    own = python_entry(tmp_path, f"{code}    return 0.5, {{'acc': 7.0, 'kind': 'text'}}\n")
    for entries, acc in (([{"name": "maths"}, own], [1.0, 0.0, 0.0]), ([own, {"name": "maths"}], [7.0] * 3)):
        columns = make_manager(*entries)(batch(), return_dict=True)["reward_extra_info"]
        assert columns["acc"] == acc and columns["kind"] == ["text"] * 3
        assert columns["reward/python/acc"] == [7.0] * 3 and columns["reward/maths/acc"] == [1.0, 0.0, 0.0]
        assert "reward/python/kind" not in columns
        validation = make_manager(*entries, validates=1)(batch(), return_dict=True)["reward_extra_info"]
        assert validation["acc"] == acc and validation.keys().isdisjoint({"reward/maths/acc", "reward_seconds"})


SLOW = """
import pathlib, subprocess, time
def compute_score(data_source, solution_str, ground_truth, extra_info, started):
    if "slow" in solution_str:
        pathlib.Path(started).write_text(str(subprocess.Popen(["sleep", "6000"]).pid))
        time.sleep(600)
    return {"score": 1.0, "right": True, "text": solution_str}
"""


def test_a_call_beyond_timeout_s_is_killed_scores_0_and_is_counted(tmp_path):
    """Let the slow call come behind another one, and alone in its batch; the made-up answer came before."""
    made = make_manager(python_entry(tmp_path, SLOW, timeout_s=3.0, kwargs={"started": str(tmp_path / "pid")}))
    assert made.try_row(ROW, "row 0").startswith("python 1 (")
    for texts in (("x", "slow"), ("slow",)):
        fast = [float(text != "slow") for text in texts]
        found = made(batch(golds=["1"] * len(texts), texts=texts), return_dict=True)
        columns = found["reward_extra_info"]
        assert found["reward_tensor"].sum(-1).tolist() == columns["reward/python"] == fast
        assert columns["reward/python/timed_out"] == columns["timed_out"] == [1 - each for each in fast]
        assert columns["right"] == fast and columns["text"] == [text.replace("slow", "") for text in texts]
        assert slowest_sample(columns)["sample"] == texts.index("slow")
        with contextlib.suppress(psutil.NoSuchProcess):  # what the function started is ended too
            started, deadline = psutil.Process(int((tmp_path / "pid").read_text())), time.monotonic() + HANG_S
            while started.status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() < deadline
                time.sleep(0.02)


def test_a_helper_tells_errors_of_its_function_like_any_other(tmp_path):
    for code, words in {
        FLAKY.replace('"xx"', '"x"'): r"own.py:7: KeyError: 'score'",
        "1 / 0\n": r"own.py:1: .*found ZeroDivisionError",
        "async def compute_score(data_source, solution_str, ground_truth, extra_info): ...": "own.py:1: .* is async",
    }.items():
        (tmp_path / "own.calls").unlink(missing_ok=True)
        made = make_manager(python_entry(tmp_path, code, timeout_s=60.0))
        with pytest.raises(RewardError, match=rf"recipe.rewards\[0\] \(python\), sample 0 .*: .*{words}"):
            made(batch())


ROW = {"data_source": "d", "reward_model": {"ground_truth": "1"}, "extra_info": None}


def test_a_made_up_answer_finds_what_is_wrong_before_the_run(tmp_path, monkeypatch):
    made = make_manager({"name": "maths"}, {"name": "length"}, {"name": "reward_model", "path": "x"})
    said = made.try_row(ROW, "row")
    assert re.fullmatch(r"maths 0\.1 \(.* s\), length 0 \(.* s\)", said)
    place = r"recipe.rewards\[0\] \(python\), a made-up answer to row 0: .*own.py:"
    head = "import time\ndef compute_score(data_source, solution_str, ground_truth, extra_info):\n    "
    for number, (code, words) in enumerate(
        {
            "return None": "2: compute_score returned None",
            "return solution_str.answer": "3: AttributeError",
            "time.sleep(600)": "3: TimeoutError: no result after 0.2 s; set timeout_s of the entry",
            "try: time.sleep(600)\n    except Exception: return 0": "3: TimeoutError: no result after 0.2 s",
        }.items()
    ):
        (folder := tmp_path / str(number)).mkdir()
        made = make_manager(python_entry(folder, head + code))
        if "sleep" in code:
            monkeypatch.setattr(manager, "TRY_S", 0.2)
        with pytest.raises(ConfigError, match=f"{place}{words}"):
            made.try_row(ROW, "row 0")
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"maths\), a made-up answer to row 0: .*gold answer None"):
        make_manager({"name": "maths"}).try_row({"data_source": "d"}, "row 0")
    keys = {"timeout_s": 0.5, "kwargs": {"started": str(tmp_path / "pid")}}
    slow = python_entry(tmp_path, SLOW.replace("slow", "made"), **keys)
    with pytest.raises(ConfigError, match=r"more than 0.5 s by the clock; recipe.rewards\[0\].timeout_s is its limit"):
        make_manager(slow).try_row(ROW, "row 0")


def test_the_first_rows_of_training_and_validation_are_tried(monkeypatch):
    made = make_manager({"name": "maths"})
    rows = {"train_dataset": [ROW], "val_dataset": [{"data_source": "d"}]}
    trainer = SimpleNamespace(reward_fn=made, val_reward_fn=made, **rows)
    train = SimpleNamespace(samples=True, validates=False)
    (report,) = _input_reports(trainer, train)
    assert report.startswith("reward of a made-up answer to the first prompt of data.train_files: maths 0.1")
    train.validates = True
    with pytest.raises(ConfigError, match="made-up answer to the first prompt of data.val_files: .*gold answer None"):
        list(_input_reports(trainer, train))
    trainer.val_reward_fn = make_manager({"name": "reward_model", "path": "x"}, validates=1)
    (report,) = _input_reports(trainer, train)
    assert "data.train_files" in report


def test_the_length_part_needs_no_gold_answer():
    made = make_manager({"name": "length", "buffer_tokens": 4, "weight": 0.5})
    assert made(length_batch(4, 5, 8)).sum(-1).tolist() == [0.0, -0.125, -0.5]


def test_scores_of_reward_models_are_added_and_not_taken_alone():
    scores = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]])
    data = length_batch(*LENGTHS, rm_scores=scores)
    models = [{"name": "reward_model", "path": name, "weight": weight} for name, weight in (("a", 0.5), ("b", 0.25))]
    entries = [models[0], {"name": "length", "buffer_tokens": 4}, models[1]]
    found = make_manager(*entries)(data, return_dict=True)
    assert torch.equal(found["reward_tensor"].sum(-1), torch.tensor([3.0, 5.0, 9.0]))
    assert found["reward_tensor"][0, 3] == 3.0
    columns = found["reward_extra_info"]
    assert columns["reward/reward_model_0"] == [1.0, 2.0, 3.0]
    assert columns["reward/reward_model_2"] == [10.0, 20.0, 30.0]
    naive = NaiveRewardManager(Tokenizer(), 0, lambda **sample: 7.0)
    assert torch.equal(naive(data), scores)  # the control: verl's takes these alone
    whole = torch.zeros(3, 8)  # [B, S_response], as verl's own worker gives them
    for more, words in (({}, "found none"), ({"rm_scores": whole}, r"found \[3, 8\]")):
        with pytest.raises(RewardError, match=rf"recipe.rewards: .*\[3, 2\], {words}"):
            make_manager(*entries)(length_batch(*LENGTHS, **more))
    bad = scores.clone()
    bad[1, 1] = float("nan")
    words = r"recipe.rewards\[2\] \(reward_model\), sample 1 .*returned nan; expected a finite"
    with pytest.raises(RewardError, match=words):
        make_manager(*entries)(length_batch(*LENGTHS, rm_scores=bad))
    # validation runs no reward model
    validation = make_manager(*entries, validates=1)(length_batch(*LENGTHS), return_dict=True)
    assert list(validation["reward_extra_info"]) == ["reward/length"]


def test_verls_own_scores_are_a_part(monkeypatch):
    default = "default_compute_score"
    monkeypatch.setattr(verl_reward, default, lambda data_source, solution_str, ground_truth, extra_info=None: 0.5)
    for entry in (None, {"name": "data_source"}):
        assert make_manager(entry)(batch()).sum(-1).tolist() == [0.5] * 3


FLAKY = """
import pathlib
def inner(text):
    calls = pathlib.Path(__file__).with_suffix(".calls")
    calls.write_text(calls.read_text() + "x" if calls.exists() else "x")
    if calls.read_text() == "xx":
        return {}["score"]
    return 1.0
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return inner(solution_str)
"""


def test_an_error_names_part_sample_and_line_and_verl_does_not_swallow_it(tmp_path):
    """Fail once, for the second sample; verl's compute_reward prints that and calls again, which would succeed."""
    made = make_manager({"name": "format"}, python_entry(tmp_path, FLAKY))
    with pytest.raises(RewardError) as raised:
        verl_reward.compute_reward(batch(uid=["u0", "u1", "u2"]), made)
    text = f"recipe.rewards[1] (python), sample 1 of the batch (data_source 'd', uid u1): {tmp_path}/own.py:7: KeyError"
    assert str(raised.value).startswith(text) and isinstance(raised.value.__cause__, KeyError)
    with pytest.raises(RewardError):
        made(batch())
    (tmp_path / "own.calls").unlink()  # the control
    given = reward_config(None, custom_reward_function={"path": str(tmp_path / "own.py"), "name": "compute_score"})
    rewards, extra = verl_reward.compute_reward(
        batch(), NaiveRewardManager(Tokenizer(), 0, verl_reward.get_custom_reward_fn(given))
    )
    assert rewards.sum() == 3 and extra == {}


def test_verls_task_of_launch_reward_fn_async_has_the_same_manager_and_error(tmp_path, monkeypatch):
    monkeypatch.setattr(verl_reward, "load_reward_manager", load_parts(verl_reward.load_reward_manager))
    task = verl_reward.compute_reward_async._function
    rewards, columns = task(batch(), reward_config({"name": "format"}), Tokenizer())
    assert rewards.sum() == 2 and columns["reward/format"] == [1.0, 1.0, 0.0]
    with pytest.raises(RewardError, match="sample 1 of the batch"):
        task(batch(), reward_config(python_entry(tmp_path, FLAKY)), Tokenizer())


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("return float('nan')", "sample 0 .*own.py:1: compute_score returned nan; expected a finite number"),
        ("return {'score': 1.0, 'acc': 1.0} if '{1' in solution_str else 1.0", "sample 1 .*first response, acc"),
        ("return ground_truth.strip()", "sample 0 .*own.py:2: AttributeError: 'NoneType'"),  # no gold answer
    ],
)
def test_what_is_no_score_is_refused(tmp_path, code, words):
    head = "def compute_score(data_source, solution_str, ground_truth, extra_info):"
    made = make_manager(python_entry(tmp_path, f"{head}\n    {code}\n"))
    with pytest.raises(RewardError, match=words):
        made(batch(golds=(None, None, None)))


def test_an_error_while_the_file_is_loaded_names_its_line(tmp_path):
    made = make_manager(python_entry(tmp_path, "import json\n\nTABLE = json.loads('')\n"))
    with pytest.raises(ConfigError, match=r"a made-up answer to row 0: .*own.py:3: JSONDecodeError: Expecting"):
        made.try_row(ROW, "row 0")


def test_a_line_is_found_in_the_traceback_of_another_process(tmp_path, monkeypatch):
    code = "import json\n\n\ndef score(text=None, **_):\n    return json.loads(text)['score']\n"
    entry = python_entry(tmp_path, code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    part = make_manager(entry | {"function": "score", "path": "own.py"}).parts[0][0]
    import own

    with pytest.raises(ValueError) as raised, ProcessPoolExecutor(1) as pool:
        pool.submit(own.score, "x").result()
    del sys.modules["own"]
    assert "here: own.py:5: JSONDecodeError" in str(manager.part_error(part, raised.value, "here"))
