"""Compute losses and compare logits and gradients for both sides of the parity tests."""

from __future__ import annotations

import functools

import torch

LENGTHS, WIDTH = (150, 97, 131), 160  # beyond the 64 tokens where yarn starts
# for tests of critics: number of samples, first column of their responses, token whose logits the head computes
SAMPLES, RESPONSE_START, WORD = 8, 60, 7


def make_batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (ids, mask, position_ids), each [3, WIDTH], padded left and right as verl pads prompts and responses."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(6, 512, (len(LENGTHS), WIDTH), generator=generator)
    mask = torch.zeros(len(LENGTHS), WIDTH, dtype=torch.bool)
    for row, length in enumerate(LENGTHS):
        start = (WIDTH - length) // 2 * (row % 2)
        mask[row, start : start + length] = True
    ids[~mask] = 2
    return ids, mask, (mask.long().cumsum(-1) - 1).clamp(min=0)


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of the real tokens: logits [B, S, V], ids and mask [B, S]."""
    wanted = mask[:, 1:] & mask[:, :-1]
    return torch.nn.functional.cross_entropy(logits[:, :-1][wanted].float(), ids[:, 1:][wanted])


@functools.cache
def _directions(size: int) -> torch.Tensor:
    return torch.randn(size, 6, generator=torch.Generator().manual_seed(size))


def sketch(tensor: torch.Tensor) -> torch.Tensor:
    """Return [..., 6], fixed random projections of the last dimension: a relative error stays about what it is."""
    return tensor @ _directions(tensor.shape[-1])


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
