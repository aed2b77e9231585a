"""Run four gloo ranks in one update, in which rank 2 hangs before its second all-reduce and the others wait."""

import os
import signal
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.ranks import HANG_S
from verl_patches.heartbeat import heartbeat, node
from verl_patches.heartbeat.node import read_processes, stacks
from verl_patches.launch.supervise.stall import Bounds, find_awaited_ranks, find_stall

BOUNDS = {
    "place": Bounds(first_s=1800, least_s=10, factor=1),
    "wait": Bounds(first_s=1800, least_s=1800, factor=1, collective_s=10),
}


def one_hangs(folder, how, by):
    """Return on rank 0 [sentence of the stall, names of culprits, their stacks, who waits for whom]; else None."""
    rank, folder = dist.get_rank(), Path(folder)
    heartbeat.current_heartbeat().start(folder, f"rank {rank}", rank)
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    ones, ended = torch.ones(2), threading.Event()
    if rank == 0:
        dist.send(ones, 1)  # counted too, so that counts differ within a group
    if rank == 1:
        dist.recv(ones, 0)
    for _ in range(2):  # the second call of a phase has the bound of the first
        with heartbeat.current_heartbeat().in_call("update_actor"):
            heartbeat.current_heartbeat().begin_phase("update")
            dist.all_reduce(ones)
            dist.all_reduce(ones, group=halves[rank // 2])
    answers = []
    watch = threading.Thread(target=_watch, args=(folder, BOUNDS[by], answers, ended), daemon=True)
    watch.start() if rank == 0 else None
    with heartbeat.current_heartbeat().in_call("update_actor"):
        heartbeat.current_heartbeat().begin_phase("update")
        dist.all_reduce(ones)
        if rank == 2 and how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)  # the watch continues it to get its stacks
        if rank == 2 and how == "busy":
            while not (folder / "found").exists():
                pass
        dist.all_reduce(ones, group=halves[rank // 2])
        dist.all_reduce(ones)
    ended.wait() if rank == 0 else None
    heartbeat.current_heartbeat()._file = -1  # no beat asks process groups that are being destroyed
    return answers or None


def _watch(folder, bounds, answers, ended):
    stall = None
    while stall is None:
        time.sleep(0.5)
        seen = read_processes(folder)
        stall = find_stall(seen, bounds)
    names = [each.beat.name for each in stall.culprits]
    node.STACK_S = HANG_S  # a busy machine may need longer than a run allows
    answers += [stall.sentence, names, stacks(folder, [*names, "rank 3"]), find_awaited_ranks(seen)]
    (folder / "found").touch()
    ended.set()
