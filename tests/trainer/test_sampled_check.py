"""The trainer's side of the truth check on sequences that are sampled for it.

Whole runs, with the workers' side: tests/loop/test_truth_control.py.
"""

import re
from types import SimpleNamespace

import pytest
import torch
import yaml
from omegaconf import OmegaConf
from verl import DataProto

from verl_patches.rollout.log_probs import CHECK
from verl_patches.trainer import truth_check
from verl_patches.trainer.sampled_check import SampledCheck

CONFIG = """
trainer: {nnodes: 1, n_gpus_per_node: 4}
data: {max_prompt_length: 3, max_response_length: 2, train_batch_size: 8}
actor_rollout_ref:
  rollout: {name: vllm, mode: sync, tensor_model_parallel_size: 2, temperature: 0.9, top_p: 0.9, top_k: 50,
            log_prob_micro_batch_size_per_gpu: 2}
  actor:
    megatron: {tensor_model_parallel_size: 1, context_parallel_size: 1, expert_model_parallel_size: 4,
               expert_tensor_parallel_size: 1, pipeline_model_parallel_size: 1,
               virtual_pipeline_model_parallel_size: null}
recipe:
  rollout: {replay: null, balanced_routing: false}
  train: {balanced_routing: false, layers_per_stage: null}
  logprob_check: {action: stop, every: 2, sequences: null}
"""


def config_of(**check):
    return OmegaConf.merge(yaml.safe_load(CONFIG), {"recipe": {"logprob_check": check}})


class Workers:
    """Four ranks, two replicas; the actor's log-prob of token t is -t, vLLM's of the last replica is 0.25 more."""

    def __init__(self):
        self.asked, self.rows = [], []

    def generate_sequences(self, prompts):
        self.asked.append(dict(prompts.meta_info))
        return DataProto.from_dict(tensors={"responses": torch.zeros(2, 2)}, meta_info=dict(prompts.meta_info))

    def take_checked(self):
        first = {"prompts": [[5, 6]], "responses": [[1, 2]], "log_probs": [[-1.0, -2.0]], "seconds": 0.5}
        second = {"prompts": [[7]], "responses": [[3]], "log_probs": [[-2.75]], "seconds": 0.25}
        return [first, None, second, None]

    def compute_log_prob(self, batch):
        self.rows.append(batch.batch)
        return DataProto.from_dict(tensors={"old_log_probs": -batch.batch["responses"].float()})


def made(**check):
    trainer = SimpleNamespace(config=config_of(**check), tokenizer=SimpleNamespace(pad_token_id=0))
    workers = Workers()
    return SampledCheck(workers, workers, trainer), workers


def test_the_first_step_and_each_nth_after_it_are_compared():
    check, workers = made()
    reports = []
    for _ in range(3):
        output = check.generate_sequences(DataProto.from_dict(tensors={"input_ids": torch.zeros(2, 3)}))
        assert CHECK not in output.meta_info
        reports.append(check.report)
    assert workers.asked == [{CHECK: {"sequences": 1, "seed": 1}}, {}, {CHECK: {"sequences": 1, "seed": 3}}]
    assert reports[1] is None and reports[0]["delta"] == reports[2]["delta"]
    first = reports[0]
    assert (first["sequences"], first["tokens"], first["sample_s"]) == (2, 3, 0.5)
    assert first["delta"]["mean"] == pytest.approx(0.25 / 3) and first["delta"]["max"] == 0.25
    rows = workers.rows[0]
    assert rows["input_ids"][:2].tolist() == [[0, 5, 6, 1, 2], [0, 0, 7, 3, 0]]
    assert rows["attention_mask"][:2].tolist() == [[0, 1, 1, 1, 1], [0, 0, 1, 1, 0]]
    assert len(rows["input_ids"]) == 8  # train dp 4 x micro batches of 2: verl shares them out equally


def test_validation_goes_through():
    check, workers = made()
    for meta in ({"validate": True}, {"do_sample": False}):
        check.generate_sequences(DataProto.from_dict(tensors={"input_ids": torch.zeros(2, 3)}, meta_info=dict(meta)))
    assert workers.asked == [{"validate": True}, {"do_sample": False}] and check.report is None


REPLAY = {"recipe.rollout.replay": "outputs/x"}


@pytest.mark.parametrize(("check", "others", "words"), [
    ({}, {}, None),
    ({"every": None, "sequences": 3}, {}, None),
    ({"sequences": 3}, {}, "sequences is 3; expected a multiple of 2"),
    ({"sequences": 10}, {}, "sequences is 10; expected at most data.train_batch_size 8"),
    ({}, REPLAY, "every is 2, but .* recorded ones; set recipe.logprob_check.action"),
    ({}, {"recipe.train.balanced_routing": True}, "every is 2, but .* balanced routing"),
    ({}, {"actor_rollout_ref.rollout.mode": "async"}, "every is 2, but .* vllm, async; only vllm, sync"),
    ({"action": "off"}, REPLAY, None),
])  # fmt: skip
def test_a_setting_that_cannot_be_checked_is_refused_by_name(check, others, words):
    config = config_of(**check)
    for key, value in others.items():
        OmegaConf.update(config, key, value)
    faults = list(truth_check.faults(config))
    assert len(faults) == (words is not None) and all(re.search(words, fault) for fault in faults), faults
