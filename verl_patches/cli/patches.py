"""Define the commands `status` and `digest`, which show patches, and `install-prelude`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from verl_patches import catalog
from verl_patches.cli.live import print_run_state
from verl_patches.cli.output import Json, print_json, print_table, print_text
from verl_patches.errors import ConfigError, RecipeError
from verl_patches.patching.boot import install_prelude
from verl_patches.patching.contract import installed_root
from verl_patches.patching.engine import Engine
from verl_patches.patching.spec import ROLES
from verl_patches.patching.switches import PATCHES_VAR, Switches, parse_switches, switches_from_environment
from verl_patches.run.compose import output_root
from verl_patches.run.record.record import read_summary
from verl_patches.upstream.versions import installed_line
from verl_patches.weights.run_folders import find_start

SwitchesOption = Annotated[str | None, typer.Option("--switches", help="Value used in place of VERL_PATCHES.")]

_NO_ROLE = "not in this catalogue"  # for a row in the record of another version
_WRONG_STATES = frozenset({"drifted", "unsupported", "failed", "overridden"})  # states of rows that need attention
WATCHED_HELP = "A run's folder, or the name of one in outputs/ of this repository: show what it does now."
RUN_HELP = "A run's folder, or the name of one in outputs/ of this repository: show the recorded states of its rows."


def build_engine(switches: str | None) -> Engine:
    """Return an engine over the rows of a platform with these switches (default VERL_PATCHES); nothing is applied."""
    chosen = current_switches(switches)
    return Engine(catalog.platform_rows(chosen.platform), chosen)


def current_switches(switches: str | None) -> Switches:
    """Return the given switches, or those of VERL_PATCHES.

    Without both they are those of the line whose packages are installed, or else production's, as standard error says.
    """
    if switches is not None or os.environ.get(PATCHES_VAR):
        return switches_from_environment() if switches is None else parse_switches(switches)
    line = installed_line()
    chosen, why = Switches(), "no line has all of its packages installed"
    if line:
        chosen = Switches(line, "npu" if installed_root("torch_npu") else "cpu")
        why = f"the packages of line {line} are installed"
    typer.echo(f"{chosen.text()} is used, as {PATCHES_VAR} is unset and {why}; --switches gives others", err=True)
    return chosen


def status_command(
    watched: Annotated[Path | None, typer.Argument(metavar="[RUN]", help=WATCHED_HELP)] = None,
    run: Annotated[Path | None, typer.Option("--run", help=RUN_HELP)] = None,
    switches: SwitchesOption = None,
    as_json: Json = False,
) -> None:
    """Show the progress of RUN, or without it the rows of the catalogue, with --run their states in a recorded run.

    Without a run no row is applied: it is "waiting" if a run with these switches would apply it, else "off".
    """
    if watched is not None:
        if run is not None or switches is not None:
            raise ConfigError(
                f"status: expected RUN ({watched}) alone for its progress, or --run RUN for its rows, or --switches"
            )
        print_run_state(watched, as_json)
    if run is not None:
        _print_recorded_rows(run, as_json)
    engine = build_engine(switches)
    rows = []
    for row in engine.status():
        state = "waiting" if row["id"] in engine.wanted else "off"
        rows.append({**row, "state": state, "role": engine.specs[row["id"]].role})
    if as_json:
        print_json({"switches": engine.switches.text(), "rows": rows})
    else:
        title = f"patches for {replace(engine.switches, rows=None).text()}"
        _print_role_tables(title, ("id", "state", "target", "reason"), rows)
        print_text(
            "waiting: on; a run applies the row when it imports the module. status --run RUN shows a run's states."
        )


def _print_recorded_rows(run: Path, as_json: bool) -> NoReturn:
    """Print the states that a run recorded; exit code 1 where one is wrong."""
    run = find_start(run, output_root())
    record = read_summary(run)
    roles = {spec.id: spec.role for spec in catalog.all_rows()}
    rows = _states_by_row(record.get("patches", []))
    rows = [{**row, "role": roles.get(row["id"], _NO_ROLE)} for row in rows]
    if not rows:
        raise RecipeError(
            f"{run} has no recorded states: no process has reported yet; `status {run}` shows its progress"
        )
    exit_reason, dirty = record.get("exit", "unknown"), record.get("dirty", {})
    wrong = [r["id"] for r in rows if _WRONG_STATES & set(r["states"].values())]
    if as_json:
        print_json({"run": str(run), "exit": exit_reason, "dirty": dirty, "rows": rows, "wrong": wrong})
    else:
        for name, files in dirty.items():
            typer.echo(f"dirty: {name} was not as pinned: {', '.join(files)}")
        typer.echo(f"run ended: {exit_reason}. A row is waiting where its module was never imported in that process.")
        shown = [{**row, "states": _states_text(row["states"])} for row in rows]
        _print_role_tables(f"patches of {run}", ("id", "target", "states", "reason"), shown)
    raise typer.Exit(1 if wrong else 0)


def _print_role_tables(title: str, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Print a table of rows for each role."""
    by_role: dict[str, list[list[str]]] = {role: [] for role in (*ROLES, _NO_ROLE)}
    for row in rows:
        by_role[row["role"]].append([row[key] for key in columns])
    for role, cells in by_role.items():
        if cells:
            print_table(f"{title}, {role}: {len(cells)} rows", columns, cells)


def _states_by_row(rows: Iterable[Mapping[str, str]]) -> list[dict[str, Any]]:
    """Return recorded states by row: {id, target, states: {process: state}, reason (of a wrong state)}."""
    folded: dict[str, dict[str, Any]] = {}
    for row in rows:
        entry = folded.setdefault(row["id"], {"id": row["id"], "target": row["target"], "states": {}, "reason": ""})
        entry["states"][row["process"]] = row["state"]
        entry["reason"] = row.get("reason") or entry["reason"]
    return list(folded.values())


def _states_text(states: Mapping[str, str]) -> str:
    """Return {process: state} as text, such as "active: 257 processes"."""
    processes: dict[str, list[str]] = {}
    for process, state in states.items():
        processes.setdefault(state, []).append(process)
    texts = {state: names[0] if len(names) == 1 else f"{len(names)} processes" for state, names in processes.items()}
    return ", ".join(f"{state}: {text}" for state, text in texts.items())


def digest_command(switches: SwitchesOption = None, as_json: Json = False) -> None:
    """Print the digest of the rows to apply, which controller and workers compare before step 1."""
    engine = build_engine(switches)
    if as_json:
        print_json({"switches": engine.switches.text(), "digest": engine.digest(), "intent": engine.intent()})
    else:
        typer.echo(engine.digest())


def install_prelude_command(
    verl_path: Annotated[Path | None, typer.Option("--verl-path", help="verl checkout; default: installed.")] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Remove both again.")] = False,
    as_json: Json = False,
) -> None:
    """Insert `from verl_patches import prelude_patch` into verl's Megatron workers, and a .pth file into this Python.

    The .pth file runs the prelude in every process of this Python that imports upstream before it reaches the line.
    """
    results = install_prelude.remove_prelude(verl_path) if undo else install_prelude.install_prelude(verl_path)
    if as_json:
        print_json({name: {**asdict(result), "file": str(result.file)} for name, result in results.items()})
        return
    for result in results.values():
        typer.echo(f"{result.state}: {result.file}" + (f", line {result.line}" if result.line else ""))
