"""`doctor`: every check of this node, and of all nodes of a running Ray with a comparison between them.

There is one way to look at other nodes: ray_nodes.py runs `doctor --this-node --json` on each. A node's report
is findings (node_checks.py, npu_checks.py) and `facts`, which the rows of ACROSS compare.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from importlib import metadata
from statistics import median_high
from typing import Any

import psutil
from omegaconf import OmegaConf

from verl_patches.config.environment import REPOSITORY
from verl_patches.doctor import npu_checks
from verl_patches.doctor.node_checks import (
    HOST_ROWS,
    PROBE_MIB,
    PROBE_REPEAT,
    PROBE_S,
    Node,
    NodeCheck,
    NotRunError,
    Result,
    check_node,
    speed,
)
from verl_patches.errors import ConfigError, fault_of
from verl_patches.launch import ray_cluster
from verl_patches.patching.engine import Engine
from verl_patches.patching.report import Finding, Report
from verl_patches.upstream import versions

COMMAND = "doctor"
NODE_ROWS = (*HOST_ROWS, *npu_checks.NPU_ROWS)
NODE_S = 600  # of a node's own checks: 16 dies x 5 calls of npu-smi and hccn_tool, and reading every file's header
CLOCK_S = 1.0  # Ray's heartbeats and the time stamps of logs of several nodes
_SOFTWARE = ("driver", "cann_toolkit", "cann_kernels", "cann_nnal")
_SHOWN, _DIGITS = 5, 16


# one node


def facts_of(node: Node) -> dict[str, Any]:
    """What other nodes are compared with: plain data."""
    return {
        "host": socket.gethostname(),
        "digest": Engine(tuple(node.rows), node.run.process_switches).digest(),
        "code": _code(),
        "config": hashlib.sha256(OmegaConf.to_yaml(node.run.verl).encode()).hexdigest()[:16],
        "image": _image(),
        "software": _software(node),
        "interface": _interface(node),
        "super_pod": npu_checks.super_pod_of(node),
        "hccs_only": npu_checks.hccs_only(node),
    }


def _code() -> str:
    """Hash of this project's own files that a run reads."""
    digest = hashlib.sha256()
    files = [file for pattern in ("verl_patches/**/*.py", "configs/**/*.yaml") for file in REPOSITORY.glob(pattern)]
    for file in sorted(files):
        digest.update(f"{file.relative_to(REPOSITORY)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _image() -> dict[str, str]:
    """{distribution or part of the system: version}. A container cannot read its image's name."""
    packages = {d.metadata["Name"]: d.version for d in metadata.distributions() if d.metadata["Name"]}
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        name = "unknown"
    return {**packages, "Python": platform.python_version(), "operating system": name, "machine": platform.machine()}


def _software(node: Node) -> dict[str, str]:
    """Versions of Ascend software below Python, as `versions` finds them."""
    if not node.npu:
        return {}
    report = versions.compare(node.run.recipe.line, node.machine, trees=node.run.trees)
    software = {f.name: f.found for f in report.findings if f.name in _SOFTWARE}
    return {**software, "firmware": npu_checks.firmware_of(node) or "unknown"}


def _interface(node: Node) -> dict[str, Any] | None:
    if fault_of(lambda: node.interface) or node.interface is None:
        return None
    name, state = node.interface[0], psutil.net_if_stats().get(node.interface[0])
    addresses = [a.address for a in psutil.net_if_addrs().get(name, ()) if a.family == socket.AF_INET]
    return {"name": name, "address": addresses[0] if addresses else None, "mtu": state.mtu if state else None}


def this_node(node: Node) -> dict[str, Any]:
    """The report of this node alone: {command, line, state, counts, rows, nodes: [{address, facts}]}."""
    facts = facts_of(node)
    return _as_report(node, check_node(node, NODE_ROWS), {facts["host"]: facts})


def _as_report(node: Node, findings: Iterable[Finding], facts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    report = Report(COMMAND, node.run.recipe.line, tuple(findings))
    return {**report.as_dict(), "nodes": [{"address": place, "facts": known} for place, known in facts.items()]}


# all nodes


@dataclass(frozen=True)
class Nodes:
    """The nodes of a running Ray, as ray_nodes.py answered; `fault` is set where no Ray did."""

    node: Node
    nodes: Sequence[Mapping[str, Any]] = ()
    probes: Mapping[str, Mapping[str, Any]] | None = None
    fault: str = ""

    def require_ray(self) -> None:
        """NotRunError where no Ray answered."""
        if self.fault:
            raise NotRunError(self.fault, "start Ray on the nodes, with the commands that train --dry-run prints")

    def require_reports(self) -> None:
        """NotRunError where no node reported."""
        self.require_ray()
        if not self.reports:
            raise NotRunError("no node gave a report")

    @cached_property
    def reports(self) -> dict[str, dict[str, Any]]:
        """{place of a node: its report} of those that answered with one."""
        reports = {}
        for number, node in enumerate(self.nodes):
            if (report := _report(node.get("answer"))) is not None:
                reports[self.place(number)] = report
        return reports

    def place(self, number: int) -> str:
        """The node's address, with Ray's id where two nodes have the same."""
        node = self.nodes[number]
        same = [other for other in self.nodes if other["address"] == node["address"]]
        return node["address"] + (f" ({node['id'][:8]})" if len(same) > 1 else "")

    @property
    def facts(self) -> dict[str, dict[str, Any]]:
        """{place: facts} of the nodes that reported."""
        return {place: report["nodes"][0]["facts"] for place, report in self.reports.items()}

    def fact(self, name: str) -> dict[str, Any]:
        """{place: a fact} of the nodes that reported."""
        return {place: facts.get(name) for place, facts in self.facts.items()}


def _report(answer: Mapping[str, Any] | None) -> dict[str, Any] | None:
    try:
        report = json.loads((answer or {})["output"])
        return report if report["rows"] and report["nodes"][0]["facts"] else None
    except (ValueError, LookupError, TypeError):
        return None


def ask(node: Node, words: Sequence[str]) -> Nodes:
    """All nodes' reports through the Ray of recipe.ray_address; `words`: the arguments of this command."""
    settings = {"mib": PROBE_MIB, "repeat": PROBE_REPEAT, "limit_s": PROBE_S}
    probes = {"gloo": {"backend": "gloo", "local": 1, **settings}}
    if node.npu:
        probes["hccl"] = {"backend": "hccl", "local": node.dies, **settings}
    command = ["-m", "verl_patches", COMMAND, *words, "--this-node", "--json"]
    request = {"address": node.run.recipe.ray_address, "command": command, "limit_s": NODE_S, "probes": probes}
    request["cwd"] = os.getcwd()  # relative folders of the config
    try:
        answer = ray_cluster.ask_nodes(request, ray_cluster.ANSWER_S + NODE_S + 2 * PROBE_S)
    except ConfigError as error:
        return Nodes(node, fault=str(error))
    return Nodes(node, answer["nodes"], answer["probes"])


def _deviating(values: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """(the value that most nodes have, {place: value} of the others); values as text."""
    texts = {place: str(value) for place, value in values.items()}
    usual = Counter(texts.values()).most_common(1)[0][0]
    return usual, {place: text for place, text in texts.items() if text != usual}


def _equal(name: str) -> Any:
    """A check that all nodes have the same fact `name`."""

    def compare(nodes: Nodes) -> Iterator[Result]:
        nodes.require_reports()
        usual, others = _deviating(nodes.fact(name))
        for place, text in others.items():
            yield Result(False, text[:_DIGITS], usual[:_DIGITS], where=place)
        if not others:
            yield Result(True, f"{usual[:_DIGITS]} on {len(nodes.reports)} nodes")

    return compare


def _equal_parts(name: str) -> Any:
    """A check that all nodes have the same fact `name`, a mapping: each part that differs is named."""

    def compare(nodes: Nodes) -> Iterator[Result]:
        nodes.require_reports()
        facts = {place: fact or {} for place, fact in nodes.fact(name).items()}
        keys = sorted({key for fact in facts.values() for key in fact})
        differing: dict[str, list[tuple[str, str, str]]] = {}
        for key in keys:
            usual, others = _deviating({place: fact.get(key, "absent") for place, fact in facts.items()})
            for place, text in others.items():
                differing.setdefault(place, []).append((key, text, usual))
        for place, parts in differing.items():
            texts = [f"{key} {text}, others {usual}" for key, text, usual in parts]
            more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
            yield Result(False, "; ".join(texts[:_SHOWN]) + more, where=place, details=tuple(texts[_SHOWN:]))
        if not keys:
            yield Result(None, f"nothing to compare: recipe.platform is {nodes.node.run.recipe.platform}")
        elif not differing:
            yield Result(True, f"{len(keys)} versions equal on {len(facts)} nodes")

    return compare


def _number(nodes: Nodes) -> Iterator[Result]:
    nodes.require_ray()
    fault = fault_of(ray_cluster.check_nodes, nodes.node.run, nodes.nodes)
    yield Result(fault is None, fault or f"{len(nodes.nodes)} nodes")


def _answers(nodes: Nodes) -> Iterator[Result]:
    nodes.require_ray()
    for number, node in enumerate(nodes.nodes):
        place, answer = nodes.place(number), node.get("answer")
        if place not in nodes.reports:
            lines = (answer or {}).get("error", "").strip().splitlines() or ["no message"]
            found = f"no answer within {NODE_S} s" if answer is None else f"exit code {answer['code']}: {lines[-1]}"
            yield Result(False, found, where=place)
    if len(nodes.reports) == len(nodes.nodes):
        yield Result(True, f"{len(nodes.reports)} reports")


def _clocks(nodes: Nodes) -> Iterator[Result]:
    nodes.require_reports()
    clocks = {nodes.place(number): node["clock"] for number, node in enumerate(nodes.nodes)}
    middle = median_high([clock["ahead_s"] for clock in clocks.values() if clock] or [0.0])
    worst = 0.0
    for place in nodes.reports:
        clock = clocks[place]
        if clock is None:
            yield Result(False, "no answer about the time", where=place)
            continue
        ahead = clock["ahead_s"] - middle
        worst = max(worst, abs(ahead))
        if abs(ahead) > CLOCK_S:
            side = "ahead of" if ahead > 0 else "behind"
            yield Result(False, f"{abs(ahead):.1f} s {side} most nodes (within {clock['within_s']:.3f} s)", where=place)
    if worst <= CLOCK_S and any(clocks.values()):
        yield Result(True, f"at most {worst:.3f} s apart")


def _network(nodes: Nodes) -> Iterator[Result]:
    nodes.require_reports()
    faults = 0
    facts = nodes.fact("interface")
    shared = Counter(fact["address"] for fact in facts.values() if fact)
    for place, fact in facts.items():
        fault = None
        if fact is None or fact["address"] is None:
            fault = "no interface with an IPv4 address"
        elif nodes.node.nodes > 1 and fact["address"].startswith("127."):
            fault = f"{fact['name']} is the loopback, {fact['address']}"
        elif shared[fact["address"]] > 1:
            fault = f"{fact['name']} has {fact['address']}, as another node has"
        if fault:
            faults += 1
            yield Result(False, fault, "an address that the other nodes reach", where=place)
    sizes = {place: str(fact["mtu"]) for place, fact in facts.items() if fact}
    if not sizes:
        return
    usual, others = _deviating(sizes)
    for place, mtu in others.items():
        todo = f"ip link set {facts[place]['name']} mtu {usual}"
        yield Result(False, f"{facts[place]['name']} has MTU {mtu}", f"MTU {usual}, as most nodes", todo, where=place)
    if not faults and not others:
        names = sorted({fact["name"] for fact in facts.values()})
        yield Result(True, f"{', '.join(names)} on {len(facts)} nodes, MTU {usual}")


def _super_pod(nodes: Nodes) -> Iterator[Result]:
    npu_checks.require_npu(nodes.node)
    nodes.require_reports()
    pods, only = nodes.fact("super_pod"), nodes.fact("hccs_only")
    if unknown := [place for place, pod in pods.items() if pod is None and only[place]]:
        yield Result(False, "npu-smi names no SuperPoD, and the dies have no address of their own", where=unknown[0])
        return
    fits = len(set(pods.values())) == 1 or not any(only.values())
    yield Result(fits, ", ".join(f"{place}: {pod}" for place, pod in pods.items()))


def _probed(name: str) -> Any:
    """A check of the all-reduce `name` over all nodes."""

    def compare(nodes: Nodes) -> Iterator[Result]:
        if name == "hccl":
            npu_checks.require_npu(nodes.node)
        nodes.require_reports()
        result = (nodes.probes or {}).get(name)
        if result is None:
            yield Result(None, "no answer to the probe")
        elif "error" in result:
            yield Result(False, result["error"])
        else:
            yield Result(True, speed(result["measured"], f"{result['world']} ranks, {PROBE_MIB} MiB"))

    return compare


ACROSS = (
    NodeCheck("nodes", "Ray's nodes and their resources", "trainer.nnodes with trainer.n_gpus_per_node each",
        "train --dry-run prints the ray commands", _number),
    NodeCheck("reports", "`doctor --this-node` on each node", "a report of every node",
        "run it on that node: python -m verl_patches doctor CONFIG --this-node", _answers),
    NodeCheck("digest", "python -m verl_patches digest", "the same patches on every node",
        "copy this checkout to that node; python -m verl_patches digest --json shows every row", _equal("digest")),
    NodeCheck("checkout", "hash of verl_patches/ and configs/", "the same checkout on every node",
        "rsync -a --delete verl_patches configs NODE:CHECKOUT", _equal("code")),
    NodeCheck("config", "hash of the composed config", "the same config on every node",
        "python -m verl_patches config --config-name CONFIG on both, and diff", _equal("config")),
    NodeCheck("image", "versions of all Python packages, Python, operating system", "the same on every node",
        "start the container of that node from the same image: docker images --digests deepseekv3-a3",
        _equal_parts("image")),
    NodeCheck("software", "driver, firmware, CANN", "the same on every node",
        "python -m verl_patches versions on that node; install the pinned release", _equal_parts("software")),
    NodeCheck("clocks", "the node's clock against this node's, corrected by the way there and back",
        f"at most {CLOCK_S:g} s from most nodes", "chronyc makestep, or systemctl restart chronyd", _clocks),
    NodeCheck("network", "address and MTU of the interface", "an own address each, one MTU",
        "ip -brief address; recipe.hccl.interface, or the _SOCKET_IFNAME variables of that node", _network),
    NodeCheck("SuperPoD", "npu-smi info -t spod-info", "one SuperPoD where ports have no address",
        "give the dies' ports addresses (hccn_tool -i DIE -ip -s), or take nodes of one SuperPoD", _super_pod),
    NodeCheck("gloo, all nodes", "an all-reduce of one process a node", "the right sum",
        "ping and nc between the nodes' addresses; open the firewall between them", _probed("gloo")),
    NodeCheck("hccl, all nodes", "an all-reduce over all dies of all nodes", "the right sum",
        "ls ~/ascend/log/debug/plog: HCCL's errors", _probed("hccl")),
)  # fmt: skip


def compare_nodes(nodes: Nodes) -> list[Finding]:
    """The findings of the rows that compare nodes."""
    return [finding for row in ACROSS for finding in row.findings(nodes, npu=nodes.node.npu)]


def all_nodes(nodes: Nodes) -> dict[str, Any]:
    """The report of all nodes, as `this_node`: equal findings of nodes are one row, whose place names the nodes.

    Where no node reported, it has the findings of this one.
    """
    if nodes.reports:
        return _as_report(nodes.node, [*compare_nodes(nodes), *_joined(nodes.reports)], nodes.facts)
    alone = this_node(nodes.node)
    findings = [*compare_nodes(nodes), *report_of(alone).findings]
    return _as_report(nodes.node, findings, {one["address"]: one["facts"] for one in alone["nodes"]})


def _joined(reports: Mapping[str, Mapping[str, Any]]) -> Iterable[Finding]:
    """The findings of all nodes in order, equal ones once: "all N nodes" or the nodes' names before the place."""
    places: dict[Finding, list[str]] = {}
    for place, report in reports.items():
        for row in report["rows"]:
            places.setdefault(_finding(row), []).append(place)
    order = {row.name: number for number, row in enumerate(NODE_ROWS)}  # a node with another checkout may have others
    ordered = sorted(places.items(), key=lambda entry: order.get(entry[0].name.partition(":")[0], len(order)))
    for finding, named in ordered:
        text = f"all {len(named)} nodes" if len(named) == len(reports) else ", ".join(named)
        yield replace(finding, where=f"{text}: {finding.where}" if finding.where else text)


def report_of(found: Mapping[str, Any]) -> Report:
    """The Report of `this_node` or `all_nodes`, for the table and the exit code."""
    return Report(found["command"], found["line"], tuple(map(_finding, found["rows"])))


def _finding(row: Mapping[str, Any]) -> Finding:
    """A row of a report as plain data; fields that this checkout does not know are left out."""
    known = {each.name for each in fields(Finding)}
    return Finding(**{name: value for name, value in row.items() if name in known} | {"details": tuple(row["details"])})
