"""Which node of the job this machine is, and by which address other nodes reach it."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from verl_patches.cluster.job import MASTER, RANK, Job
from verl_patches.errors import ConfigError

_LOOPBACK = ("127.0.0.1", "127.0.1.1")  # of the own name: Debian and Ubuntu resolve it to the second


@dataclass(frozen=True)
class Place:
    """This node in the job: rank, and the addresses of Ray's head and of this node, which other nodes reach."""

    rank: int
    head: str
    address: str


def place_of(job: Job, environ: Mapping[str, str], rank: int | None = None, head: str | None = None) -> Place:
    """Where this node is in the job: by the options, else NODE_RANK and MASTER_ADDR, else the job's hosts.

    Raises ConfigError where that is not enough, or names an address that is not of this node.
    """
    if rank is None:
        rank = _rank(job, environ)
    if not 0 <= rank < job.nodes:
        raise ConfigError(f"node rank {rank}: job {job.name} has {job.nodes} nodes, so expected 0 to {job.nodes - 1}")
    named = head or environ.get(MASTER) or (job.hosts[0] if job.hosts else None)
    if named is None:
        if job.nodes > 1:
            raise ConfigError(f"the address of Ray's head is unknown: set {MASTER}, or give --head or the job's hosts")
        named = _address_of(job.interface) if job.interface else _any_address()
    head = _resolved(named)
    if job.nodes > 1 and head in _LOOPBACK:
        raise ConfigError(f"Ray's head is {named}, the loopback, which other nodes cannot reach: give another address")
    if rank == 0:
        if not _is_own(head):
            raise ConfigError(
                f"node rank 0 holds Ray's head, but its address {named} is none of this machine ({_own_addresses()}): "
                f"start it there, or correct {MASTER}"
            )
        return Place(0, head, head)
    if job.hosts:
        address = _resolved(job.hosts[rank])
    elif job.interface:
        address = _address_of(job.interface)
    else:
        address = _towards(head, job.ports.gcs)
    if not _is_own(address):
        raise ConfigError(f"{job.host_of(rank)} is none of this machine's addresses ({_own_addresses()})")
    return Place(rank, head, address)


def _rank(job: Job, environ: Mapping[str, str]) -> int:
    given = environ.get(RANK)
    if given:
        if not given.isdigit():
            raise ConfigError(f"{RANK} is {given!r}, expected a whole number")
        return int(given)
    own = [number for number, host in enumerate(job.hosts) if _is_own(_resolved(host))]
    if len(own) == 1:
        return own[0]
    if job.nodes == 1:
        return 0
    raise ConfigError(f"which node of job {job.name} is this? Give --node-rank or set {RANK}, 0 to {job.nodes - 1}")


def _resolved(host: str) -> str:
    try:
        return socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise ConfigError(f"the address {host} cannot be resolved: {error.strerror}") from None


def _is_own(address: str) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _own() -> dict[str, list[str]]:
    interfaces = psutil.net_if_addrs().items()
    return {name: [a.address for a in addresses if a.family == socket.AF_INET] for name, addresses in interfaces}


def _own_addresses() -> str:
    return ", ".join(address for addresses in _own().values() for address in addresses) or "no address"


def _any_address() -> str:
    own = [address for addresses in _own().values() for address in addresses if not address.startswith("127.")]
    return own[0] if own else "127.0.0.1"


def _address_of(interface: str) -> str:
    """The IPv4 address of an interface of this node."""
    own = _own()
    if not own.get(interface):
        names = ", ".join(f"{name} {addresses[0]}" for name, addresses in own.items() if addresses)
        raise ConfigError(f"interface {interface} (SOCKET_IFNAME) has no IPv4 address here; this node has {names}")
    return own[interface][0]


def _towards(head: str, port: int) -> str:
    """The address from which this node reaches the head."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((head, port))  # chooses a route, sends nothing
        except OSError as error:
            raise ConfigError(f"node {socket.gethostname()} has no route to {head}: {error.strerror}") from None
        return probe.getsockname()[0]
