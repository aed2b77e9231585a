"""Define cases for the tests of model/log_prob.py, their results by the plain formula, and the work of a rank."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from verl_patches.model import log_prob

ROWS_OF_A_CHUNK = 3


@dataclass(frozen=True)
class Case:
    """Describe logits [T, V] = offset + scale * normal and the weights of the results in the loss.

    A result with weight 0 is not in the loss; one with None is not computed."""

    tokens: int = 10  # not a multiple of the chunk
    words: int = 64
    offset: float = 0.0
    scale: float = 2.0
    dtype: torch.dtype = torch.float32
    log_prob_weight: float = 1.0
    entropy_weight: float | None = None
    masked: int = 0  # tokens at the start without weight

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (logits [T, V], labels [T]), the same in every process; every eighth label is the last token id."""
        generator = torch.Generator().manual_seed(7)
        logits = self.offset + self.scale * torch.randn(self.tokens, self.words, generator=generator)
        labels = torch.randint(0, self.words, (self.tokens,), generator=generator)
        labels[::8] = self.words - 1
        return logits.to(self.dtype), labels

    def loss(self, log_probs: torch.Tensor, entropy: torch.Tensor | None = None) -> torch.Tensor:
        """Return a weighted sum of both, with another weight for each token."""
        weights = torch.linspace(-1, 1, self.tokens, dtype=log_probs.dtype)
        weights = weights.masked_fill(torch.arange(self.tokens) < self.masked, 0.0)
        total = log_probs.new_zeros(())
        for weight, values in ((self.log_prob_weight, log_probs), (self.entropy_weight, entropy)):
            if weight:
                total = total + weight * (weights * values).sum()
        return total

    def expected(self) -> dict[str, Any]:
        """Return log_probs, entropy [T] and gradient [T, V], in float64."""
        logits, labels = self.inputs()
        logits = logits.double().requires_grad_()
        every = logits.log_softmax(dim=-1)
        found = {"log_probs": every.gather(-1, labels[:, None])[:, 0]}
        if self.entropy_weight is not None:
            found["entropy"] = -(every.exp() * every).sum(dim=-1)
        self.loss(**found).backward()
        return {**{name: value.detach() for name, value in found.items()}, "gradient": logits.grad}


CASES = {
    "log_probs": Case(),
    "both": Case(entropy_weight=0.5),
    "entropy_only": Case(log_prob_weight=0.0, entropy_weight=1.0),
    "entropy_not_in_the_loss": Case(entropy_weight=0.0),
    "masked": Case(masked=4, entropy_weight=0.5),
    "large": Case(offset=1e4, scale=300.0, entropy_weight=0.5),
    "far_below": Case(offset=-1e4, scale=1.0, entropy_weight=0.5),
    "one_token": Case(tokens=1, entropy_weight=0.5),
    "vocabulary": Case(tokens=5, words=129280, scale=1.0, entropy_weight=0.5),
    "bf16": Case(dtype=torch.bfloat16, entropy_weight=0.5),
    "bf16_log_probs": Case(dtype=torch.bfloat16),
}


def start_tensor_parallel() -> None:
    """Make Megatron's groups with all ranks in one tensor-parallel group."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())


def answer(case: Case) -> dict[str, torch.Tensor]:
    """Compute log_probs, entropy [T], and this rank's part of the gradient [T, V/tp] in small chunks.

    A chunk has ROWS_OF_A_CHUNK tokens. The functions are those that verl's actor calls, in its order.
    """
    from verl.workers.actor import megatron_actor

    logits, labels = case.inputs()
    own = logits.chunk(dist.get_world_size(), dim=-1)[dist.get_rank()].clone().requires_grad_()
    model_logits = own * 1.0  # keeps nothing for its backward, as Megatron's output layer
    with mock.patch.object(log_prob, "CHUNK_BYTES", ROWS_OF_A_CHUNK * own.shape[-1] * 4):
        found = {}
        if case.entropy_weight is not None:
            found["entropy"] = megatron_actor.vocab_parallel_entropy(model_logits)
        found["log_probs"] = megatron_actor.vocab_parallel_log_probs_from_logits(model_logits, labels)
        case.loss(**found).backward()
    return {**{name: value.detach() for name, value in found.items()}, "gradient": own.grad}


@contextlib.contextmanager
def all_reduce_left_out(number: int):
    """Skip the `number`-th all-reduce of model/log_prob.py."""
    calls = iter(range(100))

    def all_reduce(tensor, **kwargs):
        if next(calls) != number:
            dist.all_reduce(tensor, **kwargs)

    with mock.patch.object(log_prob, "dist", SimpleNamespace(all_reduce=all_reduce, ReduceOp=dist.ReduceOp)):
        yield


def without_maximum():
    """Take 0 for the largest logit."""
    return mock.patch.object(torch.Tensor, "amax", lambda tensor, dim: tensor.new_zeros(len(tensor)))


def answers() -> dict[str, dict]:
    """Return the `answer` of each case, and of case `both` with one step left out each time."""
    start_tensor_parallel()
    found = {name: answer(case) for name, case in CASES.items()}
    for number in range(3):
        with all_reduce_left_out(number):
            found[f"all_reduce {number}"] = answer(CASES["both"])
    with without_maximum():
        found["maximum"] = answer(CASES["large"])
    return found


def both_in_the_loss() -> str:
    """Return the error of a loss with log-probs and entropy of the same logits, "" without an error."""
    start_tensor_parallel()
    return _error(lambda: answer(CASES["both"]))


def in_place() -> dict[str, object]:
    """Return whether the gradient is in place, the number of collectives, and errors of wrong uses."""
    start_tensor_parallel()
    case, found = CASES["both"], {}
    logits, labels = case.inputs()
    calls = []
    with mock.patch.object(dist, "all_reduce", lambda *args, **kwargs: calls.append(args)):
        model_logits = logits.requires_grad_() * 1.0
        model_logits.register_hook(
            lambda gradient: found.update(same_memory=gradient.data_ptr() == model_logits.data_ptr())
        )
        log_probs, entropy = _entropy_and_log_probs(model_logits, labels)
        loss = log_probs.sum() + entropy.sum()
        loss.backward(retain_graph=True)
        found |= {"calls": len(calls), "attribute_left": log_prob._PASS_ATTRIBUTE in vars(model_logits)}
        found["second_backward"] = _error(loss.backward)
        found["entropy_after_log_probs"] = _error(functools.partial(_wrong_order, logits * 1.0, labels))
        strided = logits.detach().t().contiguous().requires_grad_()
        log_probs, entropy = _entropy_and_log_probs(strided.t() * 1.0, labels)  # not contiguous
        (log_probs.sum() + entropy.sum()).backward()
        found["same_if_strided"] = torch.equal(strided.grad.t(), logits.grad)
        with torch.no_grad():
            found["graph"] = [value.requires_grad for value in _entropy_and_log_probs(logits * 1.0, labels)]
    return found


def _entropy_and_log_probs(logits, labels):
    entropy = log_prob.vocab_parallel_entropy(logits)
    return log_prob.vocab_parallel_log_probs_from_logits(logits, labels), entropy


def _wrong_order(logits, labels):
    log_probs = log_prob.vocab_parallel_log_probs_from_logits(logits, labels)
    (log_probs.sum() + log_prob.vocab_parallel_entropy(logits).sum()).backward()


def _error(function) -> str:
    try:
        function()
    except RuntimeError as error:
        return str(error)
    return ""
