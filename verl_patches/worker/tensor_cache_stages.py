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

What goes into verl's generation from unpadded prompts, and what stays of it on the worker.

What verl's actor computes is taken where it is: on the device, before verl's worker moves it to the host.

verl's compute_log_prob and compute_ref_log_prob end with `output.to("cpu")` (verl/workers/megatron_workers.py, both
pins); at 54c9b736 `output` has the model's inputs too. Inside `taken` the worker gets rows without values instead.

Dynamic batch size with recipe.tensor_cache.enabled: verl's actor takes the micro batches that the plan has.

verl packs each rank's samples by itself, into as many micro batches as the rank with the most tokens needs at least
(verl/utils/seqlen_balancing.py, rearrange_micro_batches of 0.4.0): some come out above the token budget, and the n-th
ones of two replicas are not of one length. Here all replicas follow one plan (comm/micro_batches.py). Without
trainer.balance_batch everything is in verl's order, and verl packs.
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
from verl_patches.tensor_cache.batch_plan import BatchPlan, held_after_rollout, plan_batch, train_replicas
from verl_patches.tensor_cache.exchange import Told, wire_bytes
from verl_patches.tensor_cache.exchange import Ragged, from_padded, model_inputs, to_padded
from verl_patches.tensor_cache.cache import TensorCache
from verl_patches.layout.of_config import train_layout_in
from verl_patches.memory import ledger
from verl_patches.trainer import rollout_correction
from verl_patches.tensor_cache.config import token_budget
from verl_patches.worker.on_policy_update import speaks_for_its_replica
from collections.abc import Mapping
from verl_patches.tensor_cache.batch_plan import held_after_rollout
from verl_patches.tensor_cache.exchange import Ragged, from_padded, prompt_inputs
from verl_patches.errors import ConfigError
from collections.abc import Iterator
from contextlib import contextmanager
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain, cycle
from verl_patches.tensor_cache import batch_plan
from verl_patches.tensor_cache.batch_plan import BatchPlan
from verl_patches.patching.engine import PatchError

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


def padded_prompts(told: Mapping[str, Any], rank: int, world: int) -> DataProto:
    """This rank's prompts as verl's generation takes them.

    `told`: prompt_ids (int32, one after the other) and prompt_lengths of all ranks in order, width and pad of the
    padded prompts, and meta. ConfigError where they cannot be shared out equally, on every rank.
    """
    lengths = told["prompt_lengths"]
    each, left = divmod(len(lengths), world)
    if left:
        raise ConfigError(f"tensor cache: {len(lengths)} prompts for {world} workers; expected a multiple of {world}: "
                          "change data.train_batch_size")
    ids = np.split(told["prompt_ids"], np.cumsum(lengths)[:-1])[rank * each : (rank + 1) * each]
    ragged = Ragged(torch.from_numpy(np.concatenate(ids)), tuple(map(len, ids)))
    raw = np.empty(each, dtype=object)
    raw[:] = [part.tolist() for part in ids]
    return DataProto.from_dict(tensors=prompt_inputs(ragged, told["width"], told["pad"]),
                               non_tensors={"raw_prompt_ids": raw}, meta_info=dict(told["meta"]))  # fmt: skip


def keep_rollout(cache: TensorCache, step: int, batch: Any) -> DataProto:
    """What the trainer gets of verl's output `batch`; ids and log-probs stay in `cache`, unpadded, by sample."""
    count, width = batch["responses"].shape
    samples = held_after_rollout(count * dist.get_world_size(), range(dist.get_world_size()))[dist.get_rank()]
    mask = batch["attention_mask"]
    prompts = from_padded(batch["prompts"], mask[:, :-width], left=True, dtype=torch.int32)
    responses = from_padded(batch["responses"], mask[:, -width:], dtype=torch.int32)
    cache.put(step, "prompts", samples, prompts)
    cache.put(step, "responses", samples, responses)
    if "rollout_log_probs" in batch.keys():
        cache.put(step, "rollout_log_probs", samples, from_padded(batch["rollout_log_probs"], mask[:, -width:]))
    ids = np.empty(count, dtype=object)
    on_host = Ragged(responses.values.cpu(), responses.lengths)
    ids[:] = [part.numpy() for part in on_host.parts()]
    lengths = {"prompt_length": prompts.lengths, "response_length": responses.lengths}
    return DataProto.from_dict(tensors={name: torch.tensor(each) for name, each in lengths.items()},
                               non_tensors={"response_ids": ids})  # fmt: skip


