"""torch.cuda.empty_cache() of verl's own code, which does nothing where our memory schedule calls empty_cache itself.

The row replaces the name `torch` in one module of verl: on an NPU a row on torch.cuda itself would be overwritten, as
transfer_to_npu sets torch.cuda's names when it is imported.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import wrapt

from verl_patches.worker.context import context


class _Cuda(wrapt.ObjectProxy):
    def empty_cache(self) -> None:
        """As torch.cuda's, or nothing where a scheduler moves memory."""
        if context().scheduler is None:
            self.__wrapped__.empty_cache()


class _Torch(wrapt.ObjectProxy):
    @property
    def cuda(self) -> _Cuda:
        return _Cuda(self.__wrapped__.cuda)

    def __reduce_ex__(self, protocol: int) -> tuple[Any, ...]:
        return without_empty_cache, (self.__wrapped__,)  # Ray pickles functions of verl's workers with their globals


def without_empty_cache(torch: ModuleType) -> Any:
    """Row provider for the name `torch` of a module."""
    return _Torch(torch)
