"""Logits, labels and losses for the tests of model/log_prob.py, and their answers by the plain formula in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Case:
    """Logits [T, V] = offset + scale * normal; a weight of 0: that result is not in the loss; of None: it is
    not computed."""

    tokens: int = 10  # not a multiple of the chunk
    words: int = 64
    offset: float = 0.0
    scale: float = 2.0
    dtype: torch.dtype = torch.float32
    log_prob_weight: float = 1.0
    entropy_weight: float | None = None
    masked: int = 0  # tokens at the start without weight

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits [T, V], labels [T]), the same in every process; every eighth label is the last word."""
        generator = torch.Generator().manual_seed(7)
        logits = self.offset + self.scale * torch.randn(self.tokens, self.words, generator=generator)
        labels = torch.randint(0, self.words, (self.tokens,), generator=generator)
        labels[::8] = self.words - 1
        return logits.to(self.dtype), labels

    def loss(self, log_probs: torch.Tensor, entropy: torch.Tensor | None = None) -> torch.Tensor:
        """A weighted sum of both, with another weight for each token."""
        weights = torch.linspace(-1, 1, self.tokens, dtype=log_probs.dtype)
        weights = weights.masked_fill(torch.arange(self.tokens) < self.masked, 0.0)
        total = log_probs.new_zeros(())
        for weight, values in ((self.log_prob_weight, log_probs), (self.entropy_weight, entropy)):
            if weight:
                total = total + weight * (weights * values).sum()
        return total

    def expected(self) -> dict[str, Any]:
        """log_probs, entropy [T] and gradient [T, V], in float64."""
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
