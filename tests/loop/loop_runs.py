"""How tests start the smoke command, and what is left of a run."""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Finished:
    """A run that ended: exit code, seconds, what it printed, its folder and its summary."""

    code: int
    wall_s: float
    output: str
    folder: Path
    summary: dict

    @property
    def steps(self):
        return self.summary["steps"]

    @classmethod
    def read(cls, folder):
        """The run in folder/r, of which folder/finished.json tells the rest."""
        summary = folder / "r" / "summary.json"
        return cls(
            **json.loads((folder / "finished.json").read_text()),
            folder=folder / "r",
            summary=json.loads(summary.read_text()) if summary.is_file() else {},
        )


def smoke_command(*arguments, folder, run):
    """(command, environment) of one smoke run that writes to folder/run; its workers can import this folder's hooks."""
    command = [sys.executable, "-m", "verl_patches", "smoke", "--run", run, *arguments, f"recipe.output_root={folder}"]
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    return command, {**os.environ, "COLUMNS": "200", "PYTHONPATH": path}
