"""One gloo rank of a line a3 test, in a fresh process: `python mindspeed_rank.py FILE.py:FUNCTION FOLDER`.

The folder holds engine.yaml (verl's actor_rollout_ref section with `recipe`). The engine is started as a worker does
it, under the rows; the function is called with (folder, Megatron's arguments) and what it returns is saved.
"""

import dataclasses
import importlib
import os
import sys
from pathlib import Path

from verl_patches import catalog
from verl_patches.model import a3_rows
from verl_patches.patching import engine
from verl_patches.patching.switches import from_environment
from verl_patches.platform.cpu import rows as cpu_rows

# MindSpeed goes over Tensor.type itself; platform/cpu/rows.py has this line's stand-in
_NOT_HERE = {"platform.torch_tensor_type"}
_DTYPE = {"model.train_dtype", "model.optimizer_dtype"}


def rows():
    """The rows of this line that a rank without verl's loop needs."""
    shared = [row for row in (*catalog.NO_BUILD, *cpu_rows.TORCH, *cpu_rows.VERL) if row.id not in _NOT_HERE]
    shared += [row for row in catalog.MODEL if row.id in _DTYPE]
    shared = [dataclasses.replace(row, lines=frozenset({"a3"})) for row in shared]
    return (*a3_rows.ROWS, *cpu_rows.NPU, *shared)


def main(job: str, folder: Path) -> None:
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as the launcher does; Megatron's validator asks for it
    found = {row.id: row for row in rows()}
    engine.start(found.values(), from_environment()).apply()
    file, _, function = job.partition(":")
    import torch
    from omegaconf import OmegaConf

    from verl_patches.training import engine_start

    config = OmegaConf.load(folder / "engine.yaml")
    engine_start.prepare(config)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = torch.distributed.FileStore(str(folder / f"{Path(file).stem}.{function}.store"), world_size)
    torch.distributed.init_process_group("nccl", store=store, rank=rank, world_size=world_size)
    args = engine_start.start(config)
    module = importlib.import_module(Path(file).stem)  # this file's folder is on sys.path
    torch.save(getattr(module, function)(folder, args), folder / f"{module.__name__}.{function}.rank{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