@contextmanager
def taken(actor: Any) -> Iterator[list[torch.Tensor]]:
    """[log-probs, entropies] of the one compute_log_prob that `actor` (MegatronPPOActor) runs inside, both [B, S].

    On this object alone, so rows on its class stand. The batch that it was given has no tensors afterwards.
    """
    found: list[torch.Tensor] = []
    compute = actor.compute_log_prob

    def take(data: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found[:] = compute(data, *args, **kwargs)
        data.batch = data.batch.select()
        nothing = found[0][:, :0]
        return nothing, nothing

    actor.compute_log_prob = take
    try:
        yield found
    finally:
        del actor.compute_log_prob


Parts = list[list[int]]  # [micro batch] -> places in the batch that verl splits
_following: _Following | None = None


class _Following:
    """What the stage that runs now splits its batches into, in order; over again for each epoch."""

    def __init__(self, splits: Sequence[Parts], tokens: Sequence[Sequence[int]]):
        self._splits = cycle(zip(splits, tokens, strict=True))
        self.reached = 0

    def next(self, found: list[int]) -> Parts:
        """Of a batch whose rows have so many tokens; PatchError where the plan has others here."""
        parts, expected = next(self._splits)
        if found != list(expected):
            raise PatchError(f"micro batches: batch {self.reached} of this stage has {len(found)} rows of {sum(found)} "
                             f"tokens, the plan has {len(expected)} of {sum(expected)} there, or in another order")
        self.reached += 1
        return parts


def planned(
    stage: str, budget: int | None, plan: BatchPlan, replica: int, tokens: Sequence[int] | None
) -> AbstractContextManager[None]:
    """A stage, "update" or a forward pass, in which dynamic micro batches of a replica are the plan's.

    `tokens`: [sample] -> tokens. Micro batches are verl's without a budget (their size is not dynamic) or tokens.
    """
    if budget is None or tokens is None:
        return nullcontext()
    split = update_splits(plan, replica) if stage == "update" else pass_splits(plan, replica, tokens, budget)
    return following(split, [tokens[sample] for sample in plan.placed[replica]])


def update_splits(plan: BatchPlan, replica: int) -> list[Parts]:
    """[mini batch] -> its micro batches; the update has its samples in the order of the plan."""
    return [_places(mini, list(chain.from_iterable(mini))) for mini in plan.schedule[replica]]


def pass_splits(plan: BatchPlan, replica: int, lengths: Sequence[int], token_budget: int) -> list[Parts]:
    """One batch of all samples of a replica, for a forward pass with a budget of its own."""
    packed = batch_plan.packed(plan.placed, lengths, token_budget, balance=False)  # the plan has dealt them
    return [_places(packed[replica], plan.placed[replica])]


def _places(parts: Sequence[Sequence[int]], order: Sequence[int]) -> Parts:
    place = {sample: at for at, sample in enumerate(order)}
    return [[place[sample] for sample in part] for part in parts]


@contextmanager
def following(splits: Sequence[Parts], tokens: Sequence[int]) -> Iterator[None]:
    """A stage whose dynamic micro batches are `splits`, of rows with these tokens, all batches one after another.

    Raises PatchError where verl's actor did not ask for them.
    """
    global _following
    rows = iter(tokens)
    now = _following = _Following(splits, [[next(rows) for part in parts for _ in part] for parts in splits])
    try:
        yield
    finally:
        _following = None
    if not now.reached:
        raise PatchError("micro batches: the actor did not split by the plan; row update.micro_batches_as_planned must "
                         "reach verl.workers.actor.megatron_actor: look at `status --run DIR`")  # fmt: skip


def as_planned(rearrange_micro_batches: Callable) -> Callable:
    """Provider for verl's rearrange_micro_batches: (micro batches, places), by the plan inside `following`."""

    @functools.wraps(rearrange_micro_batches)
    def rearrange(batch: Any, *args: Any, **kwargs: Any) -> tuple[list[Any], Parts]:
        if _following is None:
            return rearrange_micro_batches(batch, *args, **kwargs)
        parts = _following.next(batch["attention_mask"].sum(dim=1).tolist())
        return [batch[torch.tensor(part, device=batch["attention_mask"].device)] for part in parts], parts

    return rearrange
