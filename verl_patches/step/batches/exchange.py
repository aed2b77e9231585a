"""Ragged tensors (values of samples without padding), their padded form, and one exchange of them between ranks.

`exchange` sends several ragged tensors to the ranks that compute their samples by one AlltoAllV of bytes. Wire layout:
one segment per peer, in rank order. A segment begins with a header of 16 bytes, the hash of (plan, tensors),
which the receiver compares; then, tensor by tensor in order of names, the values of the planned samples, each tensor
aligned to 16 bytes. A rank that fails before the collective sends segments of the planned size with a header of zeros,
so that no rank waits and all raise. Only a rank that cannot allocate its two buffers leaves the others to the
collective's timeout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from verl_patches.errors import RecipeError
from verl_patches.step.batches.batch_plan import BatchPlan
from verl_patches.step.batches.limits import ID_BYTES


@dataclass(frozen=True)
class Ragged:
    """`values` [T]: the values of all samples, concatenated; `lengths`: the number of values of each sample."""

    values: torch.Tensor
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.values.shape == (sum(self.lengths),), (self.values.shape, self.lengths)

    def parts(self) -> tuple[torch.Tensor, ...]:
        """One view per sample."""
        return self.values.split(self.lengths) if self.lengths else ()

    def take(self, places: Sequence[int]) -> Ragged:
        """The samples at these places, in this order; a copy."""
        parts = self.parts()
        values = torch.cat([self.values[:0], *(parts[i] for i in places)])
        return Ragged(values, tuple(self.lengths[i] for i in places))


def from_padded(
    padded: torch.Tensor, mask: torch.Tensor, *, left: bool = False, dtype: torch.dtype | None = None
) -> Ragged:
    """The values of `padded` [B, S] where `mask` [B, S] is true, as `dtype`; padding is right, or `left`, of them.

    ValueError for a mask with a gap. Waits for the device.
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
    """[B, width], padded on the right, or on the `left` as verl's prompts; ValueError for a longer sample."""
    if max(ragged.lengths, default=0) > width:
        raise ValueError(f"ragged: the longest sample has {max(ragged.lengths)} values, expected {width} at most")
    values = ragged.values if dtype is None else ragged.values.to(dtype)
    mask = mask_of(ragged.lengths, width, left=left, device=values.device)
    return values.new_full(mask.shape, pad).masked_scatter_(mask, values)


