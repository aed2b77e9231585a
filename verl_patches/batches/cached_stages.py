"""Stages of a step on tensors that stay in the worker's process: recipe.tensor_cache.enabled.

    stage      runs                                        returns to the trainer
    generate   verl's generate_sequences                   lengths and ids of responses (3 bytes each)
    place      one exchange to the train replicas          bytes moved (batches/batch_plan.py)
    log_prob   verl's compute_log_prob                     entropy; log-probs if KL in the reward needs them
    ref        verl's compute_ref_log_prob                 as log_prob, without entropy
    update     verl's update_actor with given advantages   metrics
    close      drops all tensors                           nothing

batches/cached_step.py calls them by `RecipeWorker.run_stage`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from verl import DataProto

from verl_patches.batches.batch_plan import BatchPlan, plan_batch, replicas_of_expert_group, train_replicas
from verl_patches.batches.cache import TensorCache
from verl_patches.batches.exchange import (
    Ragged,
    TensorSpec,
    from_padded,
    is_metrics_rank,
    model_inputs,
    packed_ids,
    prompt_inputs,
    to_padded,
    wire_bytes,
)
from verl_patches.batches.limits import token_budget
from verl_patches.batches.micro_batches import planned
from verl_patches.current import Current
from verl_patches.errors import ConfigError
from verl_patches.memory.ledger import Ledger

_LOG_PROBS = ("old_log_probs", "ref_log_prob", "rollout_log_probs")


class CachedBatch:
    """The tensors of one step that stay in this process, and the stages that use them.

    `generating`: the step whose responses are being generated, None outside stage generate. `payload`, `plan` and
    `tokens` (by sample) are those of stage place.
    """

    def __init__(self, platform: str, ledger: Ledger | None):
        self.cache = TensorCache(platform)
        self.generating: Current[int] = Current()
        self.plan: BatchPlan | None = None
        self.payload: Mapping[str, Any] | None = None
        self.tokens: tuple[int, ...] = ()
        if ledger is not None:
            ledger.register("tensor_cache", lambda: self.cache.bytes_held, varies=True)

    @property
    def replica(self) -> int:
        """The train replica of this rank."""
        return self.plan.replica_of[dist.get_rank()]

    @property
    def samples(self) -> tuple[int, ...]:
        """The samples that this rank computes."""
        return self.plan.placed[self.replica]

    def run(self, worker: Any, stage: str, step: int, payload: Mapping[str, Any] | None) -> Any:
        """Run one stage of `step` by the methods of `worker`; returns little data, or None. An error drops all."""
        if stage == "close":
            return self.cache.close()
        run = {
            "generate": self._generate,
            "place": self._place,
            "log_prob": self._log_prob,
            "ref": self._ref,
            "update": self._update,
        }[stage]
        with self.cache.closed_by_error():
            return run(worker, step, payload)

    def keep_responses(self, output: DataProto) -> DataProto:
        """Lengths and response ids of verl's `output`, whose tensors are put into the cache.

        Outside stage generate (validation, greedy baselines) `output` itself.
        """
        step = self.generating.value
        return output if step is None else keep_rollout(self.cache, step, output.batch)

    def _generate(self, worker: Any, step: int, payload: Mapping[str, Any]) -> dict[str, Any]:
        """`payload`: see `padded_prompts`. Returns lengths (int32) and `packed_ids` of this rank's responses."""
        padded = padded_prompts(payload, dist.get_rank(), dist.get_world_size())
        self.cache.open(step)
        with self.generating.set(step):
            output = worker.generate_sequences(padded)
        ids = np.concatenate(output.non_tensor_batch["response_ids"])
        return {"response_length": output.batch["response_length"].numpy(), "response_ids": packed_ids(ids)}

    def _place(self, worker: Any, step: int, payload: Mapping[str, Any]) -> dict[str, Any]:
        """`payload`: prompts and responses (int32, lengths by sample), widths, pad, balance.

        Returns bytes, and `balance` of the update's micro batches: sum(most of any replica) / sum(mean), 1 is equal.
        """
        rank, actor = dist.get_rank(), worker.config.actor
        train = worker.run.train
        prompts, responses = payload["prompts"].tolist(), payload["responses"].tolist()
        tokens = tuple(a + b for a, b in zip(prompts, responses, strict=True))
        budget = token_budget(worker.config, "update")
        packs = budget is not None and payload["balance"]
        size = None if packs else 1 if budget else actor.ppo_micro_batch_size_per_gpu  # 1: verl packs by itself
        self.payload, self.tokens, sharing = payload, tokens, replicas_of_expert_group(train)
        self.plan = plan_batch(
            train_replicas(train),
            tokens,
            balance=payload["balance"],
            mini_batch_size=actor.ppo_mini_batch_size * train.dp,  # verl has divided it in the worker
            micro_batch_size=size,
            token_budget=budget if packs else None,
            sharing=sharing,
        )
        specs = {"prompts": TensorSpec(torch.int32, prompts), "responses": TensorSpec(torch.int32, responses)}
        if "rollout_log_probs" in self.cache.names:
            specs["rollout_log_probs"] = TensorSpec(torch.float32, responses)
        self.cache.redistribute(step, self.plan, rank, specs)
        sent, received = wire_bytes(self.plan, rank, specs)
        most, mean = self.plan.tokens(tokens, sharing)
        moved = {"sent_bytes": sent, "received_bytes": received, "kept_bytes": self.cache.bytes_held}
        return {**moved, "balance": round(most / mean, 4)}

    def _log_prob(self, worker: Any, step: int, payload: Mapping[str, Any]) -> dict[str, Any] | None:
        """`payload`: send_back, whether to return the log-probs too (unpadded, in the order of `samples`)."""
        data, mask = self._inputs(step)
        with taken(worker.actor) as results, self._planned(worker.config, "log_prob"):
            worker.compute_log_prob(data)
        log_probs, entropies = results
        values = self._keep(step, "old_log_probs", log_probs, mask, payload)
        if "rollout_log_probs" in self.cache.names:
            worker.note_log_probs(self._padded(step, "rollout_log_probs"), log_probs, mask)
        if not is_metrics_rank():
            return None
        entropy = (entropies * mask).sum(1) / mask.sum(1)
        return {"samples": np.array(self.samples, np.int32), "entropy": entropy.cpu().numpy(), **values}

    def _ref(self, worker: Any, step: int, payload: Mapping[str, Any]) -> dict[str, Any] | None:
        data, mask = self._inputs(step)
        with taken(worker.ref_policy) as results, self._planned(worker.config, "ref"):
            worker.compute_ref_log_prob(data)
        values = self._keep(step, "ref_log_prob", results[0], mask, payload)
        return {"samples": np.array(self.samples, np.int32), **values} if values else None

    def _update(self, worker: Any, step: int, payload: Mapping[str, Any]) -> dict[str, Any] | None:
        """`payload`: advantages by sample, one each or one per response token (per_token), and meta (meta_info)."""
        data, mask = self._inputs(step)
        for name in _LOG_PROBS:
            if name in self.cache.names:
                data.batch[name] = self._padded(step, name)
        data.batch["advantages"] = self._advantages(payload, mask)
        data.meta_info.update(payload["meta"])
        self.cache.close()  # the update has copies
        with self._planned(worker.config, "update"):
            metrics = worker.update_actor(data).meta_info["metrics"]
        return metrics if is_metrics_rank() else None

    def _inputs(self, step: int) -> tuple[DataProto, torch.Tensor]:
        """(the model's inputs, mask of responses) of the samples that this rank computes."""
        prompts, responses = (self.cache.get(step, name, self.samples) for name in ("prompts", "responses"))
        widths = self.payload["widths"]
        tensors = model_inputs(prompts, responses, *widths, self.payload["pad"])
        return DataProto.from_dict(tensors=tensors), tensors["attention_mask"][:, widths[0] :].bool()

    def _padded(self, step: int, name: str) -> torch.Tensor:
        return to_padded(self.cache.get(step, name, self.samples), self.payload["widths"][1])

    def _keep(self, step: int, name: str, padded: torch.Tensor, mask: torch.Tensor, payload: Mapping) -> dict[str, Any]:
        """Put log-probs into the cache; returns {values: a copy for the trainer} if it needs one of this rank."""
        ragged = from_padded(padded, mask)
        self.cache.put(step, name, self.samples, ragged)
        return {"values": ragged.values.cpu().numpy()} if payload["send_back"] and is_metrics_rank() else {}

    def _planned(self, config: Any, stage: str) -> AbstractContextManager[None]:
        tokens = self.tokens if self.payload["balance"] else None
        return planned(stage, token_budget(config, stage), self.plan, self.replica, tokens)

    def _advantages(self, payload: Mapping[str, Any], mask: torch.Tensor) -> torch.Tensor:
        values = torch.tensor(payload["advantages"])
        if not payload["per_token"]:
            return values[list(self.samples)].to(mask.device)[:, None] * mask
        ragged = Ragged(values, tuple(self.payload["responses"].tolist()))
        return to_padded(ragged.take(self.samples), mask.shape[1]).to(mask.device)


