"""One gloo rank of a test, in a fresh process under the rows: `python rank_main.py FILE.py:FUNCTION FOLDER`.

Started by the fixture `run_ranks` (conftest.py) with RANK and WORLD_SIZE set; saves what the function returns.
"""

import verl_patches.prelude_patch  # noqa: F401, I001  before torch, as in a worker

import importlib
import os
import sys
from pathlib import Path

import torch


def main(job: str, folder: Path) -> None:
    file, _, function = job.partition(":")
    module = importlib.import_module(Path(file).stem)  # this file's folder is on sys.path
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = torch.distributed.FileStore(str(folder / f"{module.__name__}.{function}.store"), world_size)
    torch.distributed.init_process_group("nccl", store=store, rank=rank, world_size=world_size)
    torch.save(getattr(module, function)(folder), folder / f"{module.__name__}.{function}.rank{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
