"""Findings of `check`, `versions` and `doctor`, and the report that they make."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

STATES = ("fine", "note", "problem")
NOT_RUN = "not run"  # a check of `doctor` that cannot be made on this machine: neither a pass nor a problem


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
    """All findings of one command about one line, and their JSON shape."""

    command: str
    line: str
    findings: tuple[Finding, ...]

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
        """Plain data: {command, line, state, counts, rows}."""
        states = [finding.state for finding in self.findings]
        counts = {state: states.count(state) for state in (*STATES, *([NOT_RUN] if NOT_RUN in states else []))}
        rows = [asdict(finding) for finding in self.findings]
        return {"command": self.command, "line": self.line, "state": self.state, "counts": counts, "rows": rows}
