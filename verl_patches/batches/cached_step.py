"""The trainer's side of recipe.tensor_cache: only small tensors travel between trainer and workers.

verl's fit() is unchanged. The ids and masks of its batch are rebuilt here from lengths and unpadded ids; log-probs stay
on the workers (batches/cached_stages.py) unless KL in the reward needs them here. The column `sample` identifies
the sample of a row, so that the trainer may reorder rows (balance_batch).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from verl import DataProto

from verl_patches.batches.exchange import Ragged, from_padded, model_inputs, to_padded, unpacked_ids
from verl_patches.errors import ConfigError

SAMPLE = "sample"  # [B] int64: a row's place in the batch as it was generated
_NON_TENSORS = {"raw_prompt_ids", "tools_kwargs"}  # of prompts; the second is used with multi_turn only: refused


@dataclass
class CachedStep:
    """Settings of a run and state of its current step; shared by the groups of actor and reference."""

    pad_id: int
    response_width: int
    balance: bool
    send_back: bool
    step: int = 0
    lengths: tuple[int, ...] = ()
    open: bool = False
    report: list[dict[str, float]] = field(default_factory=list)


class TensorCacheStages:
    """Stages of a step on a worker group whose tensors stay with it."""

    def __init__(self, group: Any, cached: CachedStep):
        self._group, self._cached = group, cached

    @classmethod
    def of(cls, trainer: Any, group: Any, actor: TensorCacheStages | None) -> TensorCacheStages:
        """From the trainer's configuration; a reference group shares the step of its `actor`."""
        if actor is not None:
            return cls(group, actor._cached)
        config = trainer.config
        pad_id, width = trainer.tokenizer.pad_token_id, config.data.max_response_length
        return cls(group, CachedStep(pad_id, width, config.trainer.balance_batch, config.algorithm.use_kl_in_reward))

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """verl's batch of this step, but for log-probs."""
        unknown = set(prompts.non_tensor_batch) - _NON_TENSORS
        if unknown:
            raise ConfigError(
                f"recipe.tensor_cache.enabled is true, but prompts have {', '.join(sorted(unknown))}, "
                "which is not returned with the responses; expected text only: set it false"
            )
        cached = self._cached
        payload = _prompt_payload(prompts, cached.pad_id)
        cached.step, cached.open = cached.step + 1, True
        results = self._run("generate", payload)
        sent = {name: np.concatenate([result[name] for result in results]) for name in results[0]}
        cached.lengths = tuple(sent["response_length"].tolist())
        batch = _full_batch(prompts, unpacked_ids(sent["response_ids"]), cached)
        widths = batch["prompts"].shape[1], cached.response_width
        repeated = payload["prompt_lengths"].repeat(len(cached.lengths) // len(payload["prompt_lengths"]))
        placed = {"prompts": repeated, "responses": sent["response_length"]}
        placed |= {"widths": widths, "pad": cached.pad_id, "balance": cached.balance}
        cached.report = self._run("place", placed)
        return DataProto.from_dict(tensors=batch)

    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """entropys [B, S_response]: each sample's mean in all its places, enough for verl's entropy loss."""
        rows, results = batch.batch[SAMPLE], self._run("log_prob", {"send_back": self._cached.send_back})
        entropy = torch.empty(len(rows))
        for result in results:
            entropy[result["samples"].tolist()] = torch.tensor(result["entropy"])  # Ray's array is read-only
        answer = {"entropys": entropy[rows][:, None].expand(len(rows), self._cached.response_width)}
        return self._answer(rows, answer, "old_log_probs", results)

    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """Nothing, or ref_log_prob [B, S_response] where it is needed here."""
        results = self._run("ref", {"send_back": self._cached.send_back})
        return self._answer(batch.batch[SAMPLE], {}, "ref_log_prob", results)

    def update_actor(self, batch: DataProto) -> DataProto:
        """verl's metrics, from the first replica as in verl."""
        tensors = batch.batch
        advantages = from_padded(tensors["advantages"], tensors["response_mask"])
        by_sample = advantages.take(tensors[SAMPLE].argsort().tolist())
        values, per_token = _outcome_or_token_values(by_sample)
        sent = {"advantages": values.numpy(), "per_token": per_token, "meta": dict(batch.meta_info)}
        results = self._run("update", sent)
        self._cached.open = False
        return DataProto(meta_info={"metrics": results[0]})

    def end_step(self) -> dict[str, float] | None:
        """Bytes that the step's exchange moved, maximum over ranks, and `balance` of its plan.

        Frees the tensors of a step without an update, as in critic warm-up.
        """
        cached = self._cached
        if cached.open:
            self._group.run_stage("close", cached.step)
            cached.open = False
        if not cached.report:
            return None
        return {name: max(report[name] for report in cached.report) for name in cached.report[0]}

    @staticmethod
    def without_verls_partition(metrics: Mapping[str, Any]) -> dict[str, Any]:
        """A step's metrics without those of verl's balance_batch, whose partition is not used."""
        return {name: value for name, value in metrics.items() if not name.startswith("global_seqlen/")}

    def _run(self, stage: str, sent: dict[str, Any]) -> list[Any]:
        """Results of all ranks that return one, in order of ranks."""
        results = self._group.run_stage(stage, self._cached.step, sent)
        return [result for result in results if result is not None]

    def _answer(
        self, rows: torch.Tensor, tensors: dict[str, Any], name: str, results: list[dict[str, Any]]
    ) -> DataProto:
        if self._cached.send_back:
            parts: dict[int, torch.Tensor] = {}
            for result in results:
                samples = result["samples"].tolist()
                lengths = [self._cached.lengths[sample] for sample in samples]
                parts.update(zip(samples, torch.tensor(result["values"]).split(lengths), strict=True))
            ragged = Ragged(
                torch.cat([parts[sample] for sample in rows.tolist()]),
                tuple(self._cached.lengths[sample] for sample in rows.tolist()),
            )
            tensors[name] = to_padded(ragged, self._cached.response_width)
        return DataProto(batch=TensorDict(tensors, batch_size=[len(rows)]))


def _prompt_payload(prompts: DataProto, pad_id: int) -> dict[str, Any]:
    """Unpadded prompt ids for the workers; ConfigError where raw_prompt_ids differ from them."""
    padded = prompts.batch["input_ids"]
    ids = from_padded(padded, prompts.batch["attention_mask"], left=True, dtype=torch.int32)
    parts = [part.tolist() for part in ids.parts()]
    for row, raw in enumerate(prompts.non_tensor_batch.get("raw_prompt_ids", ())):
        if list(raw) != parts[row]:
            raise ConfigError(
                f"recipe.tensor_cache.enabled is true, but raw_prompt_ids of prompt {row} ({len(raw)}) "
                f"differ from its input_ids ({len(parts[row])}); expected equal ones, as from verl's RLHFDataset"
            )
    return {
        "prompt_ids": ids.values.numpy(),
        "prompt_lengths": np.array(ids.lengths, np.int32),
        "width": padded.shape[1],
        "pad": pad_id,
        "meta": dict(prompts.meta_info),
    }


def _full_batch(prompts: DataProto, response_ids: np.ndarray, cached: CachedStep) -> dict[str, torch.Tensor]:
    """The tensors that verl's generate_sequences returns, rebuilt on the trainer, and `sample`."""
    padded = prompts.batch["input_ids"]
    count = len(cached.lengths)
    n = count // len(padded)
    ids = from_padded(padded, prompts.batch["attention_mask"], left=True).take([at // n for at in range(count)])
    responses = Ragged(torch.from_numpy(response_ids), cached.lengths)
    tensors = model_inputs(ids, responses, padded.shape[1], cached.response_width, cached.pad_id)
    return {**tensors, SAMPLE: torch.arange(count)}


def _outcome_or_token_values(ragged: Ragged) -> tuple[torch.Tensor, bool]:
    """(one value a sample, False) where each sample has one value (GRPO), else (all values, True)."""
    parts = ragged.parts()
    if all(len(part) and bool((part == part[0]).all()) for part in parts):
        return torch.stack([part[0] for part in parts]), False
    return ragged.values, True
