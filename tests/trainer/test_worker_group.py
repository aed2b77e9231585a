"""Test the trainer's calls of a step: recording and replay, the sampled check, skipped passes, the tensor cache.

tests/loop/test_smoke.py and tests/loop/test_truth_control.py have whole runs.
"""

import functools
import json
import math
import re
import shutil
from types import SimpleNamespace
from uuid import UUID

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from verl import DataProto
from verl.trainer.ppo.core_algos import agg_loss

from tests.runs import composed, trainer_config
from verl_patches.errors import ConfigError
from verl_patches.heartbeat import heartbeat
from verl_patches.heartbeat.heartbeat import read_beat
from verl_patches.layout.phases import VALIDATE
from verl_patches.run.resolve import changed_run
from verl_patches.step.log_probs import logprob_check
from verl_patches.step.log_probs.rollout_log_probs import CheckedSample
from verl_patches.step.replay.recording import find_recording
from verl_patches.step.replay.sample_seeds import SEEDS
from verl_patches.trainer.worker_group import RecipeWorkerGroup, _log_prob_deltas
from verl_patches.weights.run_folders import take_start

LENGTH = 2
REPLAY = {"recipe.rollout.replay": "outputs/x"}


@functools.cache
def four_ranks():
    """Return a run of four ranks of EP4, which train at dp 4 with micro batches of 2; vLLM has two replicas."""
    rollout = "actor_rollout_ref.rollout"
    settings = ["trainer.n_gpus_per_node=4", "actor_rollout_ref.actor.megatron.expert_model_parallel_size=4"]
    settings += ["data.train_batch_size=8", "data.max_prompt_length=3", f"data.max_response_length={LENGTH}"]
    settings += [f"{rollout}.tensor_model_parallel_size=2", f"{rollout}.temperature=0.9", f"{rollout}.top_p=0.9"]
    return composed("deepseekv3_tiny_cpu", [*settings, f"{rollout}.top_k=50"])


def run_with(**recipe):
    """Return `four_ranks` with other keys of sections of `recipe`."""
    keys = {f"recipe.{name}.{key}": value for name, section in recipe.items() for key, value in section.items()}
    return changed_run(four_ranks(), keys)


class Workers:
    """Stand in for four ranks, two replicas; the actor's log-prob of t is -t, vLLM's in the last replica 0.25 more."""

    world_size = 4

    def __init__(self):
        self.generated, self.log_prob_batches, self.updates, self.profiled = [], [], [], []
        self.asked = []

    def generate_sequences(self, prompts):
        self.generated.append(dict(prompts.meta_info))
        ids = prompts.batch["input_ids"].repeat_interleave(2, 0)
        tensors = {"prompts": ids, "responses": ids[:, :LENGTH] + len(self.generated), "sample": torch.arange(len(ids))}
        tensors["rollout_log_probs"] = -torch.arange(float(len(ids)))[:, None].repeat(1, LENGTH)
        return DataProto.from_dict(tensors=tensors, meta_info=dict(prompts.meta_info))

    def begin_rollout(self, keep_awake, seed):
        self.asked.append((len(self.generated), keep_awake, seed))

    def end_rollout(self):
        first = CheckedSample([5, 6], [1, 2], [-1.0, -2.0], 0.5)
        return [first, None, CheckedSample([7], [3], [-2.75], 0.25), None]

    def begin_profile(self, step, folder):
        self.profiled.append((step, folder))

    def compute_log_prob(self, batch):
        self.log_prob_batches.append(batch.batch)
        return DataProto.from_dict(tensors={"old_log_probs": -batch.batch["responses"].float()})

    def update_actor(self, batch):
        self.updates.append(batch.batch)
        return "metrics"


def make_group(record_to=None, calls=None, actor=None, profile_to=None, seed=None, **recipe):
    run = changed_run(run_with(**recipe), {"actor_rollout_ref.rollout.seed": seed})
    config, tokenizer = trainer_config(run), SimpleNamespace(pad_token_id=0)
    trainer = SimpleNamespace(config=config, tokenizer=tokenizer, global_steps=0, train_dataloader=[])
    workers, names = Workers(), [] if calls is None else calls
    return RecipeWorkerGroup(workers, trainer, lambda *call: names.append(call), record_to, actor, profile_to), workers


