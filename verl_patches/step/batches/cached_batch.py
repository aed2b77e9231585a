"""Hold the tensors of one step that stay in a worker's process (recipe.tensor_cache), and their plan.

    stage of recipe_worker.py   runs                                 here
    generate_cached             verl's generate_sequences            keep_responses
    place_cached                one exchange to the train replicas   place
    log_prob_cached             verl's compute_log_prob              inputs, keep_log_probs
    ref_log_prob_cached         verl's compute_ref_log_prob          inputs, keep_log_probs
    update_cached               verl's update_actor                  update_batch

The plan comes from step/batches/batch_plan.py and is equal on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from verl import DataProto

from verl_patches.current import Current
from verl_patches.errors import ConfigError
from verl_patches.layout.parallel import ParallelLayout
from verl_patches.memory.ledger import Ledger
from verl_patches.step.batches import payloads
from verl_patches.step.batches.batch_plan import BatchPlan, expert_group_replicas, plan_batch, train_replicas
from verl_patches.step.batches.cache import TensorCache
from verl_patches.step.batches.exchange import (
    RaggedTensor,
    TensorSpec,
    from_padded,
    is_metrics_rank,
    model_inputs,
    packed_ids,
    prompt_inputs,
    to_padded,
    wire_bytes,
)
from verl_patches.step.batches.limits import token_budget
from verl_patches.step.batches.micro_batches import PlannedSplits, plan_stage_splits
from verl_patches.step.replay.sample_seeds import SEEDS

_ROLLOUT_LOG_PROBS = "rollout_log_probs"
_LOG_PROB_COLUMNS = ("old_log_probs", "ref_log_prob", _ROLLOUT_LOG_PROBS)


class CachedBatch:
    """Hold the tensors of one step that stay in this process.

    Stage place_cached sets `placement`, `plan` and `tokens` (by sample); before it `tokens` is empty and the other two
    are not set.
    """

    plan: BatchPlan
    placement: payloads.Placement

    def __init__(self, platform: str, ledger: Ledger | None):
        self.cache = TensorCache(platform)
        self.tokens: tuple[int, ...] = ()
        self._responses: list[payloads.ResponseIds] | None = None  # answers of the step; None outside `generating`
        if ledger is not None:
            ledger.register("tensor_cache", lambda: self.cache.bytes_held, any_size=True)

    @property
    def replica(self) -> int:
        """Return the train replica of this rank."""
        return self.plan.replica_by_rank[dist.get_rank()]

    @property
    def samples(self) -> tuple[int, ...]:
        """Return the samples that this rank computes."""
        return self.plan.replica_samples[self.replica]

    @contextmanager
    def generating(self) -> Iterator[list[payloads.ResponseIds]]:
        """Begin a step; yield a list to which `keep_responses` adds the responses that verl generates inside."""
        self.cache.close()
        self._responses = []
        try:
            yield self._responses
        finally:
            self._responses = None

    def keep_responses(self, output: DataProto) -> DataProto:
        """Put the tensors of verl's `output` into the cache, unpadded and by sample; return it without tensors.

        Outside `generating` (validation, greedy baselines) return `output` itself.
        """
        if self._responses is None:
            return output
        batch = output.batch
        (count, width), rank = batch["responses"].shape, dist.get_rank()
        samples, mask = range(rank * count, (rank + 1) * count), batch["attention_mask"]
        prompts = from_padded(batch["prompts"], mask[:, :-width], left=True, dtype=torch.int32)
        responses = from_padded(batch["responses"], mask[:, -width:], dtype=torch.int32)
        self.cache.put("prompts", samples, prompts)
        self.cache.put("responses", samples, responses)
        if _ROLLOUT_LOG_PROBS in batch.keys():
            self.cache.put(_ROLLOUT_LOG_PROBS, samples, from_padded(batch[_ROLLOUT_LOG_PROBS], mask[:, -width:]))
        lengths = np.array(responses.lengths, np.int32)
        self._responses.append(payloads.ResponseIds(lengths, packed_ids(responses.values.cpu().numpy())))
        return DataProto(batch=batch.select())

    def place(self, placement: payloads.Placement, config: Any, train: ParallelLayout) -> dict[str, float]:
        """Exchange responses so that this rank has those of `samples`; config: verl's section actor_rollout_ref.

        Return this rank's {sent_bytes, received_bytes, kept_bytes} and balance: over micro batches, sum(most tokens of
        any replica) / sum(mean tokens).
        """
        rank, actor = dist.get_rank(), config.actor
        prompts, responses = placement.prompt_lengths.tolist(), placement.response_lengths.tolist()
        tokens = tuple(a + b for a, b in zip(prompts, responses, strict=True))
        budget = token_budget(config, "update")
        packs = budget is not None and placement.balance_batch
        size = None if packs else actor.ppo_micro_batch_size_per_gpu
        if budget and not packs:
            size = 1  # for the order alone: verl packs them later
        self.placement, self.tokens, group_replicas = placement, tokens, expert_group_replicas(train)
        self.plan = plan_batch(
            train_replicas(train),
            tokens,
            balance=placement.balance_batch,
            mini_batch_size=actor.ppo_mini_batch_size * train.dp,  # verl has divided it in the worker
            micro_batch_size=size,
            token_budget=budget if packs else None,
            group_replicas=group_replicas,
        )
        specs = {"prompts": TensorSpec(torch.int32, prompts), "responses": TensorSpec(torch.int32, responses)}
        if _ROLLOUT_LOG_PROBS in self.cache.names:
            specs[_ROLLOUT_LOG_PROBS] = TensorSpec(torch.float32, responses)
        self.cache.redistribute(self.plan, rank, specs)
        most, mean = self.plan.token_cost(tokens, group_replicas)
        sent, received = wire_bytes(self.plan, rank, specs)
        moved = {"sent_bytes": sent, "received_bytes": received, "kept_bytes": self.cache.bytes_held}
        return {**moved, "balance": round(most / mean, 4)}

    def inputs(self) -> tuple[DataProto, torch.Tensor]:
        """Return (the model's inputs, mask of responses) of the samples that this rank computes."""
        prompts, responses = (self.cache.get(name, self.samples) for name in ("prompts", "responses"))
        widths = self.placement.widths
        tensors = model_inputs(prompts, responses, *widths, self.placement.pad_id)
        return DataProto.from_dict(tensors=tensors), tensors["attention_mask"][:, widths[0] :].bool()

    def padded_responses(self, name: str) -> torch.Tensor:
        """Return a cached tensor of responses for the samples that this rank computes, [b, S_response]."""
        return to_padded(self.cache.get(name, self.samples), self.placement.widths[1])

    def stage_splits(self, config: Any, stage: str) -> PlannedSplits | None:
        """Return the plan's micro batches for `stage`, a key of limits.DYNAMIC_BATCH_KEYS; None if verl makes them."""
        if not self.placement.balance_batch:
            return None
        return plan_stage_splits(stage, token_budget(config, stage), self.plan, self.replica, self.tokens)

    def keep_log_probs(
        self, name: str, found: DataProto, mask: torch.Tensor, send_back: bool
    ) -> payloads.LogProbs | None:
        """Put column `name` of verl's `found` into the cache; on the metrics rank return what the trainer needs."""
        ragged = from_padded(found.batch[name].to(mask.device), mask)
        self.cache.put(name, self.samples, ragged)
        entropys = found.batch.get("entropys")
        if not is_metrics_rank() or (entropys is None and not send_back):
            return None
        mask = mask.to("cpu")
        entropy = None if entropys is None else ((entropys * mask).sum(1) / mask.sum(1)).numpy()
        values = ragged.values.cpu().numpy() if send_back else None
        return payloads.LogProbs(np.array(self.samples, np.int32), entropy, values)

    def update_batch(self, advantages: payloads.Advantages) -> DataProto:
        """Return the batch of the update and close the cache, as the batch has copies."""
        data, mask = self.inputs()
        for name in _LOG_PROB_COLUMNS:
            if name in self.cache.names:
                data.batch[name] = self.padded_responses(name)
        data.batch["advantages"] = self._padded_advantages(advantages, mask)
        data.meta_info.update(advantages.meta)
        self.cache.close()
        return data

    def _padded_advantages(self, advantages: payloads.Advantages, mask: torch.Tensor) -> torch.Tensor:
        values = torch.tensor(advantages.values)
        if not advantages.per_token:
            return values[list(self.samples)].to(mask.device)[:, None] * mask
        ragged = RaggedTensor(values, tuple(self.placement.response_lengths.tolist()))
        return to_padded(ragged.take(self.samples), mask.shape[1]).to(mask.device)


cached_batch: Current[CachedBatch | None] = Current(None)  # None before the first stage, or without recipe.tensor_cache


def padded_prompts(prompts: payloads.PromptIds, rank: int, world: int) -> DataProto:
    """Return this rank's prompts in verl's form; ConfigError, on every rank, unless all ranks have equally many."""
    lengths = prompts.lengths
    count, rest = divmod(len(lengths), world)
    if rest:
        raise ConfigError(
            f"tensor cache: {len(lengths)} prompts for {world} workers; expected a multiple of {world}: "
            "change data.train_batch_size"
        )
    own = slice(rank * count, (rank + 1) * count)
    ids = np.split(prompts.ids, np.cumsum(lengths)[:-1])[own]
    ragged = RaggedTensor(torch.from_numpy(np.concatenate(ids)), tuple(map(len, ids)))
    raw: Any = np.empty(count, dtype=object)
    raw[:] = [part.tolist() for part in ids]
    seeds = {} if prompts.seeds is None else {SEEDS: torch.tensor(prompts.seeds[own])}
    return DataProto.from_dict(
        tensors=prompt_inputs(ragged, prompts.width, prompts.pad_id) | seeds,
        non_tensors={"raw_prompt_ids": raw},
        meta_info=dict(prompts.meta),
    )
