"""Watch a run from its driver: read the heartbeats of all nodes, and end the run at a stall or a lost node.

The driver only waits for the controller, and never waits for an answer to its calls: a rank, the controller or a node
that does not answer cannot block it. On its own node it reads the files itself, on each other node an actor without
resources reads them.
"""

from __future__ import annotations

import json
import logging
import math
import re
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from verl_patches.errors import RecipeError
from verl_patches.heartbeat import node
from verl_patches.heartbeat.heartbeat import heartbeat_folder
from verl_patches.heartbeat.node import SeenProcess
from verl_patches.launch.supervise.stall import (
    Bounds,
    LostNodeError,
    StallError,
    find_stall,
    start_progress,
    unstarted_ranks_text,
)
from verl_patches.layout.phases import START
from verl_patches.processes import FREE_S
from verl_patches.run.ray_nodes import call_results, error_line, living_nodes, start_on_node

log = logging.getLogger(__name__)
CHECK_EVERY_S, NODES_EVERY_S, SAY_EVERY_S = 2.0, 10.0, 5.0
LOST_S = 60.0  # without an answer a node is lost; Ray's own health check takes about 30 s
AGENT_S = 20.0  # from a failure of a node's agent to the first call of the next one
ASK_S = 20.0  # limit of the calls that ask nodes for stacks, or for their processes or their end when a run ends
RECORD_FILE, STACKS_FOLDER = "watch.json", "stacks"
_RAISING_PROCESS = re.compile(r"\(pid=(\d+), ip=([^,()\s]+)")
# Ascend's Error Code list of PyTorch: ERR**100 is a failed call of ACL, ERR**200 one of HCCL; EI0002 and EI0006 are
# time limits of HCCL, of an operation and of a connection, which torch_npu may report as an error of the device
# (gitcode.com/Ascend/pytorch docs/zh/troubleshooting: ERR-100.md, HCCL_timeout.md; HCCL user guide, EI0006)
_COLLECTIVE_ERROR = re.compile(r"\bEI000[26]\b|\bERR\d\d200\b|HCCL|DistBackendError")
_DEVICE_ERROR = re.compile(r"\bERR\d\d100\b|NPU (?:function )?error\b")


class Watcher:
    """Watch a run of `world` ranks, whose record is in `folder`. say(text): gets the progress of the start."""

    def __init__(self, folder: Path, bounds: Bounds, world: int, say: Callable = lambda text: None):
        import ray

        self._record_folder, self._bounds, self._world = folder, bounds, world
        self._heartbeat_folder, self._own_node = heartbeat_folder(), ray.get_runtime_context().get_node_id()
        self._remote_nodes: dict[str, _RemoteNode] = {}
        self._address = ""  # the address of the driver's node
        self._checked = self._listed = 0.0
        self._say, self._said, self._say_at = say, "", 0.0

    def check(self) -> None:
        """Check the run, at most once in CHECK_EVERY_S; raise a StallError or LostNodeError that names the culprit."""
        now = time.monotonic()
        if now - self._checked < CHECK_EVERY_S:
            return
        self._checked = now
        if now - self._listed >= NODES_EVERY_S:
            self._listed = now
            self._list_nodes()
        for other in self._remote_nodes.values():
            other.poll()
        self._refuse_lost_nodes()
        processes = self.processes()
        text = start_progress(processes, self._world)
        if not text:
            self._say_at = math.inf  # a step has begun, so nothing more is said of the start
        elif text != self._said and now >= self._say_at:
            self._said, self._say_at = text, now + SAY_EVERY_S
            self._say(text)
        stall = find_stall(processes, self._bounds, self._world)
        if stall is not None:
            files = self._write_stacks([*stall.culprits, *stall.waiting])
            text = stall.sentence + (f". Python stacks: {', '.join(files)}" if files else "")
            self._record(stall.culprits, text, files)
            raise StallError(text)

    def processes(self) -> list[SeenProcess]:
        """Return the ranks and the controller, as their nodes saw them last."""
        seen_here = node.read_processes(self._heartbeat_folder, self._own_node)
        seen_here += [seen for other in self._remote_nodes.values() for seen in other.seen]
        return sorted(seen_here, key=node.rank_order)

    def explain_error(self, error: BaseException) -> None:
        """Raise LostNodeError in place of `error`, which ended the run, where a node with ranks is lost.

        The record names processes that have ended, with their nodes, or else the rank that raised an error of its
        device. Ranks that had not started are in the log.
        """
        self._list_nodes()
        self._refuse_lost_nodes(error)
        others = [other for other in self._remote_nodes.values() if not other.lost]
        answers = _collect_answers([other.agent.processes.remote() for other in others])
        for other, answer in zip(others, answers, strict=True):
            other.seen = other.seen if answer is None else answer
        processes = self.processes()
        starting = any(seen.beat.call == START for seen in processes)
        if starting and (late := unstarted_ranks_text(processes, self._world)):
            log.warning("watch: at the failed start: %s", late)
        if gone := [seen for seen in processes if seen.state == "gone"]:
            self._record(gone, f"{', '.join(seen.where for seen in gone)} ended", [])
        elif is_device_error(str(error)) and (raised := self._raising_rank(str(error))):
            self._record([raised], f"{raised.where} raised an error of its device", [])

    def close(self, failed: bool) -> None:
        """Remove the heartbeats on every node; of a run that failed, first kill its remaining processes.

        Then wait until these have freed their dies and pinned memory, which another start needs: at most FREE_S.
        """
        answering = [other for other in self._remote_nodes.values() if not other.is_lost]
        calls, limit_s = [other.agent.close.remote(failed) for other in answering], FREE_S if failed else 0.0
        with suppress(RecipeError):  # of a full disk
            if failed:
                self._say(f"waiting until the run's processes have freed dies and host memory, at most {FREE_S:.0f} s")
        left = node.close(self._heartbeat_folder, failed)
        left += [name for names in _collect_answers(calls, ASK_S + limit_s) for name in names or ()]
        if left:
            log.warning("watch: these processes still hold dies and host memory: %s; look at their nodes", left)

    def _raising_rank(self, text: str) -> SeenProcess | None:
        """Return the rank that raised the error `text`, by the innermost pid and address that Ray writes into it."""
        for pid, address in reversed(_RAISING_PROCESS.findall(text)):
            for seen in self.processes():
                other = self._remote_nodes.get(seen.node)
                at = other.address if other else self._address
                if seen.beat.rank is not None and (seen.beat.pid, at) == (int(pid), address):
                    return seen
        return None

    def _list_nodes(self) -> None:
        import ray

        try:
            alive = {living_node["id"]: living_node["address"] for living_node in living_nodes()}
        except ray.exceptions.RayError as error:  # the head is busy, or gone: then Ray ends the driver
            log.warning("watch: Ray's head does not list its nodes: %s", error)
            return
        self._address = alive.get(self._own_node, self._address)
        for name, address in alive.items():
            if name != self._own_node and name not in self._remote_nodes:
                self._remote_nodes[name] = _RemoteNode(name, address)
        for name, other in self._remote_nodes.items():
            other.lost = name not in alive

    def _refuse_lost_nodes(self, error: BaseException | None = None) -> None:
        for other in (each for each in self._remote_nodes.values() if each.seen and each.is_lost):
            how = "Ray's head has lost it" if other.lost else f"no answer for {other.unanswered_s():.0f} s"
            ranks = ", ".join(seen.beat.name for seen in other.seen)
            place = next((seen.beat.place for seen in other.seen if seen.beat.place), "no call")
            text = f"node {other.address} with {ranks} is lost: {how}; its ranks were last seen in {place}"
            self._record(other.seen, text, [])
            raise LostNodeError(text) from error

    def _write_stacks(self, asked: Sequence[SeenProcess]) -> list[str]:
        """Return the files of these processes' Python stacks, below the run's folder."""
        names = [seen.beat.name for seen in asked]
        nodes = {seen.node for seen in asked}
        calls = [other.agent.stacks.remote(names) for name, other in self._remote_nodes.items() if name in nodes]
        stacks = node.stacks(self._heartbeat_folder, names) if self._own_node in nodes else {}
        for answer in _collect_answers(calls):
            stacks |= answer or {}
        files = []
        for name in (name for name in names if name in stacks):
            file = self._record_folder / STACKS_FOLDER / f"{name.replace(' ', '_')}.txt"
            if _write_file(file, stacks[name]):
                files.append(str(file))
        return files

    def _record(self, culprits: Sequence[SeenProcess], sentence: str, files: Sequence[str]) -> None:
        entries = [
            {"name": seen.beat.name, "pid": seen.beat.pid, "host": seen.host, "node": seen.node} for seen in culprits
        ]
        record: dict[str, Any] = {"sentence": sentence, "culprits": entries, "stacks": list(files)}
        record["watched_on"] = socket.gethostname()
        _write_file(self._record_folder / RECORD_FILE, json.dumps(record, indent=1) + "\n")


