"""Convert ragged tensors (values of samples without padding) to padded ones and back, and exchange them between ranks.

`exchange` sends each tensor by an AlltoAllV to the ranks that compute its samples. Before the first one the ranks
agree that all of them have the tensors that the plan expects, so that none waits for a rank that has failed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist

from verl_patches.reshard.rank_errors import RankError, catch_errors, raise_on_any_rank
from verl_patches.step.batches.batch_plan import BatchPlan
from verl_patches.step.batches.limits import ID_BYTES


@dataclass(frozen=True)
class RaggedTensor:
    """Hold `values` [T], all samples' values concatenated, and `lengths`, the number of values of each sample."""

    values: torch.Tensor
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.values.shape == (sum(self.lengths),), (self.values.shape, self.lengths)

    def parts(self) -> tuple[torch.Tensor, ...]:
        """Return one view per sample."""
        return self.values.split(self.lengths) if self.lengths else ()

    def take(self, places: Sequence[int]) -> RaggedTensor:
        """Return a copy of the samples at these places, in this order."""
        parts = self.parts()
        values = torch.cat([self.values[:0], *(parts[i] for i in places)])
        return RaggedTensor(values, tuple(self.lengths[i] for i in places))


def from_padded(
    padded: torch.Tensor, mask: torch.Tensor, *, left: bool = False, dtype: torch.dtype | None = None
) -> RaggedTensor:
    """Return the values of `padded` [B, S] where `mask` [B, S] is true, as `dtype`; `left`: padding is on the left.

    Raises ValueError for a mask with a gap. Waits for the device.
    """
    keep = mask.bool()
    lengths = tuple(keep.sum(1).tolist())
    if not torch.equal(keep, value_mask(lengths, keep.shape[1], left=left, device=keep.device)):
        side = "end" if left else "beginning"
        raise ValueError(f"ragged tensor: a row's values are not one block at its {side}; expected padding on one side")
    values = padded.masked_select(keep)
    return RaggedTensor(values if dtype is None else values.to(dtype), lengths)