cached_batch: Current[CachedBatch] = Current()  # None before the first stage, and without recipe.tensor_cache


def padded_prompts(payload: Mapping[str, Any], rank: int, world: int) -> DataProto:
    """This rank's prompts as verl's generation takes them.

    `payload`: prompt_ids (int32, concatenated) and prompt_lengths of all ranks in order, width and pad of the padded
    prompts, and meta. ConfigError, on every rank, unless ranks can have equally many.
    """
    lengths = payload["prompt_lengths"]
    count, rest = divmod(len(lengths), world)
    if rest:
        raise ConfigError(
            f"tensor cache: {len(lengths)} prompts for {world} workers; expected a multiple of {world}: "
            "change data.train_batch_size"
        )
    ids = np.split(payload["prompt_ids"], np.cumsum(lengths)[:-1])[rank * count : (rank + 1) * count]
    ragged = Ragged(torch.from_numpy(np.concatenate(ids)), tuple(map(len, ids)))
    raw = np.empty(count, dtype=object)
    raw[:] = [part.tolist() for part in ids]
    return DataProto.from_dict(
        tensors=prompt_inputs(ragged, payload["width"], payload["pad"]),
        non_tensors={"raw_prompt_ids": raw},
        meta_info=dict(payload["meta"]),
    )


