"""Make micro batches of a token budget: by verl's packing on line a3; with the tensor cache, by the plan on both lines.

verl's Megatron actor of 54c9b736, line a3, takes a fixed number of samples; its FSDP actor and 0.4.0's Megatron actor
read budget keys, which line a3 uses too: `use_dynamic_bsz` and `ppo_max_token_len_per_gpu` of the actor,
`log_prob_use_dynamic_bsz` and `log_prob_max_token_len_per_gpu` of rollout and ref. verl's own `rearrange_micro_batches`
packs: all ranks of the run agree on the largest number of micro batches that one of them needs, as they exchange
tokens with each other's experts. With the tensor cache the plan decides for all replicas (step/batches/batch_plan.py).

The gradient of a mini batch does not depend on its micro batches, nor on the number of data-parallel ranks. With
loss_agg_mode=token-mean it is the gradient of the sum over response tokens, divided by the response tokens of the mini
batch on all data-parallel ranks (DAPO, arXiv:2503.14476, eq. 8); in the other modes, of the mean over its samples. verl
averages each micro batch by itself and gives all of them equal weight, in both versions (core_algos.agg_loss).

    pack_micro_batches        wraps the actor's pass over a batch: puts its log-probs back into the order of the batch
    split_by_tokens           wraps the split into micro batches: splits by tokens inside `pack_micro_batches`
    count_mini_batch          wraps the iterator over micro batches: counts samples and tokens of their mini batch
    scale_micro_batch_loss    wraps the aggregation of a micro batch's loss: divides by those counts
    split_as_planned          wraps verl's packing: uses the micro batches of the plan
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle
from typing import Any

import torch
import torch.distributed as dist

from verl_patches.current import Current
from verl_patches.errors import RecipeError
from verl_patches.step.batches import batch_plan
from verl_patches.step.batches.batch_plan import BatchPlan

MicroBatches = list[list[int]]  # [micro batch] -> rows of the batch that is split


@dataclass(frozen=True)
class Stage:
    """Describe how one stage of a worker makes its micro batches; with the defaults, as verl does.

    budget: most tokens of a micro batch, if `pack_micro_batches` splits (line a3). splits: the plan's micro batches,
    for `split_as_planned`. counts: of the mini batches, during an update of actor or critic. packed_pass: set during
    the actor's pass.
    """

    budget: int | None = None
    splits: PlannedSplits | None = None
    counts: MiniBatchCounts | None = None
    packed_pass: PackedPass | None = None


current_stage: Current[Stage] = Current(Stage())


class PackedPass:
    """Pack one pass of the actor over a batch into micro batches of at most about `budget` tokens.

    `rows`: [micro batch] -> rows of the batch; empty before the split.
    """

    def __init__(self, budget: int):
        self.budget = budget
        self.rows: MicroBatches = []

    def split(self, batch: Any) -> list[Any]:
        """Return micro batches of `batch` (TensorDict), split by row update.micro_batches_as_planned or by verl."""
        from verl.utils import seqlen_balancing

        micro_batches, self.rows = seqlen_balancing.rearrange_micro_batches(batch, max_token_len=self.budget)
        return micro_batches

    def restore_order(self, outputs: list[Any]) -> list[Any]:
        """Return a forward pass's outputs as one micro batch in the order of the batch.

        `outputs`: from verl's loss function, {"log_probs"} or [{"log_probs"}, entropies]; empty on all but the last
        pipeline stage.
        """
        if not outputs:
            return outputs
        inverse = torch.tensor(list(chain.from_iterable(self.rows))).argsort()
        if isinstance(outputs[0], dict):
            return [{"log_probs": _restore_order([each["log_probs"] for each in outputs], inverse)}]
        log_probs = _restore_order([found["log_probs"] for found, _ in outputs], inverse)
        return [[{"log_probs": log_probs}, _restore_order([entropies for _, entropies in outputs], inverse)]]


def _restore_order(parts: list[torch.Tensor], inverse: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts)[inverse.to(parts[0].device)]


def pack_micro_batches(forward_backward_batch: Callable) -> Callable:
    """Wrap verl's MegatronPPOActor.forward_backward_batch: pack micro batches if the stage has a budget."""

    @functools.wraps(forward_backward_batch)
    def run(self: Any, data: Any, forward_only: bool = False, *args: Any, **kwargs: Any) -> Any:
        stage = current_stage.value
        if stage.budget is None:
            return forward_backward_batch(self, data, forward_only, *args, **kwargs)
        data.meta_info["micro_batch_size"] = 1  # verl multiplies it, for a shape that Megatron does not read
        now = PackedPass(stage.budget)
        with current_stage.set(replace(stage, packed_pass=now)):
            outputs = forward_backward_batch(self, data, forward_only, *args, **kwargs)
            return now.restore_order(outputs) if forward_only else outputs

    return run


def split_by_tokens(split_dict_tensor_into_batches: Callable) -> Callable:
    """Wrap verl's split of a batch into micro batches: split by tokens inside `pack_micro_batches`."""

    @functools.wraps(split_dict_tensor_into_batches)
    def split(tensors: Any, batch_size: int) -> Any:
        now = current_stage.value.packed_pass
        return split_dict_tensor_into_batches(tensors, batch_size) if now is None else now.split(tensors)

    return split


LOSS_METRICS = "actor/pg_loss", "actor/kl_loss", "critic/vf_loss"  # verl's metrics of an update