def generate(group, batch):
    """Generate the next step's responses; verl's trainer counts the steps."""
    group._trainer.global_steps += 1
    return group.generate_sequences(batch)


def prompts(start=0, **meta):
    ids = torch.arange(start, start + 6).reshape(2, 3)
    return DataProto.from_dict(tensors={"input_ids": ids}, meta_info=meta)


def scored(output, order=(2, 0, 3, 1), **columns):
    """Return the batch of an update: responses in the order of verl's balancing, with uids, rewards and parts."""
    uids = np.array([str(UUID(int=row // 2)) for row in range(4)], dtype=object)
    output.batch["token_level_scores"] = torch.tensor([[0.0, row / 4] for row in range(4)])
    batch = DataProto.from_dict(tensors=dict(output.batch), non_tensors={"uid": uids, **columns})
    batch.reorder(torch.tensor(order))
    return batch


@pytest.mark.parametrize("updates", [["actor"], ["critic"], ["critic", "actor"]])
def test_scores_are_recorded_with_the_first_update_in_the_order_of_the_responses(tmp_path, updates):
    """Check also verl's critic warm-up, whose steps have no update of the actor; a later update writes nothing."""
    group, _ = make_group(tmp_path)
    critic, workers = make_group(actor=group)
    workers.update_critic = lambda batch: "metrics"
    output = generate(group, prompts())
    for number, name in enumerate(updates):
        columns = {"reward/maths": np.arange(4) + 10.0 * number, "acc": np.zeros(4)}
        columns["reward_model"] = np.array([{"ground_truth": 0}] * 2 + [{}] * 2, dtype=object)
        batch = scored(output, **columns)
        (group.update_actor if name == "actor" else critic.update_critic)(batch)
    found = load_file(tmp_path / "scores_1.safetensors")
    assert found.keys() == {"uid", "score", "reward/maths"}
    assert found["score"].tolist() == [0.0, 0.25, 0.5, 0.75] and found["reward/maths"].tolist() == [0, 1, 2, 3]
    assert [UUID(bytes=bytes(uid.tolist())).int for uid in found["uid"]] == [0, 0, 1, 1]
    with safe_open(tmp_path / "scores_1.safetensors", "pt") as file:
        assert json.loads(file.metadata()["gold"]) == {UUID(int=0).hex: "0", UUID(int=1).hex: None}


def test_the_gap_of_log_probs_is_of_each_response_without_padding():
    tensors = {
        "old_log_probs": torch.tensor([[-1.0, -2.0], [-3.0, -9.0]]),
        "rollout_log_probs": torch.full((2, 2), -2.0),
    }
    assert _log_prob_deltas({"old_log_probs": tensors["old_log_probs"]}) == {}  # as with the tensor cache
    found = _log_prob_deltas(tensors | {"attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]])})
    assert {name: values.tolist() for name, values in found.items()} == {
        "dlogp/mean": [0.5, 1.0],
        "dlogp/max": [1.0, 1.0],
    }


def test_an_update_waits_for_the_files_of_all_ranks_first():
    group, workers = make_group()
    critic, of_critic = make_group(actor=group)
    order = []
    checkpoints = SimpleNamespace(wait_before_update=lambda: order.append("waited"))
    group._trainer.recipe_checkpoints = critic._trainer.recipe_checkpoints = checkpoints
    workers.update_actor = of_critic.update_critic = lambda batch: order.append("updated")
    output = generate(group, prompts())
    for update in (critic.update_critic, group.update_actor):
        update(scored(output))
    assert order == ["waited", "updated"] * 2


def test_recorded_responses_are_replayed_without_generating(tmp_path):
    calls = []
    group, _ = make_group(tmp_path / "rollouts", calls)
    recorded = [generate(group, prompts(start)) for start in (0, 6)]
    assert group.world_size == 4 and group.update_actor(scored(recorded[1])) == "metrics"
    assert [path.name for path in sorted(tmp_path.rglob("scores_*"))] == ["scores_2.safetensors"]
    stages = [(1, "generate_sequences"), (1, "reward"), (2, "generate_sequences"), (2, "reward"), (2, "update_actor")]
    assert calls == stages

    replay, workers = make_group(rollout={"replay": str(tmp_path / "rollouts")})
    for output, start in zip(recorded, (0, 6), strict=True):
        replayed = generate(replay, prompts(start)).batch
        assert torch.equal(replayed["responses"], output.batch["responses"])
        assert set(replayed.keys()) == {"prompts", "responses"}  # log-probs are of the recorded run's weights
    assert not workers.generated
    with pytest.raises(ConfigError, match="step 3 is not recorded; the recording ends at 2"):
        generate(replay, prompts())
    with pytest.raises(ConfigError, match="recorded with other prompts"):
        generate(make_group(rollout={"replay": str(tmp_path / "rollouts")})[0], prompts(1))


def test_the_parts_of_the_reward_have_their_means_in_the_record_of_the_step():
    group, _ = make_group()
    generate(group, prompts())
    assert group.end_step() == {"rewards": None, "slowest_sample": None}  # a step without an update
    batch = prompts()
    batch.non_tensor_batch |= {"reward/maths": np.array([0.0, 1.0]), "acc": np.array([0.0, 1.0])}
    batch.non_tensor_batch |= {"reward/maths/acc": np.array([0.0, 0.5]), "uid": np.array(["u", "v"], dtype=object)}
    batch.non_tensor_batch["reward_seconds"] = np.array([0.5, 2.0])
    batch.batch["sample"] = torch.tensor([1, 0])
    slowest = {"sample": 0, "uid": "v", "data_source": None, "seconds": 2.0}
    expected = {"rewards": {"maths": 0.5, "maths/acc": 0.25}, "slowest_sample": slowest}
    group.update_actor(batch)
    assert group.end_step() == expected
    critic, workers = make_group(actor=group)
    workers.update_critic = lambda batch: "metrics"
    generate(group, prompts())
    assert critic.update_critic(batch) == "metrics"  # in trainer.critic_warmup the only update
    assert group.end_step() == expected


def test_a_recording_is_found_by_run_start_folder_or_file_and_refused_elsewhere(tmp_path):
    """Let start 2 go on after step 1: the second step that start 1 recorded is not the run's."""
    first, second = (tmp_path / take_start([tmp_path], parent, None) for parent in (None, ("0001", 1)))
    group = make_group(first / "rollouts")[0]
    generate(group, prompts())
    generate(group, prompts(6))
    one, two = (start / "rollouts" for start in (first, second))
    two.mkdir()
    shutil.copy(one / "step_2.safetensors", two)
    for given, found in ((tmp_path, {1: one, 2: two}), (first, {1: one, 2: one}), (one, {1: one, 2: one})):
        assert find_recording(str(given), 2) == found
    assert find_recording(str(one / "step_1.safetensors"), 1) == {1: one, 2: one}
    with pytest.raises(ConfigError, match=r"has 2 step\(s\), this run has 3; use --steps 2"):
        find_recording(str(tmp_path), 3)
    with pytest.raises(ConfigError, match="no step_1.safetensors"):
        find_recording(str(tmp_path / "elsewhere"))


@pytest.mark.parametrize(("meta", "place"), [({"validate": True}, (VALIDATE, 1)), ({"do_sample": False}, ("", 0))])
def test_validation_and_greedy_baselines_are_verls_own_calls(tmp_path, meta, place):
    """Check that the controller is in validate from its first batch to the next step."""
    group, workers = make_group(tmp_path / "rollouts", logprob_check={"every": 1})
    with heartbeat._heartbeat.set(heartbeat.Heartbeat()) as own:
        own.start(tmp_path / "beats", "controller")
        generate(group, prompts(**meta))
        beat = read_beat(tmp_path / "beats" / "controller.beat")
    assert workers.generated == [meta] and group.step == 0 and not (tmp_path / "rollouts").exists()
    assert group.sampled_check.report is None and (beat.place, beat.step) == place


def test_prompts_have_seeds_only_with_the_engines_seed():
    """Check a step with two batches and its validation; greedy baselines need none."""
    group, workers = make_group()
    sent, generate_sequences = [], workers.generate_sequences
    workers.generate_sequences = lambda batch: sent.append(batch.batch.get(SEEDS)) or generate_sequences(batch)
    generate(group, prompts())
    assert sent == [None]  # seed null, as on 256 dies
    group, workers = make_group(seed=3)
    workers.generate_sequences = lambda batch: sent.append(batch.batch.get(SEEDS)) or generate_sequences(batch)
    generate(group, prompts())
    group._generate(prompts())
    for meta in ({"validate": True}, {"do_sample": False}):
        group.generate_sequences(prompts(**meta))
    assert sent.pop() is None and len({int(seed) for batch in sent[1:] for seed in batch}) == 6


def test_every_nth_step_from_the_first_on_is_checked():
    group, workers = make_group(logprob_check={"every": 2})
    reports = []
    for _ in range(3):
        generate(group, prompts())
        reports.append(group.end_step()["logprob_check"])
    assert workers.asked == [(0, False, 1), (2, False, 3)]
    first = reports[0]
    assert reports[1] is None and first["delta"] == reports[2]["delta"]
    assert (first["sequences"], first["tokens"], first["sample_s"]) == (2, 3, 0.5)
    assert first["delta"]["mean"] == pytest.approx(0.25 / 3) and first["delta"]["max"] == 0.25
    rows = workers.log_prob_batches[0]
    assert rows["input_ids"][:2].tolist() == [[0, 5, 6, 1, 2], [0, 0, 7, 3, 0]]
    assert rows["attention_mask"][:2].tolist() == [[0, 1, 1, 1, 1], [0, 0, 1, 1, 0]]
    assert len(rows["input_ids"]) == 8  # train dp 4 x micro batches of 2: verl splits them equally


def test_the_pass_for_old_log_probs_is_left_out():
    """Give verl 0.4.0 neither log-probs: it compares vLLM's with old ones as soon as a batch has them."""
    calls = []
    group, workers = make_group(calls=calls, train={"skip_old_log_prob": True})
    output = generate(group, prompts())
    assert "rollout_log_probs" not in output.batch.keys()
    found = group.compute_log_prob(output)
    entropys = found.batch.pop("entropys")  # as verl's fit() does from here on
    assert math.isnan(agg_loss(entropys, torch.ones(4, LENGTH), "token-mean"))
    batch = output.union(found)
    assert "old_log_probs" not in batch.batch.keys()
    batch.reorder(torch.tensor([2, 0, 3, 1]))  # in the order of trainer.balance_batch
    group.update_actor(batch)
    (update,) = workers.updates
    assert update["rollout_log_probs"].tolist() == [[-2.0] * LENGTH, [0.0] * LENGTH, [-3.0] * LENGTH, [-1.0] * LENGTH]
    assert "old_log_probs" not in update.keys() and not workers.log_prob_batches
    assert [name for _, name in calls] == ["generate_sequences", "reward", "update_actor"]


def test_a_rollout_of_several_batches_is_begun_and_ended_once(monkeypatch):
    """Check recipe.filter_groups: one weight sync and one sleep; the check is requested before the first batch."""
    group, workers = make_group(filter_groups={"metric": "score"}, logprob_check={"every": 1})
    ended, end_rollout = [], workers.end_rollout
    workers.end_rollout = lambda: ended.append(len(workers.generated)) or end_rollout()
    generate_sequences = group.filtered_groups._generate
    monkeypatch.setattr(
        group.filtered_groups, "draw_filtered_groups", lambda batch: [generate_sequences(batch) for _ in range(2)][-1]
    )
    generate(group, prompts())
    assert workers.asked == [(0, True, 1)] and ended == [2]


@pytest.mark.parametrize(("others", "words"), [
    ({}, None),
    (REPLAY, "every is 2, but .* from a recording; set recipe.logprob_check.action"),
    ({"actor_rollout_ref.rollout.mode": "async"}, "every is 2, but .* vllm, async; expected vllm, sync"),
])  # fmt: skip
def test_a_setting_that_cannot_be_checked_is_refused_by_name(others, words):
    run = changed_run(run_with(logprob_check={"every": 2}), others)
    faults = [found.detail for found in logprob_check.logprob_checks(run) if not found.ok]
    assert len(faults) == (words is not None) and all(re.search(words, fault) for fault in faults), faults
