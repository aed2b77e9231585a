"""Query the real torch_npu for the tests here, with fake tensors of the stand-in device (.venv.npu).

python job.py OUT    writes its findings as JSON
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
    """Return all facts of the real torch_npu that the tests need."""
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
    """Return {"function.overload": schema in this torch_npu, or None} of all that the pinned version declares."""
    found: dict[str, str | None] = {}
    for name, overloads in op_schemas.read_schemas().items():
        for overload in (schema.overload for schema in overloads):
            try:
                found[f"{name}.{overload}"] = str(torch._C._get_schema(f"npu::{name}", overload)).removeprefix("npu::")
            except RuntimeError:
                found[f"{name}.{overload}"] = None
    return found


# The functions of torch_npu that worker/profile.py calls.
PROFILER = {
    "profile": lambda npu: npu.profiler.profile,
    "tensorboard_trace_handler": lambda npu: npu.profiler.tensorboard_trace_handler,
    "_record_memory_history": lambda npu: npu.npu.memory._record_memory_history_impl,  # gets all arguments
    "_snapshot": lambda npu: npu.npu.memory._snapshot,
}


def parameters(function: Any) -> list[str]:
    """Return the names of a function's or class's parameters."""
    return list(inspect.signature(function).parameters)


def record_calls(torch_npu: Any) -> list[list]:
    """Return a list that gets [name, number of arguments by position, other names] of each later call from Python."""
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
