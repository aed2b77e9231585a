"""What the tests here ask of the real torch_npu, with fake tensors of the stand-in device (.venv.npu).

python job.py OUT    writes what it found as JSON
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import torch
from cases import CASES, outcome, refusal

from verl_patches.emulation import op_schemas


def npu() -> dict[str, Any]:
    """Everything that is asked of the real torch_npu."""
    import torch_npu
    from torch._subclasses.fake_tensor import FakeTensorMode

    found: dict[str, Any] = {
        "version": torch_npu.__version__,
        "devices": torch.npu.device_count(),
        "soc": torch.npu.get_device_name(),
        "real tensor": refusal(lambda: torch.ones(4, device="npu")),
        "schemas": schemas(),
        "profiler": {name: parameters(find(torch_npu)) for name, find in PROFILER.items()},
    }
    with FakeTensorMode():
        calls = record_calls(torch_npu)
        found["cases"] = {name: outcome(case, torch_npu, "npu") for name, case in CASES.items()}
    return found | {"calls": calls}


def schemas() -> dict[str, str | None]:
    """{"function.overload": schema as this torch_npu has it, or None} of all that the pinned version declares."""
    found: dict[str, str | None] = {}
    for name, overloads in op_schemas.read().items():
        for overload in (schema.overload for schema in overloads):
            try:
                found[f"{name}.{overload}"] = str(torch._C._get_schema(f"npu::{name}", overload)).removeprefix("npu::")
            except RuntimeError:
                found[f"{name}.{overload}"] = None
    return found


# what worker/profile.py calls of torch_npu
PROFILER = {
    "profile": lambda npu: npu.profiler.profile,
    "tensorboard_trace_handler": lambda npu: npu.profiler.tensorboard_trace_handler,
    "_record_memory_history": lambda npu: npu.npu.memory._record_memory_history_impl,  # it passes all on to this one
    "_snapshot": lambda npu: npu.npu.memory._snapshot,
}


def parameters(function: Any) -> list[str]:
    """Names of what a function or class takes."""
    return list(inspect.signature(function).parameters)


def record_calls(torch_npu: Any) -> list[list]:
    """From here on, every call of these functions from Python: [name, how many arguments by position, other names]."""
    calls: list[list] = []

    def recorded(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append([name, len(args), sorted(kwargs)])
            return function(*args, **kwargs)

        return call

    for name in op_schemas.FUNCTIONS:
        if hasattr(torch_npu, name):
            setattr(torch_npu, name, recorded(name, getattr(torch_npu, name)))
    return calls


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(npu()))
