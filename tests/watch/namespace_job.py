"""The driver of a run over the nodes of a joined Ray, one rank on each: argv is its folder and the nodes' addresses.

It prints READY once all ranks are in update_actor, and then only waits for them, as main_grpo does.
"""

import os
import sys
import time
from pathlib import Path

import ray

from tests.watch.ray_job import Rank, at
from verl_patches.trainer import ray_start
from verl_patches.watch.bounds import Bounds
from verl_patches.watch.watcher import Watcher

START_S = 120


def main():
    folder, addresses = Path(sys.argv[1]), sys.argv[2:]
    ray.init(address=f"{addresses[0]}:6379", _node_ip_address=addresses[0], log_to_driver=False)
    nodes = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes()}
    ranks = [
        ray.remote(num_cpus=0)(Rank).options(**at(nodes[address])).remote(rank)
        for rank, address in enumerate(addresses)
    ]
    watcher, failed = Watcher(folder, Bounds(1800, 1800, 1), len(ranks)), True
    try:
        pids = ray.get([rank.pid.remote() for rank in ranks])
        calls = [rank.update_actor.remote() for rank in ranks]
        deadline = time.monotonic() + START_S
        while [seen.beat.call for seen in watcher.processes()] != ["update_actor"] * len(ranks):
            assert time.monotonic() < deadline, watcher.processes()
            watcher.check()
            time.sleep(0.2)
        print("READY", os.getpid(), *pids, flush=True)
        ray_start.result_of(calls[0], watcher.check)
    except ray.exceptions.RayError as error:
        watcher.explain(error)
        raise
    finally:
        watcher.close(failed)
        ray.shutdown()


if __name__ == "__main__":
    main()
