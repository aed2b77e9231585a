"""Measure bytes, rate and memory of a conversion and a save of weights against a minimum and peers. By hand:

    python tests/benchmarks/weights.py [--only convert|save] [--pairs 3] [--mib 512] [--folder DIR] [--tiny]

convert: a model of 1.4 GB in bf16 (--tiny: of 7 MB) is made in DIR (a temporary folder by default; it decides which
disk is measured) and converted, from FP8 and bf16 to Megatron's checkpoint and back, each in a process of its own.
Bytes and memory are those of one process that writes all files; the rate is the command's, which takes all cores. The
least bytes are those that each file's own process must read of the source and write. Its peer, a plain copy, reads as
many bytes of the same files and writes as many bytes, in blocks of 16 MB and with fsync, in turns with the conversions;
both find the files in the page cache. Memory is what the process has more than before it began.
save: `mib` MiB of one rank's state, the best of some turns; peers: a plain copy of the same tensors, torch.save and
fsync.

Prints JSON: a list of figures, each with `value`, `bound` and `peer`. Exits 1 where a bound is missed.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from report import argument_parser, figure, print_report, run_python

LAYOUT = "tp2 pp2 ep4 etp1 @8 layers=2,2"
SIZES = {
    "num_hidden_layers": 4, "hidden_size": 2048, "intermediate_size": 8192, "moe_intermediate_size": 1408,
    "n_routed_experts": 16, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 768,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 32000,
}  # fmt: skip
CASES = {  # source, target, --dtype, layout
    "FP8 to Megatron": ("fp8", "megatron", "bf16", LAYOUT),
    "bf16 to Megatron": ("bf16", "megatron-of-bf16", "keep", LAYOUT),
    "bf16 to Megatron, experts cut": ("bf16", "megatron-cut", "keep", "tp2 pp2 ep2 @8 layers=2,2"),
    "Megatron to bf16": ("megatron", "back", "keep", None),
}
BYTES_BOUND, RATE_BOUND, PEAK_BOUND, COPY_BOUND = 1.02, 0.7, 1.2, 1.2
_CHUNK, _FILE_BYTES = 16 << 20, 200_000_000  # size of a HF file: 8 files, where DeepSeek-V3 has 163
REPEATS, COPY_TURNS, TENSORS = 3, 20, 16  # for `save`


# ---- conversions


def make_sources(folder: Path, sizes: dict[str, int]) -> None:
    """Make the bf16 folder and, from it, the FP8 folder."""
    from tests.weights.cases import copy_in_fp8, make_folder
    from verl_patches.model.tiny import tiny_config

    make_folder(folder / "bf16", tiny_config() | sizes, files=4)
    copy_in_fp8(folder / "bf16", folder / "fp8")


def case(
    folder: Path, source: str, target: str, dtype: str, layout: str | None, processes: int | None
) -> dict[str, Any]:
    """Convert; return bytes of this process's read and write calls, the least, seconds, peak memory / largest file."""
    from verl_patches.layout.parallel import parse_layout
    from verl_patches.weights.convert import convert
    from verl_patches.weights.plan import plan_conversion
    from verl_patches.weights.source import open_source

    shutil.rmtree(folder / target, ignore_errors=True)
    os.sync()
    before, start, idle = calls_bytes(), time.perf_counter(), status("VmRSS")
    plan = plan_conversion(open_source(folder / source), layout and parse_layout(layout), dtype, _FILE_BYTES)
    convert(plan, folder / target, processes)
    seconds, moved = time.perf_counter() - start, calls_bytes() - before
    read, write = least_read(plan), sum(file.size_bytes for file in plan.files)
    largest = max(file.size_bytes for file in plan.files)
    peak = (status("VmHWM") - idle) / largest  # ru_maxrss would include the parent's, from before exec
    return {"seconds": seconds, "moved": moved, "read": read, "least": read + write, "peak": peak}


def least_read(plan: Any) -> int:
    """Return the bytes of values that the files of a plan need of the source, each for itself."""
    from verl_patches.layout.sharding import local_parameters
    from verl_patches.weights.manifest import ITEM_BYTES

    item = {name: ITEM_BYTES[tensor.dtype] for name, tensor in plan.source.tensors.items()}
    if plan.layout is None:
        return sum(parameter.count * item[parameter.name] for parameter in plan.inventory.parameters)
    held = (local_parameters(plan.inventory, plan.layout, file.rank, plan.library).shards for file in plan.files)
    return sum(shard.count * item[shard.parameter.name] for shards in held for shard in shards.values())


def status(name: str) -> int:
    """Return the bytes of an entry of this process's /proc status."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def turn(folder: Path, source: str, target: str, dtype: str, layout: str | None) -> dict[str, Any]:
    """Run `case` in one process, then in as many as the command takes, then measure the plain copy's seconds."""
    alone = case(folder, source, target, dtype, layout, 1)
    run = case(folder, source, target, dtype, layout, None)
    os.sync()
    copy = plain_copy(folder / source, folder / "copy", run["read"], run["least"] - run["read"])
    print(target, *(round(each, 2) for each in (alone["seconds"], run["seconds"], copy)), file=sys.stderr)
    return alone | {"alone": alone["seconds"], "seconds": run["seconds"], "copy": copy}


