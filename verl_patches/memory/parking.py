"""Device storages whose contents can wait on the host, in memory that is made once; tensors stay views of them.

A storage that leaves is resized to 0, so its memory goes back to the allocator's pool; coming back it is resized again,
as verl does it (verl/utils/megatron_utils.py, offload_megatron_model_to_cpu). Copies run on the device's current
stream, in whose order the pool hands memory on; whoever moves calls `synchronise` once at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from verl_patches.errors import RecipeError
from verl_patches.memory.moves import TALLY

# torch's allocator of pinned memory rounds each piece up to a power of two (ATen/core/CachingHostAllocator.h)
PIECE_BYTES, _ALIGN_BYTES = 512 << 20, 512


class Parked:
    """The storage below `tensor`, which is on the device or waits on the host; `name` is for messages.

    RecipeError if the storage has less memory than its tensor needs: somebody else has taken it.
    """

    def __init__(self, name: str, tensor: torch.Tensor):
        self.name, self.device = name, tensor.device
        self.storage = tensor.untyped_storage()  # kept: nobody else can get its identity
        self.size_bytes = self.storage.nbytes()
        self.host: list[torch.Tensor] = []
        self.away = False
        needed = (tensor.storage_offset() + tensor.numel()) * tensor.element_size() if tensor.is_contiguous() else 1
        if tensor.numel() and self.size_bytes < needed:
            raise RecipeError(f"offload: {name}: expected a storage of at least {needed:,} bytes, found "
                              f"{self.size_bytes:,}: somebody else has emptied it")

    def check(self, tensor: torch.Tensor) -> None:
        """RecipeError unless `tensor` lies in this storage and that is as large as it was left."""
        found, expected = tensor.untyped_storage(), 0 if self.away else self.size_bytes
        if found._cdata != self.storage._cdata:
            raise RecipeError(
                f"offload: {self.name}: expected the storage that was there before, of {self.size_bytes:,} bytes, "
                f"found another one of {found.nbytes():,} bytes on {found.device}: somebody else has replaced it")
        if found.nbytes() != expected:
            state = "which waits on the host" if self.away else "which is on the device"
            raise RecipeError(f"offload: {self.name}, {state}: expected a storage of {expected:,} bytes, found "
                              f"{found.nbytes():,}: somebody else has resized it")

    def is_replaced_by(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in another storage of the same size."""
        found = tensor.untyped_storage()
        return found._cdata != self.storage._cdata and found.nbytes() == self.size_bytes

    def with_host_memory_for(self, tensor: torch.Tensor) -> Parked:
        """The storage below `tensor`, which waits where this one did."""
        new = Parked(self.name, tensor)
        new.host = self.host
        return new

    def leave(self, copy: bool) -> None:
        """Give the device memory back; `copy`: after bringing the contents to the host."""
        for device, host in self._pairs() if copy else ():
            _copy(host, device)
        self.storage.resize_(0)
        self.away = True

    def make_room(self) -> None:
        """Take device memory, with any contents."""
        self.storage.resize_(self.size_bytes)
        self.away = False

    def come(self) -> None:
        """Take device memory and bring the contents back."""
        self.make_room()
        for device, host in self._pairs():
            _copy(device, host)

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        whole = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self.storage)
        return list(zip(whole.split([piece.numel() for piece in self.host]), self.host, strict=True))


def leave(parked: Sequence[Parked], copy: bool = True) -> int:
    """Let those that are on the device leave it; returns their bytes. What was never on the host is always copied."""
    here = [each for each in parked if not each.away and each.size_bytes]
    fresh = [not each.host for each in here]
    if any(fresh):
        _make_host_memory([each for each, new in zip(here, fresh, strict=True) if new])
    with torch.no_grad():
        for each, new in zip(here, fresh, strict=True):
            each.leave(copy or new)
    return sum(each.size_bytes for each in here)


def come(parked: Sequence[Parked]) -> int:
    """Bring back those that wait on the host; returns their bytes."""
    away = [each for each in parked if each.away]
    with torch.no_grad():
        for each in away:
            each.come()
    return sum(each.size_bytes for each in away)


def unique(parked: Iterable[Parked]) -> list[Parked]:
    """Each once, in order."""
    return list(dict.fromkeys(parked))


def synchronise(parked: Iterable[Parked]) -> None:
    """Wait for the copies on the current stream of their device."""
    for device in {each.device for each in parked if each.device.type != "cpu"}:
        getattr(torch, device.type).current_stream(device).synchronize()


def _copy(to: torch.Tensor, source: torch.Tensor) -> None:
    to.copy_(source, non_blocking=True)
    TALLY.copies += 1
    TALLY.copied_bytes += source.numel()


def _make_host_memory(parked: Sequence[Parked]) -> None:
    """Pieces that several small storages share, and of which a large one takes several; pinned where there is a device.

    On a CPU each storage has pieces of its own: nothing rounds them up.
    """
    left = sum(-(-each.size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES for each in parked)
    piece, used = _allocate(0, parked[0].device), 0
    for each in parked:
        wanted = each.size_bytes
        while wanted:
            if used == piece.numel() or each.device.type == "cpu":
                size = wanted if each.device.type == "cpu" else left
                piece, used = _allocate(min(PIECE_BYTES, size), each.device), 0
            taken = min(wanted, piece.numel() - used)
            each.host.append(piece[used : used + taken])
            padded = -(-taken // _ALIGN_BYTES) * _ALIGN_BYTES
            used, left, wanted = min(used + padded, piece.numel()), left - padded, wanted - taken


def _allocate(size_bytes: int, device: Any) -> torch.Tensor:
    if size_bytes:
        TALLY.host_allocations += 1
        TALLY.host_bytes += size_bytes
    # a CPU has one memory, and under platform cpu torch.cuda only looks as if it were there
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=bool(size_bytes) and device.type != "cpu")
