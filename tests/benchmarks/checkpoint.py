"""What a save costs: bytes against the state, the time that the trainer waits, the rate of writing. Run by hand:

    python tests/benchmarks/checkpoint.py [--mib 512] [--runs 1]

Prints JSON: a list of figures with `value`, `bound` and `peer`. Exits 1 where a bound is missed. Copies and files are
of `mib` MiB of one rank's state, best of three; peers in the same process: a plain copy of the same tensors, torch.save
and fsync of them. With `runs`, two smoke runs at pp2, where verl's own checkpoints work too: bytes in the
folder, and seconds that a save took of the step.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from report import figure, parser_of, print_report, run_smoke

REPEATS, TENSORS = 3, 16


def best(work: Callable[[int], None]) -> float:
    """Seconds of the fastest of some calls."""
    seconds = []
    for number in range(REPEATS):
        start = time.perf_counter()
        work(number)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def of_one_rank(mib: int, folder: Path) -> list[dict]:
    """Figures of copying and writing."""
    import torch

    from tests.reshard.cases import TINY
    from verl_patches.memory.host_backed import HostBackedStorage, copy_storages_to_host
    from verl_patches.weights.checkpoint import rank_files, write_rank
    from verl_patches.weights.manifest import Manifest, whole_tensor
    from verl_patches.weights.train_state import Piece, Place
    from verl_patches.weights.writer import begin, complete

    tensors = [torch.randn((mib << 20) // 4 // TENSORS) for _ in range(TENSORS)]
    storages = [HostBackedStorage(str(n), tensor) for n, tensor in enumerate(tensors)]
    copy_storages_to_host(storages)  # makes host memory, as the first offload does
    hosts = [torch.empty_like(tensor).fill_(0) for tensor in tensors]
    plain = best(lambda _: [host.copy_(tensor) for host, tensor in zip(hosts, tensors, strict=True)])
    ours = best(lambda _: copy_storages_to_host(storages))
    pieces = []
    for number, tensor in enumerate(tensors):
        entry = whole_tensor(f"weight/{number}", "F32", tensor.shape, name=str(number))
        pieces.append(Piece(entry, tensor, (Place(tuple(tensor.shape), (1,), 0),)))

    def write(number: int) -> None:
        begin(folder / str(number), Manifest("checkpoint", TINY, "@1", "fp32", "x", tuple(rank_files(1))))
        write_rank(folder / str(number), 0, pieces, lambda piece: [piece.base], {})
        complete(folder / str(number))

    def save(number: int) -> None:
        with (folder / f"{number}.pt").open("wb") as file:
            torch.save(tensors, file)
            file.flush()
            os.fsync(file.fileno())

    written, saved = best(write), best(save)
    size, state = size_of(folder / "0"), sum(tensor.nbytes for tensor in tensors)
    return [
        figure("bytes written / state", round(size / state, 6), "ratio", 1.02),
        figure("host copy / plain copy", round(ours / plain, 3), "ratio", 1.2, plain_s=round(plain, 4)),
        figure("write", round(state / written / 1e9, 3), "GB/s", None, peer=round(state / saved / 1e9, 3)),
    ]


def size_of(folder: Path) -> int:
    """Bytes of all files below `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def of_runs(folder: str) -> list[dict]:
    """Figures of a smoke run, with verl's own checkpoints as peer."""
    found = {}
    for name, patches in (("ours", "[]"), ("verl", "[-checkpoint.*]")):
        layout = ("--train-layout", "pp2", "--steps", "2", "trainer.save_freq=1", f"recipe.patches={patches}")
        run_smoke(folder, name, *layout)
        log = Path(folder, name, "driver.log").read_text(errors="replace")
        seconds = [float(text) for text in re.findall(r"timing_s/save_checkpoint:([\d.]+)", log)]
        found[name] = size_of(Path(folder, name, "checkpoints", "global_step_2")), min(seconds)
    return [
        figure("checkpoint of the tiny model", found["ours"][0], "bytes", None, peer=found["verl"][0]),
        figure("save's part of a step", found["ours"][1], "s", None, peer=found["verl"][1]),
    ]


def main() -> int:
    """Run the benchmark and print the report."""
    args = parser_of(__doc__, mib=512, runs=0).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = of_one_rank(args.mib, Path(folder))
        figures += of_runs(folder) if args.runs else []
    return print_report("checkpoint", figures, mib=args.mib)


if __name__ == "__main__":
    sys.exit(main())
