"""Dynamic micro batches on line a3: as many samples as a token budget holds, where verl 54c9b736 takes a fixed number.

verl's Megatron actor of that commit reads no such key; its FSDP actor and 0.4.0's Megatron actor do. The keys are
theirs: `use_dynamic_bsz` and `ppo_max_token_len_per_gpu` of the actor, `log_prob_use_dynamic_bsz` and
`log_prob_max_token_len_per_gpu` of rollout and ref. verl's own `rearrange_micro_batches` packs: all ranks of the run
agree on the largest number of micro batches that one of them needs, as their experts' exchanges are common. With the
tensor cache the plan decides (tensor_cache_stages.py).

A sample's weight in the loss is that of micro batches of one sample, whatever it is packed with: the gradient does not
depend on the packing. In 0.4.0 it does: each micro batch is averaged by itself, and all weigh the same.

    packing            row provider around the actor's pass: puts log-probs back into the order of the batch
    by_tokens          row provider for the split into micro batches
    equal_samples      row provider for the aggregation of a micro batch's loss
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch

from verl_patches.current import Current


class Packing:
    """One pass of the actor over a batch, in micro batches of at most about `budget` tokens.

    `rows`: [micro batch] -> rows of the batch; empty before the split.
    """

    def __init__(self, budget: int):
        self.budget = budget
        self.rows: list[list[int]] = []

    @property
    def samples(self) -> int:
        """Number of samples in all micro batches."""
        return sum(map(len, self.rows))

    def split(self, batch: Any) -> list[Any]:
        """Micro batches of `batch` (TensorDict), by row update.micro_batches_as_planned or by verl."""
        from verl.utils import seqlen_balancing

        micro_batches, self.rows = seqlen_balancing.rearrange_micro_batches(batch, max_token_len=self.budget)
        return micro_batches

    def in_order(self, outputs: list[Any]) -> list[Any]:
        """Outputs of a forward pass as one micro batch in the order of the batch.

        `outputs`: as verl's loss function makes them, {"log_probs"} or [{"log_probs"}, entropies]; empty on all but the
        last pipeline stage.
        """
        if not outputs:
            return outputs
        back = torch.tensor(list(chain.from_iterable(self.rows))).argsort()
        if isinstance(outputs[0], dict):
            return [{"log_probs": _restored([each["log_probs"] for each in outputs], back)}]
        log_probs = _restored([found["log_probs"] for found, _ in outputs], back)
        return [[{"log_probs": log_probs}, _restored([entropies for _, entropies in outputs], back)]]


stage_budget: Current[int] = Current()  # tokens of a micro batch of the stage in progress; None: a number of samples
current_packing: Current[Packing] = Current()  # of the actor's pass in progress, where micro batches are dynamic


def _restored(parts: list[torch.Tensor], back: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts)[back.to(parts[0].device)]


def packing(forward_backward_batch: Callable) -> Callable:
    """Row provider for verl's MegatronPPOActor.forward_backward_batch: dynamic micro batches in a stage with a budget.

    `stage_budget` is set by worker/recipe_worker.py.
    """

    @functools.wraps(forward_backward_batch)
    def run(self: Any, data: Any, forward_only: bool = False, *args: Any, **kwargs: Any) -> Any:
        budget = stage_budget.value
        if budget is None:
            return forward_backward_batch(self, data, forward_only, *args, **kwargs)
        data.meta_info["micro_batch_size"] = 1  # verl multiplies it, for a shape that Megatron does not read
        with current_packing.set(Packing(budget)) as now:
            outputs = forward_backward_batch(self, data, forward_only, *args, **kwargs)
            return now.in_order(outputs) if forward_only else outputs

    return run


def by_tokens(split_dict_tensor_into_batches: Callable) -> Callable:
    """Row provider for verl's split of a batch into micro batches: by tokens inside `packing`."""

    @functools.wraps(split_dict_tensor_into_batches)
    def split(tensors: Any, batch_size: int) -> Any:
        now = current_packing.value
        return split_dict_tensor_into_batches(tensors, batch_size) if now is None else now.split(tensors)

    return split


def equal_samples(agg_loss: Callable) -> Callable:
    """Row provider for verl's agg_loss: inside `packing` the sum over samples, each as a micro batch of its own.

    Megatron divides by the number of micro batches; what is returned makes up for it.
    """

    @functools.wraps(agg_loss)
    def aggregate(loss_mat: torch.Tensor, loss_mask: torch.Tensor, loss_agg_mode: str) -> torch.Tensor:
        now = current_packing.value
        if now is None:
            return agg_loss(loss_mat, loss_mask, loss_agg_mode)
        rows = zip(loss_mat.split(1), loss_mask.split(1), strict=True)
        losses = [agg_loss(loss, mask, loss_agg_mode) for loss, mask in rows]
        return torch.stack(losses).sum() * (len(now.rows) / now.samples)

    return aggregate
