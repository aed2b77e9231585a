"""Gather and compare the patch states of all workers in the controller, before step 1."""

from __future__ import annotations

import re
from typing import Any

from verl_patches.errors import our_command
from verl_patches.patching.engine import PatchError
from verl_patches.patching.row import UNREVIEWED_STATES

NO_PRELUDE_TEXT = (
    "it did not run the prelude, so upstream runs there unpatched. Every worker process must import "
    f"verl_patches.prelude_patch: start with `{our_command('train', '--config-name', 'CONFIG')}`, or run "
    f"`{our_command('install-prelude')}` on every node"
)
_NO_METHOD_ERROR = re.compile(r"has no attribute '\w*prove_patches'")
_SILENT_STATES = ("waiting", "active")


def gather_proofs(group: Any) -> list[dict[str, Any]]:
    """Return the proof of every worker of verl's worker group, by rank (`prove_patches` of worker/recipe_worker.py).

    A worker without a proof gets {rank, where, status: [], error}. PatchError where the group has no prove_patches.
    """
    import ray

    if not hasattr(group, "prove_patches"):
        raise PatchError(
            "the worker group has no method prove_patches, so the patches of its workers are unknown; expected workers "
            "of verl's ActorRolloutRefWorker with row update.recipe_worker: remove -update.recipe_worker from "
            "recipe.patches, or use verl's worker class"
        )
    proofs, answers = [], group.prove_patches()  # references, so that one worker's error does not hide the others
    for rank, answer in enumerate(answers):
        try:
            proofs.append(ray.get(answer))
        except (AttributeError, PatchError) as error:
            where, _, text = str(error).partition("\n")
            # the worker has no engine or no method
            unpatched = isinstance(error, PatchError) or _NO_METHOD_ERROR.search(str(error))
            reason = NO_PRELUDE_TEXT if unpatched else f"it could not report its patches:\n{text or where}"
            proofs.append({"rank": rank, "where": where, "status": [], "error": reason})
    return proofs


def summary_entry(row: dict[str, str]) -> dict[str, str]:
    """Return the entry of summary.json for one row of one process, with a reason unless it is active or waiting."""
    keys = ("id", "state", "target", "process", *(() if row["state"] in _SILENT_STATES else ("reason",)))
    return {key: row[key] for key in keys}


def unreviewed_rows(rows: list[dict[str, str]]) -> dict[str, list[str]]:
    """Return {state: ids} of drifted and unsupported rows of any process, which only the drift policy allows."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row["state"] in UNREVIEWED_STATES and row["id"] not in found.setdefault(row["state"], []):
            found[row["state"]].append(row["id"])
    return found


def require_proofs(workers: list[dict[str, Any]]) -> None:
    """Refuse workers whose patches are not all active: PatchError has the first one's error and the others' ranks."""
    bad = [worker for worker in workers if worker["error"]]
    if bad:
        others = ", ".join(str(worker["rank"]) for worker in bad[1:])
        more = f"\n{len(bad) - 1} more workers failed: ranks {others}" if others else ""
        raise PatchError(f"worker {bad[0]['rank']} ({bad[0]['where']}): {bad[0]['error']}{more}")


def require_same_patches(intent: dict[str, str], digest: str, workers: list[dict[str, Any]]) -> None:
    """Refuse a worker whose patches differ from the controller's: PatchError names worker and rows."""
    for worker in workers:
        if worker["digest"] == digest:
            continue
        rows = sorted(set(intent.items()) ^ set(worker["intent"].items()))
        names = ", ".join(dict.fromkeys(name for name, _ in rows)) or "line, platform or drift policy"
        raise PatchError(
            f"worker {worker['rank']} ({worker['where']}) has other patches than the controller: digest "
            f"{worker['digest'][:12]}, expected {digest[:12]}; different rows: {names}. Its VERL_PATCHES, its copy of "
            "verl_patches or its upstream packages differ from the controller's: make them equal on every node"
        )
