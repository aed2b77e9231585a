"""Test dynamic sampling in the loop: kept groups differ, one weight sync a step, vLLM's log-probs are the actor's."""

import json
from collections import defaultdict

import pytest
from loop_runs import VERIFY, assert_weights_arrive

pytestmark = pytest.mark.slow


def read_groups(folder, step):
    """Return the scores of each prompt's responses in a step, as verl wrote them."""
    groups = defaultdict(list)
    for line in (folder / f"{step}.jsonl").read_text().splitlines():
        row = json.loads(line)
        groups[row["input"]].append(row["score"])
    return list(groups.values())


def test_every_kept_group_has_rewards_that_differ(smoke, tmp_path):
    run = smoke("--steps", "2", "algo=dapo", f"+trainer.rollout_data_dir={tmp_path}", VERIFY)
    assert_weights_arrive(run, verified=True)
    for step in run.steps:
        groups, kept = read_groups(tmp_path, step["step"]), step["filter_groups"]
        assert len(groups) == 4 and all(len(scores) == 2 and scores[0] != scores[1] for scores in groups)
        assert kept["prompts"] == 4 * kept["drawn_batches"] and 4 <= kept["differ"]
        assert not step["memory"]["violations"]["count"]
        line = f"step {step['step']}: {kept['differ']} of {kept['prompts']} prompts in {kept['drawn_batches']} batches"
        assert f"{line} have responses with different rewards" in run.progress
    assert sum(step["filter_groups"]["drawn_batches"] for step in run.steps) > 2
    assert all(step["filter_groups"]["kept_share"] < 1 for step in run.steps)  # control: others were drawn too
