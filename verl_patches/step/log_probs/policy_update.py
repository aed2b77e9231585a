"""Replace old log-probs, or weight advantages, in the loss of an update.

Three settings use it: recipe.train.skip_old_log_prob leaves out the separate pass for old log-probs,
recipe.rollout_correction weights advantages, and recipe.train.importance_ratio=sequence is GSPO.

With skip_old_log_prob trainer/worker_group.py skips compute_log_prob, and the trainer's batch has no such column.
`PolicyUpdate` passes vLLM's log-probs to the loss in the place of old ones, or weights the advantages.
`replace_old_log_probs` keeps them for comparison and replaces them by those that the update computes, so the ratio is
exactly 1. For GSPO it shifts old log-probs so that each token's ratio is that of its sequence.

With one mini batch and one epoch the update's forward pass has the same weights as verl's separate pass, so both give
the same log-probs; step/log_probs/ratio_settings.py refuses other configurations. Imports torch, not verl.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from verl_patches.current import Current
from verl_patches.errors import RecipeError
from verl_patches.spec import RunSpec
from verl_patches.step.batches.exchange import is_metrics_rank
from verl_patches.step.log_probs import rollout_correction
from verl_patches.step.log_probs.ratio_settings import Correction, parse_correction

_ROLLOUT_COLUMN, _OLD_COLUMN = "rollout_log_probs", "old_log_probs"
_MISSING_COLUMN = (
    "recipe.rollout_correction is on, but the batch has no rollout_log_probs; expected vLLM's log-prob of each sampled "
    "token. On line a3 patch row rollout.keep_log_probs must be on, which adds them: see `status --run DIR`"
)
_LOSS_NOT_CALLED = (
    "recipe.train.{} is set, but the update did not compute its loss by row update.loss_on_policy, so it used the old "
    "log-probs of its batch. The row must be active in verl.workers.actor.megatron_actor: look at `status --run DIR`"
)


class PolicyUpdate:
    """Hold the log-probs of vLLM and of the actor in one update_actor, in the order of its micro batches.

    `skip`: recipe.train.skip_old_log_prob; `correction`: recipe.rollout_correction, or None; `by_sequence`:
    recipe.train.importance_ratio is sequence, which requires `skip` to be false.
    """

    def __init__(self, skip: bool, correction: Correction | None, by_sequence: bool = False):
        self.skip, self.correction, self.has_rollout, self.loss_called = skip, correction, False, False
        self.by_sequence = by_sequence
        self.compared: list[tuple[torch.Tensor, ...]] = []  # (vLLM's log-probs, the actor's, mask)
        self.sums: dict[str, float] = {}  # sum and number of the update's log-probs, if vLLM has none

    @classmethod
    def from_run(cls, run: RunSpec) -> PolicyUpdate | None:
        """Return the update that a run sets; None for verl's own. On fixed data `skip` is on: the ratio is then 1."""
        recipe = run.recipe
        skip = recipe.train.skip_old_log_prob or not run.samples
        correction = parse_correction(recipe.rollout_correction)
        by_sequence = recipe.train.importance_ratio == "sequence"
        return cls(skip, correction, by_sequence) if skip or by_sequence or correction is not None else None

    @contextmanager
    def update_context(self, batch: Any) -> Iterator[None]:
        """Run verl's update of `batch` inside; RecipeError if a correction lacks vLLM's log-probs.

        verl's actor selects old_log_probs by name. If the pass is skipped and vLLM has none, as on fixed data, the
        column is zeros, which `replace_old_log_probs` replaces. RecipeError if the update did not call that function.
        """
        self.has_rollout = _ROLLOUT_COLUMN in batch.keys()
        if self.correction and not self.has_rollout:
            raise RecipeError(_MISSING_COLUMN)
        if self.correction and not self.skip:
            mask = batch["attention_mask"][:, -batch["responses"].shape[1] :].bool()  # as in the actor's loss
            sides = batch[_ROLLOUT_COLUMN], batch[_OLD_COLUMN], mask
            self.compared.append(sides)
            batch["advantages"] = weighted_advantages(batch["advantages"], *sides, self.correction)
        if self.skip:
            batch[_OLD_COLUMN] = batch[_ROLLOUT_COLUMN] if self.has_rollout else torch.zeros_like(batch["advantages"])
        changes_loss = self.skip or self.by_sequence
        with current_update.set(self if changes_loss else None):
            yield
        if changes_loss and is_metrics_rank() and not self.loss_called:
            raise RecipeError(_LOSS_NOT_CALLED.format("skip_old_log_prob" if self.skip else "importance_ratio"))

    def loss_inputs(self, batch_log_probs: Any, log_prob: Any, advantages: Any, mask: Any) -> tuple[Any, Any]:
        """Return (old log-probs, advantages) for the loss of one micro batch; all [b, S_response].

        `batch_log_probs`: old log-probs of the batch; vLLM's if the pass for them is skipped.
        """
        old, self.loss_called = log_prob.detach(), True
        if self.by_sequence:
            return sequence_old_log_probs(batch_log_probs, old, mask), advantages
        if self.has_rollout:
            self.compared.append((batch_log_probs, old, mask))
            if self.correction:
                advantages = weighted_advantages(advantages, batch_log_probs, old, mask, self.correction)
        else:
            found = {"log_probs": torch.where(mask.bool(), old, 0.0).sum(), "targets": mask.sum()}
            self.sums = {name: self.sums.get(name, 0.0) + float(value) for name, value in found.items()}
        return old, advantages

    def log_prob_sums(self) -> rollout_correction.LogProbSums | None:
        """Return moments of the update's log-probs; None on ranks that do not report."""
        if not is_metrics_rank():
            return None
        if not self.compared:
            return rollout_correction.LogProbSums(self.sums)
        rollout, actor, mask = map(torch.cat, zip(*self.compared, strict=True))
        return rollout_correction.log_prob_sums(rollout, actor, mask, self.correction)


current_update: Current[PolicyUpdate | None] = Current(None)  # the update in progress, if it changes the loss


def weighted_advantages(advantages: Any, rollout: Any, actor: Any, mask: Any, correction: Correction) -> torch.Tensor:
    """Return advantages x weights, in the advantages' dtype; all [B, S_response]."""
    weights = rollout_correction.importance_weights(rollout, actor, mask, correction).weights
    return advantages * weights.to(advantages.dtype)


def sequence_old_log_probs(old: torch.Tensor, log_prob: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return old log-probs with which every token's ratio is its sequence's (GSPO, arXiv:2507.18071, eq. 7).

    All are [b, S_response], without gradient. With them verl's loss with seq-mean-token-mean has the gradient of eq. 5:
    each token contributes 1/length of its sequence's.
    """
    mean = ((log_prob - old) * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return log_prob - mean


def replace_old_log_probs(compute_policy_loss: Callable) -> Callable:
    """Wrap compute_policy_loss: old log-probs become the actor's own, or give the ratios of sequences."""

    @functools.wraps(compute_policy_loss)
    def loss(old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, *args: Any, **kwargs: Any) -> Any:
        update = current_update.value
        if update is not None:
            old_log_prob, advantages = update.loss_inputs(old_log_prob, log_prob, advantages, response_mask)
        return compute_policy_loss(old_log_prob, log_prob, advantages, response_mask, *args, **kwargs)

    return loss
