"""The commands about upstream's sources: `check` compares them with the catalogue, `fingerprint` records a review."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from verl_patches.errors import ConfigError
from verl_patches.patching.engine import Engine
from verl_patches.patching.report import Report

Json = Annotated[bool, typer.Option("--json", help="Plain JSON on standard output.")]
Switch = Annotated[str | None, typer.Option("--switches", help="As VERL_PATCHES, which it stands in for.")]


def register(app: typer.Typer, engine_of: Callable[[str | None], Engine]) -> None:
    """Add the commands to `app`; `engine_of(switches)` gives an engine over the catalogue, nothing applied."""

    @app.command("check")
    def check_command(
        upstream: Annotated[Path | None, typer.Option(help="Folder with the upstream clones side by side (line pypi: "
                                                           "with the packages, as a site-packages folder).")] = None,
        installed: Annotated[bool, typer.Option("--installed", help="The packages of this Python; default.")] = False,
        line: Annotated[str | None, typer.Option(help="pypi or a3; default: the line of VERL_PATCHES.")] = None,
        base: Annotated[Path | None, typer.Option(help="A known tree, laid out as --upstream: print the whole "
                                                       "difference of drifted targets against it.")] = None,
        as_json: Json = False,
    ) -> None:
        """What every row expects of upstream, against its sources: target, body, signature, bindings."""
        if upstream is not None and installed:
            raise ConfigError("check: --upstream and --installed exclude each other; give one")
        report = run_check(upstream, line, base)
        if as_json:
            typer.echo(json.dumps(report.as_dict(), indent=1))
        else:
            show(report)
        raise typer.Exit(report.exit_code)

    @app.command("fingerprint")
    def fingerprint_command(
        row_ids: Annotated[list[str] | None, typer.Argument(help="Rows; all of the line when none is given.")] = None,
        write: Annotated[bool, typer.Option("--write", help="Record them as reviewed.")] = False,
        no_source: Annotated[bool, typer.Option("--no-source", help="With --write: accept targets without Python text "
                                                                    "(compiled or inherited).")] = False,
        upstream: Annotated[Path | None, typer.Option(help="Read these clones, as for `check`.")] = None,
        switches: Switch = None,
        as_json: Json = False,
    ) -> None:
        """Fingerprints of targets as they stand on disk, against the reviewed ones."""
        rows = fingerprints(engine_of(switches), row_ids or [], write, no_source, upstream)
        if as_json:
            typer.echo(json.dumps(rows, indent=1))
        else:
            table(f"fingerprints, line {rows['line']}", ("target", "found", "reviewed"),
                  [(r["target"], r["found"], r["reviewed"] or "-") for r in rows["rows"]])
        raise typer.Exit(0 if all(r["found"] == r["reviewed"] for r in rows["rows"]) else 1)


def run_check(upstream: Path | None, line: str | None, base: Path | None) -> Report:
    """The report on one line; ConfigError for folders and lines that are not there."""
    from verl_patches.catalog import ROWS
    from verl_patches.cluster.pins import load_pins
    from verl_patches.patching.contract import check, installed_roots
    from verl_patches.patching.row_contract import Sources
    from verl_patches.patching.switches import from_environment

    line = line or from_environment().line
    pins = load_pins().line(line)
    if upstream is None and not any(line in row.lines for row in ROWS):
        return Report("check", line, ())
    here = installed_roots(line) if upstream is None else _roots("--upstream", upstream, line)
    known = {} if base is None else _roots("--base", base, line)
    return check(ROWS, line, Sources(here, upstream is None, known, pins.packages))


def _roots(option: str, folder: Path, line: str) -> dict[str, Path]:
    """{top-level package: the folder that holds it}; a line without repositories has its packages in `folder`."""
    from verl_patches.cluster.pins import load_pins
    from verl_patches.patching.contract import PACKAGES

    if not folder.is_dir():
        raise ConfigError(f"{option} {folder} is not a folder")
    if load_pins().line(line).repositories:
        return load_pins().line(line).package_roots(folder)
    missing = [package for package in PACKAGES[line] if not (folder / package).is_dir()]
    if missing:
        raise ConfigError(f"{option} {folder}: expected the packages {', '.join(PACKAGES[line])}, "
                          f"found no {', '.join(missing)}")
    return dict.fromkeys(PACKAGES[line], folder)


def fingerprints(
    engine: Engine, row_ids: list[str], write: bool, no_source: bool, upstream: Path | None = None
) -> dict[str, Any]:
    """{line, rows: [{target, found, reviewed}]}, recorded first if `write`; ConfigError for targets that have no text.

    Such a target is accepted where the row is an `extend`, where it was reviewed as such, or with `no_source`.
    """
    from verl_patches.patching import fingerprint as fp

    line = engine.switches.line
    names = row_ids or [name for name, spec in engine.specs.items() if line in spec.lines]
    for name in names:
        engine.explain(name)  # refuses an unknown one, with the nearest
    specs = [engine.specs[name] for name in names if not engine.specs[name].is_module_stub]
    roots = {} if upstream is None else _roots("--upstream", upstream, line)
    root_of = {spec.target: roots.get(spec.target_module.split(".")[0]) for spec in specs}
    found = {target: fp.statements(target, root) for target, root in root_of.items()}
    if write:
        absent = [f"{spec.id}: {spec.target}" for spec in specs if not found[spec.target] and spec.kind != "extend"
                  and not no_source and fp.reviewed_hash(line, spec.target) != fp.NO_SOURCE]
        absent += [f"{spec.id}: {spec.target}" for spec in specs
                   if fp.source_file(spec.target_module, root_of[spec.target]) is None]
        if absent:
            raise ConfigError("fingerprint: nothing was written, these targets have no Python text here:\n  "
                              + "\n  ".join(dict.fromkeys(absent)) + "\n`python -m verl_patches check` lists near "
                              "names; for a compiled or inherited target add --no-source")
        fp.write_reviewed(line, found)
    known = fp.reviewed().get(line, {})
    return {"line": line, "rows": [{"target": target, "found": fp.whole_hash(seen) if seen else fp.NO_SOURCE,
                                    "reviewed": known.get(target)} for target, seen in found.items()]}


def show(report: Report) -> None:
    """A table of what is not fine, its details, and one line of counts."""
    told = [finding for finding in report.findings if finding.state != "fine"]
    if told:
        table(f"check, line {report.line}", ("row", "state", "where", "found", "to do"),
              [(f.name, f.state, f.where, f.found, f.todo) for f in told])
    for finding in told:
        for detail in finding.details:
            typer.echo(f"{finding.name}: {detail}")
    if report.state == "empty":
        typer.echo(f"check: the catalogue has no row for line {report.line}: nothing was checked")
    else:
        counts = ", ".join(f"{count} {state}" for state, count in report.as_dict()["counts"].items())
        typer.echo(f"check, line {report.line}: {counts}")


def table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """A rich table on standard output, 200 columns wide in pipes and files so that ids stay whole."""
    from rich.console import Console
    from rich.table import Table

    made = Table(title=title)
    for column in columns:
        made.add_column(column, overflow="fold")
    for row in rows:
        made.add_row(*row)
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(made)
