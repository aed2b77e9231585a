"""Compute log-probs and entropy of vocab-parallel logits in fp32, chunk by chunk of tokens.

The two functions replace those of verl/utils/megatron/tensor_parallel.py, which hold up to two more fp32 tensors of the
logits' size. Here no such tensor is made: forward reads the logits once, by chunks of CHUNK_BYTES, and backward
overwrites the logits by their gradient, by the same chunks. T is the number of tokens, V the size of the vocabulary, tp
the number of tensor-parallel ranks.

    memory beyond the logits       bytes
    forward                        2 * CHUNK_BYTES + 40 * T
    saved for backward             20 * T: maximum, log-sum, entropy, targets; and the logits themselves, not copied
    backward                       2 * CHUNK_BYTES + 20 * T

A chunk has at least one token, which takes V/tp * 4 bytes. Logits in bf16 are converted chunk by chunk.

verl asks for the entropy and then for log-probs of the same tensor. One autograd node serves both, because only a
single node may overwrite what it has saved. Both together take one pass over the logits and three all-reduces of [T] or
[2, T]; verl's take six. Under no_grad nothing is saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

CHUNK_BYTES = 8 << 20  # bytes of a chunk of this rank's logits in fp32
_PASS_ATTRIBUTE = "_vocab_parallel_pass"  # attribute of logits that keeps a pass for the call for log-probs


@dataclass
class _PassResults:
    """Hold the results of a pass over logits [T, V/tp]; each is fp32 [T] and equal on all TP ranks.

    maximum: the largest logit. log_sum: log(sum(exp(logit - maximum))), kept apart from maximum because their sum would
    round. entropy: None unless asked for. targets: int64 [T], index of the target token in this rank's part of the
    vocabulary, -1 where another rank holds it; None before log-probs are asked for.
    """

    maximum: torch.Tensor
    log_sum: torch.Tensor
    entropy: torch.Tensor | None
    targets: torch.Tensor | None = None


def vocab_parallel_entropy(vocab_parallel_logits: torch.Tensor) -> torch.Tensor:
    """Return the entropy in nats of the softmax over all TP ranks' logits.

    vocab_parallel_logits: [..., V/tp], fp32 or bf16. Returns fp32 [...]. Backward overwrites the logits by their
    gradient. Differs from verl's: it subtracts the maximum from logits before it weighs them, so that large logits do
    not cancel; it needs no torch.compile; its backward works together with that of the log-probs of the same tensor.
    """
    results, entropy, link = _run_pass(vocab_parallel_logits, with_entropy=True)
    setattr(vocab_parallel_logits, _PASS_ATTRIBUTE, (results, link))
    return entropy


def vocab_parallel_log_probs_from_logits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the log-probs of `labels` under the softmax over all TP ranks' logits.

    logits: [..., V/tp], fp32 or bf16. labels: int64 [...], the same on all TP ranks. Returns fp32 [...]. Backward
    overwrites the logits by their gradient. Megatron's vocab_parallel_cross_entropy overwrites them in forward (with
    MindSpeed it copies them in fp32).
    """
    entropy_pass = logits.__dict__.pop(_PASS_ATTRIBUTE, None)
    if entropy_pass is not None:
        results, link = entropy_pass
    else:
        results, _, link = _run_pass(logits, with_entropy=False)
    return link + _log_probs(logits.detach().flatten(0, -2), labels.flatten(), results).view(labels.shape)


def _run_pass(logits: torch.Tensor, with_entropy: bool) -> tuple[_PassResults, torch.Tensor | None, torch.Tensor]:
    """Return (results, entropy, link); the last two are differentiable and have the shape of `logits`[..., 0]."""
    logits = logits.contiguous()  # Megatron's are; the gradient is written through a flat view
    results = _read_logits(logits.detach().flatten(0, -2), with_entropy)
    return results, *_EntropyAndLink.apply(logits, results)


