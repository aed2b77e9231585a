"""sha256 of tensors on disk, computed in a thread beside the reads or writes that have their bytes in memory anyway.

Each tensor of a file has a digest of its own bytes, so that whoever reads a whole tensor can check it, in one pass and
in any order of tensors. That of the file is over its header and these digests: no byte is hashed twice. No torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

DIGITS = 16  # of a tensor's digest in a manifest


class FileDigest:
    """The digests of a file, from its bytes in order, in pieces of any size.

    `head`: the header; `sizes`: bytes of its tensors, in order. Without tensors it is the plain sha256 of the bytes.
    `tensors`: digests of the tensors whose last byte was given, DIGITS hex digits each.
    """

    def __init__(self, head: bytes, sizes: Sequence[int] = ()):
        self.tensors: list[str] = []
        self._file, self._sizes, self._plain = hashlib.sha256(head), list(sizes), not sizes
        self._tensor, self._left = hashlib.sha256(), 0
        self._begin()

    def _begin(self) -> None:
        """Go on to the next tensor that has bytes."""
        while len(self.tensors) < len(self._sizes):
            self._tensor, self._left = hashlib.sha256(), self._sizes[len(self.tensors)]
            if self._left:
                return
            self._end()

    def _end(self) -> None:
        self._file.update(self._tensor.digest())
        self.tensors.append(self._tensor.hexdigest()[:DIGITS])

    @property
    def missing(self) -> int:
        """Bytes of the tensors that were not given yet."""
        return self._left + sum(self._sizes[len(self.tensors) + 1 :])

    def update(self, view: memoryview) -> int:
        """Add the next bytes; how many of them are more than the tensors have."""
        if self._plain:
            self._file.update(view)
            return 0
        while len(view) and len(self.tensors) < len(self._sizes):
            take = min(len(view), self._left)
            self._tensor.update(view[:take])
            self._left -= take
            view = view[take:]
            if not self._left:
                self._end()
                self._begin()
        return len(view)

    def hexdigest(self) -> str:
        """The digest of the file so far."""
        return self._file.hexdigest()


class Beside:
    """Calls in a thread beside the caller's, one at a time; the error of one is raised by the next `wait` or `add`."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._last: Future | None = None

    def add(self, function: Callable[..., Any], *args: Any) -> None:
        """Wait for the call before, and begin this one; what it is given must not change until it has ended."""
        self.wait()
        self._last = self._pool.submit(function, *args)

    def wait(self) -> None:
        """Until the last call has ended."""
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown()
