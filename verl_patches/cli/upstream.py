"""The commands about the pins: `versions` and `fetch-upstream`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from verl_patches.cli.contract import LineOption, run_check
from verl_patches.cli.output import Json, leave_with
from verl_patches.cli.run import Upstream
from verl_patches.errors import ConfigError
from verl_patches.upstream.checkouts import LINE, trees_of
from verl_patches.upstream.fetch import DEFAULT_DEST, fetch_upstream
from verl_patches.upstream.pins import load_pins
from verl_patches.upstream.versions import compare

MIRROR_HELP = "A folder of git mirrors, or URL for URL/NAME.git; then the only source."


def versions_command(line: LineOption = None, upstream: Upstream = None, as_json: Json = False) -> None:
    """What of the pins is on this machine: packages, commits, Ascend software, environment variables."""
    report = compare(line, trees=trees_of(upstream))
    if upstream is not None and report.line != LINE:
        raise ConfigError(f"--upstream contains line {LINE}, but --line is {report.line}: give --line {LINE}")
    leave_with(report, as_json)


def fetch_upstream_command(
    line: Annotated[str, typer.Option(help="The line whose repositories are cloned.")] = "a3",
    mirror: Annotated[str | None, typer.Option(help=MIRROR_HELP)] = None,
    dest: Annotated[Path | None, typer.Option(help="Folder of the clones; default: upstream/ here.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="A repository; can be repeated. Default: all.")] = None,
    as_json: Json = False,
) -> None:
    """Clone the pinned repositories, verify them, insert the prelude line, and run `check` over them."""

    def log(text: str) -> None:
        if not as_json:
            typer.echo(text, err=True)

    report = fetch_upstream(line, load_pins().line(line), dest or DEFAULT_DEST, run_check, mirror, only or (), log)
    leave_with(report, as_json)
