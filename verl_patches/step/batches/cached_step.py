"""Make the payloads that the trainer sends to workers (recipe.tensor_cache), and verl's batch from the answers.

verl's fit() is unchanged. The ids and masks of its batch are rebuilt here from lengths and unpadded ids; log-probs stay
on the workers (step/batches/cached_batch.py) unless KL in the reward needs them here. The column `sample` identifies a
row's sample, so that the trainer may reorder rows (balance_batch). trainer/worker_group.py makes the calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from verl import DataProto

from verl_patches.errors import ConfigError
from verl_patches.step.batches import payloads
from verl_patches.step.batches.exchange import RaggedTensor, from_padded, model_inputs, to_padded, unpacked_ids
from verl_patches.step.replay.sample_seeds import SEEDS

SAMPLE = "sample"  # [B] int64: a row's place in the batch as it was generated
# columns of prompts; tools_kwargs matters only with multi_turn, which is refused
_NON_TENSORS = {"raw_prompt_ids", "tools_kwargs"}


@dataclass
class CachedStep:
    """Hold the settings of a run and the state of its step; the worker groups of actor and reference share one.

    `send_back`: whether the trainer needs log-probs (algorithm.use_kl_in_reward). `lengths`: tokens of
    the step's responses, by sample. `reports`: one of each rank, about the exchange in place_cached.
    """

    pad_id: int
    response_width: int
    balance_batch: bool
    send_back: bool
    lengths: tuple[int, ...] = ()
    reports: Sequence[dict[str, float]] = ()

    @classmethod
    def from_trainer(cls, trainer: Any) -> CachedStep:
        """Return the state of a run from the configuration of verl's trainer."""
        config = trainer.config
        pad_id, width = trainer.tokenizer.pad_token_id, config.data.max_response_length
        return cls(pad_id, width, config.trainer.balance_batch, config.algorithm.use_kl_in_reward)

    def begin(self, prompts: DataProto) -> payloads.PromptIds:
        """Begin the next step and return its prompts; raise ConfigError for prompts with more than text."""
        unknown = set(prompts.non_tensor_batch) - _NON_TENSORS
        if unknown:
            raise ConfigError(
                f"recipe.tensor_cache.enabled is true, but prompts have {', '.join(sorted(unknown))}, "
                "which is not returned with the responses; expected text only: set recipe.tensor_cache.enabled=false"
            )
        padded = prompts.batch["input_ids"]
        ids = from_padded(padded, prompts.batch["attention_mask"], left=True, dtype=torch.int32)
        parts = [part.tolist() for part in ids.parts()]
        for row, raw in enumerate(prompts.non_tensor_batch.get("raw_prompt_ids", ())):
            if list(raw) != parts[row]:
                raise ConfigError(
                    f"recipe.tensor_cache.enabled is true, but raw_prompt_ids of prompt {row} ({len(raw)} tokens) "
                    f"differ from its input_ids ({len(parts[row])} tokens); expected equal ones, as verl's RLHFDataset "
                    "gives them: use that dataset, or set recipe.tensor_cache.enabled=false"
                )
        lengths, meta = np.array(ids.lengths, np.int32), dict(prompts.meta_info)
        seeds = prompts.batch[SEEDS].numpy() if SEEDS in prompts.batch.keys() else None
        return payloads.PromptIds(ids.values.numpy(), lengths, seeds, padded.shape[1], self.pad_id, meta)

    def responses(
        self, prompts: DataProto, answers: Sequence[payloads.ResponseIds]
    ) -> tuple[DataProto, payloads.Placement]:
        """Return verl's batch of this step, without log-probs but with `sample`, and the payload that places it."""
        lengths = np.concatenate([answer.lengths for answer in answers])
        ids = unpacked_ids(np.concatenate([answer.ids for answer in answers]))
        self.lengths = tuple(lengths.tolist())
        padded, count = prompts.batch["input_ids"], len(self.lengths)
        n = count // len(padded)
        repeated = from_padded(padded, prompts.batch["attention_mask"], left=True).take(
            [at // n for at in range(count)]
        )
        widths = padded.shape[1], self.response_width
        tensors = model_inputs(repeated, RaggedTensor(torch.from_numpy(ids), self.lengths), *widths, self.pad_id)
        batch = DataProto.from_dict(tensors={**tensors, SAMPLE: torch.arange(count)})
        prompt_lengths = np.array(repeated.lengths, np.int32)
        return batch, payloads.Placement(prompt_lengths, lengths, widths, self.pad_id, self.balance_batch)

    def log_probs(self, batch: DataProto, answers: Sequence[payloads.LogProbs]) -> DataProto:
        """Return entropys [B, S_response], and old_log_probs [B, S_response] if the trainer needs them.

        All places of a sample have its mean entropy, which is enough for verl's entropy loss.
        """
        rows = batch.batch[SAMPLE]
        entropy = torch.empty(len(rows))
        for answer in answers:
            entropy[answer.samples.tolist()] = torch.tensor(answer.entropy)  # Ray's array is read-only
        entropys = entropy[rows][:, None].expand(len(rows), self.response_width)
        return self._log_prob_batch(rows, {"entropys": entropys}, "old_log_probs", answers)

    def ref_log_probs(self, batch: DataProto, answers: Sequence[payloads.LogProbs]) -> DataProto:
        """Return ref_log_prob [B, S_response] if the trainer needs it, else nothing."""
        return self._log_prob_batch(batch.batch[SAMPLE], {}, "ref_log_prob", answers)

    def advantages(self, batch: DataProto) -> payloads.Advantages:
        """Return the payload of the update."""
        tensors = batch.batch
        ragged = from_padded(tensors["advantages"], tensors["response_mask"])
        values, per_token = _outcome_or_token_values(ragged.take(tensors[SAMPLE].argsort().tolist()))
        return payloads.Advantages(values.numpy(), per_token, dict(batch.meta_info))

    def report(self) -> dict[str, float] | None:
        """Return each number of `reports`, the largest of this step's ranks; None before the first step."""
        if not self.reports:
            return None
        return {name: max(report[name] for report in self.reports) for name in self.reports[0]}

    def _log_prob_batch(
        self, rows: torch.Tensor, tensors: dict[str, torch.Tensor], name: str, answers: Sequence[payloads.LogProbs]
    ) -> DataProto:
        if self.send_back:
            parts: dict[int, torch.Tensor] = {}
            for answer in answers:
                samples = answer.samples.tolist()
                lengths = [self.lengths[sample] for sample in samples]
                parts.update(zip(samples, torch.tensor(answer.values).split(lengths), strict=True))
            ragged = RaggedTensor(
                torch.cat([parts[sample] for sample in rows.tolist()]),
                tuple(self.lengths[sample] for sample in rows.tolist()),
            )
            tensors[name] = to_padded(ragged, self.response_width)
        return DataProto(batch=TensorDict(tensors, batch_size=[len(rows)]))


def _outcome_or_token_values(ragged: RaggedTensor) -> tuple[torch.Tensor, bool]:
    """Return (one value a sample, False) if each sample has equal values (GRPO), else (all values, True)."""
    parts = ragged.parts()
    if all(len(part) and bool((part == part[0]).all()) for part in parts):
        return torch.stack([part[0] for part in parts]), False
    return ragged.values, True
