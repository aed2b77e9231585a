"""Compute losses of fixed data over a whole batch, and their metrics; pure functions in any floating dtype.

Log-ratios are log pi(y|x) - log pi_ref(y|x), summed over the tokens of a response, in nats. Each function returns the
loss, a scalar with gradients, and {metric: scalar}. dpo, ipo and kto are those of TRL 0.17.0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

Loss = tuple[torch.Tensor, dict[str, torch.Tensor]]


def sft(log_probs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean loss over all target tokens; log_probs [B]: sum of each response, tokens [B]: their number."""
    return -log_probs.sum() / tokens.sum()


def dpo(chosen: torch.Tensor, rejected: torch.Tensor, beta: float, label_smoothing: float = 0.0) -> Loss:
    """Return DPO's loss (arXiv:2305.18290) of pairs, log-ratios [P]; with label_smoothing conservative DPO, cDPO."""
    margins = beta * (chosen - rejected)
    losses = -logsigmoid(margins) * (1 - label_smoothing) - logsigmoid(-margins) * label_smoothing
    return losses.mean(), preference_metrics(beta * chosen, beta * rejected)


def ipo(chosen: torch.Tensor, rejected: torch.Tensor, beta: float) -> Loss:
    """Return IPO's loss (arXiv:2310.12036) of pairs; log-ratios [P] averaged over tokens. beta is the paper's tau."""
    losses = (chosen - rejected - 1 / (2 * beta)).square()
    return losses.mean(), preference_metrics(beta * chosen, beta * rejected)


def kto(log_ratios: torch.Tensor, kl_log_ratios: torch.Tensor, desirable: torch.Tensor, settings: Any) -> Loss:
    """Return KTO's loss (arXiv:2402.01306) of unpaired rows, log-ratios and `desirable` (bool) [P].

    kl_log_ratios [P]: those of each prompt with another row's response; their mean, at least 0, is the KL, without
    gradients. settings: beta, desirable_weight, undesirable_weight.
    """
    kl = kl_log_ratios.detach().mean().clamp(min=0)
    signs = torch.where(desirable, 1.0, -1.0)
    gains = settings.beta * (log_ratios - kl) * signs
    weights = log_ratios.new_tensor((settings.undesirable_weight, settings.desirable_weight))[desirable.long()]
    rewards, metrics = settings.beta * log_ratios.detach(), {"kl": kl, "accuracy": (gains > 0).double().mean()}
    kinds = {"chosen_reward": rewards[desirable], "rejected_reward": rewards[~desirable]}
    metrics |= {name: found.mean() for name, found in kinds.items() if len(found)}  # a batch may lack one kind
    if len(metrics) == 4:
        metrics["margin"] = metrics["chosen_reward"] - metrics["rejected_reward"]
    return (weights * (1 - torch.sigmoid(gains))).mean(), metrics


def bradley_terry(chosen: torch.Tensor, rejected: torch.Tensor) -> Loss:
    """Return a reward model's loss: the mean of softplus(rejected - chosen) over pairs of scores [P]."""
    return -logsigmoid(chosen - rejected).mean(), preference_metrics(chosen, rejected)


def prm(scores: torch.Tensor, labels: torch.Tensor) -> Loss:
    """Return a process reward model's loss: mean binary cross-entropy of steps' logits and labels in 0..1 [M]."""
    loss = binary_cross_entropy_with_logits(scores, labels, reduction="sum") / max(len(scores), 1)
    return loss, {"accuracy": ((scores > 0) == (labels > 0.5)).double().mean()} if len(scores) else {}


def preference_metrics(chosen: torch.Tensor, rejected: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return metrics of the rewards [P] of chosen and rejected responses."""
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        "margin": (chosen - rejected).mean(),
        "accuracy": (chosen > rejected).double().mean(),
        "chosen_reward": chosen.mean(),
        "rejected_reward": rejected.mean(),
    }
