"""Measure an all-reduce over gloo or HCCL: `python -m verl_patches.platform.all_reduce_probe JSON`.

JSON: {backend: gloo | hccl, first: first rank of this node, local: ranks of this node, world: ranks of all nodes,
address: HOST:PORT of rank 0, interface: where a node's variables set none, mib: size of the tensor, repeat}.
Each rank is a process of its own. The node's first rank prints {seconds, bus_bytes_per_s} of one all-reduce; the
program exits with 1 where a rank fails or the sum is wrong. bus_bytes_per_s is size x 2 (world - 1) / world / seconds,
the figure of nccl-tests. HCCL was not tried. `measure_node` runs the program on one node.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from verl_patches.errors import RecipeError
from verl_patches.processes import die_with_parent

TIMEOUT_S = 60  # limit of a rendezvous and of a collective
PROBE_S = 150  # limit of the whole program
MIB, REPEAT = 16, 3


def measure_node(
    backend: str, ranks: int, interface: str | None, environ: Mapping[str, str], mib: int = MIB
) -> dict[str, float]:
    """Return {seconds, bus_bytes_per_s} of `ranks` ranks on this node alone; RecipeError where the program fails."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    settings = {"backend": backend, "address": address, "interface": interface, "mib": mib, "repeat": REPEAT}
    settings |= {"first": 0, "local": ranks, "world": ranks}
    command = [sys.executable, "-m", "verl_patches.platform.all_reduce_probe", json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S, env=dict(environ))
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"seconds"')]
    if done.returncode or not lines:
        errors = [line for line in done.stderr.splitlines() if line and not line.startswith(" ")]
        raise RecipeError(errors[-1] if errors else f"expected a result of the probe, found exit {done.returncode}")
    return json.loads(lines[0])


def speed_text(measured: Mapping[str, float], what: str) -> str:
    """Return the time and bandwidth of a measurement as text, after the label `what`."""
    return f"{what}: {1e3 * measured['seconds']:.1f} ms, {measured['bus_bytes_per_s'] / 1e9:.2f} GB/s"


def main(settings: dict[str, Any]) -> int:
    """Start the ranks of this node, or run one of them if `settings` has a rank; return the exit code."""
    if "rank" in settings:
        measured = _measure_all_reduce(**settings)
        if settings["rank"] == settings["first"]:
            sys.stdout.write(json.dumps(measured) + "\n")
        return 0
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name in ("GLOO_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME") if settings["interface"] else ():
        env[name] = env.get(name) or settings["interface"]
    ranks = []
    for index in range(settings["local"]):
        own = json.dumps({**settings, "rank": settings["first"] + index, "device": index})
        command = [sys.executable, "-m", "verl_patches.platform.all_reduce_probe", own]
        ranks.append(subprocess.Popen(command, env=env, preexec_fn=die_with_parent))
    return max(abs(rank.wait()) for rank in ranks)


def _measure_all_reduce(
    backend: str, rank: int, device: int, world: int, address: str, mib: int, repeat: int, **others: Any
) -> dict[str, float]:
    import torch
    from torch import distributed

    place = "cpu"
    if backend == "hccl":
        import torch_npu  # noqa: F401  registers the device npu

        torch.npu.set_device(device)
        place = f"npu:{device}"
    limit = timedelta(seconds=TIMEOUT_S)
    distributed.init_process_group(backend, f"tcp://{address}", limit, world_size=world, rank=rank)
    values = torch.full((mib << 18,), float(rank + 1), device=place)
    distributed.all_reduce(values)
    expected = world * (world + 1) / 2
    if not bool((values == expected).all()):
        raise RuntimeError(f"rank {rank}: the all-reduce gave {values.unique()[:4].tolist()}, expected {expected}")
    distributed.barrier()
    start = time.perf_counter()
    for _ in range(repeat):
        distributed.all_reduce(values)
    distributed.barrier()
    if backend == "hccl":
        torch.npu.synchronize()
    seconds = (time.perf_counter() - start) / repeat
    distributed.destroy_process_group()
    return {"seconds": seconds, "bus_bytes_per_s": (mib << 20) * 2 * (world - 1) / world / seconds}


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
