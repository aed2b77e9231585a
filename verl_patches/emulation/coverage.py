"""Which modules of vllm-ascend and which functions of torch_npu a run on platform npu_emulated reached.

Functions are those with a reference here, counted where their arguments are bound to the schema; a module is reached
where it is imported.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from verl_patches.emulation.op_schemas import ATB_FUNCTIONS, CALLS, WITH_EMULATION, WITH_REFERENCE, read

PACKAGE = "vllm_ascend"


def reached() -> dict[str, Any]:
    """{functions: {name: calls}, modules: {name: imported}, graphs: traced, groups: hccl.groups()} of this process."""
    from verl_patches.emulation.npu.hccl import groups  # here: on this platform alone
    from verl_patches.emulation.npu.packages import Graphs

    functions = {name: CALLS[name] for name in (*WITH_REFERENCE, *WITH_EMULATION, *ATB_FUNCTIONS)}
    places = getattr(sys.modules.get(PACKAGE), "__path__", ())
    return {
        "functions": functions,
        "graphs": len(Graphs.traced),
        "groups": groups(),
        "modules": {name: name in sys.modules for place in places for name in _modules(Path(place))},
    }


def _modules(folder: Path) -> Iterable[str]:
    for file in sorted(folder.rglob("*.py")):
        parts = (PACKAGE, *file.relative_to(folder).with_suffix("").parts)
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def coverage_of(workers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """For summary.json, of what `reached` gave in every worker.

    {functions: {name: {calls, schemas}}, functions_never, modules, modules_never, graphs, groups}: lists of names, how
    many graphs the worker that traced most has traced, and the HCCL groups of the first worker.
    """
    calls, modules, graphs, groups = Counter(), {}, 0, []
    for worker in workers:
        groups = groups or worker["groups"]
        graphs = max(graphs, worker["graphs"])
        calls.update(worker["functions"])
        modules |= {name: modules.get(name, False) or imported for name, imported in worker["modules"].items()}
    called = {name: count for name, count in calls.items() if count}
    schemas = {name: [f"{name}{schema.signature}" for schema in read()[name]] for name in called}
    return {
        "functions": {name: {"calls": called[name], "schemas": schemas[name]} for name in sorted(called)},
        "graphs": graphs,
        "groups": groups,
        "functions_never": sorted(name for name, count in calls.items() if not count),
        "modules": sorted(name for name, imported in modules.items() if imported),
        "modules_never": sorted(name for name, imported in modules.items() if not imported),
    }


def lines_of(coverage: Mapping[str, Any]) -> list[str]:
    """The coverage for a reader: counts, then each function with its schemas and calls, then modules by name."""
    functions, never = coverage["functions"], coverage["functions_never"]
    imported, not_imported = coverage["modules"], coverage["modules_never"]
    return [
        f"emulated NPU: {len(functions)} of {len(functions) + len(never)} functions of torch_npu were called; "
        f"{len(imported)} of {len(imported) + len(not_imported)} modules of vllm-ascend were imported; a worker traced "
        f"{coverage['graphs']} graphs",
        *(f"  {' or '.join(found['schemas'])}: {found['calls']} calls" for found in functions.values()),
        f"  never called: {', '.join(never) or 'none'}",
        f"  imported: {_short(imported)}",
        f"  never imported: {_short(not_imported)}",
    ]


def _short(modules: Iterable[str]) -> str:
    return ", ".join(name.removeprefix(f"{PACKAGE}.") for name in modules) or "none"
