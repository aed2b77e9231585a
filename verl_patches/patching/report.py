"""Define the findings of `check`, `versions` and `doctor`, and the report that lists them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

STATES = ("fine", "note", "problem")
NOT_RUN = "not run"  # a check of `doctor` that this machine cannot make; it neither passes nor fails


@dataclass(frozen=True)
class Finding:
    """Hold one result of a check. `state`: fine, note (for information), problem, or NOT_RUN.

    `name`: the checked row id, package or variable; `where`: file:line or place; `todo`: the next step; `details`:
    further lines (statements with their places, a diff).
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
    """Hold all findings of one command about one line, and give them as JSON."""

    command: str
    line: str
    findings: tuple[Finding, ...]

    @property
    def state(self) -> str:
        """Return "problem" if a finding is one, "empty" (a failure) if nothing was checked, else "fine"."""
        if not self.findings:
            return "empty"
        return "problem" if any(f.state == "problem" for f in self.findings) else "fine"

    @property
    def exit_code(self) -> int:
        """Return 0 only if something was checked and no problem was found, else 1."""
        return 0 if self.state == "fine" else 1

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data: {command, line, state, counts, rows}."""
        states = [finding.state for finding in self.findings]
        counts = {state: states.count(state) for state in (*STATES, *([NOT_RUN] if NOT_RUN in states else []))}
        rows = [asdict(finding) for finding in self.findings]
        return {"command": self.command, "line": self.line, "state": self.state, "counts": counts, "rows": rows}
