"""Check log-probs in runs with temperature, top-p or top-k: every N steps, on extra samples.

    trainer    SampledCheck            every N steps from the first on, requests a sample of each replica and compares
    worker     rollout_log_probs.py    samples once more while vLLM is awake, after the step's responses

trainer/worker_group.py makes the calls: begin_rollout with the seed, then end_rollout and the actor's
compute_log_prob after the step's rollout. There is no second weight sync, and the step's responses, rewards and update
are those of a run without the check. The actor's pass is verl's own, which divides its logits by no temperature
(MegatronPPOActor of both verl versions).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from verl import DataProto
from verl.protocol import pad_dataproto_to_divisor

from verl_patches.spec import run_from_config
from verl_patches.step.batches.exchange import RaggedTensor, model_inputs, to_padded
from verl_patches.step.log_probs import logprob_check, rollout_correction
from verl_patches.step.log_probs.rollout_log_probs import CheckedSample


class SampledCheck:
    """Check log-probs of a run every `every` steps.

    `report` after a checked step: {sequences, tokens, sample_s, log_prob_s, delta}; None after others.
    """

    def __init__(self, trainer: Any, every: int):
        run = run_from_config(trainer.config)
        data, rollout = run.verl.data, run.verl.actor_rollout_ref.rollout
        self._every = every
        self._widths = data.max_prompt_length, data.max_response_length, trainer.tokenizer.pad_token_id
        self._multiple = run.train.dp * (rollout.log_prob_micro_batch_size_per_gpu or 1)
        self.report: dict[str, Any] | None = None

    def seed(self, step: int) -> int | None:
        """Return the seed with which workers sample in the rollout of `step`; None in a step that is not checked."""
        self.report = None
        return None if (step - 1) % self._every else step

    def compare(self, samples: Sequence[CheckedSample], compute_log_prob: Callable[[DataProto], DataProto]) -> None:
        """Make the report from the samples of all replicas; `compute_log_prob` is the actor's pass."""
        prompts, responses = [sample.prompt for sample in samples], [sample.response for sample in samples]
        sampled = [sample.log_probs for sample in samples]
        prompt_width, width, pad = self._widths
        tensors = model_inputs(_ragged(prompts, torch.int64), _ragged(responses, torch.int64), prompt_width, width, pad)
        begin = time.perf_counter()
        whole, _ = pad_dataproto_to_divisor(DataProto.from_dict(tensors=tensors), self._multiple)
        actor = compute_log_prob(whole).batch["old_log_probs"][: len(responses)]
        seconds = time.perf_counter() - begin
        rollout, mask = to_padded(_ragged(sampled, torch.float32), width), tensors["attention_mask"][:, prompt_width:]
        metrics = rollout_correction.log_prob_metrics(rollout_correction.log_prob_sums(rollout, actor, mask))
        self.report = {
            "sequences": len(responses),
            "tokens": sum(map(len, responses)),
            "sample_s": round(max(sample.seconds for sample in samples), 4),
            "log_prob_s": round(seconds, 4),
            "delta": logprob_check.logprob_delta(metrics),
        }


def _ragged(rows: list[list[Any]], dtype: torch.dtype) -> RaggedTensor:
    return RaggedTensor(torch.tensor([value for row in rows for value in row], dtype=dtype), tuple(map(len, rows)))
