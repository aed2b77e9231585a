"""CPU stand-ins for tensordict and Ray that fit nowhere else."""

from __future__ import annotations

import importlib
from typing import Any


def stay_on_cpu(self: Any, device: Any = None, **kwargs: Any) -> Any:
    """TensorDict.cuda: there is no other device; the same TensorDict."""
    return self


def reduce_to_name(self: Any, protocol: int | None = None) -> tuple:
    """ConfigModule.__reduce_ex__: pickle torch's configuration modules by name, as ordinary modules are."""
    return importlib.import_module, (self.__name__,)
