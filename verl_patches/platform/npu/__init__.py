"""Handle what only NPUs need; this file checks the die and sets the network interface of a worker process.

Die: the device runtime may be called only after Ray has set ASCEND_RT_VISIBLE_DEVICES. Network: HCCL, Gloo and torch's
RPC rendezvous over the interface towards Ray's head. Every worker looks it up on its own node, as nodes may name it
differently. Without it Gloo takes the interface that the host name resolves to, which may be the loopback.
"""

from __future__ import annotations

import logging
import os
import socket

from verl_patches.errors import ConfigError

VISIBLE_DEVICES = "ASCEND_RT_VISIBLE_DEVICES"
RAY_NOSET_VARIABLE = "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"
MC2_MIN_RANKS = 16  # fewer ranks use all-to-all: vllm_ascend.ascend_forward_context.get_fused_moe_state
# HCCL reads a name as a prefix of interfaces, and "=eth1" as that interface alone (CANN envref_07_0075)
INTERFACE_VARIABLES = {"HCCL_SOCKET_IFNAME": "={}", "GLOO_SOCKET_IFNAME": "{}", "TP_SOCKET_IFNAME": "{}"}

log = logging.getLogger(__name__)


def check_visible_die(visible: int) -> None:
    """Raise ConfigError if this verl worker would run on another die than Ray's; call it before any process group.

    visible: number of devices that the device runtime sees in this process (torch.npu.device_count()). A process that
    Ray did not start is not checked, as it chose its device itself.
    """
    import ray

    if not ray.is_initialized():
        return
    assigned = [str(number) for number in ray.get_runtime_context().get_accelerator_ids()["NPU"]]
    found = os.environ.get(VISIBLE_DEVICES)
    fault = None
    if len(assigned) != 1:
        fault = f"expected one die from Ray, found ids {assigned}: the Ray actor must request exactly one NPU"
    elif found != assigned[0]:
        fault = (
            f"{VISIBLE_DEVICES} is {found!r}, expected {assigned[0]!r}, the die that Ray assigned. "
            f"{RAY_NOSET_VARIABLE} is {os.environ.get(RAY_NOSET_VARIABLE)!r} (if set, Ray does not set "
            f"{VISIBLE_DEVICES}): unset it before `ray start`, and do not set {VISIBLE_DEVICES} in a runtime_env or a "
            "set-up hook"
        )
    elif visible != 1:
        fault = (
            f"the device runtime sees {visible} devices, expected 1, with {VISIBLE_DEVICES}={found}: it was started "
            "before Ray set the variable. Remove calls of torch.npu that run before `import verl`, as in a set-up hook"
        )
    if fault:
        raise ConfigError(f"rank {os.environ.get('RANK')} (pid {os.getpid()} on {socket.gethostname()}): {fault}")


def set_interface(nodes: int, interface: str | None = None, head: str | None = None) -> None:
    """Set the interface in those variables of INTERFACE_VARIABLES that this process's environment leaves unset.

    `interface`: recipe.hccl.interface; None takes the one towards `head`, the HOST:PORT of Ray's head (None: the head
    of this worker's Ray). Raises ConfigError where the node has no such interface, or where one is the loopback and
    there are several nodes.
    """
    own = {name: os.environ[name] for name in INTERFACE_VARIABLES if os.environ.get(name)}
    if len(own) < len(INTERFACE_VARIABLES):
        if interface:
            require_interface(interface)
        chosen = interface or interface_towards(head or _ray_head_address())
        why = "recipe.hccl.interface" if interface else "the route to Ray's head"
        refuse_loopback(nodes, chosen, why)
        for name in INTERFACE_VARIABLES.keys() - own.keys():
            os.environ[name] = INTERFACE_VARIABLES[name].format(chosen)
        log.info("network interface %s, from %s; set in this node's environment: %s", chosen, why, own or "nothing")
    for name, value in own.items():
        for part in value.lstrip("=").split(","):
            refuse_loopback(nodes, part, f"{name}={value} of this node's environment")


def interface_towards(address: str) -> str:
    """Return the interface through which this node reaches HOST:PORT; ConfigError where there is no route."""
    host, _, port = address.rpartition(":")
    try:
        family, kind, _, _, place = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # a datagram socket chooses a route and sends nothing
            ip = probe.getsockname()[0]
    except OSError as error:
        raise ConfigError(f"{_node_text()} has no route to Ray's head {address}: {error}; check the address") from error
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == ip for each in addresses):
            return name
    raise ConfigError(
        f"{_node_text()} reaches Ray's head {address} from {ip}, but none of its interfaces has this address; "
        "set recipe.hccl.interface"
    )


def require_interface(interface: str, why: str = "recipe.hccl.interface") -> None:
    """Raise ConfigError if this node has no such interface; `why` names the key or variable that asks for it."""
    import psutil

    names = sorted(psutil.net_if_addrs())
    if interface not in names:
        todo = "Set it to null, or export HCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME and TP_SOCKET_IFNAME"
        if why != "recipe.hccl.interface":  # a variable
            todo = "Correct or unset it"
        found = f"{why} is {interface}; expected an interface of {_node_text()}: {', '.join(names)}"
        raise ConfigError(f"{found}. {todo} before `ray start` on that node")


def refuse_loopback(nodes: int, interface: str, why: str) -> None:
    """Raise ConfigError if several nodes would rendezvous over the loopback."""
    if nodes > 1 and interface in ("lo", "localhost"):
        raise ConfigError(
            f"{_node_text()} would use the loopback {interface} for rendezvous, from {why}; expected an interface that "
            f"other nodes reach, as trainer.nnodes is {nodes}. Start Ray with --node-ip-address and such an address, "
            "or set recipe.hccl.interface"
        )


def _node_text() -> str:
    return f"node {socket.gethostname()}"


def _ray_head_address() -> str:
    import ray

    if not ray.is_initialized():  # else get_runtime_context would start a new Ray
        raise ConfigError(
            f"{_node_text()}: pid {os.getpid()} cannot look up the interface towards Ray's head; expected a process of "
            "a Ray cluster, found one without a connection. Start it by Ray, set recipe.hccl.interface, or set "
            f"{', '.join(INTERFACE_VARIABLES)} in its environment"
        )
    return ray.get_runtime_context().gcs_address
