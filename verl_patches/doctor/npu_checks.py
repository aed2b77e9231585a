"""What `doctor` checks of a node's dies, by npu-smi and hccn_tool. The tools only read; nothing is reset or set.

The dies of one SuperPoD exchange over HCCS, within a node and between nodes. Their own Ethernet ports (RoCE) are used
between SuperPoDs, and need an address only then (CANN's rank table reference, `device_ip`): a port without an address
is a note while HCCS is healthy, and doctor/doctor.py asks that all such nodes are of one SuperPoD.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

from verl_patches.doctor.node_checks import (
    PROBE_MIB,
    Node,
    NodeCheck,
    NotRunError,
    Result,
    probe,
    probe_settings,
    speed,
)
from verl_patches.planning.plan import peak_bytes
from verl_patches.platform.npu import NOT_SET_BY_RAY, VISIBLE
from verl_patches.platform.npu.npu_tools import HEALTHY, NO_IP, Die, NotUnderstoodError, NpuSmi, field, parse_npu_smi

MIB = 1 << 20
_BOARD = ("Compatibility", "Software Version", "Firmware Version")
_MOUNTED = "mount it from the host, as scripts/start_container.sh does for npu-smi"


def require_npu(node: Node) -> None:
    """NotRunError where the run is for another platform."""
    if not node.npu:
        raise NotRunError(f"no NPU here: recipe.platform is {node.run.recipe.platform}")


def smi_of(node: Node) -> NpuSmi:
    """The table of npu-smi on this node; NotRunError without one."""
    require_npu(node)
    if node.npu_smi is None:
        raise NotRunError("npu-smi is not installed", _MOUNTED)
    return parse_npu_smi(node.npu_smi)


def _health(node: Node) -> Iterator[Result]:
    smi = smi_of(node)
    enough = len(smi.dies) >= node.dies
    yield Result(enough, f"{len(smi.dies)} dies", f"at least {node.dies} (trainer.n_gpus_per_node)", name="dies")
    for die in smi.dies:
        if die.health != HEALTHY:
            todo = f"npu-smi info -t health -i {die.card} -c {die.chip} prints the error code; leave the node out"
            yield Result(False, die.health, HEALTHY, todo, _name(die))
    if all(die.health == HEALTHY for die in smi.dies):
        yield Result(True, f"{len(smi.dies)} dies are {HEALTHY}")


def _name(die: Die) -> str:
    return f"die {die.number} (card {die.card}, chip {die.chip})"


def _memory(node: Node) -> Iterator[Result]:
    smi = smi_of(node)
    need = peak_bytes(node.run)
    for process in smi.processes:
        found = f"process {process.pid} ({process.name}) holds {process.memory_mb} MB"
        name = f"card {process.card}, chip {process.chip}"
        yield Result(False, found, "no process", f"end it on the host: kill {process.pid}", name)
    least = None
    for die in smi.dies:
        if die.total_mb is None or die.used_mb is None:
            yield Result(False, "not understood: npu-smi prints no figures", name=_name(die))
            continue
        free = (die.total_mb - die.used_mb) * MIB
        least = free if least is None else min(least, free)
        if free < need:
            expected = f"{need / 1e9:.1f} GB free (modelled peak)"
            yield Result(
                False, f"{free / 1e9:.1f} GB free of {die.total_mb * MIB / 1e9:.1f}", expected, name=_name(die)
            )
    if least is not None and least >= need:
        yield Result(True, f"at least {least / 1e9:.1f} GB free, no process", f"{need / 1e9:.1f} GB (modelled peak)")


def _board(node: Node) -> Iterator[Result]:
    smi = smi_of(node)
    releases = set()
    for card in sorted({die.card for die in smi.dies}):
        text = node.machine.output("npu-smi", "info", "-t", "board", "-i", str(card)) or ""
        fits, driver, firmware = (field(text, name) for name in _BOARD)
        releases.add((fits, f"driver {driver}, firmware {firmware}"))
        if fits != HEALTHY:
            yield Result(False, f"{fits}: driver {driver}, firmware {firmware}", HEALTHY, name=f"card {card}")
    texts = sorted(text for _, text in releases)
    yield Result(len(texts) == 1, "; ".join(texts), "one driver and one firmware on all cards", name="all cards")


def _answer(node: Node, *command: str) -> str:
    """What a tool prints; empty without NPUs, and where it does not run or end, which a row says."""
    try:
        return (node.machine.output(*command) or "") if node.npu else ""
    except (OSError, subprocess.SubprocessError):
        return ""


def _field_of(text: str, name: str) -> str | None:
    try:
        return field(text, name)
    except NotUnderstoodError:
        return None


def firmware_of(node: Node) -> str | None:
    """The firmware of the first card, for the comparison of nodes; None without NPUs or an answer."""
    return _field_of(_answer(node, "npu-smi", "info", "-t", "board", "-i", "0"), "Firmware Version")


def super_pod_of(node: Node) -> str | None:
    """The SuperPoD of the node's first die; None without NPUs or an answer."""
    return _field_of(_answer(node, "npu-smi", "info", "-t", "spod-info", "-i", "0", "-c", "0"), "Super Pod ID")


