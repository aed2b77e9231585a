"""Two commands: `check` compares upstream's sources with the catalogue, `fingerprint` records a review."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from verl_patches.cli.output import Json, leave_with, table
from verl_patches.errors import ConfigError
from verl_patches.patching.engine import Engine
from verl_patches.patching.report import Finding, Report


def register(app: typer.Typer, engine_of: Callable[[str | None], Engine]) -> None:
    """Add the commands to `app`; `engine_of(switches)` gives an engine over the catalogue, nothing applied."""

    @app.command("check")
    def check_command(
        upstream: Annotated[
            Path | None,
            typer.Option(
                help="Folder with the upstream clones side by side (line pypi: "
                "with the packages, as a site-packages folder)."
            ),
        ] = None,
        installed: Annotated[bool, typer.Option("--installed", help="The packages of this Python; default.")] = False,
        line: Annotated[str | None, typer.Option(help="pypi or a3; default: the line of VERL_PATCHES.")] = None,
        base: Annotated[
            Path | None,
            typer.Option(
                help="A known tree, laid out as --upstream: print the whole difference of drifted targets against it."
            ),
        ] = None,
        as_json: Json = False,
    ) -> None:
        """Compare upstream's files with their pins, and every row's target, body, signature and bindings with them."""
        if upstream is not None and installed:
            raise ConfigError("check: --upstream and --installed exclude each other; give one")
        leave_with(run_check(upstream, line, base), as_json, fine=False)

    @app.command("fingerprint")
    def fingerprint_command(
        row_ids: Annotated[list[str] | None, typer.Argument(help="Rows; all of the line when none is given.")] = None,
        write: Annotated[bool, typer.Option("--write", help="Record them as reviewed.")] = False,
        no_source: Annotated[
            bool,
            typer.Option(
                "--no-source", help="With --write: accept targets without Python text (compiled or inherited)."
            ),
        ] = False,
        upstream: Annotated[Path | None, typer.Option(help="Read these clones, as for `check`.")] = None,
        line: Annotated[str | None, typer.Option(help="pypi or a3; default: the line of VERL_PATCHES.")] = None,
        as_json: Json = False,
    ) -> None:
        """Compare fingerprints of the targets on disk with the reviewed ones."""
        rows = fingerprints(engine_of(line and f"line={line}"), row_ids or [], write, no_source, upstream)
        if as_json:
            typer.echo(json.dumps(rows, indent=1))
        elif not rows["rows"]:
            typer.echo(f"fingerprint: the catalogue has no row with a target on line {rows['line']}")
        else:
            table(
                f"fingerprints, line {rows['line']}",
                ("target", "found", "reviewed"),
                [(r["target"], r["found"], r["reviewed"] or "-") for r in rows["rows"]],
            )
            for target in rows["dropped"]:
                typer.echo(f"dropped from the record, no row has this target: {target}")
        fine = rows["rows"] and all(r["found"] == r["reviewed"] for r in rows["rows"])
        raise typer.Exit(0 if fine else 1)


def run_check(upstream: Path | None, line: str | None, base: Path | None = None) -> Report:
    """The report on one line; ConfigError for folders and lines that are not there."""
    from verl_patches.catalog import ROWS
    from verl_patches.patching.contract import PACKAGES, Sources, check, installed_roots
    from verl_patches.patching.switches import from_environment
    from verl_patches.upstream.checkouts import FETCH
    from verl_patches.upstream.modified import source_findings
    from verl_patches.upstream.pins import load_pins

    name = line or from_environment().line
    pins = load_pins().line(name)
    if upstream is None and not any(name in row.lines for row in ROWS):
        return Report("check", name, ())
    here = installed_roots(name) if upstream is None else _roots("--upstream", upstream, name, part=True)
    known = {} if base is None else _roots("--base", base, name)
    absent = frozenset(PACKAGES[name]) - set(here)
    compared = dict(zip(here, source_findings(pins, here), strict=True))
    verified = {package: f"{f.name}, {f.found}" for package, f in compared.items() if f.state == "fine"}
    report = check(ROWS, name, Sources(here, upstream is None, known, pins.packages, absent, verified))
    if report.state == "empty":
        return report
    missing = [
        Finding(
            f"package {package}",
            "problem",
            str(upstream),
            "a clone of every repository of the line",
            f"absent: the rows of {package} were not checked",
            f"{FETCH}; a run needs no clone of what pip has installed (check --installed looks at that)",
        )
        for package in PACKAGES[name]
        if package in absent
    ]
    return Report("check", name, (*missing, *compared.values(), *report.findings))


def _roots(option: str, folder: Path, line: str, part: bool = False) -> dict[str, Path]:
    """{top-level package: the folder that holds it}; a line without repositories has its packages in `folder`.

    Raises ConfigError for packages that are missing; with `part` only where all are.
    """
    from verl_patches.patching.contract import PACKAGES
    from verl_patches.upstream.pins import load_pins

    if not folder.is_dir():
        raise ConfigError(f"{option} {folder} is not a folder")
    if load_pins().line(line).repositories:
        return load_pins().line(line).package_roots(folder, part)
    missing = [package for package in PACKAGES[line] if not (folder / package).is_dir()]
    if missing and (not part or len(missing) == len(PACKAGES[line])):
        raise ConfigError(
            f"{option} {folder}: expected the packages {', '.join(PACKAGES[line])}, found no {', '.join(missing)}"
        )
    return {package: folder for package in PACKAGES[line] if package not in missing}


def fingerprints(
    engine: Engine, row_ids: list[str], write: bool, no_source: bool, upstream: Path | None = None
) -> dict[str, Any]:
    """{line, rows: [{target, found, reviewed}], dropped}, recorded first if `write`; ConfigError for absent targets.

    A target without Python text is recorded where the row is an `extend`, where it was reviewed as such, or with
    `no_source`. `dropped`: targets that no row has any more; writing the whole line takes their records out.
    """
    from verl_patches.patching import fingerprint as fp

    line = engine.switches.line
    names = row_ids or [name for name, spec in engine.specs.items() if line in spec.lines]
    for name in names:
        engine.explain(name)  # refuses an unknown one, with the nearest
        if line not in engine.specs[name].lines:
            raise ConfigError(
                f"row {name} is for line {', '.join(sorted(engine.specs[name].lines))}, not for {line}; "
                "say which with --line"
            )
    specs = [engine.specs[name] for name in names if not engine.specs[name].is_module_stub]
    roots = {} if upstream is None else _roots("--upstream", upstream, line)
    dropped: list[str] = []
    root_of = {spec.target: roots.get(spec.target_module.split(".")[0]) for spec in specs}
    found = {target: fp.statements(target, root) for target, root in root_of.items()}
    if write:
        absent = [
            f"{spec.id}: {spec.target}"
            for spec in specs
            if not found[spec.target]
            and spec.kind != "extend"
            and not no_source
            and fp.reviewed_hash(line, spec.target) != fp.NO_SOURCE
        ]
        absent += [
            f"{spec.id}: {spec.target}"
            for spec in specs
            if fp.source_file(spec.target_module, root_of[spec.target]) is None
        ]
        if absent:
            raise ConfigError(
                "fingerprint: nothing was written, these targets have no Python text here:\n  "
                + "\n  ".join(dict.fromkeys(absent))
                + "\n`python -m verl_patches check` lists near "
                "names; for a compiled or inherited target add --no-source"
            )
        dropped = fp.write_reviewed(line, found, whole=not row_ids)
    known = fp.reviewed().get(line, {})
    rows = [
        {"target": target, "found": fp.whole_hash(seen) if seen else fp.NO_SOURCE, "reviewed": known.get(target)}
        for target, seen in found.items()
    ]
    return {"line": line, "rows": rows, "dropped": dropped}
