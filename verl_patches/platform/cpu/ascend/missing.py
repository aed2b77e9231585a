"""How a stand-in module answers for a name that it does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from verl_patches.platform.cpu.ascend import not_on_our_paths


def refuse_unknown(module: str) -> Callable[[str], NoReturn]:
    """A module's `__getattr__`: AttributeError that names the attribute and why, or where to add it.

    `module` is the stand-in's own `__name__`, "verl_patches.platform.cpu.ascend.torch_npu.npu".
    """
    real = module.partition(".ascend.")[2]

    def __getattr__(name: str) -> NoReturn:
        why = not_on_our_paths.reason(f"{real}.{name}")
        raise AttributeError(
            f"the stand-in for {real} has no {name!r}: " + (
                f"not on our paths ({why})" if why else "nothing was seen to use it. If the pinned package has it and "
                f"it is needed, add it to {module.replace('.', '/')}"
            ),
            name=name,
        )

    return __getattr__
