"""A worker whose stages leave their tensors to each other: what recipe.tensor_cache.enabled adds to verl's worker.

    run_kept             one of: generate  verl's generate_sequences; lengths and ids of responses go back, the rest
                                           stays (keep_responses, row provider for the sharding manager's
                                           postprocess_data)
                                 place     to the train replicas (comm/batch_plan.py), one exchange
                                 log_prob  verl's compute_log_prob on what is here; the entropy goes back
                                 ref       verl's compute_ref_log_prob, likewise; nothing goes back
                                 update    verl's update_actor, with advantages that are given
                                 close     nothing stays

The worker of the actor and that of the reference share a process and its tensors. training/kept_batch.py calls these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from verl import DataProto
from verl.single_controller.base.decorator import Dispatch, register

from verl_patches.comm.batch_plan import BatchPlan, held_after_rollout, plan_batch, train_replicas
from verl_patches.comm.exchange import Told, wire_bytes
from verl_patches.comm.ragged import Ragged, from_padded, model_inputs, to_padded
from verl_patches.comm.tensor_cache import TensorCache
from verl_patches.layout.parallel import train_layout_in
from verl_patches.memory import ledger
from verl_patches.training import rollout_correction
from verl_patches.training.kept_config import token_budget
from verl_patches.training.kept_log_probs import taken
from verl_patches.training.kept_micro_batches import planned
from verl_patches.training.kept_rollout import keep_rollout, padded_prompts
from verl_patches.training.old_log_prob import speaks_for_its_replica

_LOG_PROBS = ("old_log_probs", "ref_log_prob", "rollout_log_probs")


@dataclass
class _Process:
    """What this process keeps between calls."""

    cache: TensorCache
    generating: int | None = None
    plan: BatchPlan | None = None
    told: Mapping[str, Any] | None = None
    tokens: tuple[int, ...] = ()

    @property
    def replica(self) -> int:
        """The train replica of this rank."""
        return self.plan.replica_of[dist.get_rank()]

    @property
    def samples(self) -> tuple[int, ...]:
        """Those that this rank computes."""
        return self.plan.placed[self.replica]


_process: _Process | None = None


def _here(worker: Any) -> _Process:
    global _process
    if _process is None:
        _process = _Process(TensorCache(worker.config.recipe.platform))
        if (kept := ledger.current()) is not None:
            kept.register("tensor_cache", lambda: _process.cache.bytes_held, varies=True)
    return _process


@contextmanager
def _generating(here: _Process, step: int) -> Iterator[None]:
    here.generating = step
    try:
        yield
    finally:
        here.generating = None


def keep_responses(postprocess_data: Callable) -> Callable:
    """Row provider for MegatronVLLMShardingManager.postprocess_data: inside `_generate`, what it returns stays."""

    @functools.wraps(postprocess_data)
    def post(self: Any, data: DataProto) -> DataProto:
        output = postprocess_data(self, data)
        if _process is None or _process.generating is None:
            return output
        return keep_rollout(_process.cache, _process.generating, output.batch)

    return post


@register(dispatch_mode=Dispatch.ONE_TO_ALL)
def run_kept(self: Any, stage: str, step: int, told: Mapping[str, Any] | None = None) -> Any:
    """Run one stage of `step` on what this process keeps; what goes back is small, or None."""
    here = _here(self)
    if stage == "close":
        return here.cache.close()
    with here.cache.closed_by_error():
        return _STAGES[stage](self, here, step, told)


def _generate(worker: Any, here: _Process, step: int, told: Mapping[str, Any]) -> dict[str, Any]:
    """`told`: see `padded_prompts`. Back go lengths, and ids of this rank's responses, one after the other (int32)."""
    padded = padded_prompts(told, dist.get_rank(), dist.get_world_size())
    here.cache.open(step)
    with _generating(here, step):
        output = worker.generate_sequences(padded)
    lengths = {name: output.batch[name].numpy() for name in ("prompt_length", "response_length")}
    return {**lengths, "response_ids": np.concatenate(output.non_tensor_batch["response_ids"])}


