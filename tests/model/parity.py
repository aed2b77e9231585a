"""Compute losses and compare logits and gradients for both sides of the parity tests."""

from __future__ import annotations

import torch

# for tests of critics: number of samples, first column of their responses, token whose logits the head computes
SAMPLES, RESPONSE_START, WORD = 8, 60, 7


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of the real tokens: logits [B, S, V], ids and mask [B, S]."""
    wanted = mask[:, 1:] & mask[:, :-1]
    return torch.nn.functional.cross_entropy(logits[:, :-1][wanted].float(), ids[:, 1:][wanted])


def logits_error(reference, found):
    """Return max |difference| / max |logit| on real tokens."""
    mask, expected = reference["mask"], reference["logits"]
    return ((found[mask] - expected[mask]).abs().max() / expected[mask].abs().max()).item()


def whole_gradients(ranks, layout):
    """Return {HF name: gradient}, assembled from the parts of all ranks."""
    found = {}
    for rank in ranks:
        for region, shape, tensor in rank[layout]["gradients"]:
            whole = found.setdefault(region.name, torch.full(shape, torch.nan))
            part = whole.narrow(region.axis, region.start, region.rows)
            assert part.isnan().all() or torch.allclose(part, tensor, atol=1e-6), f"{region} differs between ranks"
            part.copy_(tensor)
    return found


def gradient_errors(expected, found):
    """Return {HF name: |difference| / |gradient|}, both as norms over the tensor."""
    assert found.keys() == expected.keys()
    return {name: ((found[name] - g).norm() / g.norm().clamp(min=1e-12)).item() for name, g in expected.items()}
