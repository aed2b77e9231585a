"""Whether writes to memory reach every element of every tensor exactly once: interval arithmetic on storages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch


def not_once(tensors: Mapping[str, torch.Tensor], writes: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """What is wrong, one sentence for each fault: elements that no write or more than one write reaches.

    `writes`: (what is written there, view of a storage). No data is read, so that meta tensors do too; cost follows the
    contiguous runs of the views, not their elements.
    """
    by_storage: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for what, view in writes:
        by_storage.setdefault(view.untyped_storage()._cdata, []).append((what, view))
    written = {storage: _Written(found) for storage, found in by_storage.items()}
    problems = []
    for name, tensor in tensors.items():
        if tensor.numel():
            found = written.get(tensor.untyped_storage()._cdata)
            faults = ["none written"] if found is None else found.faults(tensor)
            expected = f"{name}: expected each of its {tensor.numel()} elements to be written once, found"
            problems += [f"{expected} {fault}" for fault in faults]
    return problems


class _Written:
    """The writes to one storage: intervals [start, stop) in bytes, in order of address."""

    def __init__(self, writes: list[tuple[str, torch.Tensor]]):
        runs = [_runs(view) for _, view in writes]
        who = np.repeat(np.arange(len(runs)), [len(run) for run in runs])
        intervals = np.concatenate(runs)
        order = np.argsort(intervals[:, 0], kind="stable")
        self.names, self.who = [what for what, _ in writes], who[order]
        self.starts, self.stops = intervals[order].T
        reach = np.maximum.accumulate(self.stops)
        self.again = np.flatnonzero(self.starts[1:] < reach[:-1]) + 1  # they begin inside an earlier one, and share:
        self.shared = np.stack([self.starts[self.again], np.minimum(self.stops[self.again], reach[self.again - 1])], 1)
        heads = np.flatnonzero(np.concatenate([[True], self.starts[1:] > reach[:-1]]))  # where a gap ends
        self.merged = np.stack([self.starts[heads], reach[np.append(heads[1:] - 1, len(reach) - 1)]], axis=1)

    def faults(self, tensor: torch.Tensor) -> list[str]:
        """What of `tensor` is written twice, by what, and how much not at all."""
        wanted, found = _runs(tensor), []
        doubled = np.flatnonzero(_below(wanted, self.shared[:, 1]) > _below(wanted, self.shared[:, 0]))
        if len(doubled):
            second, begin = self.again[doubled[0]], self.shared[doubled[0], 0]
            place = max(begin, wanted[wanted[:, 1] > begin][0, 0])  # the first that is of this tensor
            first = np.flatnonzero(self.stops[:second] > place)[0]
            pair = f"{self.names[self.who[first]]} and by {self.names[self.who[second]]}"
            found.append(f"{_index(tensor, place)} written by {pair}")
        missing = wanted[:, 1] - wanted[:, 0] - (_below(self.merged, wanted[:, 1]) - _below(self.merged, wanted[:, 0]))
        if missing.any():
            begin = wanted[np.flatnonzero(missing)[0], 0]
            around = np.flatnonzero((self.merged[:, 0] <= begin) & (begin < self.merged[:, 1]))
            first = self.merged[around[0], 1] if len(around) else begin
            count = int(missing.sum()) // tensor.element_size()
            found.append(f"{count} not written, the first at {_index(tensor, first)}")
        return found


def _runs(view: torch.Tensor) -> np.ndarray:
    """[start, stop) in bytes of each contiguous run of `view` in its storage, shape [runs, 2], in order of address."""
    run, starts = 1, np.zeros(1, dtype=np.int64)
    steps = zip(view.stride(), view.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in steps if size > 1):
        if len(starts) == 1 and stride == run:
            run *= size
        else:
            starts = (np.arange(size)[:, None] * stride + starts).ravel()
    bytes_each = view.element_size()
    starts = np.sort(starts + view.storage_offset()) * bytes_each
    return np.stack([starts, starts + run * bytes_each], axis=1)


def _below(intervals: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Bytes of the disjoint, sorted intervals that lie below each place."""
    before = np.concatenate([[0], np.cumsum(intervals[:, 1] - intervals[:, 0])])
    at = np.searchsorted(intervals[:, 0], places, side="right")
    return before[at] - np.where(at > 0, np.maximum(intervals[at - 1, 1] - places, 0), 0)


def _index(tensor: torch.Tensor, place: int) -> list[int]:
    """The index of the element at byte `place` of the storage."""
    left, index = int(place) // tensor.element_size() - tensor.storage_offset(), [0] * tensor.dim()
    for dim in sorted(range(tensor.dim()), key=tensor.stride, reverse=True):
        if tensor.shape[dim] > 1:
            index[dim], left = divmod(left, tensor.stride(dim))
    return index