def calls_bytes() -> int:
    """Return the bytes that this process has read and written, by the kernel's count of its calls."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"]) + int(counts["wchar"])


def plain_copy(source: Path, target: Path, read: int, write: int) -> float:
    """Return the seconds to read `read` bytes of `source`'s files and to write `write` to new ones, with fsync."""
    start, buffer = time.perf_counter(), memoryview(bytearray(_CHUNK))
    target.mkdir()
    files = [path for path in sorted(source.rglob("*")) if path.suffix in (".safetensors", ".pt")]
    done, number = 0, 0
    while done < read:
        path = files[number % len(files)]
        with path.open("rb", buffering=0) as file, (target / str(number)).open("wb", buffering=0) as out:
            while done < read and (count := file.readinto(buffer)):
                left, done = count * write // read, done + count
                while left:
                    left -= out.write(buffer[:left])
            os.fsync(out.fileno())
        number += 1
    seconds = time.perf_counter() - start
    shutil.rmtree(target)
    return seconds


def conversions(folder: Path, pairs: int, sizes: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Return the figures of bytes, rate and memory of each case."""
    make_sources(folder, sizes)
    for name in CASES:
        text = run_python(__file__, "--folder", folder, "--case", name, "--pairs", str(pairs))
        runs = json.loads(text)
        median = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        least = median["least"]
        moved = round(runs[0]["moved"] / least, 5)
        yield figure(f"{name}: bytes read + written / least possible", moved, "", BYTES_BOUND)
        ratio = statistics.median(run["copy"] / run["seconds"] for run in runs)
        peers = {"copy, MB/s": round(least / median["copy"] / 1e6)}
        more = {
            "MB/s": round(least / median["seconds"] / 1e6),
            "MB/s, one process": round(least / median["alone"] / 1e6),
        }
        bound = None if "FP8" in name else RATE_BOUND
        more["fine"] = bound is None or ratio >= bound
        yield figure(f"{name}: rate / plain copy (at least)", round(ratio, 3), "", bound, peers, **more)
        peak = max(run["peak"] for run in runs)
        yield figure(f"{name}: peak memory / largest file", round(peak, 3), "", PEAK_BOUND)


# ---- saves


def best(turns: int, *works: Callable[[int], None]) -> list[float]:
    """Return the seconds of the fastest call of each of `works`, which take turns."""
    seconds = [[0.0] * turns for _ in works]
    for turn in range(turns):
        for number, work in enumerate(works):
            start = time.perf_counter()
            work(turn)
            seconds[number][turn] = time.perf_counter() - start
    return [min(each) for each in seconds]


def saves(folder: Path, mib: int) -> list[dict[str, Any]]:
    """Return the figures of copying and writing."""
    import torch

    from verl_patches.memory.host_backed import HostBackedStorage, copy_storages_to_host
    from verl_patches.weights.checkpoint_files import Place, StoredTensor, write_rank
    from verl_patches.weights.manifest import whole_entry

    tensors = [torch.randn((mib << 20) // 4 // TENSORS) for _ in range(TENSORS)]
    storages = [HostBackedStorage(str(n), tensor) for n, tensor in enumerate(tensors)]
    copy_storages_to_host(storages)  # makes host memory, as the first offload does
    hosts = [torch.empty_like(tensor).fill_(0) for tensor in tensors]

    def copy(_: int) -> None:
        for host, tensor in zip(hosts, tensors, strict=True):
            host.copy_(tensor)

    plain, ours = best(COPY_TURNS, copy, lambda _: copy_storages_to_host(storages))
    pieces = []
    for number, tensor in enumerate(tensors):
        entry = whole_entry(f"weight/{number}", "F32", tensor.shape, name=str(number))
        pieces.append(StoredTensor(entry, tensor, (Place(tuple(tensor.shape), (1,), 0),)))

    def write(number: int) -> None:
        (folder / str(number)).mkdir()
        write_rank(folder / str(number), 0, pieces, lambda piece: [piece.base], {})

    def save(number: int) -> None:
        with (folder / f"{number}.pt").open("wb") as file:
            torch.save(tensors, file)
            file.flush()
            os.fsync(file.fileno())

    written, saved = best(REPEATS, write, save)
    size = sum(path.stat().st_size for path in (folder / "0").rglob("*") if path.is_file())
    state = sum(tensor.nbytes for tensor in tensors)
    return [
        figure("bytes written / state", round(size / state, 6), "ratio", BYTES_BOUND),
        figure("host copy / plain copy", round(ours / plain, 3), "ratio", COPY_BOUND, plain_s=round(plain, 4)),
        figure("write", round(state / written / 1e9, 3), "GB/s", None, peer=round(state / saved / 1e9, 3)),
    ]


def main() -> int:
    """Measure and print the report."""
    parser = argument_parser(__doc__, pairs=3, mib=512)
    parts: dict[str, Callable[[Path], Any]] = {
        "convert": lambda folder: conversions(folder, given.pairs, {"num_hidden_layers": 4} if given.tiny else SIZES),
        "save": lambda folder: saves(folder, given.mib),
    }
    parser.add_argument("--folder", type=Path, help="where the folders are made")
    parser.add_argument("--only", choices=parts, help="one part; all of them by default")
    parser.add_argument("--case", choices=CASES, help="run one conversion; used for the child processes")
    parser.add_argument("--tiny", action="store_true", help="convert a tiny model: its times say nothing")
    given = parser.parse_args()
    if given.case:
        print(json.dumps([turn(given.folder, *CASES[given.case]) for _ in range(given.pairs)]))
        return 0
    lines = []
    for name in [given.only] if given.only else parts:
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            lines += parts[name](Path(folder))
    return print_report("weights", lines, python=sys.version.split()[0], cores=len(os.sched_getaffinity(0)))


if __name__ == "__main__":
    sys.exit(main())
