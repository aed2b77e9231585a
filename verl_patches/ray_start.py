"""The ports of Ray on a node, and the `ray start` command of a node: both are made nowhere else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

HEAD_PORT = 6379
SERVICES = (  # of every node, in this order from `first` on: name, option of `ray start`
    ("node manager", "node-manager-port"),
    ("object manager", "object-manager-port"),
    ("runtime environments", "runtime-env-agent-port"),
    ("metrics", "metrics-export-port"),
    ("agent", "dashboard-agent-grpc-port"),
    ("agent's HTTP server", "dashboard-agent-listen-port"),
)
HEAD_SERVICES = (  # behind those
    ("client server", "ray-client-server-port"),
    ("dashboard", "dashboard-port"),
    ("dashboard's gRPC server", "dashboard-grpc-port"),
)


@dataclass(frozen=True)
class RayPorts:
    """The port plan of a node's Ray.

    gcs: of the head; first: of nine that follow each other, the last three on the head only; workers: (first, last).
    """

    gcs: int = HEAD_PORT
    first: int = HEAD_PORT + 1
    workers: tuple[int, int] = (10002, 19999)

    def _services(self, head: bool) -> list[tuple[str, str, int]]:
        """(name, option, port) of each service of a node."""
        named = [*SERVICES, *(HEAD_SERVICES if head else ())]
        return [(*service, self.first + number) for number, service in enumerate(named)]

    def options(self, head: bool) -> dict[str, int]:
        """{option of `ray start`: port} of one node."""
        workers = {"min-worker-port": self.workers[0], "max-worker-port": self.workers[1]}
        return {option: port for _, option, port in self._services(head)} | workers

    def spans(self, head: bool = True) -> dict[str, tuple[int, int]]:
        """{service: (first, last) port}; the head has the most."""
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
    labels: Mapping[str, str] | None = None,
    temp_dir: str | None = None,
) -> list[str]:
    """The words of a node's `ray start`; the dashboard listens on the loopback of the head.

    head, node: addresses that other nodes reach. device: {"NPU" or "GPU": number}, one of them. Other nodes take the
    head's temp_dir.
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
    words += [f"--labels={json.dumps(dict(labels))}"] if labels else []
    return words
