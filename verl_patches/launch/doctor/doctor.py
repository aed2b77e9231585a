"""Run `doctor`: the checks of this node; or those of each node of a running Ray, and those that need several nodes.

All nodes are examined in the same way: ray_nodes.py runs `doctor --this-node --json` on each. Equal findings of several
nodes become one row, so that a node that differs has its own row.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median_high
from typing import Any

from verl_patches.errors import ConfigError, config_error_text, our_command
from verl_patches.launch import ray_cluster
from verl_patches.launch.doctor import npu_checks
from verl_patches.launch.doctor.node_checks import HOST_ROWS, Node, NodeCheck, NotRunError, Result
from verl_patches.patching.report import Finding, Report
from verl_patches.run.ray_nodes import read_report

COMMAND = "doctor"
NODE_ROWS = (*HOST_ROWS, *npu_checks.NPU_ROWS)
NODE_S = 600  # limit for all checks of a node
_FINDING_KEYS = ("name", "state", "where", "expected", "found", "todo")  # keys of a finding in a node's report
CLOCK_S = 1.0  # tolerated difference of clocks: times of Ray's heartbeats and of logs are compared between nodes


def check_this_node(node: Node) -> Report:
    """Make the checks of this node alone."""
    findings = tuple(finding for row in NODE_ROWS for finding in row.findings(node, npu=node.npu))
    return Report(COMMAND, node.run.line, findings)


def check_all_nodes(node: Node, words: Sequence[str]) -> Report:
    """Make the checks of all nodes through the Ray of recipe.ray_address; words: the arguments of this command.

    If no Ray answers, that is reported as a problem and only this node is checked.
    """
    command = ["-m", "verl_patches", COMMAND, *words, "--this-node", "--json"]
    request = {"address": node.run.recipe.ray_address, "command": command, "limit_s": NODE_S}
    request["cwd"] = os.getcwd()  # folders in the config may be relative
    try:
        answer = ray_cluster.ask_nodes(request, ray_cluster.ANSWER_S + NODE_S)
    except ConfigError as fault:
        report, row = check_this_node(node), ALL_ROWS[0]
        missing = Finding(row.name, "problem", "", row.expected, str(fault), row.todo)
        return replace(report, findings=(missing, *report.findings))
    return check_answer(node, answer)


def check_answer(node: Node, answer: Mapping[str, Any]) -> Report:
    """Make the checks of ALL_ROWS on the answer of ray_nodes.py, and join equal findings of several nodes to one."""
    findings = [finding for row in ALL_ROWS for finding in row.findings(node, answer, npu=node.npu)]
    reports = {one["address"]: _node_findings(one) for one in answer["nodes"]}
    joined = _join_findings({place: found for place, found in reports.items() if found is not None})
    return Report(COMMAND, node.run.line, (*findings, *joined))


def _node_findings(node: Mapping[str, Any]) -> list[Finding] | None:
    """Return the findings of a node; None where it gave no report of this checkout."""
    try:
        report = read_report((node["answer"] or {"output": ""})["output"])
        return [Finding(*map(row.__getitem__, _FINDING_KEYS)) for row in report["rows"]]
    except (ValueError, LookupError, TypeError):
        return None


def _join_findings(reports: Mapping[str, Sequence[Finding]]) -> Iterator[Finding]:
    """Yield the findings of all nodes in order; their places are "all N nodes" or the nodes' addresses."""
    places: dict[Finding, list[str]] = {}
    for place, findings in reports.items():
        for finding in findings:
            places.setdefault(finding, []).append(place)
    order = {row.name: number for number, row in enumerate(NODE_ROWS)}  # another checkout may have other rows
    ordered = sorted(places.items(), key=lambda entry: order.get(entry[0].name.partition(":")[0], len(order)))
    for finding, named in ordered:
        text = f"all {len(named)} nodes" if len(named) == len(reports) else ", ".join(named)
        yield replace(finding, where=f"{text}: {finding.where}" if finding.where else text)


def _node_count(node: Node, answer: Mapping[str, Any]) -> Iterator[Result]:
    fault = config_error_text(ray_cluster.check_nodes, node.run, answer["nodes"])
    yield Result(fault is None, fault or f"{len(answer['nodes'])} nodes")
    for one in answer["nodes"]:
        if _node_findings(one) is None:
            given = one["answer"] or {"code": "none", "error": f"no answer within {NODE_S} s"}
            lines = given["error"].strip().splitlines() or ["its output is not a report of this version of doctor"]
            todo = f"run it on that node: {our_command('doctor', 'CONFIG', '--this-node')}"
            yield Result(
                False, f"exit code {given['code']}: {lines[-1]}", "a report of doctor", todo, "report", one["address"]
            )


def _clocks(node: Node, answer: Mapping[str, Any]) -> Iterator[Result]:
    clocks = {one["address"]: one["clock"] for one in answer["nodes"] if one["clock"]}
    if not clocks:
        raise NotRunError("no node returned its clock")
    middle = median_high(clock["ahead_s"] for clock in clocks.values())
    apart = {address: clock["ahead_s"] - middle for address, clock in clocks.items()}
    for address, ahead in apart.items():
        if abs(ahead) > CLOCK_S:
            found = f"{abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} most nodes"
            yield Result(False, f"{found} (measured to {clocks[address]['within_s']:.3f} s)", where=address)
    if (worst := max(map(abs, apart.values()))) <= CLOCK_S:
        yield Result(True, f"at most {worst:.3f} s apart")


ALL_ROWS = (
    NodeCheck("nodes", "trainer.nnodes with trainer.n_gpus_per_node",
        f"start the missing nodes: {our_command('plan', 'CONFIG')} prints the commands", _node_count),
    NodeCheck("clocks", f"at most {CLOCK_S:g} s from most nodes",
        "chronyc makestep, or systemctl restart chronyd", _clocks),
)  # fmt: skip