def keep_rollout(cache: TensorCache, step: int, batch: Any) -> DataProto:
    """Lengths and ids of responses of verl's `batch`; its ids and log-probs go into `cache`, unpadded, by sample."""
    (count, width), rank = batch["responses"].shape, dist.get_rank()
    samples, mask = range(rank * count, (rank + 1) * count), batch["attention_mask"]
    prompts = from_padded(batch["prompts"], mask[:, :-width], left=True, dtype=torch.int32)
    responses = from_padded(batch["responses"], mask[:, -width:], dtype=torch.int32)
    cache.put(step, "prompts", samples, prompts)
    cache.put(step, "responses", samples, responses)
    if "rollout_log_probs" in batch.keys():
        cache.put(step, "rollout_log_probs", samples, from_padded(batch["rollout_log_probs"], mask[:, -width:]))
    ids = np.empty(count, dtype=object)
    ids[:] = [part.numpy() for part in responses.values.cpu().split(responses.lengths)]
    lengths = {"response_length": torch.tensor(responses.lengths, dtype=torch.int32)}
    return DataProto.from_dict(tensors=lengths, non_tensors={"response_ids": ids})


@contextmanager
def taken(actor: Any) -> Iterator[list[torch.Tensor]]:
    """[log-probs, entropies] of the one compute_log_prob that `actor` (MegatronPPOActor) runs inside, both [B, S].

    verl's compute_log_prob and compute_ref_log_prob end with `output.to("cpu")` (verl/workers/megatron_workers.py, both
    pins); at 54c9b736 `output` has the model's inputs too. Inside, the worker gets empty rows instead, and its batch
    has no tensors afterwards. Replaces the method on this object only, so rows on its class stay in place.
    """
    results: list[torch.Tensor] = []
    compute, own = actor.compute_log_prob, vars(actor).get("compute_log_prob")

    def take(data: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        results[:] = compute(data, *args, **kwargs)
        data.batch = data.batch.select()
        return results[0][:, :0], results[0][:, :0]

    actor.compute_log_prob = take
    try:
        yield results
    finally:
        if own is None:
            del actor.compute_log_prob
        else:
            actor.compute_log_prob = own
