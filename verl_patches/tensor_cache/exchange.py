"""Values of samples one after another, without padding, and the padded form that verl's batches have.

One AlltoAllV of bytes that carries several ragged tensors from where they are to where a plan computes them.

Wire layout: one segment for each peer, by rank. It begins with a header of 16 bytes, the hash of (plan, step, tensors),
which the receiver compares; then tensor by tensor, by name, the planned samples' values, each tensor from a multiple of
16 bytes on. A rank that cannot take part still sends segments of the planned size, with a header of zeros: so no rank
waits for it, and all stop. Both buffers are there before anything else that can fail; one that finds no memory even
for them leaves the others to the collective's timeout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from verl_patches.errors import RecipeError
from verl_patches.tensor_cache.batch_plan import BatchPlan


@dataclass(frozen=True)
class Ragged:
    """`values` [T]: those of the first sample, then those of the second, ...; `lengths`: how many each has."""

    values: torch.Tensor
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.values.dim() != 1 or self.values.numel() != sum(self.lengths):
            raise ValueError(
                f"ragged: values have shape {tuple(self.values.shape)}, lengths add up to "
                f"{sum(self.lengths)}; expected [{sum(self.lengths)}]"
            )

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
    mask = [
        mask_of(prompts.lengths, prompt_width, left=True, device=left.device),
        mask_of(responses.lengths, response_width, device=left.device),
    ]
    begin = prompt_width - torch.tensor(prompts.lengths, dtype=torch.int64, device=left.device)[:, None]
    places = torch.arange(prompt_width + response_width, device=left.device)[None]
    return {
        "prompts": left,
        "responses": right,
        "input_ids": torch.cat([left, right], 1),
        "attention_mask": torch.cat(mask, 1).long(),
        "position_ids": (places - begin).clamp(min=0),
    }


_ALIGNED = 16  # bytes; the header's too


class ExchangeError(RecipeError):
    """Ranks do not carry out the same plan on the same tensors, or one of them cannot; names the ranks."""


@dataclass(frozen=True)
class TensorSpec:
    """What every rank knows of a tensor before any of it moves: dtype, and [sample] -> number of values."""

    dtype: torch.dtype
    lengths: Sequence[int]


def exchange(
    plan: BatchPlan,
    rank: int,
    specs: Mapping[str, TensorSpec],
    held: Callable[[], Mapping[str, Ragged]],
    *,
    step: int,
    device: torch.device | str = "cpu",
    group: object = None,
) -> dict[str, Ragged]:
    """Tensors of the samples that `rank` computes, in its order; collective over `group`, whose ranks are the plan's.

    `held()`: the same tensors of the samples plan.held[rank]; what it raises reaches the other ranks as an
    ExchangeError. Raises that too where held tensors are not as in `specs`, or a peer has another plan or step.
    Plans that differ in sizes fail in the collective itself.
    """
    kinds = {name: specs[name] for name in sorted(specs)}
    header = _header(plan, step, kinds, device)
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
    dist.all_to_all_single(arrived, send, splits[1], splits[0], group=group)
    if problem is not None:
        raise problem
    segments = arrived.split(splits[1])
    _check(segments, header, rank)
    return _unpack(segments, receives, plan.placed[plan.replica_of[rank]], kinds)


def wire_bytes(plan: BatchPlan, rank: int, specs: Mapping[str, TensorSpec]) -> tuple[int, int]:
    """Bytes that `rank` sends and receives, headers and what stays on the rank included."""
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
        ragged = held[name]
        expected = (kind.dtype, tuple(kind.lengths[sample] for sample in samples_held))
        found = (ragged.values.dtype, ragged.lengths)
        if found != expected:
            raise ExchangeError(_not_as_expected(name, samples_held, expected, found))
        parts[name] = dict(zip(samples_held, ragged.parts(), strict=True))
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


def _header(plan: BatchPlan, step: int, kinds: Mapping[str, TensorSpec], device: torch.device | str) -> torch.Tensor:
    said = repr((plan.digest, step, [(name, str(kind.dtype), list(kind.lengths)) for name, kind in kinds.items()]))
    digest = hashlib.blake2b(said.encode(), digest_size=_ALIGNED).digest()
    return torch.tensor(list(digest), dtype=torch.uint8, device=device)


def _check(segments: Sequence[torch.Tensor], header: torch.Tensor, rank: int) -> None:
    begins = torch.stack([segment[:_ALIGNED] for segment in segments]).cpu()
    wrong = [peer for peer, same in enumerate((begins == header.cpu()).all(1).tolist()) if not same]
    failed = [peer for peer in wrong if not begins[peer].any()]
    if failed:
        raise ExchangeError(f"exchange: rank(s) {failed[:8]} had nothing to send; their own errors say why")
    if wrong:
        raise ExchangeError(
            f"exchange: rank {rank} has another plan, step, or other tensors than rank(s) {wrong[:8]}; "
            "all ranks must pass the same lengths, step and tensors"
        )


def _not_as_expected(name: str, samples: Sequence[int], expected: tuple, found: tuple) -> str:
    if expected[0] != found[0]:
        return f"exchange: {name} is {found[0]}, expected {expected[0]}, as passed on all ranks"
    if len(expected[1]) != len(found[1]):
        return f"exchange: {name} is of {len(found[1])} samples, expected {len(expected[1])}"
    pairs = zip(samples, *(expected[1], found[1]), strict=True)
    sample, count, has = next(each for each in pairs if each[1] != each[2])
    return f"exchange: {name} of sample {sample} has {has} values, expected {count}, as passed on all ranks"
