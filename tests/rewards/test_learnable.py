"""Test the task for tiny random models: a constant answer earns at most a third, one of the right kind earns one."""

import json
from random import Random

import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.make_learnable import make_rows, write_records, write_task
from verl_patches.errors import ConfigError
from verl_patches.rewards import by_source
from verl_patches.rewards.learnable import DATA_SOURCE, KINDS, MIN_CHARS, compute_score

ROWS = make_rows(300, seed=0)


def mean_reward(answer_to, rows=ROWS):
    """Return the mean over the task's prompts of the reward for answer_to(prompt)."""
    pairs = [(row["prompt"][0]["content"], row["reward_model"]["ground_truth"]) for row in rows]
    scores = [compute_score(DATA_SOURCE, answer_to(prompt), kind) for prompt, kind in pairs]
    assert all(0 <= score <= 1 for score in scores)
    return sum(scores) / len(scores)


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=64) | st.text(alphabet="".join(KINDS.values()), min_size=8, max_size=64))
def test_no_constant_answer_earns_more_than_a_third(answer):
    assert mean_reward(lambda prompt: answer, ROWS[:30]) <= 1 / 3 + 1e-9


def test_the_right_kind_earns_one_and_the_kind_of_another_prompt_does_not():
    assert mean_reward(lambda prompt: prompt + prompt) == 1.0
    rng = Random(1)
    assert mean_reward(lambda prompt: rng.choice(ROWS)["prompt"][0]["content"] * 2) < 0.45  # negative control


def test_every_right_character_counts_and_short_answers_do_not_pay():
    scores = [compute_score("d", "a" * n + "A" * (20 - n), "small") for n in range(21)]
    assert scores == [n / 20 for n in range(21)]
    answers = {"a": 1 / MIN_CHARS, "": 0.0, " \n\t": 0.0, "\ufffd" * 16 + "a" * 16: 0.5}
    assert {answer: compute_score("d", answer, "small") for answer in answers} == answers


def test_rows_are_the_same_for_a_seed_and_balanced_in_threes():
    assert make_rows(300, seed=0) == ROWS != make_rows(300, seed=1)
    kinds = [row["reward_model"]["ground_truth"] for row in ROWS]
    assert all(set(kinds[i : i + 3]) == set(KINDS) for i in range(0, 300, 3))
    assert len({row["prompt"][0]["content"] for row in ROWS}) == 300


def test_a_written_task_holds_other_prompts_for_the_test(tmp_path):
    train, test = (pyarrow.parquet.read_table(p).to_pylist() for p in write_task(tmp_path / "task", 30, seed=5))
    assert [row["extra_info"]["index"] for row in train] == list(range(30))
    assert [row["prompt"] for row in train] == [row["prompt"] for row in make_rows(30, seed=5)]
    held_out = {json.dumps(row["prompt"]) for row in test}
    assert len(held_out) == 30 and not held_out & {json.dumps(row["prompt"]) for row in train}


def test_records_have_answers_of_the_prompts_kind_and_of_another(tmp_path):
    write_records(tmp_path / "new" / "records.jsonl", 30, seed=5)
    records = [json.loads(line) for line in (tmp_path / "new" / "records.jsonl").read_text().splitlines()]
    assert [each["prompt"] for each in records] == [row["prompt"][0]["content"] for row in make_rows(30, seed=5)]
    for each in records:
        scores = [compute_score(DATA_SOURCE, each[name], each["answer"]) for name in ("response", "chosen", "rejected")]
        assert scores == [14 / MIN_CHARS, 14 / MIN_CHARS, 0]
    with pytest.raises(ConfigError, match="overwrite"):
        write_records(tmp_path / "new" / "records.jsonl", 30)


def test_mixed_data_is_scored_by_the_reward_of_its_source():
    letters = by_source.compute_score(DATA_SOURCE, "abcdefgh" + "A" * 8, "small")
    assert letters == {"score": 0.5, "acc": 0.0, "format": 1.0}
    assert by_source.compute_score(DATA_SOURCE, "a" * 16, "small")["acc"] == 1.0
    right, wrong = (by_source.compute_score("deepscaler", rf"so \boxed{{{x}}}", "42") for x in (42, 43))
    assert right["score"] == 1.0 and wrong["score"] < 0.5 and set(letters) == set(right)
