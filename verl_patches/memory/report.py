"""One step's memory from every worker's ledger, as plain data for summary.json, the step table and the picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

KEPT_VIOLATIONS = 20  # a wrong table violates in every phase of every rank: the first ones tell it


def memory_of_step(workers: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """{peak_bytes, phases, violations} of one step; None where no worker keeps a ledger. Bytes.

    `phases`: {phase: {rank, peak_bytes, bytes: {tenant: bytes as the phase begins}, measured: {name: bytes}}} of the
    rank whose peak is highest; `measured` is the highest of any rank, by name. A phase that came twice (a validation)
    counts with the higher. `violations`: how many there were and the first ones, each with its rank.
    """
    kept = [worker for worker in workers if worker is not None]
    if not kept:
        return None
    phases: dict[str, dict[str, Any]] = {}
    for worker in kept:
        for record in worker["records"]:
            best = phases.setdefault(record["phase"], {"rank": -1, "peak_bytes": -1, "bytes": {}, "measured": {}})
            if record["peak_bytes"] > best["peak_bytes"]:
                best.update(rank=worker["rank"], peak_bytes=record["peak_bytes"], bytes=record["bytes"])
            for name, size in record["measured"].items():
                best["measured"][name] = max(size, best["measured"].get(name, 0))
    violations = [{"rank": worker["rank"], **each} for worker in kept for each in worker["violations"]]
    return {"peak_bytes": max((p["peak_bytes"] for p in phases.values()), default=0), "phases": phases,
            "violations": {"count": len(violations), "first": violations[:KEPT_VIOLATIONS]}}


def said_of(violations: dict[str, Any]) -> str:
    """One line about a step's violations, "" if there were none."""
    if not violations["count"]:
        return ""
    first = violations["first"][0]
    wanted = "some" if first["expected_bytes"] is None else f"{first['expected_bytes']:,}"
    return (f"memory ledger: {violations['count']} violation(s), first: rank {first['rank']}, {first['phase']}: "
            f"{first['tenant']} holds {first['bytes']:,} bytes, expected {wanted} (driver.log says who should "
            "have released it)")
