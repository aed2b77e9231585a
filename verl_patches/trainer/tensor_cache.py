"""The trainer's side of recipe.tensor_cache.enabled: verl's calls answered with what is small.

verl's fit() goes on as it is. Its batch holds ids and masks that are rebuilt here from lengths and unpadded ids;
log-probs stay on the workers (worker/tensor_cache_stages.py), unless KL in the reward needs them here. A row of a batch
says by `sample` which sample it is, so the trainer may order its rows as it likes (balance_batch).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from verl import DataProto

from verl_patches.errors import ConfigError
from verl_patches.tensor_cache.exchange import Ragged, from_padded, model_inputs, to_padded

SAMPLE = "sample"  # [B] int64: a row's place in the batch as it was generated
_NON_TENSORS = {"raw_prompt_ids", "tools_kwargs"}  # of prompts; the second only acts with multi_turn, which is refused


@dataclass
class CachedStep:
    """One run's settings, and its step now; shared by the groups of actor and reference."""

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
        """As the trainer's configuration says; a reference group shares the step of its `actor`."""
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
                "which would not come back with the responses; expected text alone: set it false"
            )
        cached = self._cached
        asked = _asked(prompts, cached.pad_id)
        cached.step, cached.open = cached.step + 1, True
        answers = self._run("generate", asked)
        sent = {name: np.concatenate([each[name] for each in answers]) for name in answers[0]}
        cached.lengths = tuple(sent["response_length"].tolist())
        batch = _whole_batch(prompts, sent["response_ids"], cached)
        widths = batch["prompts"].shape[1], cached.response_width
        cached.report = self._run(
            "place",
            {
                "prompts": sent["prompt_length"],
                "responses": sent["response_length"],
                "widths": widths,
                "pad": cached.pad_id,
                "balance": cached.balance,
            },
        )
        return DataProto.from_dict(tensors=batch)

    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """entropys [B, S_response], a sample's mean in each place: all that verl's entropy loss can see."""
        rows, found = batch.batch[SAMPLE], self._run("log_prob", {"send_back": self._cached.send_back})
        entropy = torch.empty(len(rows))
        for each in found:
            entropy[list(each["samples"])] = torch.tensor(each["entropy"])  # Ray's array is read-only
        answer = {"entropys": entropy[rows][:, None].expand(len(rows), self._cached.response_width)}
        return self._answer(rows, answer, "old_log_probs", found)

    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """Nothing, or ref_log_prob [B, S_response] where it is needed here."""
        found = self._run("ref", {"send_back": self._cached.send_back})
        return self._answer(batch.batch[SAMPLE], {}, "ref_log_prob", found)

    def update_actor(self, batch: DataProto) -> DataProto:
        """verl's metrics, from the first replica as verl takes them."""
        tensors = batch.batch
        advantages = from_padded(tensors["advantages"], tensors["response_mask"])
        by_sample = advantages.take(tensors[SAMPLE].argsort().tolist())
        values, per_token = _smallest(by_sample)
        found = self._run(
            "update", {"advantages": values.numpy(), "per_token": per_token, "meta": dict(batch.meta_info)}
        )
        self._cached.open = False
        return DataProto(meta_info={"metrics": found[0]})

    def end_step(self) -> dict[str, float] | None:
        """What the step's exchange moved, the most of any rank, in bytes, and `balance`, that of the plan.

        What a step without an update left goes; critic warm-up is such a step.
        """
        cached = self._cached
        if cached.open:
            self._group.run_stage("close", cached.step)
            cached.open = False
        return {name: max(each[name] for each in cached.report) for name in cached.report[0]} if cached.report else None

    @staticmethod
    def without_verls_partition(metrics: Mapping[str, Any]) -> dict[str, Any]:
        """A step's metrics but for those of the partition that verl's balance_batch makes: nobody computes it."""
        return {name: value for name, value in metrics.items() if not name.startswith("global_seqlen/")}

    def _run(self, stage: str, sent: dict[str, Any]) -> list[Any]:
        """What the ranks that have something to say answer, in order of ranks."""
        answers = self._group.run_stage(stage, self._cached.step, sent)
        return [each for each in answers if each is not None]

    def _answer(self, rows: torch.Tensor, tensors: dict[str, Any], name: str, found: list[dict[str, Any]]) -> DataProto:
        if self._cached.send_back:
            parts: dict[int, torch.Tensor] = {}
            for each in found:
                lengths = [self._cached.lengths[sample] for sample in each["samples"]]
                parts.update(zip(each["samples"], torch.tensor(each["values"]).split(lengths), strict=True))
            ragged = Ragged(
                torch.cat([parts[sample] for sample in rows.tolist()]),
                tuple(self._cached.lengths[sample] for sample in rows.tolist()),
            )
            tensors[name] = to_padded(ragged, self._cached.response_width)
        return DataProto(batch=TensorDict(tensors, batch_size=[len(rows)]))


def _asked(prompts: DataProto, pad_id: int) -> dict[str, Any]:
    """Unpadded ids of prompts, as the workers take them; ConfigError where raw_prompt_ids are other ones."""
    padded = prompts.batch["input_ids"]
    ids = from_padded(padded, prompts.batch["attention_mask"], left=True, dtype=torch.int32)
    parts = [part.tolist() for part in ids.parts()]
    for row, raw in enumerate(prompts.non_tensor_batch.get("raw_prompt_ids", ())):
        if list(raw) != parts[row]:
            raise ConfigError(
                f"recipe.tensor_cache.enabled is true, but raw_prompt_ids of prompt {row} ({len(raw)}) "
                f"are not its input_ids ({len(parts[row])}); expected text as verl's RLHFDataset has it"
            )
    return {
        "prompt_ids": ids.values.numpy(),
        "prompt_lengths": np.array(ids.lengths),
        "width": padded.shape[1],
        "pad": pad_id,
        "meta": dict(prompts.meta_info),
    }


def _whole_batch(prompts: DataProto, response_ids: np.ndarray, cached: CachedStep) -> dict[str, torch.Tensor]:
    """The tensors that verl's generate_sequences returns, rebuilt on the trainer, and `sample`."""
    asked = prompts.batch["input_ids"]
    count = len(cached.lengths)
    each = count // len(asked)
    ids = from_padded(asked, prompts.batch["attention_mask"], left=True).take([at // each for at in range(count)])
    responses = Ragged(torch.from_numpy(response_ids), cached.lengths)
    tensors = model_inputs(ids, responses, asked.shape[1], cached.response_width, cached.pad_id)
    return {**tensors, SAMPLE: torch.arange(count)}


def _smallest(ragged: Ragged) -> tuple[torch.Tensor, bool]:
    """(one value a sample, False) where each has one only (GRPO and other outcome rewards), else (all values, True)."""
    parts = ragged.parts()
    if all(len(part) and bool((part == part[0]).all()) for part in parts):
        return torch.stack([part[0] for part in parts]), False
    return ragged.values, True