class MiniBatchCounts:
    """Count samples and tokens of the mini batches in one update of actor or critic; the losses are divided by them.

    micro_batches: number in each mini batch so far; samples: of the last mini batch on this rank; tokens: its response
    tokens, as the mean over data-parallel ranks.
    """

    def __init__(self) -> None:
        self.micro_batches: list[int] = []
        self.samples, self.tokens = 0, torch.zeros(())

    def begin(self, batches: Sequence[Any]) -> None:
        """Count the next mini batch, given in micro batches (TensorDict); collective over data-parallel ranks."""
        self.micro_batches.append(len(batches))
        self.samples = sum(map(len, batches))
        tokens = sum(batch["attention_mask"][:, -batch["responses"].shape[1] :].sum() for batch in batches)
        self.tokens = _mean_over_replicas(tokens.float())

    def report(self, metrics: dict[str, Any]) -> None:
        """Replace verl's losses, which cover one replica, by means over replicas; collective over replicas.

        Does nothing on ranks without losses.
        """
        for name in LOSS_METRICS:
            if name in metrics:
                losses = torch.tensor(metrics[name], device=self.tokens.device).flatten().split(self.micro_batches)
                metrics[name] = _mean_over_replicas(torch.stack([loss.mean() for loss in losses]).mean()).item()


def _mean_over_replicas(value: torch.Tensor) -> torch.Tensor:
    from megatron.core import parallel_state

    dist.all_reduce(value, group=parallel_state.get_data_parallel_group())
    return value / parallel_state.get_data_parallel_world_size()


def count_mini_batch(make_batch_generator: Callable) -> Callable:
    """Wrap verl's make_batch_generator, which gets all micro batches of a mini batch: count them."""

    @functools.wraps(make_batch_generator)
    def make(batches: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if (counts := current_stage.value.counts) is not None:
            counts.begin(batches)
        return make_batch_generator(batches, *args, **kwargs)

    return make


def scale_micro_batch_loss(agg_loss: Callable) -> Callable:
    """Wrap verl's agg_loss: in an update, return a micro batch's part of the loss of its mini batch.

    Megatron divides by the number of micro batches, and averages gradients over data-parallel ranks; the returned part
    makes up for both.
    """

    @functools.wraps(agg_loss)
    def aggregate(loss_mat: torch.Tensor, loss_mask: torch.Tensor, loss_agg_mode: str) -> torch.Tensor:
        counts = current_stage.value.counts
        if counts is None:
            return agg_loss(loss_mat, loss_mask, loss_agg_mode)
        if loss_agg_mode == "token-mean":
            return (loss_mat * loss_mask).sum() * (counts.micro_batches[-1] / counts.tokens)
        rows = zip(loss_mat.split(1), loss_mask.split(1), strict=True)
        losses = [agg_loss(loss, mask, loss_agg_mode) for loss, mask in rows]
        return torch.stack(losses).sum() * (counts.micro_batches[-1] / counts.samples)

    return aggregate


# ---- micro batches of the plan (recipe.tensor_cache)


class PlannedSplits:
    """Give the micro batches of the stage in progress, batch by batch; each epoch repeats them.

    `batches`: (micro batches, tokens by row) of each batch.
    """

    def __init__(self, batches: Sequence[tuple[MicroBatches, list[int]]]):
        self._batches = cycle(batches)

    def next_micro_batches(self, tokens: list[int]) -> MicroBatches:
        """Return the next batch's micro batches; RecipeError if the plan expects other `tokens` by row."""
        parts, expected = next(self._batches)
        if tokens != expected:
            raise RecipeError(
                f"micro batches: a batch of this stage has {len(tokens)} rows with {sum(tokens)} tokens; expected the "
                f"plan's {len(expected)} rows with {sum(expected)} tokens, in its order: the actor must not shuffle or "
                "select rows"
            )
        return parts


def plan_stage_splits(
    stage: str, budget: int | None, plan: BatchPlan, replica: int, tokens: Sequence[int]
) -> PlannedSplits | None:
    """Return the plan's micro batches of a replica in a stage ("update" or a forward pass); None without a budget.

    `tokens`: by sample. A forward pass is one batch of all samples, packed for its own budget.
    """
    if budget is None:
        return None
    batches: Sequence[Sequence[Sequence[int]]] = plan.schedule[replica]
    if stage != "update":
        packed = batch_plan.packed_batches(plan.replica_samples, tokens, budget, balance=False)  # already balanced
        batches = [packed[replica]]
    splits = []
    for micros in batches:
        order = list(chain.from_iterable(micros)) if stage == "update" else plan.replica_samples[replica]
        row_by_sample = {sample: row for row, sample in enumerate(order)}
        splits.append(([[row_by_sample[sample] for sample in micro] for micro in micros], [tokens[s] for s in order]))
    return PlannedSplits(splits)


def split_as_planned(rearrange_micro_batches: Callable) -> Callable:
    """Wrap verl's rearrange_micro_batches: return (micro batches, rows) by the plan of the stage.

    verl packs each rank's samples by themselves (verl/utils/seqlen_balancing.py, 0.4.0), on all ranks into as many
    micro batches as the rank with the most tokens needs, ceil(tokens / budget): some exceed the budget, and the n-th
    ones of two replicas differ in length. Here all replicas follow one plan. Without trainer.balance_batch verl packs.
    """

    @functools.wraps(rearrange_micro_batches)
    def rearrange(batch: Any, *args: Any, **kwargs: Any) -> tuple[list[Any], MicroBatches]:
        splits = current_stage.value.splits
        if splits is None:
            return rearrange_micro_batches(batch, *args, **kwargs)
        parts = splits.next_micro_batches(batch["attention_mask"].sum(dim=1).tolist())
        return [batch[torch.tensor(part, device=batch["attention_mask"].device)] for part in parts], parts

    return rearrange
