"""Values of samples one after another, without padding, and the padded form that verl's batches have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Ragged:
    """`values` [T]: those of the first sample, then those of the second, ...; `lengths`: how many each has."""

    values: torch.Tensor
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.values.dim() != 1 or self.values.numel() != sum(self.lengths):
            raise ValueError(f"ragged: values have shape {tuple(self.values.shape)}, lengths add up to "
                             f"{sum(self.lengths)}; expected [{sum(self.lengths)}]")  # fmt: skip

    def parts(self) -> tuple[torch.Tensor, ...]:
        """One view a sample."""
        return self.values.split(self.lengths) if self.lengths else ()

    def take(self, places: Sequence[int]) -> Ragged:
        """Samples by place, in this order; a copy."""
        parts = self.parts()
        values = torch.cat([self.values[:0], *(parts[at] for at in places)])
        return Ragged(values, tuple(self.lengths[at] for at in places))


def from_padded(
    padded: torch.Tensor, mask: torch.Tensor, *, left: bool = False, dtype: torch.dtype | None = None
) -> Ragged:
    """The values of `padded` [B, S] that `mask` [B, S] keeps, as `dtype`; padding is behind, or before them (`left`).

    Raises ValueError for a mask with a hole, which no length can tell. Waits for the device.
    """
    keep = mask.bool()
    lengths = tuple(keep.sum(1).tolist())
    if not torch.equal(keep, mask_of(lengths, keep.shape[1], left=left, device=keep.device)):
        side = "ends" if left else "begins"
        raise ValueError(f"ragged: a row of the mask is not one block that {side} it; expected padding on one side")
    values = padded.masked_select(keep)
    return Ragged(values if dtype is None else values.to(dtype), lengths)


def to_padded(
    ragged: Ragged, width: int, *, pad: float = 0, left: bool = False, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """[B, width] with `pad` behind the values, or before them (`left`: verl's prompts); ValueError if one is longer."""
    if max(ragged.lengths, default=0) > width:
        raise ValueError(f"ragged: the longest sample has {max(ragged.lengths)} values, expected {width} at most")
    values = ragged.values if dtype is None else ragged.values.to(dtype)
    mask = mask_of(ragged.lengths, width, left=left, device=values.device)
    return values.new_full(mask.shape, pad).masked_scatter_(mask, values)


def mask_of(
    lengths: Sequence[int], width: int, *, left: bool = False, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """[B, width] bool, true at the values."""
    count = torch.tensor(lengths, dtype=torch.int64, device=device)[:, None]
    place = torch.arange(width, device=device)[None]
    return place >= width - count if left else place < count


def prompt_inputs(prompts: Ragged, width: int, pad_id: int) -> dict[str, torch.Tensor]:
    """The tensors of prompts [B, width] that verl's dataset makes: int64, padded on the left, positions from 0 on."""
    ids = to_padded(prompts, width, pad=pad_id, left=True, dtype=torch.int64)
    mask = mask_of(prompts.lengths, width, left=True, device=ids.device).long()
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def model_inputs(
    prompts: Ragged, responses: Ragged, prompt_width: int, response_width: int, pad_id: int
) -> dict[str, torch.Tensor]:
    """The tensors of verl's batch that follow from token ids: int64, as vLLMRollout.generate_sequences makes them.

    prompts [B, P] (padded on the left), responses [B, R] (on the right), input_ids, attention_mask and position_ids
    [B, P + R]; positions count on through the padding behind a response (vllm_rollout_spmd.py, verl 0.4.0 and
    54c9b736). Not equal to verl's are ids behind a response's first end token, if the engine went on after it: masked
    there, `pad_id` here.
    """
    left = to_padded(prompts, prompt_width, pad=pad_id, left=True, dtype=torch.int64)
    right = to_padded(responses, response_width, pad=pad_id, dtype=torch.int64)
    mask = [mask_of(prompts.lengths, prompt_width, left=True, device=left.device),
            mask_of(responses.lengths, response_width, device=left.device)]  # fmt: skip
    begin = prompt_width - torch.tensor(prompts.lengths, dtype=torch.int64, device=left.device)[:, None]
    places = torch.arange(prompt_width + response_width, device=left.device)[None]
    return {"prompts": left, "responses": right, "input_ids": torch.cat([left, right], 1),
            "attention_mask": torch.cat(mask, 1).long(), "position_ids": (places - begin).clamp(min=0)}  # fmt: skip
