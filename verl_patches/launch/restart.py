"""Restart a run after a failure that another start may survive (recipe.restart).

Each start resumes from the newest checkpoint, in its own folder (run/run_start.py). This file decides which failures
are worth another start and which nodes that start leaves out, and records the reason and culprits of each failure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from verl_patches.errors import ConfigError
from verl_patches.launch.ray_cluster import list_nodes, nodes_with_devices
from verl_patches.launch.supervise.watcher import RECORD_FILE, is_collective_error, is_device_error
from verl_patches.run.record.record import read_object
from verl_patches.run.resolve import changed_run
from verl_patches.spec import RunSpec

_FINAL_REASON = re.compile(  # reasons after which another start would fail in the same way, or is not wanted
    r"^interrupted by|^still running after"
    r"|(?:^|[\s.])(?:ConfigError|PatchError|WeightSyncError|SkippedStepsError|AlarmError|CheckpointError)\b"
)
_RETRYABLE_REASON = re.compile(  # reasons after which another start may go well
    r"\b(?:StallError|LostNodeError|WorkerDiedError|worker process(?:es)? died|ActorDiedError|ActorUnavailableError"
    r"|WorkerCrashedError|NodeDiedError|RaySystemError|ray\.exceptions\.OutOfMemoryError|DistBackendError|DistNetworkError"
    r"|DistStoreError)\b|^driver ended by|^no output for|Connection (?:reset|closed) by peer"
)


def is_retryable(reason: str) -> bool:
    """Return whether another try may succeed: processes, nodes and connections fail by chance, settings do not."""
    by_chance = _RETRYABLE_REASON.search(reason) or is_device_error(reason) or is_collective_error(reason)
    return bool(by_chance) and not _FINAL_REASON.search(reason)


class Restarts:
    """Decide and record the restarts of one run, `base_run`."""

    def __init__(self, run: RunSpec):
        self.base_run = run
        self._max_restarts = run.recipe.restart.max_restarts
        self._left_out_nodes = list(run.recipe.restart.exclude_nodes)
        self.records: list[dict[str, Any]] = []

    def run(self) -> RunSpec:
        """Return the run of the next start: the given one, without faulty nodes."""
        return changed_run(self.base_run, {"recipe.restart.exclude_nodes": list(self._left_out_nodes)})

    def allows_restart(self, code: int, reason: str | None) -> bool:
        """Return whether there is another start after one that ended with `code` for `reason`."""
        return bool(code and reason) and len(self.records) < self._max_restarts and is_retryable(reason or "")

    def record_failure(self, code: int, reason: str, folder: Path) -> str:
        """Record the start in `folder`, which failed, and return the message for the next one."""
        culprits = []  # those that the watch recorded
        with suppress(ConfigError):
            culprits = read_object(folder / RECORD_FILE).get("culprits", [])
        left_out = self._leave_out_nodes(culprits)
        record = {"start": folder.name, "reason": reason, "exit_code": code, "culprits": culprits}
        self.records.append({**record, "left_out": left_out})
        return f"restart {len(self.records)} of {self._max_restarts}, from the newest checkpoint{left_out}: {reason}"

    def _leave_out_nodes(self, culprits: Sequence[dict[str, Any]]) -> str:
        """Leave the culprits' nodes out of the next start where enough others exist; return what the message adds."""
        names = {culprit["node"] for culprit in culprits if culprit.get("node")}
        if self.base_run.recipe.ray_address is None or not names:
            return ""
        try:
            fit = nodes_with_devices(self.base_run, list_nodes(self.base_run.recipe.ray_address))
        except ConfigError as error:
            return f" (no node is left out, as Ray's nodes cannot be listed: {error})"
        known = {*names, *self._left_out_nodes}
        faulty = {node["address"] for node in fit if node["id"] in names}
        others = [node for node in fit if not known & {node["id"], node["address"]}]
        if not faulty:
            return ""  # Ray has lost them already
        if len(others) < self.base_run.verl.trainer.nnodes:
            return f", again on {', '.join(sorted(faulty))}, as Ray has no spare node"
        self._left_out_nodes += sorted(faulty)
        return f", without {', '.join(sorted(faulty))}"
