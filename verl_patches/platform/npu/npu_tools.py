"""Parse the output of `npu-smi` and `hccn_tool`. Text in an unknown form is an error.

The formats are those of the outputs in tests/platform/recorded.py (drivers 25.2 to 26.0, Atlas A3), which names the
source of each. An A3 card has two chips ("dies"), whose number on the node is Phy-ID.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

HEALTH_OK = "OK"  # others: Warning, Alarm, Critical, UNKNOWN (npu-smi 25.2.0, command reference)
NO_IP_TEXT = "no ip was preset"  # hccn_tool -ip -g prints it for a die's port that was never configured
_VERSION = re.compile(r"npu-smi\s+(\S+)\s+Version:\s*(\S+)")
_UPPER_LINE = re.compile(r"(\d+)\s+(\S*[A-Za-z]\S*)$")  # card, name
_LOWER_LINE = re.compile(r"(\d+)\s+(\d+)$")  # chip, Phy-ID
_PCI_ADDRESS = re.compile(r"[0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d$|NA$")
_MEMORY_USED = re.compile(r"(\d+)\s*/\s*(\d+)\s*$")
_HEADER_CELLS = ("npu-smi", "NPU", "Chip", "No running processes")
_QUOTED_CHARS = 120  # characters that are quoted of a text


class NotUnderstoodError(ValueError):
    """Report a tool's output that has another form than the recorded ones; the message quotes it."""


@dataclass(frozen=True)
class Die:
    """Describe a die as `npu-smi info` shows it; memory in MB, None where it has no figures."""

    card: int
    chip: int
    number: int
    name: str
    health: str
    used_mb: int | None
    total_mb: int | None


@dataclass(frozen=True)
class Process:
    """Describe a process that holds memory of a die."""

    card: int
    chip: int
    pid: str
    name: str
    memory_mb: str


@dataclass(frozen=True)
class NpuSmi:
    """Hold the output of `npu-smi info`."""

    version: str
    dies: tuple[Die, ...]
    processes: tuple[Process, ...]


def quoted(text: str) -> str:
    """Return the first characters of a text, in one line."""
    line = " ".join(text.split())
    return f"{line[:_QUOTED_CHARS]!r}" + (" ..." if len(line) > _QUOTED_CHARS else "")


def parse_npu_smi(text: str) -> NpuSmi:
    """Parse the table of `npu-smi info`: two lines a die, then the processes. NotUnderstoodError for any other line."""
    version = _VERSION.search(text)
    if version is None:
        raise NotUnderstoodError(f"npu-smi info printed {quoted(text)}, expected its table")
    dies, processes, upper = [], [], None
    for line in text.splitlines():
        if not line.strip().startswith("|"):
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if cells[0].startswith(_HEADER_CELLS):
            continue
        lower = _LOWER_LINE.match(cells[0])
        if upper is not None and len(cells) == 3 and lower and _PCI_ADDRESS.match(cells[1]):
            dies.append(_die(upper, lower, cells[2]))
            upper = None
        elif upper is None and len(cells) == 3 and (found := _UPPER_LINE.match(cells[0])) and cells[1]:
            upper = int(found[1]), found[2], cells[1]
        elif upper is None and len(cells) >= 4 and lower and cells[1].isdigit():
            processes.append(Process(int(lower[1]), int(lower[2]), *cells[1:4]))
        else:
            raise NotUnderstoodError(f"npu-smi info printed the line {quoted(line)}, expected a die or a process")
    if upper is not None or not dies:
        raise NotUnderstoodError(f"npu-smi info printed an incomplete table, {len(dies)} whole dies: {quoted(text)}")
    return NpuSmi(version[2], tuple(dies), tuple(processes))


def _die(upper: tuple[int, str, str], lower: re.Match, usage: str) -> Die:
    card, name, health = upper
    used = _MEMORY_USED.search(usage)
    used_mb, total_mb = (int(used[1]), int(used[2])) if used else (None, None)
    return Die(card, int(lower[1]), int(lower[2]), name, health, used_mb, total_mb)


def field_value(text: str, name: str) -> str:
    """Return the value of a line `name: value` (or `name : value`); NotUnderstoodError without such a line."""
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon and key.strip(" |\t").lower() == name.lower() and value.strip():
            return value.partition("|")[0].strip()
    raise NotUnderstoodError(f"expected a line {name!r}, found {quoted(text) if text.strip() else 'no output'}")