class _EntropyAndLink(torch.autograd.Function):
    """Return entropy and `link` from one autograd node; `link` is zeros, added to log-probs to get their gradient."""

    @staticmethod
    def forward(ctx, logits, results):
        ctx.save_for_backward(logits)
        ctx.results = results
        ctx.set_materialize_grads(False)  # the gradient of a result that is not in the loss stays None
        entropy = None if results.entropy is None else results.entropy.clone().view(logits.shape[:-1])
        return entropy, results.maximum.new_zeros(logits.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx, entropy_grad, log_prob_grad):
        (logits,) = ctx.saved_tensors
        gradient = logits.detach()
        grads = [None if grad is None else grad.flatten()[:, None] for grad in (entropy_grad, log_prob_grad)]
        flat = gradient.flatten(0, -2)  # a view of [T, V/tp], which is overwritten
        for rows in _row_slices(flat):
            parts = (None if grad is None else grad[rows] for grad in grads)
            flat[rows] = _chunk_gradient(flat[rows], ctx.results, rows, *parts)
        return gradient, None


def _row_slices(logits: torch.Tensor) -> Iterator[slice]:
    """Return slices of rows of logits [T, V/tp], of CHUNK_BYTES in fp32 each."""
    size = max(1, CHUNK_BYTES // (4 * logits.shape[1]))
    return (slice(start, start + size) for start in range(0, len(logits), size))


def _read_logits(logits: torch.Tensor, with_entropy: bool) -> _PassResults:
    """Read logits [T, V/tp] once, relative to this rank's maximum, then all-reduce maximum and sums of all tokens."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    largest = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    sums = largest.new_zeros(2 if with_entropy else 1, len(logits))  # sums of exp(x), x * exp(x); x = logit - largest
    for rows in _row_slices(logits):
        largest[rows] = logits[rows].amax(dim=-1)
        _sum_chunk(logits[rows], largest[rows, None], sums[:, rows])
    maximum = largest.clone()
    dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
    shift = largest - maximum
    if with_entropy:
        sums[1] += shift * sums[0]
    sums *= shift.exp()
    dist.all_reduce(sums, group=group)
    log_sum = sums[0].log()
    return _PassResults(maximum, log_sum, log_sum - sums[1] / sums[0] if with_entropy else None)


def _sum_chunk(logits: torch.Tensor, largest: torch.Tensor, sums: torch.Tensor) -> None:
    """Fill sums [1 or 2, t] of logits [t, V/tp]; being a function of its own frees a chunk's tensors at its end."""
    values = logits.float() - largest
    powers = values.exp() if len(sums) > 1 else values.exp_()
    sums[0] = powers.sum(dim=-1)
    if len(sums) > 1:
        sums[1] = values.mul_(powers).sum(dim=-1)


def _log_probs(logits: torch.Tensor, labels: torch.Tensor, results: _PassResults) -> torch.Tensor:
    """Return log-probs [T] of labels [T] under logits [T, V/tp], and set `results.targets`."""
    from megatron.core import parallel_state

    targets = labels - parallel_state.get_tensor_model_parallel_rank() * logits.shape[1]
    elsewhere = (targets < 0) | (targets >= logits.shape[1])
    results.targets = targets.masked_fill(elsewhere, -1)
    target_logits = logits.gather(1, results.targets.clamp(min=0)[:, None])[:, 0].float() - results.maximum
    target_logits.masked_fill_(elsewhere, 0.0)
    dist.all_reduce(target_logits, group=parallel_state.get_tensor_model_parallel_group())
    return target_logits - results.log_sum


def _chunk_gradient(
    logits: torch.Tensor,
    results: _PassResults,
    rows: slice,
    entropy_grad: torch.Tensor | None,
    log_prob_grad: torch.Tensor | None,
) -> torch.Tensor:
    """Return the fp32 gradient of `logits` [t, V/tp], which are the `rows` of all tokens' logits.

    With p the softmax and H the entropy: d H / d logit = -p * (log(p) + H), d log-prob / d logit = [is target] - p.
    """
    log_p = logits.float() - results.maximum[rows, None]
    log_p -= results.log_sum[rows, None]
    if entropy_grad is None:
        gradient = log_p.exp_().mul_(log_prob_grad).neg_()
    else:
        assert results.entropy is not None  # only a computed entropy has a gradient
        gradient = log_p.exp()
        log_p.add_(results.entropy[rows, None]).mul_(entropy_grad)
        gradient.mul_(log_p if log_prob_grad is None else log_p.add_(log_prob_grad)).neg_()
    if log_prob_grad is not None:
        assert results.targets is not None  # computing the log-probs set them
        targets = results.targets[rows, None]
        gradient.scatter_add_(1, targets.clamp(min=0), log_prob_grad.masked_fill(targets < 0, 0.0))
    return gradient
