"""Start Ray on nodes (their ports, `ray start`) and ask the nodes of a running Ray.

A process inside a Ray asks with `living_nodes`, `start_on_node` and `call_results`, others with `ask_nodes`. Every
start takes the address of a Ray from `answering_address`.

`ask_nodes` runs this module as a program (`python -m verl_patches.run.ray_nodes JSON`), so that its caller does not
join Ray: Ray ends a process that has joined it when the head goes away. JSON is {address} and one of

    {}                          list the living nodes; nothing runs on them
    {job, nodes, limit_s}       wait, without joining Ray and for limit_s at most, until so many nodes of a job are
                                alive; then list all nodes as `_wait_for_nodes` does
    {command, cwd, limit_s}
                                run `python COMMAND --head HOST:PORT` on each node, in the folder `cwd` and in the
                                environment of its raylet, which is that of the run's workers

The program prints ANSWER_PREFIX and {nodes: [{id, address, resources, here, answer, clock}]}. `answer` is
{code, output, error} of the command, None where the node gave none within `limit_s`; `clock` is {ahead_s, within_s}:
how far the node's clock is ahead of this node's, and how exactly that is known.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_patches.errors import ConfigError, RecipeError, our_command

ANSWER_PREFIX = "NODES"
JOB_LABEL, RANK_LABEL = "verl_patches/job", "verl_patches/rank"  # labels that node.sh gives a node
POLL_S = 1.0
CLOCK_CALLS = 5  # clock readings, of which the quickest counts
CALL_S = 30  # limit of a call that returns at once, and what a command gets beyond its own limit
HEAD_S = 15  # limit for Ray's head to answer at all


# the ports of Ray on a node, and a node's `ray start` command; no other file makes either
HEAD_PORT = 6379
SERVICES = (  # (name, option of `ray start`) of every node's services; their ports follow each other from `first` on
    ("node manager", "node-manager-port"),
    ("object manager", "object-manager-port"),
    ("runtime environments", "runtime-env-agent-port"),
    ("metrics", "metrics-export-port"),
    ("agent", "dashboard-agent-grpc-port"),
    ("agent's HTTP server", "dashboard-agent-listen-port"),
)
HEAD_SERVICES = (  # services that only the head has; their ports follow those of SERVICES
    ("client server", "ray-client-server-port"),
    ("dashboard", "dashboard-port"),
    ("dashboard's gRPC server", "dashboard-grpc-port"),
)


@dataclass(frozen=True)
class RayPorts:
    """Plan the ports of a node's Ray.

    gcs: the head's port; first: the first of nine consecutive ports, the last three of which only the head uses;
    workers: (first, last).
    """

    gcs: int = HEAD_PORT
    first: int = HEAD_PORT + 1
    workers: tuple[int, int] = (10002, 19999)

    def _services(self, head: bool) -> list[tuple[str, str, int]]:
        """Return (name, option, port) of each service of a node."""
        named = [*SERVICES, *(HEAD_SERVICES if head else ())]
        return [(*service, self.first + number) for number, service in enumerate(named)]

    def options(self, head: bool) -> dict[str, int]:
        """Return {option of `ray start`: port} of one node."""
        workers = {"min-worker-port": self.workers[0], "max-worker-port": self.workers[1]}
        return {option: port for _, option, port in self._services(head)} | workers

    def spans(self, head: bool = True) -> dict[str, tuple[int, int]]:
        """Return {service: (first, last) port} of one node; the head has the most."""
        gcs = {"Ray's GCS": (self.gcs, self.gcs)} if head else {}
        services = {f"Ray's {name}": (port, port) for name, _, port in self._services(head)}
        return services | gcs | {"Ray's workers": self.workers}


def ray_start(
    head: str,
    node: str,
    is_head: bool,
    device: Mapping[str, int],
    ports: RayPorts = RayPorts(),
    dashboard: bool = False,
    temp_dir: str | None = None,
) -> list[str]:
    """Return the words of a node's `ray start` command; the dashboard listens on the loopback of the head.

    head, node: addresses that other nodes reach. device: {"NPU" or "GPU": number}, one of them. Other nodes take over
    the head's temp_dir.
    """
    words = ["ray", "start"]
    words += ["--head", f"--port={ports.gcs}"] if is_head else [f"--address={head}:{ports.gcs}"]
    words.append(f"--node-ip-address={head if is_head else node}")
    if is_head:
        words += [f"--include-dashboard={str(dashboard).lower()}", "--dashboard-host=127.0.0.1"]
        words += [f"--temp-dir={temp_dir}"] if temp_dir else []
    words.append("--disable-usage-stats")
    words += [f"--{option}={port}" for option, port in ports.options(is_head).items()]
    for name, number in device.items():
        words.append(f"--num-gpus={number}" if name == "GPU" else f"--resources={json.dumps({name: number})}")
    return words


def ask_nodes(request: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """Return this program's answer to a request within `limit_s`; RecipeError with its last line where it fails."""
    try:
        command = [sys.executable, "-m", __name__, json.dumps(dict(request))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
        output, error = done.stdout, done.stderr.strip().splitlines() or ["no message"]
    except subprocess.TimeoutExpired:
        output, error = "", [f"not all nodes answered within {limit_s:g} s: see Ray's logs on the head node"]
    line = next((line for line in output.splitlines() if line.startswith(ANSWER_PREFIX)), None)
    if line is None:
        raise RecipeError(f"{request['address']}: {error[-1]}")
    return json.loads(line.removeprefix(ANSWER_PREFIX))


def living_nodes() -> list[dict[str, Any]]:
    """Return [{id, address, resources, here}] of the living nodes of the Ray that this process has joined.

    here: whether it is the node of this process.
    """
    import ray

    own, keys = ray.get_runtime_context().get_node_id(), ("NodeManagerAddress", "Resources")
    alive = [(node["NodeID"], *(node[key] for key in keys)) for node in ray.nodes() if node["Alive"]]
    return [{"id": id, "address": place, "resources": has, "here": id == own} for id, place, has in alive]


def start_on_node(kind: type, node: str) -> Any:
    """Start an actor of class `kind`, without resources, on the node with this id."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(num_cpus=0)(kind).options(scheduling_strategy=there).remote()


def call_results(calls: Sequence[Any], limit_s: float) -> list[Any]:
    """Return the result of each call, or its RayError; None for a call that has not ended within `limit_s`."""
    import ray

    answers: list[Any] = []
    ended, _ = ray.wait(list(calls), num_returns=len(calls), timeout=limit_s) if calls else ([], [])
    for call in calls:
        try:
            answers.append(ray.get(call) if call in ended else None)
        except ray.exceptions.RayError as error:
            answers.append(error)
    return answers


def error_line(error: BaseException) -> str:
    """Return the last line of an error, because Ray puts the remote stack before it."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _node_class() -> Any:
    """Return the class of the actor that runs on each node.

    Ray pickles it by value, so the node needs no verl_patches to load it.
    """

    class Node:
        def clock(self) -> float:
            import time

            return time.time()

        def run(self, command: list[str], limit_s: float, cwd: str | None = None) -> dict[str, Any]:
            import os
            import subprocess
            import sys

            import psutil

            # Ray sets ASCEND_RT_VISIBLE_DEVICES and others for this actor, which has no die
            environ = psutil.Process(os.getpid()).parent().environ()
            if environ.pop("RAY_LD_PRELOAD", None):  # Ray's own jemalloc, which workers do not get
                environ.pop("LD_PRELOAD", None)
            command, cwd = [sys.executable, *command], cwd if cwd and os.path.isdir(cwd) else None
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, env=environ, cwd=cwd)
            except subprocess.TimeoutExpired:
                return {"code": 124, "output": "", "error": f"no end within {limit_s:g} s"}
            return {"code": done.returncode, "output": done.stdout, "error": done.stderr[-4000:]}

    return Node


