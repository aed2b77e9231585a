"""What a step's offload costs, counted: copies per byte, host memory made, bytes against the plan. Run by hand:

    python tests/benchmarks/offload.py

Prints JSON: a list of figures, each with `value`, `bound` and `peer` (verl 0.4.0's own four functions where its worker
calls them, on the same objects, in a process of their own). Exits 1 where a bound is missed. Megatron's real DDP and
bf16 optimizer, moved by the scheduler as the schedule says; copies and host memory are counted from outside, in the
third step, by the tensor calls that make them. `plan`, of both, is the simulation of our schedule
(memory/schedule.py): what a step has to copy. Calls are counted as what they do on a device (`Counted` in
tests/memory/offload_objects.py).
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

from report import figure, print_report, run_python

PHASES = ("reshard", "old_log_prob", "ref", "update")  # in which training's memory moves
Moves = dict[str, tuple[Callable[[], None], Callable[[], None]]]  # phase: (before its work, after it)


def child(functions: str) -> Any:
    """`count` of our functions or of verl's, in a process of its own."""
    variables = {"VERL_PATCHES": "line=pypi,platform=cpu", "TORCHDYNAMO_DISABLE": "1"}
    output = run_python("-W", "ignore", __file__, functions, **variables, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    return json.loads(output.splitlines()[-1])


def count(functions: str) -> list[dict[str, Any]]:
    """Per phase of the third step: {phase, copied_bytes, plan_bytes, host_allocations}."""
    import verl_patches.prelude_patch  # noqa: F401  before Megatron, as in a worker

    # isort: split
    from tests.memory import offload_job as job
    from tests.memory.offload_objects import Counted

    # isort: split
    import torch
    import torch.distributed as dist

    from verl_patches.memory.measure import buffers_of, held_bytes, optimizer_tensors
    from verl_patches.memory.schedule import SCHEDULE, simulate

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    job.failures([])  # starts Megatron
    chunks, optimizer = job.trained(torch.bfloat16)
    reference = [torch.nn.Linear(40, 50)]
    job.step(chunks, optimizer, 0)
    held = {
        "actor_params": [b.param_data for b in buffers_of(chunks)],
        "ref_params": reference[0].parameters(),
        "grads": [b.grad_data for b in buffers_of(chunks)],
        "optimizer": optimizer_tensors(optimizer),
    }
    plan = simulate(SCHEDULE, {name: held_bytes(list(tensors), "cpu") for name, tensors in held.items()})
    host: dict[int, Any] = {}
    with Counted(host):
        moves = (moves_of_schedule if functions == "ours" else moves_of_verl)(chunks, optimizer, reference)
    counts: dict[str, dict[str, Any]] = {}
    for number in (1, 2, 3):
        for phase in PHASES:
            seen = Counted(host)
            before, after = moves[phase]
            with seen:
                before()
            if phase == "update":
                job.step(chunks, optimizer, number)
            with seen:
                after()
            plan_bytes = plan[phase].to_device_bytes + plan[phase].to_host_bytes
            copies = {"copied_bytes": seen.copied_bytes, "host_allocations": seen.host_allocations}
            counts[phase] = {"phase": phase, **copies, "plan_bytes": plan_bytes}
    return list(counts.values())


def moves_of_schedule(chunks: list, optimizer: Any, reference: list) -> Moves:
    """By the scheduler; all is on the host afterwards."""
    from verl_patches.memory.offload import Params, training_handlers
    from verl_patches.memory.schedule import SCHEDULE
    from verl_patches.memory.scheduler import Scheduler

    scheduler = Scheduler(SCHEDULE, lambda: None)
    handlers = {**training_handlers(chunks, optimizer), "ref_params": Params(reference)}
    handlers.pop("grads").free()
    for handler in handlers.values():
        handler.offload()
    scheduler.add({**training_handlers(chunks, optimizer), **handlers})
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

    offload_actor = functools.partial(verl.offload_megatron_model_to_cpu, chunks)
    offload_reference = functools.partial(verl.offload_megatron_model_to_cpu, reference)

    def after_update() -> None:
        offload_actor()
        verl.offload_megatron_optimizer(optimizer)

    after_update()
    offload_reference()
    return {
        "reshard": (before_sync, offload_actor),
        "old_log_prob": (functools.partial(load, chunks, False), offload_actor),
        "ref": (functools.partial(load, reference, False), offload_reference),
        "update": (before_update, after_update),
    }


def figures() -> Iterator[dict[str, Any]]:
    """All of them."""

    def compared(name: str, values: list[float], bound: float, **more: Any) -> dict[str, Any]:
        return figure(name, values[0], "", bound, {"verl 0.4.0": values[1]}, **more)

    ours, verls = child("ours"), child("verl")
    phases = list(zip(ours, verls, strict=True))
    for both in phases:
        copies = [round(each["copied_bytes"] / each["plan_bytes"], 3) for each in both]
        yield compared(f"copies per byte, {both[0]['phase']}", copies, 1.0)
    for both in phases:
        allocations = [each["host_allocations"] for each in both]
        yield compared(f"host allocations, {both[0]['phase']}", allocations, 0)
    sums = [round(sum(p["copied_bytes"] for p in of) / sum(p["plan_bytes"] for p in of), 3) for of in (ours, verls)]
    yield compared("bytes moved in a step / plan", sums, 1.0, fine=sums[0] == 1.0)


def main() -> int:
    """Measure and print; with arguments, one measurement of a child process."""
    if sys.argv[1:]:
        print("\n" + json.dumps(count(sys.argv[1])))
        return 0
    return print_report("offload", figures())


if __name__ == "__main__":
    sys.exit(main())
