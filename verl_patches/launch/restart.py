"""Starting a run's driver again after a failure that another try may survive (recipe.restart).

Each try goes on from the newest checkpoint (config/run_start.py). Here: which failures are
worth a try, what is left out of it, where the files of a failed one go (attempts/N in the run's folder), and the reason
and culprits of each.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from verl_patches.config.files import steps_of
from verl_patches.config.resolve import changed
from verl_patches.config.run_start import checkpoints_of, started
from verl_patches.errors import ConfigError
from verl_patches.evaluation.record import read_doing, read_object
from verl_patches.launch.ray_cluster import list_nodes, nodes_with_devices
from verl_patches.launch.run_folder import carry_on
from verl_patches.spec import RunSpec, Start
from verl_patches.trainer.record import run_id
from verl_patches.watch.watcher import COLLECTIVE, RECORD, STACKS, fault_in
from verl_patches.weights.checkpoint_folders import saved_in

ATTEMPTS = "attempts"
# written by one try and moved when the next begins; progress.log, rollouts, tensorboard and checkpoints are of the run
OF_A_TRY = ("driver.log", "now.json", "summary.json", "metrics.jsonl", "ray_logs", RECORD, STACKS)
_NO_USE = re.compile(
    r"^interrupted by|^still running after"
    r"|(?:^|[\s.])(?:ConfigError|PatchError|WeightSyncError|SkippedStepsError|AlarmError|CheckpointError)\b"
)
_OF_USE = re.compile(
    r"\b(?:StallError|LostNodeError|WorkerDiedError|worker process(?:es)? died|ActorDiedError|ActorUnavailableError"
    r"|WorkerCrashedError|NodeDiedError|RaySystemError|ray\.exceptions\.OutOfMemoryError|DistBackendError|DistNetworkError"
    r"|DistStoreError)\b|^driver ended by|^no output for|Connection (?:reset|closed) by peer"
)


def may_help(reason: str) -> bool:
    """Whether another try may end otherwise: processes, nodes and connections fail by chance, settings do not."""
    return bool(_OF_USE.search(reason) or fault_in(reason)) and not _NO_USE.search(reason)


def last_step_is_saved(run: RunSpec, folder: Path) -> bool:
    """Whether the run in `folder` has a checkpoint of its last step: then nothing is left for another try."""
    doing = {}
    with suppress(ConfigError):  # damaged
        doing = read_doing(folder)
    total = doing.get("steps") or steps_of(run)
    try:
        return total is not None and max(saved_in(checkpoints_of(run), run_id(folder)).own, default=0) >= total
    except OSError:  # a disk that fails: the look for the next try's checkpoint says so
        return False


class Restarts:
    """The tries of one run, which writes to `folder`."""

    def __init__(self, run: RunSpec, folder: Path):
        self._run, self._folder = run, folder
        self._times = run.recipe.restart.times
        self._left_out = list(run.recipe.restart.without_nodes)
        self.records: list[dict[str, Any]] = []

    def run(self, start: Start) -> RunSpec:
        """Return the run of the next try: from the checkpoint of `start`, without faulty nodes."""
        return started(changed(self._run, {"recipe.restart.without_nodes": list(self._left_out)}), start)

    def another(self, code: int, reason: str | None) -> bool:
        """Whether there is another try after one that ended with `code` for `reason`."""
        if not code or reason is None or len(self.records) >= self._times or not may_help(reason):
            return False
        return not last_step_is_saved(self._run, self._folder)

    def after(self, code: int, reason: str) -> str:
        """Message for the next try, after moving the failed one's files."""
        culprits, raised = self._culprits()
        number = len(self.records) + 1
        left_out = self._leave_out(self._blamed(culprits, raised))
        aside = self._folder / ATTEMPTS / str(number)
        aside.mkdir(parents=True)
        for name in OF_A_TRY:
            if (path := self._folder / name).exists():
                path.rename(aside / name)
        carry_on(aside, self._folder)
        reason = reason.replace(str(self._folder / STACKS), str(aside / STACKS))
        self.records.append({"reason": reason, "exit_code": code, "culprits": culprits, "left_out": left_out})
        return f"restart {number} of {self._times}, from the newest checkpoint{left_out}: {reason}"

    def _culprits(self) -> tuple[list[dict[str, Any]], str | None]:
        """Of the failed try, and what they raised an error of, where the watch names them for that."""
        if self._run.recipe.watch.action == "report":
            return [], None  # the record may be of an earlier stall, which the run survived
        try:
            record = read_object(self._folder / RECORD)
            return list(record["culprits"]), record.get("raised")
        except (ConfigError, KeyError, TypeError):
            return [], None

    def _blamed(self, culprits: Sequence[dict[str, Any]], raised: str | None) -> Sequence[dict[str, Any]]:
        """The culprits whose node is at fault: of a failed collective only one that the try before named too."""
        if raised != COLLECTIVE:
            return culprits
        before = {culprit.get("node") for culprit in self.records[-1]["culprits"]} if self.records else set()
        return [culprit for culprit in culprits if culprit.get("node") in before]

    def _leave_out(self, culprits: Sequence[dict[str, Any]]) -> str:
        """Leave the culprits' nodes out of the next try where enough others are there; what was done, as text."""
        names = {culprit["node"] for culprit in culprits if culprit.get("node")}
        if self._run.recipe.ray_address is None or not names:
            return ""
        try:
            fit = nodes_with_devices(self._run, list_nodes(self._run.recipe.ray_address))
        except ConfigError as error:
            return f" (the nodes are unknown: {error})"
        known = {*names, *self._left_out}
        faulty = {node["address"] for node in fit if node["id"] in names}
        others = [node for node in fit if not known & {node["id"], node["address"]}]
        if not faulty:
            return ""  # Ray has lost them already
        if len(others) < self._run.verl.trainer.nnodes:
            return f", on {', '.join(sorted(faulty))} again, as no spare node is there"
        self._left_out += sorted(faulty)
        return f", without {', '.join(sorted(faulty))}"
