"""A program that asks Ray's GCS which nodes a job has: `python -m verl_patches.cluster.members GCS JOB WANT LIMIT_S`.

GCS: HOST:PORT. It joins no cluster. Waits until nodes of WANT different ranks of JOB are alive, for LIMIT_S at most,
and prints ANSWER and [{address, port, rank, job, alive}], newest last. A process of its own, as Ray's client ends its
process where the GCS goes away.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

from verl_patches.errors import RecipeError

ANSWER = "MEMBERS"
JOB, RANK_LABEL = "verl_patches/job", "verl_patches/rank"
POLL_S, START_S = 1.0, 30.0  # beyond the limit: to import Ray and connect


def _nodes(client: Any) -> list[dict[str, Any]]:
    found = sorted(client.get_all_node_info(timeout=10).values(), key=lambda node: node.start_time_ms)
    return [
        {
            "address": node.node_manager_address,
            "port": node.node_manager_port,
            "rank": int(node.labels[RANK_LABEL]) if RANK_LABEL in node.labels else None,
            "job": node.labels.get(JOB),
            "alive": node.state == 0,  # GcsNodeInfo.ALIVE
        }
        for node in found
    ]


def main(address: str, job: str, want: int, limit_s: float) -> None:
    """Print the nodes once enough are there, or the time is over."""
    from ray._raylet import GcsClient

    client, end = GcsClient(address=address), time.monotonic() + limit_s
    while True:
        nodes = _nodes(client)
        in_job = {node["rank"] for node in nodes if node["alive"] and node["job"] == job}
        if len(in_job) >= want or time.monotonic() >= end:
            break
        time.sleep(POLL_S)
    sys.stdout.write(ANSWER + json.dumps(nodes) + "\n")


def members(address: str, job: str, want: int = 0, limit_s: float = 0.0) -> list[dict[str, Any]]:
    """Run the program; RecipeError where no GCS answers at HOST:PORT."""
    command = [sys.executable, "-m", __name__, address, job, str(want), str(limit_s)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s + START_S)
        output, error = done.stdout, done.stderr.strip().splitlines()
    except subprocess.TimeoutExpired:
        output, error = "", [f"no answer within {limit_s + START_S:g} s"]
    line = next((line for line in output.splitlines() if line.startswith(ANSWER)), None)
    if line is None:
        raise RecipeError(f"Ray's head {address} does not answer: {error[-1] if error else 'no message'}")
    return json.loads(line.removeprefix(ANSWER))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
