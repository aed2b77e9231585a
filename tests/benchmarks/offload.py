"""What a step's offload costs, counted: copies per byte, host memory made, bytes against the plan. Run by hand:

    python tests/benchmarks/offload.py

Prints JSON: a list of figures, each with `value`, `bound` and `peer` (verl 0.4.0's own four functions on the same
objects, in the same run). Exits 1 where a bound is missed. Megatron's real DDP and bf16 optimizer, moved as the worker
of verl 0.4.0 moves them; copies and host memory are counted from outside, in the third step, by the tensor calls that
make them. `plan` is the simulation of the order (memory/schedule.py). Where a GPU is, GB/s of offloading and loading
2 GiB against a plain copy of as many bytes to and from pinned memory; elsewhere that figure is null. On a CPU calls are
counted as what they do on a device (`Counted` in tests/memory/counted.py).
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OURS = ("memory.load_model", "memory.offload_model", "memory.load_optimizer", "memory.offload_optimizer")
SPEED_BYTES, REPEATS = 2 << 30, 5


def child(what: str, switches: str) -> Any:
    """What this file's function `what` finds in a rank of its own under these rows."""
    from tests.ranks import Ranks

    env = {**os.environ, "VERL_PATCHES": switches, "TORCHDYNAMO_DISABLE": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    with Ranks(1, env, prelude=True, timeout_s=600) as ranks:
        return ranks.run(f"tests.benchmarks.offload:{what}")[0]


def count() -> list[dict[str, Any]]:
    """Per phase of the third step: {phase, copied_bytes, plan_bytes, host_allocations}."""
    from tests.memory import offload_job as job

    job.found([])
    import torch
    from verl.utils import megatron_utils as verl

    from verl_patches.memory.measure import buffers_of, held_bytes, optimizer_tensors
    from verl_patches.memory.schedule import VERL_0_4_0, simulate, with_our_copies

    chunks, optimizer = job.trained(torch.bfloat16)
    reference = [torch.nn.Linear(40, 50)]
    job.step(chunks, optimizer, 0)
    held = {"actor_params": [b.param_data for b in buffers_of(chunks)], "ref_params": reference[0].parameters(),
            "grads": [b.grad_data for b in buffers_of(chunks)], "optimizer": optimizer_tensors(optimizer)}  # fmt: skip
    plan = simulate(with_our_copies(VERL_0_4_0), {name: held_bytes(list(of), "cpu") for name, of in held.items()})

    def load(models: Any, load_grad: bool) -> Callable[[], None]:
        return lambda: verl.load_megatron_model_to_gpu(models, load_grad=load_grad)

    def offload(models: Any) -> Callable[[], None]:
        return lambda: verl.offload_megatron_model_to_cpu(models)

    def no_optimizer() -> None:
        verl.offload_megatron_optimizer(optimizer)

    moves = {  # of the workers' methods in verl/workers/megatron_workers.py: before and after their work
        "reshard": ([load(chunks, True), no_optimizer], [offload(chunks)]),
        "old_log_prob": ([load(chunks, False)], [offload(chunks)]),
        "ref": ([load(reference, False)], [offload(reference)]),
        "update": ([load(chunks, True), lambda: verl.load_megatron_optimizer(optimizer)],
                   [offload(chunks), no_optimizer]),
    }  # fmt: skip
    host: dict[int, Any] = {}
    with job.Counted(host):
        offload([*chunks, *reference])()
        no_optimizer()
    found: list[dict[str, Any]] = []
    for number in (1, 2, 3):
        found = []
        for phase, sides in moves.items():
            seen = job.Counted(host)
            for at, side in enumerate(sides):
                with seen:
                    for move in side:
                        move()
                if phase == "update" and at == 0:
                    job.step(chunks, optimizer, number)
            found.append({"phase": phase, "copied_bytes": seen.copied_bytes, "host_allocations": seen.host_allocations,
                          "plan_bytes": plan[phase].to_device_bytes + plan[phase].to_host_bytes})
    return found


def speed() -> dict[str, float]:
    """GB/s, the best of some, of 2 GiB to the host and back: plain copies, and verl's functions under the rows."""
    import torch
    from verl.utils import megatron_utils as verl

    from tests.memory.offload_job import found
    from tests.memory.offload_objects import in_ddp

    found([])
    model = torch.nn.Module()
    for number in range(8):
        weight = torch.zeros(SPEED_BYTES // 8 // 2, dtype=torch.bfloat16, device="cuda")
        model.register_parameter(f"weight{number}", torch.nn.Parameter(weight))
    chunk = in_ddp(model, torch.bfloat16)
    whole = torch.empty(SPEED_BYTES, dtype=torch.uint8, device="cuda")
    host = torch.empty(SPEED_BYTES, dtype=torch.uint8, pin_memory=True)

    def best(there: Callable[[], Any], back: Callable[[], Any]) -> float:
        seconds = []
        for _ in range(REPEATS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            there()
            torch.cuda.synchronize()
            back()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        return 2 * SPEED_BYTES / min(seconds) / 1e9

    plain = best(functools.partial(host.copy_, whole, non_blocking=True),
                 functools.partial(whole.copy_, host, non_blocking=True))  # fmt: skip
    moved = best(functools.partial(verl.offload_megatron_model_to_cpu, [chunk]),
                 functools.partial(verl.load_megatron_model_to_gpu, [chunk]))  # fmt: skip
    return {"plain": round(plain, 2), "moved": round(moved, 2)}


def figures() -> Iterator[dict[str, Any]]:
    """All of them."""
    without = ",".join(f"-{row}" for row in ("memory.order*", *OURS))
    ours, verls = child("count", "line=pypi,platform=cpu"), child("count", f"line=pypi,platform=cpu,{without}")
    for mine, peer in zip(ours, verls, strict=True):
        copies = [round(each["copied_bytes"] / each["plan_bytes"], 3) for each in (mine, peer)]
        yield figure(f"copies per byte, {mine['phase']}", copies, "", 1.0)
    for mine, peer in zip(ours, verls, strict=True):
        yield figure(f"host allocations, {mine['phase']}", [each["host_allocations"] for each in (mine, peer)], "", 0)
    sums = [round(sum(p["copied_bytes"] for p in of) / sum(p["plan_bytes"] for p in of), 3) for of in (ours, verls)]
    yield {**figure("bytes moved in a step / plan", sums, "", 1.0), "fine": sums[0] == 1.0}
    asked = [sys.executable, "-c", "import torch; raise SystemExit(not torch.cuda.is_available())"]
    if subprocess.run(asked, capture_output=True).returncode:
        yield {"name": "GB/s against a plain pinned copy", "value": None, "unit": "", "bound": 0.9, "peer": None,
               "fine": True, "why": "no GPU here"}
        return
    mine, peer = child("speed", "line=pypi,platform=cuda"), child("speed", f"line=pypi,platform=cuda,{without}")
    shares = [round(each["moved"] / each["plain"], 3) for each in (mine, peer)]
    yield {**figure("GB/s against a plain pinned copy", shares, "", 0.9), "fine": shares[0] >= 0.9, "ours": mine,
           "verl": peer}


def figure(name: str, found: list[float], unit: str, bound: float) -> dict[str, Any]:
    """One line of the answer; `value` must not exceed `bound`."""
    return {"name": name, "value": found[0], "unit": unit, "bound": bound, "peer": {"verl 0.4.0": found[1]},
            "fine": found[0] <= bound}


def main() -> int:
    """Measure, print, judge."""
    sys.path.insert(0, str(ROOT))
    found = list(figures())
    fine = all(line["fine"] for line in found)
    print(json.dumps({"name": "offload", "figures": found, "fine": fine}, indent=1))
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
