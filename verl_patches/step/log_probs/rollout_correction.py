"""Measure how vLLM's and the actor's log-probs of sampled tokens differ, and correct that by importance weights.

Names and definitions are those of later verl (trainer/ppo/rollout_corr_helper.py as of b178a3cd5, "decoupled mode"): a
token's ratio is pi_actor / pi_rollout, before the update; k1, the quantity for rejection, is -log ratio, so bounds are
of pi_rollout / pi_actor. Unlike there, what is rejected, a token or a sequence, still counts in the loss's mean and in
the KL loss, and adds nothing to the policy gradient: in verl 0.4.0 and 54c9b736 the actor's mask comes from the
attention mask alone. rollout_is=token with rollout_rs=token_k1 is IcePop (arXiv:2510.18855): a token's weight is its
ratio within two bounds and 0 outside of them.

A weight w >= 0 multiplies the advantage. PPO's loss of a token, max(-r A, -clip(r) A) and for A < 0 at most -c A,
is linear in a positive factor of A, so w A gives exactly w times the loss.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from verl_patches.step.log_probs.logprob_check import DELTA_MAX, DELTA_MEAN, DELTA_STD, K3_KL, KL, NOT_FINITE, PEARSON
from verl_patches.step.log_probs.ratio_settings import MASKED_SHARE, Correction, parse_correction

MAX_LOG_RATIO = 20.0  # bound of |log ratio| before exp
_CORRECTION_PREFIX = "rollout_corr"  # verl's name
MEAN_LOG_PROB = "actor/log_prob_mean"  # mean over the responses' tokens, reported where vLLM gives no log-probs
_CHUNK_ROWS = 1024  # sequences computed at a time
_RATIO_PREFIX, _WORST_PREFIX = "recipe/token_ratio", "recipe/worst_token"
_QUANTILES = {"p0.1": 0.001, "p1": 0.01, "p50": 0.5, "p99": 0.99, "p99.9": 0.999}
_WORST_VALUES = ("rollout_logprob", "actor_logprob", "position")


@dataclass(frozen=True)
class LogProbSums:
    """Hold what `log_prob_metrics` needs of one part of a batch, in a form that `merge_sums` adds up.

    sums, highest: sums and maxima by name. bins: {bin of `_bin_edges`: tokens whose log ratio lies in it}. worst:
    (|log ratio|, vLLM's log-prob, the actor's, position in the response) of the token with the largest |log ratio|.
    """

    sums: dict[str, float] = field(default_factory=dict)
    highest: dict[str, float] = field(default_factory=dict)
    bins: Counter[int] = field(default_factory=Counter)
    worst: tuple[float, ...] = ()


class ImportanceWeights(NamedTuple):
    """Hold weights, fp32 or fp64, 0 outside the mask; ratios before the cap; accepted, bool; all [B, S_response]."""

    weights: torch.Tensor
    ratios: torch.Tensor
    accepted: torch.Tensor


def importance_weights(
    rollout: torch.Tensor, actor: torch.Tensor, mask: torch.Tensor, correction: Correction
) -> ImportanceWeights:
    """Return the weight of each response token; all [B, S_response], at least fp32, nats.

    ratio: pi_actor / pi_rollout of the token or of its sequence; weight: the ratio, at most `cap`, 1 without a `level`.
    A token (token_k1) or a sequence is rejected (weight 0) if its pi_rollout / pi_actor is outside `bounds`, where
    seq_sum_k1 takes the product over a sequence's tokens, and seq_mean_k1 their geometric mean.
    """
    mask = mask.bool()
    wide = torch.promote_types(torch.promote_types(rollout.dtype, actor.dtype), torch.float32)
    by_token = torch.where(mask, actor.to(wide) - rollout.to(wide), 0.0)
    by_sequence = by_token.sum(-1)
    by_level = {"token": by_token, "sequence": by_sequence.unsqueeze(-1).expand_as(by_token)}
    log_ratio = by_level.get(correction.level or "")
    ratios = torch.ones_like(by_token) if log_ratio is None else log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    accepted = torch.ones_like(mask)
    if correction.reject:
        assert correction.bounds is not None  # given with `reject`
        low, high = (math.log(bound) for bound in correction.bounds)
        k1 = -by_token.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        if correction.reject != "token_k1":
            length = mask.sum(-1, keepdim=True).clamp(min=1) if correction.reject == "seq_mean_k1" else 1
            k1 = k1.sum(-1, keepdim=True) / length
        accepted = ((k1 >= low) & (k1 <= high)).expand_as(mask)
    capped = ratios if log_ratio is None else ratios.clamp(max=correction.cap)
    return ImportanceWeights(torch.where(mask & accepted, capped, 0.0), ratios, accepted)


def log_prob_sums(
    rollout: torch.Tensor, actor: torch.Tensor, mask: torch.Tensor, correction: Correction | None = None
) -> LogProbSums:
    """Return the sums of one part of a batch, in fp64 on the host, for `merge_sums` and `log_prob_metrics`.

    All are [B, S_response], nats; no sequence may be split between parts.
    """
    total = LogProbSums()
    for at in range(0, len(mask), _CHUNK_ROWS):
        rows = slice(at, at + _CHUNK_ROWS)
        x, y = (t[rows].detach().float().cpu().double() for t in (rollout, actor))  # devices may lack fp64
        total = merge_sums([total, _part_sums(x, y, mask[rows].cpu().bool(), correction)])
    return total


def merge_sums(parts: Iterable[LogProbSums | None]) -> LogProbSums:
    """Return the sums of all parts together; None counts as an empty part."""
    sums: dict[str, float] = {}
    highest: dict[str, float] = {}
    bins: Counter[int] = Counter()
    worst: tuple[float, ...] = ()
    for part in filter(None, parts):
        for name, value in part.sums.items():
            sums[name] = sums.get(name, 0.0) + value
        for name, value in part.highest.items():
            highest[name] = max(highest.get(name, -math.inf), value)
        bins.update(part.bins)
        worst = max(worst, part.worst)
    return LogProbSums(sums, highest, bins, worst)


def _part_sums(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor, correction: Correction | None) -> LogProbSums:
    not_finite = int((mask & ~(torch.isfinite(x) & torch.isfinite(y))).sum())
    if not_finite or not mask.any():
        return LogProbSums({"not_finite": float(not_finite), "tokens": float(mask.sum())})
    filled, x_valid, y_valid = mask.any(-1), x[mask], y[mask]
    d = y_valid - x_valid
    rows = {
        "d": d,
        "k3": torch.expm1(d) - d,
        "abs": d.abs(),
        "abs2": d.square(),
        "x": x_valid,
        "y": y_valid,
        "xx": x_valid.square(),
        "yy": y_valid.square(),
        "xy": x_valid * y_valid,
    }
    highest = {"abs": rows["abs"]}
    sums = {"not_finite": 0.0, "tokens": float(mask.sum()), "sequences": float(filled.sum())}
    if correction:
        _, by_token, accepted = importance_weights(x, y, mask, correction)
        ratios = by_token[mask]  # as if no sequence was rejected
        bounded = ratios.clamp(1 / correction.cap, correction.cap)
        weights = by_token[filled, 0] if correction.level == "sequence" else ratios
        rows |= {
            "ratio": ratios,
            "bounded": bounded,
            "bounded_2": bounded.square(),
            "above_cap": weights > correction.cap,
            "weights": torch.ones_like(weights),
            "rejected_tokens": ~accepted[mask],
            "rejected": (mask & ~accepted).any(-1),
        }
        highest |= {"ratio": ratios, "ratio_low": -ratios}
    worst = int(rows["abs"].argmax())
    position = mask.nonzero()[worst, 1]
    return LogProbSums(
        sums | {name: float(row.sum()) for name, row in rows.items()},
        {name: float(row.max()) for name, row in highest.items()},
        _bin_counts(d),
        tuple(float(value) for value in (rows["abs"][worst], x_valid[worst], y_valid[worst], position)),
    )


@functools.cache
def _bin_edges() -> torch.Tensor:
    """Return the ascending edges of bins of log ratios: 50 bins a decade from 1e-9 to 100, of both signs, fp64."""
    positive = torch.logspace(-9, 2, 11 * 50 + 1, dtype=torch.float64)
    return torch.cat([-positive.flip(0), positive])


def _bin_counts(log_ratio: torch.Tensor) -> Counter[int]:
    """Return {bin: number of log ratios between edge bin - 1 and edge bin}, after a clamp as before exp."""
    bins = torch.bucketize(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), _bin_edges())
    return Counter({number: count for number, count in enumerate(torch.bincount(bins).tolist()) if count})


def _ratio_quantile(bins: Counter[int], share: float) -> float:
    """Return the ratio that at least `share` of the tokens do not exceed; the logarithm is the middle of its bin."""
    numbers = sorted(bins)
    tokens_up_to = list(accumulate(bins[number] for number in numbers))
    number = numbers[bisect_left(tokens_up_to, share * tokens_up_to[-1])]
    return math.exp(float(_bin_edges()[number - 1 : number + 1].mean()))


def log_prob_metrics(batch_sums: LogProbSums, correction: Correction | None = None) -> dict[str, float]:
    """Return the step's metrics by name: {} without a valid token; count and NaN if any log-prob is not finite.

    recipe/logprob_delta_{mean,std,max}: of |actor - rollout| in nats; PEARSON: correlation of both. KL, K3_KL: the k1
    and k3 estimates of KL(rollout || actor). recipe/token_ratio/pN: the N % quantile of a token's pi_actor /
    pi_rollout, whose logarithm is within 2.4 % of the exact one. recipe/worst_token: both log-probs of the token with
    the largest |log ratio|, and its position in the response, from 0. Standard deviations divide by n - 1,
    rollout_is_std by n; undefined values are left out.
    """
    sums, highest = batch_sums.sums, batch_sums.highest
    tokens = sums.get("tokens")
    if sums.get("targets"):
        return {MEAN_LOG_PROB: sums["log_probs"] / sums["targets"]}
    if not tokens:
        return {}
    if sums["not_finite"]:
        return {NOT_FINITE: sums["not_finite"], DELTA_MEAN: math.nan, DELTA_MAX: math.nan}
    named: dict[str, float | None] = {
        KL: -sums["d"] / tokens,
        K3_KL: sums["k3"] / tokens,
        DELTA_MEAN: sums["abs"] / tokens,
        DELTA_STD: math.sqrt(max(sums["abs2"] - sums["abs"] ** 2 / tokens, 0.0) / (tokens - 1)) if tokens > 1 else None,
        DELTA_MAX: highest["abs"],
        PEARSON: _pearson(sums, tokens),
        **{f"{_RATIO_PREFIX}/{name}": _ratio_quantile(batch_sums.bins, share) for name, share in _QUANTILES.items()},
        **{f"{_WORST_PREFIX}/{n}": value for n, value in zip(_WORST_VALUES, batch_sums.worst[1:], strict=True)},
    }
    if correction and correction.level:
        named |= _weight_metrics(sums, highest)
    if correction and correction.reject:
        named[MASKED_SHARE] = sums["rejected_tokens"] / tokens
        named[f"{_CORRECTION_PREFIX}/rollout_rs_seq_masked_fraction"] = sums["rejected"] / sums["sequences"]
    return {name: value for name, value in named.items() if value is not None}


def _weight_metrics(sums: dict[str, float], highest: dict[str, float]) -> dict[str, Any]:
    """Return mean, max, min of the ratios; std, ESS of ratios clamped to [1 / cap, cap]; the capped fraction."""
    tokens = sums["tokens"]
    mean, mean_2 = sums["bounded"] / tokens, sums["bounded_2"] / tokens
    return {
        f"{_CORRECTION_PREFIX}/rollout_is_mean": sums["ratio"] / tokens,
        f"{_CORRECTION_PREFIX}/rollout_is_std": math.sqrt(max(mean_2 - mean * mean, 0.0)),
        f"{_CORRECTION_PREFIX}/rollout_is_max": highest["ratio"],
        f"{_CORRECTION_PREFIX}/rollout_is_min": -highest["ratio_low"],
        f"{_CORRECTION_PREFIX}/rollout_is_eff_sample_size": mean * mean / mean_2,
        f"{_CORRECTION_PREFIX}/rollout_is_ratio_fraction_high": sums["above_cap"] / sums["weights"],
    }


def _pearson(sums: dict[str, float], n: float) -> float | None:
    x, y, xx, yy, xy = (sums[name] for name in ("x", "y", "xx", "yy", "xy"))
    spread = (xx - x * x / n) * (yy - y * y / n)
    return None if spread <= 0 else max(-1.0, min(1.0, (xy - x * y / n) / math.sqrt(spread)))


_SKIPPED_PASS_METRICS = ("actor/entropy_loss",)  # metrics that verl takes only from the pass for old log-probs


def add_worker_metrics(step: Mapping[str, Any], reports: Iterable[LogProbSums | None], recipe: Any) -> dict[str, Any]:
    """Return a step's metrics with those of the workers' updates, and without those of a skipped log-prob pass."""
    left_out = _SKIPPED_PASS_METRICS if recipe.train.skip_old_log_prob else ()
    computed = {name: value for name, value in step.items() if name not in left_out}
    return {**computed, **log_prob_metrics(merge_sums(reports), parse_correction(recipe.rollout_correction))}
