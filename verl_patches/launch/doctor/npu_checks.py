"""Check a node's dies with npu-smi and hccn_tool, which only read: nothing is reset or set.

The dies of one SuperPoD exchange over HCCS, within a node and between nodes. Their own Ethernet ports (RoCE) are used
only between SuperPoDs, and only then need an address (CANN's rank table reference, `device_ip`): a port without an
address is a note while HCCS is healthy. The note names the SuperPoD, so that nodes of another one have their own row.
"""

from __future__ import annotations

from collections.abc import Iterator

from verl_patches.launch.doctor.node_checks import Node, NodeCheck, NotRunError, Result
from verl_patches.plan.memory_plan import followed_peaks
from verl_patches.platform.npu.npu_tools import (
    HEALTH_OK,
    NO_IP_TEXT,
    Die,
    NotUnderstoodError,
    NpuSmi,
    field_value,
    parse_npu_smi,
)

MIB = 1 << 20


def read_npu_smi(node: Node) -> NpuSmi:
    """Return the table of npu-smi on this node; raise NotRunError without one, and on other platforms."""
    if not node.npu:
        raise NotRunError(f"only for NPUs: recipe.platform is {node.run.recipe.platform}")
    if node.npu_smi is None:
        raise NotRunError("npu-smi is not installed", "mount it from the host, as scripts/start_container.sh does")
    if isinstance(node.npu_smi, Exception):
        raise node.npu_smi
    return parse_npu_smi(node.npu_smi)


def _health(node: Node) -> Iterator[Result]:
    smi = read_npu_smi(node)
    wanted = node.run.verl.trainer.n_gpus_per_node
    expected = f"at least {wanted} (trainer.n_gpus_per_node)"
    yield Result(len(smi.dies) >= wanted, f"{len(smi.dies)} dies", expected, name="dies")
    for die in smi.dies:
        if die.health != HEALTH_OK:
            todo = f"npu-smi info -t health -i {die.card} -c {die.chip} prints the error code; leave the node out"
            yield Result(False, die.health, HEALTH_OK, todo, _die_name(die))


def _die_name(die: Die) -> str:
    return f"die {die.number} (card {die.card}, chip {die.chip})"


def _memory(node: Node) -> Iterator[Result]:
    smi = read_npu_smi(node)
    need = followed_peaks(node.run)["peak_bytes"]
    for process in smi.processes:
        found = f"process {process.pid} ({process.name}) holds {process.memory_mb} MB"
        name = f"card {process.card}, chip {process.chip}"
        yield Result(False, found, "no process", f"end it on the host: kill {process.pid}", name)
    expected = f"{need / 1e9:.1f} GB free (modelled peak)"
    free = {die: ((die.total_mb or 0) - (die.used_mb or 0)) * MIB for die in smi.dies}
    for die, left in free.items():
        if left < need:
            found = f"{left / 1e9:.1f} GB free of {(die.total_mb or 0) * MIB / 1e9:.1f}"
            yield Result(False, found, expected, name=_die_name(die))
    if free and min(free.values()) >= need:
        yield Result(True, f"at least {min(free.values()) / 1e9:.1f} GB free, no process", expected)


def _links(node: Node) -> Iterator[Result]:
    smi = read_npu_smi(node)
    if node.machine.output("hccn_tool", "-h") is None:
        raise NotRunError("hccn_tool is not installed", "mount /usr/bin/hccn_tool and the driver from the host")
    fine = without = 0
    for die in smi.dies:
        try:
            faults, has_port = _link_faults(node, die)
        except NotUnderstoodError as error:
            faults, has_port = [Result(False, str(error), name=_die_name(die))], True
        yield from faults
        fine += not faults and has_port
        without += not has_port
    if without:
        text = node.machine.output("npu-smi", "info", "-t", "spod-info", "-i", "0", "-c", "0")
        pod = field_value(text or "", "Super Pod ID")
        found = f"{without} of {len(smi.dies)} dies have no RoCE address: they use HCCS only, within SuperPoD {pod}"
        yield Result(True, found, name="ports", state="note")
    if fine:
        yield Result(True, f"{fine} dies: HCCS {HEALTH_OK}, link UP, net health Success")


def _link_faults(node: Node, die: Die) -> tuple[list[Result], bool]:
    """Return (faults of one die's links, whether its own Ethernet port has an address)."""

    def port(name: str) -> str:
        return node.machine.output("hccn_tool", "-i", f"{die.number}", f"-{name}", "-g") or ""

    faults, lanes = [], ("npu-smi", "info", "-t", "hccs", "-i", f"{die.card}", "-c", f"{die.chip}")
    if (hccs := field_value(node.machine.output(*lanes) or "", "hccs health status")) != HEALTH_OK:
        todo = f"{' '.join(lanes)} prints each lane; leave the node out"
        faults.append(Result(False, f"HCCS is {hccs}", f"HCCS {HEALTH_OK}", todo, _die_name(die)))
    if NO_IP_TEXT in (text := port("ip")):
        return faults, False
    link, health = field_value(port("link"), "link status"), field_value(port("net_health"), "net health status")
    if link != "UP" or health != "Success":
        tool = f"hccn_tool -i {die.number}"
        todo = f"{tool} -link_stat -g; check cable and switch port ({tool} -lldp -g)"
        found = f"port {field_value(text, 'ipaddr')}: link {link}, net health {health}"
        faults.append(Result(False, found, "link UP, net health Success", todo, _die_name(die)))
    return faults, True


NPU_ROWS = (
    NodeCheck("npu health", "every die OK", "npu-smi info -t health -i CARD; dmesg", _health),
    NodeCheck("npu memory", "free memory for the run's modelled peak",
        "npu-smi info names the processes; end them on the host", _memory),
    NodeCheck("npu links", "HCCS OK; a port with an address is UP and healthy",
        "hccn_tool -i DIE -link_stat -g", _links),
)  # fmt: skip
