"""The commands about the pins: `versions`, `fetch-upstream`, `dockerfile`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from verl_patches.cli.output import Json, leave_with


def register(app: typer.Typer) -> None:
    """Add the commands of this file to `app`."""
    _versions(app)
    _fetch_upstream(app)
    _dockerfile(app)


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
        from verl_patches.cluster.trees import LINE, trees_of
        from verl_patches.cluster.versions import compare
        from verl_patches.errors import ConfigError

        report = compare(line, trees=trees_of(upstream))
        if upstream is not None and report.line != LINE:
            raise ConfigError(f"--upstream holds line {LINE}, but this compares line {report.line}: say --line {LINE}")
        leave_with(report, as_json)


def _fetch_upstream(app: typer.Typer) -> None:
    @app.command("fetch-upstream")
    def fetch_upstream_command(
        line: Annotated[str, typer.Option(help="The line whose repositories are wanted.")] = "a3",
        mirror: Annotated[
            str | None, typer.Option(help="A folder of git mirrors, or URL for URL/NAME.git; then the only source.")
        ] = None,
        dest: Annotated[Path | None, typer.Option(help="Folder of the trees; default: upstream/ here.")] = None,
        only: Annotated[list[str] | None, typer.Option(help="A repository; can be given again. Default: all.")] = None,
        as_json: Json = False,
    ) -> None:
        """Clone the pinned repositories, verify them, insert the prelude line, and run `check` over them."""
        from verl_patches.cluster.fetch import DEFAULT_DEST, fetch_upstream
        from verl_patches.cluster.pins import load_pins

        console = Console(stderr=True, quiet=as_json)
        with console.status("looking at what is there") as status:

            def tell(name: str, percent: int | None, words: str) -> None:
                if percent is None:
                    console.print(f"{name}: {words}", highlight=False, markup=False, soft_wrap=True)
                else:
                    status.update(Text(f"{name} {'#' * (percent // 5):.<20} {percent}%"))

            report = fetch_upstream(line, load_pins().line(line), dest or DEFAULT_DEST, mirror, only or (), tell)
        leave_with(report, as_json)


def _dockerfile(app: typer.Typer) -> None:
    @app.command("dockerfile")
    def dockerfile_command(
        line: Annotated[str, typer.Option(help="The line whose container is wanted.")] = "a3",
        write: Annotated[bool, typer.Option("--write", help="Write it to configs/Dockerfile.LINE.")] = False,
        run: Annotated[bool, typer.Option("--run", help="Print how to build the image and start a container.")] = False,
        as_json: Json = False,
    ) -> None:
        """The Dockerfile of a line, from the pin file, and the commands to build it and to start its container."""
        from verl_patches.cluster import container
        from verl_patches.cluster.pins import load_pins

        pins = load_pins().line(line)
        text, path = container.dockerfile(line, pins), container.dockerfile_path(line)
        build, start = container.build_command(line, pins), container.start_command(line, pins)
        if write:
            path.write_text(text)
        if as_json:
            facts = {"line": line, "file": str(path), "written": write, "built_here": False, "dockerfile": text}
            typer.echo(json.dumps({**facts, "build": build, "start": start}, indent=1))
            return
        if run:
            typer.echo(f"{_copyable(build)}\n\n{_copyable(start)}")
        elif not write:
            typer.echo(text, nl=False)
        said = f"written to {path}" if write else "generated from configs/upstream.yaml"
        typer.echo(f"verl_patches: {said}; not built here and not run here", err=True)


def _copyable(argv: list[str]) -> str:
    """A command for a shell: an option and its value on each line."""
    lines: list[list[str]] = [[]]
    for word in argv:
        if word.startswith("--") or (len(lines) > 1 and len(lines[-1]) == 2):
            lines.append([])
        lines[-1].append(shlex.quote(word))
    return " \\\n  ".join(" ".join(line) for line in lines)
