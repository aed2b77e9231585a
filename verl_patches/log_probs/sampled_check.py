"""Log-prob check for runs with temperature, top-p or top-k: every N steps, on extra samples.

    trainer    SampledCheck            every N steps, from the first on: requests samples along with the step's rollout,
                                       then has the actor compute log-probs of them
    worker     log_probs/of_rollout.py    samples once more while vLLM is awake, after the step's responses
               take_checked            returns the samples

No second weight sync, and the step's responses, rewards and update are those of a run without the check. The actor's
pass is verl's own compute_log_prob, whose logits neither pin divides by a temperature (megatron_actor.py).
"""

from __future__ import annotations

import time
from typing import Any

import torch
from verl import DataProto
from verl.protocol import pad_dataproto_to_divisor

from verl_patches.batches.exchange import Ragged, model_inputs, to_padded
from verl_patches.log_probs import rollout_correction, truth_check
from verl_patches.log_probs.of_rollout import CHECK
from verl_patches.spec import run_of


class SampledCheck:
    """Checks the rollout of `workers`, verl's own group.

    `report` after a step that was checked: {sequences, tokens, sample_s, log_prob_s, delta}, None after others.
    """

    def __init__(self, workers: Any, trainer: Any):
        run = run_of(trainer.config)
        data, rollout = run.verl.data, run.verl.actor_rollout_ref.rollout
        self._workers = workers
        self._every = run.recipe.logprob_check.every
        self._sequences = truth_check.sequences_of(run) // run.replicas
        self._widths = data.max_prompt_length, data.max_response_length, trainer.tokenizer.pad_token_id
        self._multiple = run.train.dp * (rollout.log_prob_micro_batch_size_per_gpu or 1)
        self.report: dict[str, Any] | None = None

    def generate(self, stages: Any, prompts: DataProto, step: int) -> DataProto:
        """The step's responses, by `stages.generate_sequences`; every N steps the check as well."""
        self.report = None
        if (step - 1) % self._every:
            return stages.generate_sequences(prompts)
        prompts.meta_info[CHECK] = {"sequences": self._sequences, "seed": step}
        output = stages.generate_sequences(prompts)
        del prompts.meta_info[CHECK]
        output.meta_info.pop(CHECK, None)
        self.report = self._compare()
        return output

    def _compare(self) -> dict[str, Any]:
        reports = [report for report in self._workers.take_checked() if report is not None]
        prompts, responses, sampled = (
            [row for report in reports for row in report[name]] for name in ("prompts", "responses", "log_probs")
        )
        prompt_width, width, pad = self._widths
        tensors = model_inputs(_ragged(prompts, torch.int64), _ragged(responses, torch.int64), prompt_width, width, pad)
        begin = time.perf_counter()
        whole, _ = pad_dataproto_to_divisor(DataProto.from_dict(tensors=tensors), self._multiple)
        actor = self._workers.compute_log_prob(whole).batch["old_log_probs"][: len(responses)]
        seconds = time.perf_counter() - begin
        rollout, mask = to_padded(_ragged(sampled, torch.float32), width), tensors["attention_mask"][:, prompt_width:]
        metrics = rollout_correction.metrics(rollout_correction.moments(rollout, actor, mask))
        return {
            "sequences": len(responses),
            "tokens": sum(map(len, responses)),
            "sample_s": round(max(report["seconds"] for report in reports), 4),
            "log_prob_s": round(seconds, 4),
            "delta": truth_check.logprob_delta(metrics),
        }


def _ragged(rows: list[list[Any]], dtype: torch.dtype) -> Ragged:
    return Ragged(torch.tensor([value for row in rows for value in row], dtype=dtype), tuple(map(len, rows)))
