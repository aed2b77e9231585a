"""What is left of a run: the error that ended it, Ray's logs if it failed, and a summary.json that is always valid."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from verl_patches.trainer.summary import write_json

_TAIL_BYTES = 256 << 10
_LOG_BYTES = 4 << 20  # of one of Ray's log files, its end
_PREFIX = re.compile(r"^\([^()]*pid=\d+[^()]*\)\s?")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ERROR = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*(?:Error|Exception|Interrupt|Exit|Died|Timeout))(?:\(\w+\))?(?::|$)"
)
_WRAPPERS = ("RayTaskError",)


def last_error(log: Path) -> str | None:
    """The last exception that a log shows, with all lines of its message, without Ray's wrapping; None without one."""
    if not log.exists():
        return None
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        text = file.read().decode(errors="replace")
    lines = [_PREFIX.sub("", _COLOUR.sub("", line)) for line in text.splitlines()]
    for number in range(len(lines) - 1, -1, -1):
        match = _ERROR.match(lines[number])
        if match and match[1] not in _WRAPPERS:
            message = [lines[number]]
            for line in lines[number + 1 : number + 12]:
                if not line.startswith("  ") or line.lstrip().startswith("File "):
                    break
                message.append(line)
            return "\n".join(message).strip()[:4000]
    return None


def copy_ray_logs(temp: Path, to: Path) -> None:
    """Copy the non-empty logs of Ray sessions below `temp` (the end of each, 4 MiB) to `to`."""
    for logs in (p for p in temp.glob("**/session_[0-9]*/logs") if not p.parent.is_symlink()):
        for source in sorted(logs.glob("*")):
            if source.is_file() and source.suffix in (".log", ".out", ".err") and source.stat().st_size:
                to.mkdir(parents=True, exist_ok=True)
                with source.open("rb") as file, (to / source.name).open("wb") as copy:
                    file.seek(max(0, source.stat().st_size - _LOG_BYTES))
                    shutil.copyfileobj(file, copy)


def write_summary(
    folder: Path, code: int, reason: str | None, head: dict[str, Any], peaks: dict[str, int]
) -> tuple[int, str]:
    """Complete the driver's summary.json in `folder`, or write a minimal one from `head`; (exit code, "ok" or reason).

    A driver that exits 0 without a summary that says "ok" has not run to its end: that is an error too (code 1).
    """
    path = folder / "summary.json"
    summary = _read(path)
    found = (summary or {}).get("exit")
    said = None if found in ("running", "failed", "ok") else found  # the reason that the driver gives, if it does
    if code == 0 and found == "ok":
        reason = "ok"
    elif code == 0:
        code, reason = 1, said or "the driver ended without finishing its summary"
    elif reason is None:
        reason = said or f"the driver exited with {code}; its log shows no error"
    minimal = {"versions": {}, "steps": [], "logprob_delta": None, "patches": []}
    summary = {**head, **minimal, **(summary or {}), "peak_pss_bytes": peaks, "exit": reason}
    write_json(path, summary)
    return code, reason


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