def answering_address(given: str, limit_s: float = HEAD_S) -> str:
    """Return HOST:PORT of the Ray that `given` ("auto" or HOST:PORT) names, after its head has answered.

    Every start asks here first, because Ray's own client waits many minutes for a head that is gone. The ConfigError
    says which address was asked, where it was found and what to do.
    """
    address, source, todo = _find_address(given)
    if fault := _head_fault(address, limit_s):
        raise ConfigError(f"no Ray answers at {address}, the address of {source}: {fault}. {todo}")
    return address


def _find_address(given: str) -> tuple[str, str, str]:
    """Return (HOST:PORT of a Ray, where it was found, what to do where it does not answer).

    "auto" is the Ray of RAY_ADDRESS, or one on this machine that others may join. Ray itself would also choose a Ray
    that a run has started for itself alone. Such a Ray listens only on the loopback; Ray would ask at this machine's
    other address, and wait for ever.
    """
    from ray._private import services
    from ray._private.utils import get_ray_address_file

    start = f"Start Ray on its nodes first ({our_command('plan', 'CONFIG')} prints the commands), or"
    if given != "auto":
        source = "the configuration (recipe.ray_address, or the head of a job)"
        return given, source, f"{start} correct the address"
    variable = os.environ.get("RAY_ADDRESS", "")
    if variable not in ("", "auto"):
        return variable, "the environment variable RAY_ADDRESS", f"{start} unset RAY_ADDRESS"
    file = get_ray_address_file(None)
    running, latest = services.find_gcs_addresses(), services.find_bootstrap_address(None)
    others = {address for address in running if not address.startswith(("127.", "[::1]:", "localhost:"))}
    if running and not others:
        found = f"each Ray on this machine ({', '.join(sorted(running))}) is private to the run that started it"
        raise ConfigError(f"recipe.ray_address is auto, but {found}. {start} end that run")
    if latest and (latest in others or not running):
        return latest, f"the file {file}", f"{start} remove that file, which a Ray that has ended left behind"
    if others:
        return min(others), "a raylet on this machine", f"{start} end that raylet"
    text = f"recipe.ray_address is auto, but no Ray runs here, RAY_ADDRESS is unset, and there is no file {file}"
    raise ConfigError(f"{text}. {start} set recipe.ray_address to HOST:PORT")


