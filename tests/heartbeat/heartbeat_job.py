"""Measure the cost of heartbeats on gloo ranks, for tests/benchmarks/heartbeat.py."""

import time
from pathlib import Path

TIMES = 2000


def measure(groups: int, folder: str) -> dict[str, float]:
    """Return CPU seconds of a beat, a phase and a call on this rank."""
    import torch.distributed as dist

    from verl_patches.heartbeat.heartbeat import Heartbeat

    for _ in range(groups - 1):
        dist.new_group([0, 1])
    heartbeat = Heartbeat()
    heartbeat.start(Path(folder), f"rank {dist.get_rank()}", dist.get_rank())
    dist.barrier()

    def call() -> None:
        with heartbeat.in_call("update_actor"):
            pass

    costs = {}
    for name, action in (("beat", heartbeat.beat), ("phase", lambda: heartbeat.begin_phase("update")), ("call", call)):
        begun = time.process_time()
        for _ in range(TIMES):
            action()
        costs[name] = (time.process_time() - begun) / TIMES
    heartbeat.stop()
    dist.barrier()
    return costs
