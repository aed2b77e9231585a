"""The update without a pass for old log-probs before it, and with weights of recipe.rollout_correction.

    trainer    WithoutOldLogProb     answers compute_log_prob by itself and leaves the column out of the update's batch
    worker     update_on_policy      gives the loss vLLM's log-probs where it looks for old ones, or weighs advantages
               loss_on_policy        takes the log-probs that the update computes as old ones: ratio 1, exactly
               take_log_prob_moments what the step's log-probs of both sides were, for the truth check and the metrics

With one mini batch and one epoch the weights of the update's forward pass are those that verl's own pass before it
has, so both passes say the same; training/on_policy.py refuses where that is not so. Imports torch, not verl.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from verl_patches.errors import RecipeError
from verl_patches.training import rollout_correction
from verl_patches.training.on_policy import Correction, correction_of

_ROLLOUT, _OLD = "rollout_log_probs", "old_log_probs"
_LEFT_OUT = ("actor/entropy_loss",)  # verl has it from the pass alone
_NO_ROLLOUT = (
    "recipe.rollout_correction is on, but the batch has no rollout_log_probs; expected one for each sampled token, "
    "from vLLM. Row rollout.keep_log_probs keeps them on line a3"
)
_NOT_REACHED = (
    "recipe.train.skip_old_log_prob: the update went by vLLM's log-probs, as its loss is not that of row "
    "update.loss_on_policy in verl.workers.actor.megatron_actor; look at `status --run DIR`"
)
_update: _Update | None = None  # the running update of this process, where it takes its own log-probs as old ones


class WithoutOldLogProb:
    """A worker group whose actor is not asked for log-probs before the update; every other call goes through.

    What verl's trainer gets in their place is NaN, so that nothing can use it unseen.
    """

    def __init__(self, group: Any):
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def compute_log_prob(self, batch: Any) -> Any:
        """Columns of NaN [B, S_response] under the names that verl looks for (a DataProto)."""
        nothing = torch.full(batch.batch["responses"].shape, math.nan)
        return type(batch).from_dict(tensors={_OLD: nothing, "entropys": nothing.clone()})

    def update_actor(self, batch: Any) -> Any:
        """The update, without the column of NaN."""
        batch.batch.pop(_OLD)
        return self._group.update_actor(batch)


class _Update:
    """Log-probs of both sides that one update_actor met, in the order of its micro batches."""

    def __init__(self, correction: Correction | None, has_rollout: bool):
        self.correction, self.has_rollout, self.reached = correction, has_rollout, False
        self.seen: list[tuple[torch.Tensor, ...]] = []

    def micro_batch(self, rollout: Any, log_prob: Any, advantages: Any, mask: Any) -> tuple[Any, Any]:
        """(old log-probs, advantages) for the loss of one micro batch; all [b, S_response]."""
        old, self.reached = log_prob.detach(), True
        if self.has_rollout:
            self.seen.append((rollout, old, mask))
            if self.correction:
                advantages = weighed(advantages, rollout, old, mask, self.correction)
        return old, advantages

    def moments(self) -> rollout_correction.Moments:
        """Of everything seen."""
        if not self.seen:
            return rollout_correction.merged([])
        return rollout_correction.moments(*map(torch.cat, zip(*self.seen, strict=True)), self.correction)


def weighed(advantages: Any, rollout: Any, actor: Any, mask: Any, correction: Correction) -> torch.Tensor:
    """Advantages x weights, in the advantages' dtype; all [B, S_response]."""
    return advantages * rollout_correction.weigh(rollout, actor, mask, correction).weights.to(advantages.dtype)


def update_on_policy(update_actor: Callable) -> Callable:
    """Provider for ActorRolloutRefWorker.update_actor; with skip and correction off it changes nothing."""

    @functools.wraps(update_actor)
    def update(self: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        global _update
        recipe = self.config.get("recipe")
        skip = recipe is not None and recipe.train.skip_old_log_prob
        correction = None if recipe is None else correction_of(recipe.rollout_correction)
        if not skip and correction is None:
            return update_actor(self, data, *args, **kwargs)
        step = _Update(correction, _ROLLOUT in data.batch.keys())
        if correction and not step.has_rollout:
            raise rollout_correction.LogProbError(_NO_ROLLOUT)
        if skip:
            missing = torch.full_like(data.batch["advantages"], math.nan)
            data.batch[_OLD] = data.batch[_ROLLOUT] if step.has_rollout else missing
        else:
            _weigh_batch(data.batch, step)
        _update = step if skip else None
        try:
            output = update_actor(self, data, *args, **kwargs)
        finally:
            _update = None
        speaks = speaks_for_its_replica()
        if skip and speaks and not step.reached:
            raise RecipeError(_NOT_REACHED)
        self.log_prob_moments = step.moments() if speaks else None
        return output

    return update


def _weigh_batch(batch: Any, step: _Update) -> None:
    mask = batch["attention_mask"][:, -batch["responses"].shape[1] :].bool()  # as the actor's loss has it
    sides = batch[_ROLLOUT], batch[_OLD], mask
    step.seen.append(sides)
    batch["advantages"] = weighed(batch["advantages"], *sides, step.correction)


def speaks_for_its_replica() -> bool:
    """One rank of each replica, whose results verl takes too (collect_megatron_compute): the last stage has the loss,
    and its TP and CP ranks have the same.
    """
    from megatron.core import parallel_state as mpu

    last = mpu.is_pipeline_last_stage(ignore_virtual=True)
    return last and mpu.get_tensor_model_parallel_rank() == 0 and mpu.get_context_parallel_rank() == 0


def loss_on_policy(compute_policy_loss: Callable) -> Callable:
    """Provider for verl's compute_policy_loss: inside an update that skips the pass, old log-probs are its own."""

    @functools.wraps(compute_policy_loss)
    def loss(old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, *args: Any, **kwargs: Any) -> Any:
        if _update is not None:
            old_log_prob, advantages = _update.micro_batch(old_log_prob, log_prob, advantages, response_mask)
        return compute_policy_loss(old_log_prob, log_prob, advantages, response_mask, *args, **kwargs)

    return loss


def with_workers_metrics(
    metrics: Mapping[str, Any], reports: Iterable[rollout_correction.Moments | None], recipe: Any
) -> dict[str, Any]:
    """A step's metrics with what the workers' updates saw, and without what the left out pass would have given."""
    left_out = _LEFT_OUT if recipe.train.skip_old_log_prob else ()
    kept = {name: value for name, value in metrics.items() if name not in left_out}
    merged = rollout_correction.merged(reports)
    return {**kept, **rollout_correction.metrics(merged, correction_of(recipe.rollout_correction))}