def _place(worker: Any, here: _Process, step: int, told: Mapping[str, Any]) -> dict[str, Any]:
    """`told`: prompts and responses (int arrays, lengths by sample), widths, pad, balance.

    Back go bytes, and `balance` of the update's micro batches: sum(most of any replica) / sum(mean), 1 is equal.
    """
    world, rank, actor = dist.get_world_size(), dist.get_rank(), worker.config.actor
    train = train_layout_in(worker.config, worker.config.recipe, world)
    prompts, responses = told["prompts"].tolist(), told["responses"].tolist()
    tokens = tuple(a + b for a, b in zip(prompts, responses, strict=True))
    budget = token_budget(worker.config, "update")
    packs = budget is not None and told["balance"]
    size = None if packs else 1 if budget else actor.ppo_micro_batch_size_per_gpu  # 1: verl packs by itself
    here.told, here.tokens = told, tokens
    here.plan = plan_batch(
        held_after_rollout(len(tokens), range(world)), train_replicas(train), tokens, balance=told["balance"],
        mini_batch_size=actor.ppo_mini_batch_size * train.dp,  # verl has divided it in the worker
        micro_batch_size=size, token_budget=budget if packs else None,
        loss_agg_mode=actor.loss_agg_mode)  # fmt: skip
    kinds = {"prompts": Told(torch.int32, prompts), "responses": Told(torch.int32, responses)}
    if "rollout_log_probs" in here.cache.names:
        kinds["rollout_log_probs"] = Told(torch.float32, responses)
    here.cache.redistribute(step, here.plan, rank, kinds)
    sent, received = wire_bytes(here.plan, rank, kinds)
    most, mean = here.plan.tokens(tokens)
    return {"sent_bytes": sent, "received_bytes": received, "kept_bytes": here.cache.bytes_held,
            "balance": round(most / mean, 4)}


def _log_prob(worker: Any, here: _Process, step: int, told: Mapping[str, Any]) -> dict[str, Any] | None:
    """`told`: send_back, whether the log-probs themselves go back too (unpadded, in the order of `samples`)."""
    data, mask = _inputs(here, step)
    with taken(worker.actor) as found, _planned(here, worker.config, "log_prob"):
        worker.compute_log_prob(data)
    log_probs, entropies = found
    kept = _keep(here, step, "old_log_probs", log_probs, mask)
    speaks = speaks_for_its_replica()
    if "rollout_log_probs" in here.cache.names:
        sides = _padded(here, step, "rollout_log_probs"), log_probs, mask
        worker.log_prob_moments = rollout_correction.moments(*sides) if speaks else None
    if not speaks:
        return None
    entropy = (entropies * mask).sum(1) / mask.sum(1)
    return {"samples": here.samples, "entropy": entropy.cpu().numpy(), **_sent_back(kept, told)}


def _ref(worker: Any, here: _Process, step: int, told: Mapping[str, Any]) -> dict[str, Any] | None:
    data, mask = _inputs(here, step)
    with taken(worker.ref_policy) as found, _planned(here, worker.config, "ref"):
        worker.compute_ref_log_prob(data)
    kept = _keep(here, step, "ref_log_prob", found[0], mask)
    wanted = told["send_back"] and speaks_for_its_replica()
    return {"samples": here.samples, **_sent_back(kept, told)} if wanted else None


def _update(worker: Any, here: _Process, step: int, told: Mapping[str, Any]) -> dict[str, Any] | None:
    """`told`: advantages by sample, one each or one a response token (per_token); meta, the trainer's meta_info."""
    data, mask = _inputs(here, step)
    for name in _LOG_PROBS:
        if name in here.cache.names:
            data.batch[name] = _padded(here, step, name)
    data.batch["advantages"] = _advantages(here, told, mask)
    data.meta_info.update(told["meta"])
    here.cache.close()  # the update has copies
    with _planned(here, worker.config, "update"):
        metrics = worker.update_actor(data).meta_info["metrics"]
    return metrics if speaks_for_its_replica() else None


_STAGES = {"generate": _generate, "place": _place, "log_prob": _log_prob, "ref": _ref, "update": _update}


def _inputs(here: _Process, step: int) -> tuple[DataProto, torch.Tensor]:
    """(the model's inputs, mask of responses) of the samples that this rank computes."""
    prompts, responses = (here.cache.get(step, name, here.samples) for name in ("prompts", "responses"))
    widths = here.told["widths"]
    tensors = model_inputs(prompts, responses, *widths, here.told["pad"])
    return DataProto.from_dict(tensors=tensors), tensors["attention_mask"][:, widths[0] :].bool()


def _padded(here: _Process, step: int, name: str) -> torch.Tensor:
    return to_padded(here.cache.get(step, name, here.samples), here.told["widths"][1])


def _keep(here: _Process, step: int, name: str, found: torch.Tensor, mask: torch.Tensor) -> Ragged:
    ragged = from_padded(found, mask)
    here.cache.put(step, name, here.samples, ragged)
    return ragged


def _sent_back(kept: Ragged, told: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {"values": kept.values.cpu().numpy()} if told["send_back"] else {}


def _planned(here: _Process, config: Any, stage: str) -> AbstractContextManager[None]:
    tokens = here.tokens if here.told["balance"] else None
    return planned(stage, token_budget(config, stage), here.plan, here.replica, tokens)


def _advantages(here: _Process, told: Mapping[str, Any], mask: torch.Tensor) -> torch.Tensor:
    values = torch.tensor(told["advantages"])
    if not told["per_token"]:
        return values[list(here.samples)].to(mask.device)[:, None] * mask
    ragged = Ragged(values, tuple(here.told["responses"].tolist()))
    return to_padded(ragged.take(here.samples), mask.shape[1]).to(mask.device)
