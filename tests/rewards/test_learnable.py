"""The task for tiny random models: no constant answer earns half, doing as asked earns one."""

import json
from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_patches.errors import ConfigError
from verl_patches.rewards.learnable import DATA_SOURCE, KINDS, MIN_CHARS, compute_score, make_rows, write_task

ROWS = make_rows(300, seed=0)


def mean_reward(answer_to, rows=ROWS):
    """Mean over the task's prompts of the reward for answer_to(prompt)."""
    scores = [
        compute_score(DATA_SOURCE, answer_to(row["prompt"][0]["content"]), row["reward_model"]["ground_truth"])
        for row in rows
    ]
    assert all(0 <= score <= 1 for score in scores)
    return sum(scores) / len(scores)


def test_the_kinds_are_disjoint_so_no_character_is_paid_twice():
    assert len(set("".join(KINDS.values()))) == sum(len(kind) for kind in KINDS.values())
    assert not any(char.isspace() for kind in KINDS.values() for char in kind)


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=64) | st.text(alphabet="".join(KINDS.values()), min_size=8, max_size=64))
def test_no_constant_answer_earns_more_than_a_third(answer):
    assert mean_reward(lambda prompt: answer, ROWS[:30]) <= 1 / 3 + 1e-9


@pytest.mark.parametrize("count", range(3, 12))
@pytest.mark.parametrize("kind", KINDS)
def test_not_even_where_the_kinds_do_not_come_out_even(count, kind):
    answer = KINDS[kind] * 2
    rows = make_rows(count)
    scores = [compute_score(DATA_SOURCE, answer, row["reward_model"]["ground_truth"]) for row in rows]
    assert sum(scores) / count <= 0.5


def test_doing_as_asked_earns_one_and_the_wrong_prompt_does_not():
    assert mean_reward(lambda prompt: prompt + prompt) == 1.0
    rng = Random(1)
    assert mean_reward(lambda prompt: rng.choice(ROWS)["prompt"][0]["content"] * 2) < 0.45  # negative control


def test_every_right_character_counts_and_short_answers_do_not_pay():
    scores = [compute_score("d", "a" * n + "A" * (20 - n), "small") for n in range(21)]
    assert scores == [n / 20 for n in range(21)]
    assert compute_score("d", "a", "small") == 1 / MIN_CHARS
    assert compute_score("d", "", "small") == 0.0
    assert compute_score("d", " \n\t", "small") == 0.0
    assert compute_score("d", "\ufffd" * 16 + "a" * 16, "small") == 0.5


def test_rows_are_the_same_for_a_seed_and_balanced_in_threes():
    assert make_rows(300, seed=0) == ROWS != make_rows(300, seed=1)
    kinds = [row["reward_model"]["ground_truth"] for row in ROWS]
    assert all(set(kinds[i : i + 3]) == set(KINDS) for i in range(0, 300, 3))
    assert len({row["prompt"][0]["content"] for row in ROWS}) == 300
    assert Counter(kinds) == dict.fromkeys(KINDS, 100)


def test_bad_requests_are_refused():
    with pytest.raises(ConfigError, match="at least 3 rows"):
        make_rows(2)
    with pytest.raises(ConfigError, match="asks for 'vowels'"):
        compute_score("d", "a", "vowels")


def test_written_task(tmp_path):
    import pyarrow.parquet

    train, test = write_task(tmp_path / "task", 30, seed=5)
    read = pyarrow.parquet.read_table(train).to_pylist()
    assert [row["extra_info"]["index"] for row in read] == list(range(30))
    assert [row["prompt"] for row in read] == [row["prompt"] for row in make_rows(30, seed=5)]
    held_out = {json.dumps(row["prompt"]) for row in pyarrow.parquet.read_table(test).to_pylist()}
    assert len(held_out) == 30 and not held_out & {json.dumps(row["prompt"]) for row in read}


@pytest.mark.slow
def test_random_tokens_of_the_tiny_model_earn_a_little(tmp_path):
    from transformers import AutoTokenizer

    from verl_patches.model.tiny import make_tiny_model

    tokenizer = AutoTokenizer.from_pretrained(make_tiny_model(tmp_path / "tiny"))
    rng = Random(0)

    def babble(prompt):
        return tokenizer.decode([rng.randrange(len(tokenizer)) for _ in range(16)], skip_special_tokens=True)

    assert 0.1 <= mean_reward(babble) <= 0.35
    lengths = [len(tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)) for row in ROWS]
    assert max(lengths) <= 32
