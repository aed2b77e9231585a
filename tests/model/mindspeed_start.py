"""A rank of a line a3 test: the engine is started as a worker does it, under the rows, and then the test's function."""


import dataclasses
import os
import pkgutil
from typing import Any

from tests.ranks import init_group
from verl_patches import catalog
from verl_patches.model import a3_rows
from verl_patches.patching import engine
from verl_patches.patching.switches import from_environment
from verl_patches.platform.cpu import rows_npu, rows_torch, rows_verl

# MindSpeed goes over Tensor.type itself; rows_npu.py has this line's stand-in
_NOT_HERE = {"platform.torch_tensor_type"}
_DTYPE = {"model.train_dtype", "model.optimizer_dtype"}


def rows():
    """The rows of this line that a rank without verl's loop needs."""
    shared = [row for row in (*catalog.NO_BUILD, *rows_torch.ROWS, *rows_verl.ROWS) if row.id not in _NOT_HERE]
    shared += [row for row in catalog.MODEL if row.id in _DTYPE]
    shared = [dataclasses.replace(row, lines=frozenset({"a3"})) for row in shared]
    return (*a3_rows.ROWS, *rows_npu.ROWS, *shared)


def run(job: str, config: Any, *arguments: Any) -> Any:
    """What "module:function" returns for (*arguments, Megatron's arguments), once the engine has been started.

    config: verl's actor_rollout_ref section with `recipe`.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as the launcher does; Megatron's validator asks for it
    engine.start(rows(), from_environment()).apply()
    from verl_patches.training import engine_start

    engine_start.prepare(config)
    init_group("nccl")
    args = engine_start.start(config)
    return pkgutil.resolve_name(job)(*arguments, args)
