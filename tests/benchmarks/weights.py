"""What a conversion of weights costs: bytes, rate and memory, against the least possible and a plain copy. By hand:

    python tests/benchmarks/weights.py [--pairs 3] [--folder DIR]

A model of 1.4 GB in bf16 is made in DIR (a temporary folder by default; it decides which disk is measured) and
converted in fresh processes, from FP8 and bf16 to shards of a layout and back to bf16 and FP8. The plain copy reads as
many bytes of the same files and writes as many bytes, in blocks of 16 MB and with fsync, in turns with the conversions.

Prints JSON: a list of figures, each with `value`, `bound` (what it must not exceed) and `peer`.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from report import ROOT, figure, parser_of, print_report, run_python

LAYOUT = "tp2 pp2 ep4 etp1 @8 layers=2,2"
SIZES = {
    "num_hidden_layers": 4, "hidden_size": 2048, "intermediate_size": 8192, "moe_intermediate_size": 1408,
    "n_routed_experts": 16, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 768,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 32000,
}  # fmt: skip
CASES = {  # source, target, --dtype, layout
    "FP8 to shards": ("fp8", "shards", "bf16", LAYOUT),
    "bf16 to shards": ("bf16", "shards-of-bf16", "keep", LAYOUT),
    "shards to bf16": ("shards", "back", "keep", None),
    "shards to FP8": ("shards", "back-fp8", "fp8", None),
}
BYTES_BOUND, RATE_BOUND, LAYERS_BOUND = 1.02, 0.8, 2.0
_CHUNK = 16 << 20


def make_sources(folder: Path) -> int:
    """The bf16 folder and, made from it, the FP8 folder; the bytes of the largest layer in bf16."""
    from tests.weights.cases import make_folder
    from verl_patches.layout.inventory import build_inventory
    from verl_patches.model.tiny import tiny_config

    make_folder(folder / "bf16", tiny_config() | SIZES, files=4)
    case(folder, "bf16", "fp8", "fp8", None)
    inventory = build_inventory(folder / "bf16")
    sizes = []
    for dense, experts in zip(inventory.layers, inventory.experts, strict=True):
        sizes.append(2 * sum(p.count for p in (*dense, *(p for expert in experts for p in expert))))
    return max(sizes)


def case(folder: Path, source: str, target: str, dtype: str, layout: str | None) -> dict[str, Any]:
    """Convert in this process: bytes through read and write calls, bytes of the tensors, seconds, peak memory."""
    from verl_patches.layout.parallel import parse_layout
    from verl_patches.weights.convert import convert
    from verl_patches.weights.plan import plan_conversion
    from verl_patches.weights.source import open_source

    before, start = calls_bytes(), time.perf_counter()
    plan = plan_conversion(open_source(folder / source), layout and parse_layout(layout), dtype)
    done = convert(plan, folder / target)
    seconds, moved = time.perf_counter() - start, calls_bytes() - before
    least = done.read_bytes + sum(t.size_bytes for file in done.manifest.files for t in file.tensors)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak = int(status["VmHWM"].split()[0]) * 1024  # ru_maxrss would include the parent's, from before exec
    return {"seconds": seconds, "moved": moved, "least": least, "read": done.read_bytes, "peak": peak}


def calls_bytes() -> int:
    """Bytes that this process has read and written, by the kernel's count of its calls."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"]) + int(counts["wchar"])


def plain_copy(source: Path, target: Path, read: int, write: int) -> float:
    """Seconds to read `read` bytes of `source`'s files and to write `write` bytes to new files, with fsync."""
    start, buffer = time.perf_counter(), memoryview(bytearray(_CHUNK))
    target.mkdir()
    left = write
    for number, path in enumerate(sorted(source.glob("*.safetensors"))):
        size = path.stat().st_size
        with path.open("rb", buffering=0) as file, (target / str(number)).open("wb", buffering=0) as out:
            share = min(left, -(-write * size // read))
            while count := file.readinto(buffer):
                for _ in range(-(-write // read)):
                    take = min(count, share)
                    out.write(buffer[:take])
                    share, left = share - take, left - take
            os.fsync(out.fileno())
    seconds = time.perf_counter() - start
    shutil.rmtree(target)
    return seconds


def figures(folder: Path, pairs: int) -> Iterator[dict[str, Any]]:
    """Bytes, rate and memory of each case."""
    layer = make_sources(folder)
    for name, (source, target, *_) in CASES.items():
        runs, copies = [], []
        for pair in range(pairs):
            shutil.rmtree(folder / target, ignore_errors=True)
            os.sync()
            runs.append(json.loads(run_python(__file__, "--folder", folder, "--case", name)))
            os.sync()
            read = runs[0]["read"]
            copies.append(plain_copy(folder / source, folder / "copy", read, runs[0]["least"] - read))
            print(name, pair, round(runs[-1]["seconds"], 2), round(copies[-1], 2), file=sys.stderr)
        run = runs[0]
        yield figure(f"{name}: bytes read + written / least possible", run["moved"] / run["least"], "", BYTES_BOUND)
        ratio = statistics.median(copy / run["seconds"] for run, copy in zip(runs, copies, strict=True))
        ours = round(run["least"] / statistics.median(run["seconds"] for run in runs) / 1e6)
        peer = round(run["least"] / statistics.median(copies) / 1e6)
        more = {"MB/s": ours, "fine": ratio >= RATE_BOUND}
        yield figure(f"{name}: rate / plain copy (at least)", ratio, "", RATE_BOUND, {"copy, MB/s": peer}, **more)
        peak = max(run["peak"] for run in runs)
        yield figure(f"{name}: peak memory / largest layer", peak / layer, "", LAYERS_BOUND, {"bytes": peak})


def plan_figure() -> Iterator[dict[str, Any]]:
    """Seconds to plan DeepSeek-V3's 163 files in FP8 for 16 nodes of the 256-die layout."""
    from tests.cli.test_weights import TRAIN_256, answer, public_folder

    with tempfile.TemporaryDirectory() as name:
        source = public_folder(Path(name) / "hf", files=True)
        given = ("--layout", TRAIN_256, "--part", "0/16", "--dry-run")
        plan = answer("convert", source, Path(name) / "out", *given)
    node = plan["parts"][0]
    yield figure("671B, 163 files, 16 nodes: plan", plan["planning_s"], "s", 10.0, None, node=node)


def main() -> int:
    """Measure and print."""
    parser = parser_of(__doc__, pairs=3)
    parser.add_argument("--folder", type=Path, help="where the folders are made")
    parser.add_argument("--case", choices=CASES, help="run one conversion; used for the child processes")
    given = parser.parse_args()
    if given.case:
        print(json.dumps(case(given.folder, *CASES[given.case])))
        return 0
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        lines = [*figures(Path(name), given.pairs), *plan_figure()]
    return print_report("weights", lines, python=sys.version.split()[0], root=ROOT.name)


if __name__ == "__main__":
    sys.exit(main())
