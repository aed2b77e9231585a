"""Run drills on three raylets of this machine; `main` prints the watch's findings as JSON."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tests.runs import tiny
from verl_patches.heartbeat import heartbeat
from verl_patches.launch.ray_cluster import reserve_left_out_nodes
from verl_patches.launch.supervise.stall import Bounds, LostNodeError, StallError
from verl_patches.launch.supervise.watcher import Watcher
from verl_patches.run.resolve import changed_run
from verl_patches.trainer.run import TrainerRun, exit_reason

NODE = {"num_cpus": 1, "num_gpus": 1, "object_store_memory": 100 << 20}


class Rank:
    def __init__(self, rank):
        heartbeat.current_heartbeat().start(heartbeat.heartbeat_folder(), f"rank {rank}", rank)

    def pid(self):
        return os.getpid()

    def raise_error(self):
        raise ValueError("expected 2, found 3")

    def raise_device_error(self):
        raise RuntimeError("NPU function error: aclrtSynchronizeStream\nERR00100 PTA call acl api failed")

    def update_actor(self):
        with heartbeat.current_heartbeat().in_call("update_actor"):
            heartbeat.current_heartbeat().begin_phase("update")
            time.sleep(600)


def wait_until(true):
    """Return the value of `true()` once it is true; the test ends a drill that hangs."""
    while not (found := true()):
        time.sleep(0.2)
    return found


def check_error(watcher, error):
    """Return the message of the error that a look raises, if any."""
    try:
        watcher.check()
    except error as found:
        return str(found)


def node_options(node_id):
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False)}


def heartbeat_folder(node_id):
    """Return the folder of the run's heartbeats on one of the raylets, which share a file system."""
    own = heartbeat.heartbeat_folder()
    return own.with_name(own.name.replace(ray.get_runtime_context().get_node_id(), node_id))


def main():
    folder, found = Path(sys.argv[1]), {}
    head = {**NODE, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, connect=True, head_node_args=head)
    second, third = cluster.add_node(**NODE, node_ip_address="127.0.0.2"), cluster.add_node(**NODE)
    own = ray.get_runtime_context().get_node_id()

    without = {"recipe.restart.exclude_nodes": ["127.0.0.2", "no such node"]}
    before = ray.available_resources()["GPU"]
    reserve_left_out_nodes(changed_run(tiny(), without))
    wait_until(lambda: not ray._private.state.available_resources_per_node()[second.node_id].get("GPU", 0))
    found["free"] = [before, ray.available_resources()["GPU"]]

    nodes = [own, third.node_id, second.node_id]
    actors = [
        ray.remote(num_cpus=0)(Rank).options(**node_options(node)).remote(rank) for rank, node in enumerate(nodes)
    ]
    pids = ray.get([actor.pid.remote() for actor in actors])
    run = object.__new__(TrainerRun)
    run.group, run.worker_places = SimpleNamespace(step=7, _workers=actors), {1: "pid 5 on there"}
    try:
        ray.get(actors[1].raise_error.remote())
    except ray.exceptions.RayTaskError as error:
        found["raised"] = exit_reason(error, run.raising_rank_text(error))
        run.group._workers = [actors[0], actors[2]]
        found["raised elsewhere"] = run.raising_rank_text(error)
    watcher = Watcher(folder, Bounds(first_s=45, least_s=45, factor=1), world=3)
    watcher.check()
    try:
        ray.get(actors[2].raise_device_error.remote())
    except ray.exceptions.RayTaskError as error:
        watcher.explain_error(error)
    found["device"] = json.loads((folder / "watch.json").read_text())
    calls = [actor.update_actor.remote() for actor in actors]
    in_calls = ["update_actor"] * 3
    wait_until(lambda: watcher.check() or [seen.beat.call for seen in watcher.processes()] == in_calls)
    os.kill(pids[1], signal.SIGSTOP)
    found["stall"] = wait_until(lambda: check_error(watcher, StallError))
    found["record"] = json.loads((folder / "watch.json").read_text())
    found["stacks"] = {path.name: path.read_text() for path in (folder / "stacks").iterdir()}
    found["third"], found["second"] = third.node_id, second.node_id
    found["folders"] = [node_id for node_id in nodes if heartbeat_folder(node_id).is_dir()]

    cluster.remove_node(third, allow_graceful=False)  # SIGKILL
    found["lost"] = wait_until(lambda: check_error(watcher, LostNodeError))
    try:
        watcher.explain_error(ValueError("a worker's error that follows from it"))
    except LostNodeError as error:
        found["explained"] = str(error)
    watcher.close(failed=True)
    wait_until(lambda: not any(map(psutil.pid_exists, pids)))  # nothing is left
    found["folders_left"] = [node_id for node_id in nodes if heartbeat_folder(node_id).is_dir()]
    del calls
    ray.shutdown()
    cluster.shutdown()
    print("FOUND" + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
