"""Define the commands about upstream's sources: `check`, `explain` and `versions`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from verl_patches import catalog
from verl_patches.cli.output import Json, exit_with_report, print_json, print_table
from verl_patches.cli.patches import SwitchesOption, build_engine
from verl_patches.cli.run import Upstream
from verl_patches.errors import ConfigError
from verl_patches.patching.contract import PACKAGES, check_rows, record_rows
from verl_patches.patching.engine import find_row
from verl_patches.patching.report import Finding, Report
from verl_patches.patching.spec import PatchSpec
from verl_patches.patching.switches import switches_from_environment
from verl_patches.upstream.checkouts import FETCH_HINT, GIT_LINE, SETUP_HINT, Trees, find_trees
from verl_patches.upstream.modified import package_roots, source_findings
from verl_patches.upstream.pins import load_pins
from verl_patches.upstream.versions import compare_pins

LineOption = Annotated[str | None, typer.Option("--line", help="Set of pins: pypi or a3; default: of VERL_PATCHES.")]
SOURCES_HELP = f"Folder with the clones of line {GIT_LINE} side by side."
WRITE_HELP = "First record the bodies of the rows' targets as reviewed."
NO_SOURCE_HELP = "With --write: accept targets without Python text (compiled or inherited)."
ONLY_HELP = "With --upstream: check only this repository and the rows that target it; can be repeated."


def check_command(
    row_ids: Annotated[list[str] | None, typer.Argument(help="Ids of rows; default: all rows of the line.")] = None,
    upstream: Annotated[Path | None, typer.Option(help=SOURCES_HELP)] = None,
    line: LineOption = None,
    only: Annotated[list[str] | None, typer.Option(help=ONLY_HELP)] = None,
    write: Annotated[bool, typer.Option("--write", help=WRITE_HELP)] = False,
    no_source: Annotated[bool, typer.Option("--no-source", help=NO_SOURCE_HELP)] = False,
    as_json: Json = False,
) -> None:
    """Check upstream sources: files against their pins, and each row's target, body and bindings against the review.

    The sources are the packages of this Python, unless --upstream names a folder.
    """
    if only and upstream is None:
        raise ConfigError("check: --only needs --upstream DIR")
    name = line or switches_from_environment().line
    pins, rows = load_pins().line(name), _chosen_rows(row_ids or (), name)
    if upstream is None:
        packages, roots = [*PACKAGES[name]], package_roots(name, Trees())
    else:
        places = {
            package: upstream / key
            for key, pin in pins.choose_repositories(only or ()).items()
            for package in pin.packages
        }
        packages, roots = [*places], {package: place for package, place in places.items() if (place / package).is_dir()}
    if only:
        rows = [row for row in rows if row.target_module.split(".")[0] in packages]
    missing = [package for package in packages if package not in roots]
    unwritable = write and any(row.target_module.split(".")[0] in missing for row in rows)
    if missing and (upstream is None or not roots or unwritable):
        hint = FETCH_HINT if pins.repositories else SETUP_HINT
        raise ConfigError(f"line {name}: expected {', '.join(missing)} in {upstream or 'this Python'}; {hint}")
    if write:
        targets = [row for row in rows if not row.is_module_stub]
        for target in record_rows(targets, name, roots, no_source, whole=not (row_ids or only)):
            typer.echo(f"dropped from the record, no row has this target: {target}", err=True)
    expected = "a clone of every repository of the line"
    todo = f"{FETCH_HINT}; to check packages that pip has installed, leave out --upstream"
    findings = []
    for package in missing:
        text = f"absent: the rows of {package} were not checked"
        findings.append(Finding(f"package {package}", "problem", str(upstream), expected, text, todo))
    findings += [*source_findings(pins, roots), *check_rows(rows, name, roots, installed=upstream is None)]
    exit_with_report(Report("check", name, tuple(findings)), as_json, fine=False)


def explain_command(row_id: str, switches: SwitchesOption = None, as_json: Json = False) -> None:
    """Show one row of the catalogue: its target, provider, reason, exit condition and state."""
    engine = build_engine(switches)
    facts, spec = engine.explain(row_id), engine.specs[row_id]
    drifted = not spec.is_module_stub and facts["reviewed"] != facts["fingerprint"]
    facts["state"] = "off"
    if facts["wanted"]:  # nothing is applied here
        facts["state"] = "drifted" if drifted else "waiting"
    if as_json:
        print_json(facts)
        return
    rows = []
    for key, value in facts.items():
        rows.append((key, ", ".join(value) if isinstance(value, (list, tuple)) else str(value)))
    print_table(row_id, ("fact", "value"), rows)


def versions_command(line: LineOption = None, upstream: Upstream = None, as_json: Json = False) -> None:
    """Compare this machine with the pins: packages, commits, Ascend software, environment variables."""
    report = compare_pins(line, trees=find_trees(upstream))
    if upstream is not None and report.line != GIT_LINE:
        raise ConfigError(f"--upstream contains line {GIT_LINE}, but --line is {report.line}: give --line {GIT_LINE}")
    exit_with_report(report, as_json)


def _chosen_rows(row_ids: Sequence[str], line: str) -> list[PatchSpec]:
    """Return the rows of these ids, or all of a line; ConfigError for an unknown one, or one of another line."""
    by_id = {spec.id: spec for spec in catalog.all_rows()}
    for name in row_ids:
        lines = find_row(name, by_id).lines
        if line not in lines:
            raise ConfigError(
                f"row {name} is for line {', '.join(sorted(lines))}, not for {line}; give the line with --line"
            )
    return [spec for name, spec in by_id.items() if (name in row_ids if row_ids else line in spec.lines)]
