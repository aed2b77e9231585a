"""The commands about the pins: `versions` and `fetch-upstream`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from verl_patches.cluster.show import Json, leave_with
from verl_patches.patching.report import Report


def register(app: typer.Typer, check: Callable[[Path, str], Report]) -> None:
    """Add the commands of this file to `app`; `check`: the contract check, by folder of clones and line."""
    _versions(app)
    _fetch_upstream(app, check)


def _versions(app: typer.Typer) -> None:
    @app.command("versions")
    def versions_command(
        line: Annotated[
            str | None, typer.Option(help="pypi or a3; default: the line of VERL_PATCHES, else production.")
        ] = None,
        upstream: Annotated[
            Path | None, typer.Option(help="Folder with the clones of scripts/fetch_upstream.sh, for line a3.")
        ] = None,
        as_json: Json = False,
    ) -> None:
        """What of the pins is on this machine: packages, commits, Ascend software, environment variables."""
        from verl_patches.cluster.checkouts import LINE, trees_of
        from verl_patches.cluster.versions import compare
        from verl_patches.errors import ConfigError

        report = compare(line, trees=trees_of(upstream))
        if upstream is not None and report.line != LINE:
            raise ConfigError(f"--upstream contains line {LINE}, but --line is {report.line}: give --line {LINE}")
        leave_with(report, as_json)


def _fetch_upstream(app: typer.Typer, check: Callable[[Path, str], Report]) -> None:
    @app.command("fetch-upstream")
    def fetch_upstream_command(
        line: Annotated[str, typer.Option(help="The line whose repositories are cloned.")] = "a3",
        mirror: Annotated[
            str | None, typer.Option(help="A folder of git mirrors, or URL for URL/NAME.git; then the only source.")
        ] = None,
        dest: Annotated[Path | None, typer.Option(help="Folder of the clones; default: upstream/ here.")] = None,
        only: Annotated[list[str] | None, typer.Option(help="A repository; can be repeated. Default: all.")] = None,
        as_json: Json = False,
    ) -> None:
        """Clone the pinned repositories, verify them, insert the prelude line, and run `check` over them."""
        from verl_patches.cluster.fetch import DEFAULT_DEST, fetch_upstream
        from verl_patches.cluster.pins import load_pins

        def log(text: str) -> None:
            if not as_json:
                typer.echo(text, err=True)

        report = fetch_upstream(line, load_pins().line(line), dest or DEFAULT_DEST, check, mirror, only or (), log)
        leave_with(report, as_json)
