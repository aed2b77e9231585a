"""What a step's offload costs, counted: copies per byte, host memory made, bytes against the plan. Run by hand:

    python tests/benchmarks/offload.py

Prints JSON: a list of figures, each with `value`, `bound` and `peer` (verl 0.4.0's own four functions where its worker
calls them, on the same objects, in a process of their own). Exits 1 where a bound is missed. Megatron's real DDP and
bf16 optimizer, moved by the scheduler as the schedule says; copies and host memory are counted from outside, in the
third step, by the tensor calls that make them. `plan`, of both, is the simulation of our schedule
(memory/schedule.py): what a step has to copy. Where a GPU is, GB/s of offloading and loading 2 GiB against a plain copy
of as many bytes to and from pinned memory; elsewhere that figure is null. On a CPU calls are counted as what they do on
a device (`Counted` in tests/memory/counted.py).
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

HERE = Path(__file__).resolve()
ROOT, JOB = HERE.parents[2], HERE.parents[1] / "memory/offload_job.py"
PHASES = ("reshard", "old_log_prob", "ref", "update")  # in which training's memory moves
SPEED_BYTES, REPEATS = 2 << 30, 5


def child(what: str, whose: str, platform: str = "cpu") -> Any:
    """What this file finds when it is run as `what` by the functions of `whose`, ours or verl."""
    env = {
        **os.environ,
        "VERL_PATCHES": f"line=pypi,platform={platform}",
        "PYTHONPATH": str(ROOT),
        "TORCHDYNAMO_DISABLE": "1",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    command = [sys.executable, "-W", "ignore", str(HERE), what, whose]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{what} of {whose} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def count(whose: str) -> list[dict[str, Any]]:
    """Per phase of the third step: {phase, copied_bytes, plan_bytes, host_allocations}."""
    from tests.memory import offload_job as job
    from tests.memory.counted import Counted

    job.found([])
    import torch

    from verl_patches.memory.measure import buffers_of, held_bytes, optimizer_tensors
    from verl_patches.memory.schedule import SCHEDULE, simulate

    chunks, optimizer = job.trained(torch.bfloat16)
    reference = [torch.nn.Linear(40, 50)]
    job.step(chunks, optimizer, 0)
    held = {
        "actor_params": [b.param_data for b in buffers_of(chunks)],
        "ref_params": reference[0].parameters(),
        "grads": [b.grad_data for b in buffers_of(chunks)],
        "optimizer": optimizer_tensors(optimizer),
    }
    plan = simulate(SCHEDULE, {name: held_bytes(list(of), "cpu") for name, of in held.items()})
    host: dict[int, Any] = {}
    with Counted(host):
        moves = (moves_of_schedule if whose == "ours" else moves_of_verl)(chunks, optimizer, reference)
    found: list[dict[str, Any]] = []
    for number in (1, 2, 3):
        found = []
        for phase in PHASES:
            seen = Counted(host)
            before, after = moves[phase]
            with seen:
                before()
            if phase == "update":
                job.step(chunks, optimizer, number)
            with seen:
                after()
            found.append(
                {
                    "phase": phase,
                    "copied_bytes": seen.copied_bytes,
                    "host_allocations": seen.host_allocations,
                    "plan_bytes": plan[phase].to_device_bytes + plan[phase].to_host_bytes,
                }
            )
    return found


Moves = dict[str, tuple[Callable[[], None], Callable[[], None]]]  # phase: (before its work, after it)


def moves_of_schedule(chunks: list, optimizer: Any, reference: list) -> Moves:
    """By the scheduler; all is on the host afterwards."""
    from verl_patches.memory.offload import Params, actor_handlers
    from verl_patches.memory.schedule import SCHEDULE
    from verl_patches.memory.scheduler import Scheduler

    scheduler = Scheduler(SCHEDULE, lambda: None)
    handlers = {**actor_handlers(chunks, optimizer), "ref_params": Params(reference)}
    handlers.pop("grads").free()
    for handler in handlers.values():
        handler.offload()
    scheduler.add({**actor_handlers(chunks, optimizer), **handlers})
    return {phase: (functools.partial(scheduler.begin, phase), scheduler.end) for phase in PHASES}


def moves_of_verl(chunks: list, optimizer: Any, reference: list) -> Moves:
    """As verl/workers/megatron_workers.py calls its functions; all is on the host afterwards."""
    from verl.utils import megatron_utils as verl

    def load(models: list, load_grad: bool) -> None:
        verl.load_megatron_model_to_gpu(models, load_grad=load_grad)

    def before_sync() -> None:
        load(chunks, True)
        verl.offload_megatron_optimizer(optimizer)

    def before_update() -> None:
        load(chunks, True)
        verl.load_megatron_optimizer(optimizer)

    def no_actor() -> None:
        verl.offload_megatron_model_to_cpu(chunks)

    def after_update() -> None:
        no_actor()
        verl.offload_megatron_optimizer(optimizer)

    def no_reference() -> None:
        verl.offload_megatron_model_to_cpu(reference)

    after_update()
    no_reference()
    return {
        "reshard": (before_sync, no_actor),
        "old_log_prob": (functools.partial(load, chunks, False), no_actor),
        "ref": (functools.partial(load, reference, False), no_reference),
        "update": (before_update, after_update),
    }


def speed(whose: str) -> dict[str, float]:
    """GB/s, the best of some, of 2 GiB to the host and back: plain copies, and functions of `whose`."""
    import torch
    from verl.utils import megatron_utils as verl

    from tests.memory import offload_objects as ours

    model = torch.nn.Module()
    for number in range(8):
        weight = torch.zeros(SPEED_BYTES // 8 // 2, dtype=torch.bfloat16, device="cuda")
        model.register_parameter(f"weight{number}", torch.nn.Parameter(weight))
    chunk = ours.in_ddp(model, torch.bfloat16)
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

    plain = best(
        functools.partial(host.copy_, whole, non_blocking=True), functools.partial(whole.copy_, host, non_blocking=True)
    )
    offload, load = ours.offload, ours.load
    if whose == "verl":
        offload, load = verl.offload_megatron_model_to_cpu, verl.load_megatron_model_to_gpu
    moved = best(functools.partial(offload, [chunk]), functools.partial(load, [chunk]))
    return {"plain": round(plain, 2), "moved": round(moved, 2)}


def figures() -> Iterator[dict[str, Any]]:
    """All of them."""
    ours, verls = child("count", "ours"), child("count", "verl")
    for mine, peer in zip(ours, verls, strict=True):
        copies = [round(each["copied_bytes"] / each["plan_bytes"], 3) for each in (mine, peer)]
        yield figure(f"copies per byte, {mine['phase']}", copies, "", 1.0)
    for mine, peer in zip(ours, verls, strict=True):
        yield figure(f"host allocations, {mine['phase']}", [each["host_allocations"] for each in (mine, peer)], "", 0)
    sums = [round(sum(p["copied_bytes"] for p in of) / sum(p["plan_bytes"] for p in of), 3) for of in (ours, verls)]
    yield {**figure("bytes moved in a step / plan", sums, "", 1.0), "fine": sums[0] == 1.0}
    asked = [sys.executable, "-c", "import torch; raise SystemExit(not torch.cuda.is_available())"]
    if subprocess.run(asked, capture_output=True).returncode:
        yield {
            "name": "GB/s against a plain pinned copy",
            "value": None,
            "unit": "",
            "bound": 0.9,
            "peer": None,
            "fine": True,
            "why": "no GPU here",
        }
        return
    mine, peer = child("speed", "ours", "cuda"), child("speed", "verl", "cuda")
    shares = [round(each["moved"] / each["plain"], 3) for each in (mine, peer)]
    yield {
        **figure("GB/s against a plain pinned copy", shares, "", 0.9),
        "fine": shares[0] >= 0.9,
        "ours": mine,
        "verl": peer,
    }


def figure(name: str, found: list[float], unit: str, bound: float) -> dict[str, Any]:
    """One line of the answer; `value` must not exceed `bound`."""
    return {
        "name": name,
        "value": found[0],
        "unit": unit,
        "bound": bound,
        "peer": {"verl 0.4.0": found[1]},
        "fine": found[0] <= bound,
    }


def main() -> int:
    """Measure, print, judge."""
    if sys.argv[1:]:
        print("\n" + json.dumps({"count": count, "speed": speed}[sys.argv[1]](sys.argv[2])))
        return 0
    found = list(figures())
    fine = all(line["fine"] for line in found)
    print(json.dumps({"name": "offload", "figures": found, "fine": fine}, indent=1))
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