def _links(node: Node) -> Iterator[Result]:
    smi = smi_of(node)
    if node.machine.output("hccn_tool", "-h") is None:
        raise NotRunError("hccn_tool is not installed", "mount /usr/bin/hccn_tool and the driver from the host")
    fine = without = 0
    for die in smi.dies:
        try:
            faults, has_port = _link_faults(node, die)
        except NotUnderstoodError as error:
            faults, has_port = [Result(False, f"not understood: {error}", name=_name(die))], True
        yield from faults
        fine += not faults and has_port
        without += not has_port
    if without:
        found = f"{without} of {len(smi.dies)} dies have no address of their own: HCCS only, within one SuperPoD"
        yield Result(True, found, name="ports", state="note")
    if fine:
        yield Result(True, f"{fine} dies: HCCS {HEALTHY}, link UP, net health Success")


def _link_faults(node: Node, die: Die) -> tuple[list[Result], bool]:
    """(what is wrong with the links of one die, whether its own port has an address)."""
    faults = []
    lanes = node.machine.output("npu-smi", "info", "-t", "hccs", "-i", f"{die.card}", "-c", f"{die.chip}")
    hccs = field(lanes or "", "hccs health status")
    if hccs != HEALTHY:
        todo = f"npu-smi info -t hccs -i {die.card} -c {die.chip} prints each lane; leave the node out"
        faults.append(Result(False, f"HCCS is {hccs}", f"HCCS {HEALTHY}", todo, _name(die)))
    text = _of_port(node, die, "ip")
    if NO_IP in text:
        return faults, False
    address, link = field(text, "ipaddr"), field(_of_port(node, die, "link"), "link status")
    health = field(_of_port(node, die, "net_health"), "net health status")
    if link != "UP" or health != "Success":
        todo = (
            f"hccn_tool -i {die.number} -link_stat -g; check cable and switch port (hccn_tool -i {die.number} -lldp -g)"
        )
        found = f"port {address}: link {link}, net health {health}"
        faults.append(Result(False, found, "link UP, net health Success", todo, _name(die)))
    return faults, True


def _of_port(node: Node, die: Die, name: str) -> str:
    """The output of hccn_tool about the port of a die."""
    return node.machine.output("hccn_tool", "-i", f"{die.number}", f"-{name}", "-g") or ""


def hccs_only(node: Node) -> bool:
    """Whether the port of the first die has no address, so that the node reaches others over HCCS only."""
    return NO_IP in _answer(node, "hccn_tool", "-i", "0", "-ip", "-g")


def _binding(node: Node) -> Iterator[Result]:
    require_npu(node)
    devices = {file.name for file in node.machine.devices.glob("davinci[0-9]*")}
    missing = [f"davinci{n}" for n in range(node.dies) if f"davinci{n}" not in devices]
    found = f"no {', '.join(missing)}" if missing else f"{len(devices)} devices"
    yield Result(not missing, found, f"{node.machine.devices}/davinci0 to {node.dies - 1}", name="devices")
    visible = node.machine.environ.get(VISIBLE)
    fits = visible is None or len({*filter(None, visible.split(","))}) >= node.dies
    text = "unset" if visible is None else repr(visible)
    yield Result(fits, text, f"unset, or {node.dies} dies", f"unset {VISIBLE} where Ray is started", VISIBLE)
    value = node.machine.environ.get(NOT_SET_BY_RAY)
    yield Result(not value, value or "unset", "unset", f"unset {NOT_SET_BY_RAY} where Ray is started", NOT_SET_BY_RAY)


def _hccl(node: Node) -> Iterator[Result]:
    smi = smi_of(node)
    if smi.processes:
        raise NotRunError(f"{len(smi.processes)} processes use the dies", "end them (row npu memory)")
    name = node.interface[0] if node.interface else None
    measured = probe(probe_settings("hccl", node.dies, name), node.machine.environ)
    yield Result(True, speed(measured, f"{node.dies} dies, {PROBE_MIB} MiB"))


NPU_ROWS = (
    NodeCheck("npu health", "npu-smi info", "every die OK", "npu-smi info -t health -i CARD; dmesg", _health),
    NodeCheck("npu memory", "npu-smi info, memory and processes of each die", "free for the run's modelled peak",
        "npu-smi info names the processes; end them on the host", _memory),
    NodeCheck("npu firmware", "npu-smi info -t board -i CARD", "Compatibility OK",
        "install driver and firmware of one release, then reboot the host", _board),
    NodeCheck("npu links", "npu-smi info -t hccs; hccn_tool -ip, -link, -net_health of each die",
        "HCCS OK; a port with an address is UP and healthy", "hccn_tool -i DIE -link_stat -g", _links),
    NodeCheck("npu binding", "/dev/davinci*, ASCEND_RT_VISIBLE_DEVICES", "Ray can give every die to a worker",
        "bash scripts/start_container.sh names every device", _binding),
    NodeCheck("hccl", "an all-reduce over the node's dies, when no process uses them", "the right sum",
        "ls ~/ascend/log/debug/plog: HCCL's errors", _hccl),
)  # fmt: skip