def mask_of(
    lengths: Sequence[int], width: int, *, left: bool = False, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """[B, width] bool, true where there is a value."""
    count = torch.tensor(lengths, dtype=torch.int64, device=device)[:, None]
    place = torch.arange(width, device=device)[None]
    return place >= width - count if left else place < count


def prompt_inputs(prompts: Ragged, width: int, pad_id: int) -> dict[str, torch.Tensor]:
    """The tensors [B, width] that verl's dataset makes of prompts: int64, padded on the left, positions from 0."""
    ids = to_padded(prompts, width, pad=pad_id, left=True, dtype=torch.int64)
    mask = mask_of(prompts.lengths, width, left=True, device=ids.device).long()
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def model_inputs(
    prompts: Ragged, responses: Ragged, prompt_width: int, response_width: int, pad_id: int
) -> dict[str, torch.Tensor]:
    """The tensors of verl's batch that follow from token ids, int64, as vLLMRollout.generate_sequences makes them.

    prompts [B, P] (padded on the left), responses [B, R] (on the right), input_ids, attention_mask and position_ids
    [B, P + R]; positions count on through the padding after a response (vllm_rollout_spmd.py, verl 0.4.0 and
    54c9b736). Deviates from verl in ids after a response's first end token, which are `pad_id` here; both mask them.
    """
    left = to_padded(prompts, prompt_width, pad=pad_id, left=True, dtype=torch.int64)
    right = to_padded(responses, response_width, pad=pad_id, dtype=torch.int64)
    prompt_mask = mask_of(prompts.lengths, prompt_width, left=True, device=left.device)
    response_mask = mask_of(responses.lengths, response_width, device=left.device)
    places = torch.arange(prompt_width + response_width, device=left.device)[None]
    return {
        "prompts": left,
        "responses": right,
        "input_ids": torch.cat([left, right], 1),
        "attention_mask": torch.cat([prompt_mask, response_mask], 1).long(),
        "position_ids": (places - (~prompt_mask).sum(1, keepdim=True)).clamp(min=0),
    }


def is_metrics_rank() -> bool:
    """Whether this rank reports for its replica, as in verl's collect_megatron_compute.

    The last pipeline stage has the loss, and its TP and CP ranks have equal values.
    """
    from megatron.core import parallel_state as mpu

    last = mpu.is_pipeline_last_stage(ignore_virtual=True)
    return last and mpu.get_tensor_model_parallel_rank() == 0 and mpu.get_context_parallel_rank() == 0


def packed_ids(ids: np.ndarray) -> np.ndarray:
    """[T, ID_BYTES] uint8, the low bytes of token ids [T], the lowest first; ValueError where that is not lossless."""
    if ids.size and not 0 <= ids.min() <= ids.max() < 1 << 8 * ID_BYTES:
        raise ValueError(f"token ids are from {ids.min()} to {ids.max()}; expected 0 to {(1 << 8 * ID_BYTES) - 1}")
    return np.ascontiguousarray(ids.astype("<i4").view(np.uint8).reshape(-1, 4)[:, :ID_BYTES])


def unpacked_ids(packed: np.ndarray) -> np.ndarray:
    """[T] int32, the token ids of `packed_ids`."""
    return np.pad(packed, ((0, 0), (0, 4 - ID_BYTES))).view("<i4")[:, 0]


_ALIGNED = 16  # bytes, also of the header


class ExchangeError(RecipeError):
    """Ranks have different plans or tensors, or one of them failed; names the ranks."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's dtype, and [sample] -> number of values; equal on all ranks."""

    dtype: torch.dtype
    lengths: Sequence[int]


def exchange(
    plan: BatchPlan,
    rank: int,
    specs: Mapping[str, TensorSpec],
    held: Callable[[], Mapping[str, Ragged]],
    device: torch.device | str = "cpu",
) -> dict[str, Ragged]:
    """Tensors of the samples that `rank` computes, in its order; collective over all ranks of the plan.

    `held()`: the same tensors of the samples plan.held[rank]; an error in it is raised here, and as ExchangeError on
    the other ranks. ExchangeError too where held tensors differ from `specs`, or a peer has another plan. Plans
    that differ in sizes fail in the collective.
    """
    kinds = {name: specs[name] for name in sorted(specs)}
    header = _header(plan, kinds, device)
    sends, receives = plan.sends(rank), plan.receives(rank)
    splits = [[_segment_bytes(samples, kinds) for samples in side] for side in (sends, receives)]
    send = torch.zeros(sum(splits[0]), dtype=torch.uint8, device=device)
    arrived = torch.empty(sum(splits[1]), dtype=torch.uint8, device=device)
    problem: Exception | None = None
    try:
        _pack(send.split(splits[0]), sends, plan.held[rank], held(), kinds, header)
    except Exception as why:
        problem = why
        send.zero_()
    dist.all_to_all_single(arrived, send, splits[1], splits[0])
    if problem is not None:
        raise problem
    segments = arrived.split(splits[1])
    _check(segments, header, rank)
    return _unpack(segments, receives, plan.placed[plan.replica_of[rank]], kinds)


def wire_bytes(plan: BatchPlan, rank: int, specs: Mapping[str, TensorSpec]) -> tuple[int, int]:
    """Bytes that `rank` sends and receives, including headers and its own samples."""
    return tuple(
        sum(_segment_bytes(samples, specs) for samples in side) for side in (plan.sends(rank), plan.receives(rank))
    )


def _pack(
    segments: Sequence[torch.Tensor],
    sends: Sequence[Sequence[int]],
    samples_held: Sequence[int],
    held: Mapping[str, Ragged],
    kinds: Mapping[str, TensorSpec],
    header: torch.Tensor,
) -> None:
    parts = {}
    for name, kind in kinds.items():
        found, expected = list(held[name].lengths), [kind.lengths[sample] for sample in samples_held]
        if (held[name].values.dtype, found) != (kind.dtype, expected):
            wrong = [pair for pair in zip(samples_held, found, expected, strict=False) if pair[1] != pair[2]]
            raise ExchangeError(
                f"exchange: {name} is {held[name].values.dtype} of {len(found)} samples, expected {kind.dtype} of "
                f"{len(expected)}; (sample, values, expected) {wrong[:4]}, as passed on all ranks"
            )
        parts[name] = dict(zip(samples_held, held[name].parts(), strict=True))
    for samples, segment in zip(sends, segments, strict=True):
        segment[:_ALIGNED] = header
        at = _ALIGNED
        for name in kinds if samples else ():
            nbytes = sum(parts[name][sample].nbytes for sample in samples)
            values = [parts[name][sample].view(torch.uint8) for sample in samples]
            torch.cat(values, out=segment[at : at + nbytes])
            at += nbytes + -nbytes % _ALIGNED


def _unpack(
    segments: Sequence[torch.Tensor],
    receives: Sequence[Sequence[int]],
    computed: Sequence[int],
    kinds: Mapping[str, TensorSpec],
) -> dict[str, Ragged]:
    parts: dict[str, dict[int, torch.Tensor]] = {name: {} for name in kinds}
    for samples, segment in zip(receives, segments, strict=True):
        at = _ALIGNED
        for name, kind in kinds.items() if samples else ():
            counts = [kind.lengths[sample] for sample in samples]
            nbytes = sum(counts) * kind.dtype.itemsize
            parts[name].update(zip(samples, segment[at : at + nbytes].view(kind.dtype).split(counts), strict=True))
            at += nbytes + -nbytes % _ALIGNED
    return {
        name: Ragged(
            torch.cat([parts[name][sample] for sample in computed]), tuple(kind.lengths[sample] for sample in computed)
        )
        for name, kind in kinds.items()
    }


def _segment_bytes(samples: Sequence[int], kinds: Mapping[str, TensorSpec]) -> int:
    each = (sum(kind.lengths[sample] for sample in samples) * kind.dtype.itemsize for kind in kinds.values())
    return _ALIGNED + sum(nbytes + -nbytes % _ALIGNED for nbytes in each)


def _header(plan: BatchPlan, kinds: Mapping[str, TensorSpec], device: torch.device | str) -> torch.Tensor:
    text = repr((plan.digest, [(name, str(kind.dtype), list(kind.lengths)) for name, kind in kinds.items()]))
    digest = hashlib.blake2b(text.encode(), digest_size=_ALIGNED).digest()
    return torch.tensor(list(digest), dtype=torch.uint8, device=device)


def _check(segments: Sequence[torch.Tensor], header: torch.Tensor, rank: int) -> None:
    headers = torch.stack([segment[:_ALIGNED] for segment in segments]).cpu()
    wrong = [peer for peer, same in enumerate((headers == header.cpu()).all(1).tolist()) if not same]
    failed = [peer for peer in wrong if not headers[peer].any()]
    if failed:
        raise ExchangeError(f"exchange: rank(s) {failed[:8]} had nothing to send; see their own errors")
    if wrong:
        raise ExchangeError(
            f"exchange: rank {rank} has another plan or other tensors than rank(s) {wrong[:8]}; "
            "all ranks must pass the same lengths and tensors"
        )
