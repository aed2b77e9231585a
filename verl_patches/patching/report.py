"""Rows and their states as tables for people and as plain data for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from verl_patches.errors import ConfigError
from verl_patches.patching.spec import PatchSpec


def run_states(folder: Path) -> list[dict[str, str]]:
    """The [{id, state, target, process}] that a run recorded in its summary.json; ConfigError where there is none."""
    path = folder / "summary.json"
    if not path.is_file():
        raise ConfigError(f"--run {folder}: no summary.json there; give the folder of a run, such as outputs/smoke")
    return json.loads(path.read_text()).get("patches", [])


def count_by_process(rows: Iterable[Mapping[str, str]]) -> list[dict[str, Any]]:
    """Recorded states folded to one entry a row: {id, target, states: {process: state}}."""
    folded: dict[str, dict[str, Any]] = {}
    for row in rows:
        entry = folded.setdefault(row["id"], {"id": row["id"], "target": row["target"], "states": {}})
        entry["states"][row["process"]] = row["state"]
    return list(folded.values())


def markdown_table(specs: Iterable[PatchSpec]) -> str:
    """The README's table: id, kind, target and why of every row."""
    lines = ["| id | kind | target | platforms | why |", "|---|---|---|---|---|"]
    for spec in specs:
        platforms = ", ".join(sorted(spec.platforms))
        lines.append(f"| `{spec.id}` | {spec.kind} | `{spec.target}` | {platforms} | {spec.why} |")
    return "\n".join(lines) + "\n"
