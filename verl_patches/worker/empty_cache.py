"""verl's own calls of torch.cuda.empty_cache() do nothing where the memory schedule has its own (memory/scheduler.py).

The row providers stand in for the name `torch` of one module of verl's: on an NPU, where transfer_to_npu sets
torch.cuda's names when it is imported, a row on torch.cuda itself would be overwritten.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from verl_patches.worker.context import context


class _Names:
    """A module as it is now, but for the names given."""

    def __init__(self, module: ModuleType, **own: Any):
        vars(self).update(own, _module=module)

    def __getattr__(self, name: str) -> Any:
        if "_module" not in vars(self):  # not made by __init__
            raise AttributeError(name)
        return getattr(vars(self)["_module"], name)


class _Torch(_Names):
    def __reduce__(self) -> tuple[Any, ...]:
        return without_empty_cache, (self._module,)  # Ray pickles functions of verl's workers with what they name

    @property
    def cuda(self) -> _Names:
        """torch.cuda, with an empty_cache of ours."""
        cuda = self._module.cuda

        def empty_cache() -> None:
            if context().scheduler is None:
                cuda.empty_cache()

        return _Names(cuda, empty_cache=empty_cache)


def without_empty_cache(torch: ModuleType) -> Any:
    """Row provider for the name `torch` of a module."""
    return _Torch(torch)
