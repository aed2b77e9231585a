"""CPU stand-ins for tensordict and Ray that fit nowhere else."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from verl_patches.platform.cpu.torch_cuda import is_cuda


def stay_on_cpu(self: Any, device: Any = None, **kwargs: Any) -> Any:
    """TensorDict.cuda: there is no other device; the same TensorDict."""
    return self


def batch_stays_on_cpu(original: Callable) -> Callable:
    """Row provider for `DataProto.to`: "cuda" means the CPU."""

    @functools.wraps(original)
    def to(self: Any, device: Any) -> Any:
        return original(self, "cpu" if is_cuda(device) else device)

    return to


def reduce_to_name(self: Any, protocol: int | None = None) -> tuple:
    """ConfigModule.__reduce_ex__: pickle torch's configuration modules by name, as ordinary modules are."""
    return importlib.import_module, (self.__name__,)