def to_padded(
    ragged: RaggedTensor, width: int, *, pad: float = 0, left: bool = False, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return [B, width], padded on the right, or on the `left` like verl's prompts; ValueError for a longer sample."""
    if max(ragged.lengths, default=0) > width:
        raise ValueError(f"ragged tensor: a sample has {max(ragged.lengths)} values; expected at most {width}")
    values = ragged.values if dtype is None else ragged.values.to(dtype)
    mask = value_mask(ragged.lengths, width, left=left, device=values.device)
    return values.new_full(mask.shape, pad).masked_scatter_(mask, values)


def value_mask(
    lengths: Sequence[int], width: int, *, left: bool = False, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Return a mask [B, width] bool, true where there is a value."""
    count = torch.tensor(lengths, dtype=torch.int64, device=device)[:, None]
    place = torch.arange(width, device=device)[None]
    return place >= width - count if left else place < count


def prompt_inputs(prompts: RaggedTensor, width: int, pad_id: int) -> dict[str, torch.Tensor]:
    """Return the tensors [B, width] that verl's dataset makes of prompts: int64, padded left, positions from 0."""
    ids = to_padded(prompts, width, pad=pad_id, left=True, dtype=torch.int64)
    mask = value_mask(prompts.lengths, width, left=True, device=ids.device).long()
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def model_inputs(
    prompts: RaggedTensor, responses: RaggedTensor, prompt_width: int, response_width: int, pad_id: int
) -> dict[str, torch.Tensor]:
    """Return the tensors of verl's batch that follow from token ids, int64, as in vLLMRollout.generate_sequences.

    prompts [B, P] (padded on the left), responses [B, R] (on the right), input_ids, attention_mask and position_ids
    [B, P + R]; positions count on through the padding after a response (vllm_rollout_spmd.py, verl 0.4.0 and
    54c9b736). Deviates from verl in ids after a response's first end token, which are `pad_id` here; both mask them.
    """
    left = to_padded(prompts, prompt_width, pad=pad_id, left=True, dtype=torch.int64)
    right = to_padded(responses, response_width, pad=pad_id, dtype=torch.int64)
    prompt_mask = value_mask(prompts.lengths, prompt_width, left=True, device=left.device)
    response_mask = value_mask(responses.lengths, response_width, device=left.device)
    places = torch.arange(prompt_width + response_width, device=left.device)[None]
    return {
        "prompts": left,
        "responses": right,
        "input_ids": torch.cat([left, right], 1),
        "attention_mask": torch.cat([prompt_mask, response_mask], 1).long(),
        "position_ids": (places - (~prompt_mask).sum(1, keepdim=True)).clamp(min=0),
    }


def is_metrics_rank() -> bool:
    """Return whether this rank reports for its replica, as in verl's collect_megatron_compute.

    The last pipeline stage has the loss; its TP and CP ranks have equal values.
    """
    from megatron.core import parallel_state as mpu

    last = mpu.is_pipeline_last_stage(ignore_virtual=True)
    return last and mpu.get_tensor_model_parallel_rank() == 0 and mpu.get_context_parallel_rank() == 0


def packed_ids(ids: np.ndarray) -> np.ndarray:
    """Return [T, ID_BYTES] uint8, the low bytes of token ids [T], lowest first; ValueError if one does not fit."""
    if ids.size and not 0 <= ids.min() <= ids.max() < 1 << 8 * ID_BYTES:
        raise ValueError(f"token ids are from {ids.min()} to {ids.max()}; expected 0 to {(1 << 8 * ID_BYTES) - 1}")
    return np.ascontiguousarray(ids.astype("<i4").view(np.uint8).reshape(-1, 4)[:, :ID_BYTES])


def unpacked_ids(packed: np.ndarray) -> np.ndarray:
    """Return [T] int32, the token ids of `packed_ids`."""
    return np.pad(packed, ((0, 0), (0, 4 - ID_BYTES))).view("<i4")[:, 0]


class ExchangeError(RankError):
    """Report, on every rank alike, that a rank does not have the tensors of the plan."""

    task = "exchange"


@dataclass(frozen=True)
class TensorSpec:
    """Describe a tensor by its dtype and [sample] -> number of values; equal on all ranks."""

    dtype: torch.dtype
    lengths: Sequence[int]


def exchange(
    plan: BatchPlan,
    rank: int,
    specs: Mapping[str, TensorSpec],
    load_tensors: Callable[[], Mapping[str, RaggedTensor]],
    device: torch.device | str = "cpu",
) -> dict[str, RaggedTensor]:
    """Return tensors of the samples that `rank` computes, in its order; collective over all ranks of the plan.

    `load_tensors()`: the same tensors of the samples plan.rollout_samples[rank]. If it raises on a rank, if a rank's
    tensors do not match `specs`, or if it has no memory for the tensors that arrive, all ranks raise the same
    ExchangeError. Plan and specs must be equal on all ranks: they follow from one payload.
    """
    sent, received = plan.sent_samples(rank), plan.received_samples(rank)
    own_samples, packed, arriving = plan.rollout_samples[rank], {}, {}

    def pack() -> list[str]:
        tensors = load_tensors()
        for name, spec in specs.items():
            found, expected = tensors[name], tuple(spec.lengths[sample] for sample in own_samples)
            if (found.values.dtype, found.lengths) != (spec.dtype, expected):
                return [f"{name} has {found.values.dtype} {found.lengths}; expected {spec.dtype} {expected}"]
            packed[name] = found.take([sample - own_samples.start for sample in chain(*sent)]).values
            size = sum(_value_count(spec, samples) for samples in received)
            arriving[name] = torch.empty(size, dtype=spec.dtype, device=device)
        return []

    raise_on_any_rank(catch_errors(pack), None, device, "responses cannot be sent as planned", ExchangeError)
    arrived, order = {}, list(chain(*received))
    to_compute = plan.replica_samples[plan.replica_by_rank[rank]]
    place_by_sample = {sample: place for place, sample in enumerate(order)}
    for name, spec in specs.items():
        to_send, to_receive = ([_value_count(spec, samples) for samples in side] for side in (sent, received))
        dist.all_to_all_single(arriving[name], packed[name], to_receive, to_send)
        found = RaggedTensor(arriving[name], tuple(spec.lengths[sample] for sample in order))
        arrived[name] = found.take([place_by_sample[sample] for sample in to_compute])
    return arrived


def wire_bytes(plan: BatchPlan, rank: int, specs: Mapping[str, TensorSpec]) -> tuple[int, int]:
    """Return the bytes that `rank` sends and receives, including its own samples."""
    return tuple(
        sum(_value_count(spec, samples) * spec.dtype.itemsize for spec in specs.values() for samples in side)
        for side in (plan.sent_samples(rank), plan.received_samples(rank))
    )


def _value_count(spec: TensorSpec, samples: Sequence[int]) -> int:
    return sum(spec.lengths[sample] for sample in samples)