def _head_fault(address: str, limit_s: float) -> str | None:
    """Return why no head of a Ray answers a call at HOST:PORT within `limit_s`; None where one does."""
    import grpc
    from ray._private.ray_constants import GLOBAL_GRPC_OPTIONS
    from ray._private.utils import init_grpc_channel
    from ray.core.generated.gcs_service_pb2 import CheckAliveRequest
    from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceStub

    channel = init_grpc_channel(address, options=GLOBAL_GRPC_OPTIONS)
    try:
        NodeInfoGcsServiceStub(channel).CheckAlive(CheckAliveRequest(), timeout=limit_s)
    except grpc.RpcError as error:
        late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        return f"no answer within {limit_s:g} s" if late else " ".join(error.details().split())
    finally:
        channel.close()
    return None


def answer_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """Answer a request; the head of this file describes both."""
    address = answering_address(request["address"])
    if "job" in request:
        return {"nodes": _wait_for_nodes(**{**request, "address": address})}
    import ray

    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    nodes = living_nodes()
    if not request.get("command"):
        return {"nodes": nodes}
    kind = _node_class()
    actors, limit_s = [start_on_node(kind, node["id"]) for node in nodes], request["limit_s"]
    command = [*request["command"], "--head", ray.get_runtime_context().gcs_address]
    calls = [actor.run.remote(command, limit_s, request.get("cwd")) for actor in actors]
    for node, actor, answer in zip(nodes, actors, call_results(calls, limit_s + CALL_S), strict=True):
        if isinstance(answer, ray.exceptions.RayError):
            answer = {"code": 1, "output": "", "error": error_line(answer)}
        node["answer"] = answer
        node["clock"] = None if answer is None else _clock_offset(actor)
    return {"nodes": nodes}


def _wait_for_nodes(address: str, job: str, nodes: int, limit_s: float) -> list[dict[str, Any]]:
    """Return [{address, rank, job, alive}] of all nodes that Ray's GCS has known, newest last."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled; its stub has other names

    client, end = GcsClient(address=address), time.monotonic() + limit_s
    while True:
        known = [
            {
                "address": node.node_manager_address,
                "rank": int(node.labels[RANK_LABEL]) if RANK_LABEL in node.labels else None,
                "job": node.labels.get(JOB_LABEL),
                "alive": node.state == 0,  # GcsNodeInfo.ALIVE
            }
            for node in sorted(client.get_all_node_info(timeout=10).values(), key=lambda node: node.start_time_ms)
        ]
        in_job = {node["rank"] for node in known if node["alive"] and node["job"] == job}
        if len(in_job) >= nodes or time.monotonic() >= end:
            return known
        time.sleep(POLL_S)


def _clock_offset(actor: Any) -> dict[str, float] | None:
    """Return how far the actor's clock is ahead of this process's; None where it does not answer."""
    import ray

    measured = []
    try:
        for _ in range(CLOCK_CALLS):
            before = time.time()
            there = ray.get(actor.clock.remote(), timeout=CALL_S)
            half = (time.time() - before) / 2
            measured.append((half, there - before - half))
    except ray.exceptions.RayError:  # includes GetTimeoutError
        return None
    within_s, ahead_s = min(measured)
    return {"ahead_s": ahead_s, "within_s": within_s}


def read_report(output: str) -> dict[str, Any]:
    """Return the JSON object that starts with the first line that begins with `{`; ValueError where there is none."""
    lines = output.splitlines(keepends=True)
    return json.loads("".join(itertools.dropwhile(lambda line: not line.startswith("{"), lines)))


if __name__ == "__main__":
    try:
        sys.stdout.write(ANSWER_PREFIX + json.dumps(answer_request(json.loads(sys.argv[1]))) + "\n")
    except ConfigError as refused:
        sys.exit(str(refused))
