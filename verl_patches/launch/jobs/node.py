"""Answer a question of node.sh on a node of a job: `python -m verl_patches.launch.jobs.node QUESTION ARGUMENT...`.

    place RANK NODES HEAD INTERFACE PORT HOST...  print the addresses by which others reach this node and Ray's head
    ports ADDRESS PORT=SERVICE...                 check that all are free; a taken one is named with its process
    preload                                       print Ray's LD_PRELOAD, and on stderr what would stop or slow Ray
    wait HEAD:PORT JOB NODES LIMIT_S HOST...      wait until all nodes of the job are in Ray; the missing ones are named

Answers are on standard output. After a failure a sentence is on stderr, and the exit code is 2 for wrong use or an
obstacle, else 1.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from verl_patches.errors import ConfigError, RecipeError
from verl_patches.platform.npu.machine import ld_preload, start_notes
from verl_patches.processes import port_holder
from verl_patches.run.ray_nodes import CALL_S, ask_nodes

LOOPBACK = ("127.0.0.1", "127.0.1.1")  # /etc/hosts gives them to a machine's own name, the second on Debian and Ubuntu


def node_addresses(
    rank: int, nodes: int, head: str, interface: str, port: int, hosts: Sequence[str]
) -> tuple[str, str]:
    """Return (address of this node, address of Ray's head), as other nodes reach them.

    A node's own name may be its loopback; then its address is that of the interface, or the one that the route to
    another node takes. Raise ConfigError where no address is found, or where it is not this node's.
    """
    if not head:
        if nodes > 1:
            raise ConfigError("the address of Ray's head is unknown: set MASTER_ADDR, or give the job's hosts")
        head = _interface_address(interface) if interface else LOOPBACK[0]
    if rank == 0:
        address = _reachable_address(head, interface, "".join(hosts[1:2]), port) if nodes > 1 else _resolve_host(head)
        if not _is_own_address(address):
            raise ConfigError(
                f"node 0 runs Ray's head, but its address {head} is not one of this machine ({_own_addresses()}): "
                "start node 0 on that machine, or correct MASTER_ADDR"
            )
        return address, address
    found = _resolve_host(head)
    if found in LOOPBACK:
        raise ConfigError(
            f"Ray's head is {head}, which is the loopback on this machine, not node 0: give the IP address of node 0"
        )
    if hosts:
        address = _reachable_address(hosts[rank], interface, found, port)
    else:
        address = _interface_address(interface) if interface else _route_address(found, port)
    if not _is_own_address(address):
        raise ConfigError(
            f"node {rank}: {hosts[rank] if hosts else address} is not an address of this machine ({_own_addresses()}): "
            "start this node on the machine that has it, or correct hosts"
        )
    return address, found


def _reachable_address(name: str, interface: str, other: str, port: int) -> str:
    """Return the address of this node's own name, or another one of the node where that is the loopback."""
    address = _resolve_host(name)
    if address not in LOOPBACK:
        return address
    if interface:
        return _interface_address(interface)
    if not other:
        raise ConfigError(
            f"{name} is the loopback on this machine ({address}), which other nodes cannot reach: set interface, or "
            "give an IP address"
        )
    return _route_address(_resolve_host(other), port)


def _resolve_host(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(f"the address {host} cannot be resolved: {error.strerror}") from None


def _is_own_address(address: str) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _own_interfaces() -> dict[str, list[str]]:
    interfaces = psutil.net_if_addrs().items()
    return {name: [a.address for a in addresses if a.family == socket.AF_INET] for name, addresses in interfaces}


def _own_addresses() -> str:
    return ", ".join(address for addresses in _own_interfaces().values() for address in addresses) or "no address"


def _interface_address(interface: str) -> str:
    """Return the IPv4 address of an interface of this node."""
    own = _own_interfaces()
    if not own.get(interface):
        names = ", ".join(f"{name} {addresses[0]}" for name, addresses in own.items() if addresses)
        raise ConfigError(f"interface {interface} (SOCKET_IFNAME) has no IPv4 address here; this node has {names}")
    return own[interface][0]


def _route_address(other: str, port: int) -> str:
    """Return the address from which this node reaches another one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((other, port))  # a UDP socket chooses a route and sends nothing
        except OSError as error:
            raise ConfigError(f"node {socket.gethostname()} has no route to {other}: {error.strerror}") from None
        return str(probe.getsockname()[0])


def require_free_ports(address: str, services: Mapping[int, str]) -> None:
    """Refuse ports that are taken, and name the service and the process of each."""
    holders = {port: port_holder(port, ("0.0.0.0", address)) for port in services}
    taken = [f"port {port} ({services[port]}) is taken by {holder}" for port, holder in holders.items() if holder]
    if taken:
        raise ConfigError(f"{'; '.join(taken)}. End that process, or give other ports (ports.gcs, ports.first)")


def missing_nodes(job: str, nodes: int, hosts: Sequence[str], known: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Return {rank: the node and why it is not in Ray}; known: the nodes that Ray's head knows."""
    job_nodes = [node for node in known if node["job"] == job]
    joined, alive = {node["rank"] for node in job_nodes}, {node["rank"] for node in job_nodes if node["alive"]}
    missing = {}
    for rank in sorted(set(range(nodes)) - alive):
        why = "had joined, then its raylet ended or lost the network" if rank in joined else "never joined"
        missing[rank] = f"node {rank}{f' ({hosts[rank]})' if hosts else ''} {why}"
    return missing


def _answer_question(question: str, words: Sequence[str]) -> str:
    if question == "place":
        rank, nodes, head, interface, port, *hosts = words
        return " ".join(node_addresses(int(rank), int(nodes), head, interface, int(port), hosts))
    if question == "ports":
        services = dict(service.split("=", 1) for service in words[1:])
        require_free_ports(words[0], {int(port): name for port, name in services.items()})
    if question == "preload":
        sys.stderr.writelines(f"{note}\n" for note in start_notes(os.environ, npu=True))
        return ld_preload(os.environ)
    if question == "wait":
        address, job, nodes, limit_s, *hosts = words
        request = {"address": address, "job": job, "nodes": int(nodes), "limit_s": float(limit_s)}
        known = ask_nodes(request, float(limit_s) + CALL_S)["nodes"]
        if missing := missing_nodes(job, int(nodes), hosts, known):
            text = "; ".join(missing.values())
            raise RecipeError(f"{len(missing)} of {nodes} nodes of job {job} did not join Ray in {limit_s} s: {text}")
    return ""


def main(words: Sequence[str]) -> int:
    """Answer a question and return the exit code: 1 or 2, with a sentence, where there is no good answer."""
    try:
        if answer := _answer_question(words[0], words[1:]):
            sys.stdout.write(f"{answer}\n")
    except (ConfigError, RecipeError) as error:
        sys.stderr.write(f"{error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
