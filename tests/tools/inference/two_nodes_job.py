"""Run a command on a Ray of two nodes with a device each, one of which another job has until the command waits.

`python two_nodes_job.py COMMAND...` runs `python -m verl_patches COMMAND... recipe.ray_address=HOST:PORT`.
"""

import subprocess
import sys

import ray
from ray.cluster_utils import Cluster

WAITS = "waiting for nodes with [1, 1] free devices"

cluster = Cluster()
for _ in range(2):
    cluster.add_node(num_cpus=3, num_gpus=1, object_store_memory=100_000_000)
ray.init(address=cluster.address, log_to_driver=False)
taken = ray.util.placement_group([{"GPU": 1}])
ray.get(taken.ready())
command = [sys.executable, "-m", "verl_patches", *sys.argv[1:], f"recipe.ray_address={cluster.address}"]
with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
    for line in process.stderr:
        sys.stderr.write(line)
        if WAITS in line and taken is not None:
            ray.util.remove_placement_group(taken)
            taken = None
ray.shutdown()
cluster.shutdown()
sys.exit(process.returncode or taken is not None)
