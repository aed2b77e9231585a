"""Findings of `check`, `versions`, `fetch-upstream` and `doctor`; states that a run recorded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from verl_patches.patching.switches import SWITCHED_OFF

STATES = ("fine", "note", "problem")
NOT_RUN = "not run"  # a check of `doctor` that cannot be made on this machine: neither a pass nor a problem
WRONG = frozenset({"drifted", "unsupported", "failed", "overridden"})  # row states that need attention


@dataclass(frozen=True)
class Finding:
    """One result of a check. `state`: fine, note (for information), problem, or NOT_RUN.

    `name`: what was checked (a row id, a package, a variable); `where`: file:line or place; `todo`: the next step;
    `details`: further lines (statements with their places, a diff).
    """

    name: str
    state: str
    where: str = ""
    expected: str = ""
    found: str = ""
    todo: str = ""
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """All findings of one command about one line, or about one job of `cluster`: their JSON shape."""

    command: str
    line: str
    findings: tuple[Finding, ...]
    job: str = ""

    @property
    def about(self) -> str:
        """ "line a3", or "job NAME"."""
        return f"job {self.job}" if self.job else f"line {self.line}"

    @property
    def state(self) -> str:
        """problem if any finding is one; empty if nothing was checked, which counts as failed; else fine."""
        if not self.findings:
            return "empty"
        return "problem" if any(f.state == "problem" for f in self.findings) else "fine"

    @property
    def exit_code(self) -> int:
        """0 only where something was checked and no problem was found."""
        return 0 if self.state == "fine" else 1

    def as_dict(self) -> dict[str, Any]:
        """Plain data: {command, line or job, state, counts, rows}."""
        found = [finding.state for finding in self.findings]
        counts = {state: found.count(state) for state in (*STATES, *([NOT_RUN] if NOT_RUN in found else []))}
        rows = [asdict(finding) for finding in self.findings]
        about = {"job": self.job} if self.job else {"line": self.line}
        return {"command": self.command, **about, "state": self.state, "counts": counts, "rows": rows}


def count_by_process(rows: Iterable[Mapping[str, str]]) -> list[dict[str, Any]]:
    """Recorded states folded to one entry a row: {id, target, states: {process: state}, reason (of a wrong state)}."""
    folded: dict[str, dict[str, Any]] = {}
    for row in rows:
        entry = folded.setdefault(row["id"], {"id": row["id"], "target": row["target"], "states": {}, "reason": ""})
        entry["states"][row["process"]] = row["state"]
        entry["reason"] = row.get("reason") or entry["reason"]
    return list(folded.values())


def rows_off(rows: Iterable[Mapping[str, str]]) -> list[str]:
    """Ids of the recorded rows that the user switched off."""
    off = (row["id"] for row in rows if row["state"] == "off" and row.get("reason", "").startswith(SWITCHED_OFF))
    return list(dict.fromkeys(off))


def said_off(ids: Sequence[str]) -> str:
    """ "1 row off by you: row.id"; empty text without any."""
    return f"{len(ids)} row{'s' if len(ids) > 1 else ''} off by you: {', '.join(ids)}" if ids else ""