def _write_file(file: Path, text: str) -> bool:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    except OSError as error:
        log.warning("watch: %s cannot be written: %s", file, error.strerror)
        return False
    return True


def is_collective_error(text: str) -> bool:
    """Return whether an error is one of a collective, which the rank that raised it need not have caused."""
    return _COLLECTIVE_ERROR.search(text) is not None


def is_device_error(text: str) -> bool:
    """Return whether an error is one of a device, and not of a collective."""
    return _DEVICE_ERROR.search(text) is not None and not is_collective_error(text)


class _RemoteNode:
    """Hold a node other than the driver's: its agent, and the agent's last answer."""

    def __init__(self, name: str, address: str):
        self.name, self.address, self.lost, self.seen = name, address, False, list[SeenProcess]()
        self.agent, self._call, self._answered = start_on_node(node.NodeAgent, name), None, time.monotonic()
        self._next_call = 0.0

    def poll(self) -> None:
        """Take the answer of the last call if it has arrived, and call again."""
        import ray

        if time.monotonic() < self._next_call:
            return
        if self._call is not None:
            if not ray.wait([self._call], timeout=0)[0]:
                return
            try:
                self.seen, self._answered = ray.get(self._call), time.monotonic()
            except ray.exceptions.RayError as error:  # the agent is gone: start another, until the node is lost
                log.warning("watch: no answer from node %s: %s", self.address, error_line(error))
                self.agent, self._next_call = start_on_node(node.NodeAgent, self.name), time.monotonic() + AGENT_S
                self._call = None
                return
        self._call = self.agent.processes.remote()

    @property
    def is_lost(self) -> bool:
        """Return whether Ray has lost the node, or its agent has not answered for LOST_S."""
        return self.lost or self.unanswered_s() > LOST_S

    def unanswered_s(self) -> float:
        """Return the seconds since the last answer."""
        return time.monotonic() - self._answered


def _collect_answers(calls: Sequence[Any], limit_s: float = ASK_S) -> list[Any]:
    """Return the result of each call, None for a call that failed or has not ended within `limit_s`."""
    answers = call_results(calls, limit_s)
    for error in answers:
        if isinstance(error, Exception):
            log.warning("watch: a node did not answer: %s", error_line(error))
    return [None if isinstance(answer, Exception) else answer for answer in answers]
