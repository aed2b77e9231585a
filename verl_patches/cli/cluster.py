"""Define the command `cluster render`: from a job file to the scripts that start Ray and a run on all its nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from verl_patches.cli.output import Json, print_json
from verl_patches.launch.jobs.job import load_job, require_volumes
from verl_patches.launch.jobs.render import render

app = typer.Typer(no_args_is_help=True, help="Write scripts that start Ray and a run on all nodes of a job.")
JOB_HELP = "A job file, such as configs/cluster_256die.yaml."
FOLDER_HELP = "Folder for the scripts: a new one, or one that this command wrote."


@app.callback()
def cluster() -> None:
    """Keep `render` a subcommand: typer makes a command of an application that has one only."""


@app.command("render")
def render_command(
    job_file: Annotated[Path, typer.Argument(metavar="JOB", help=JOB_HELP)],
    folder: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help=FOLDER_HELP)],
    as_json: Json = False,
) -> None:
    """Write the scripts of a job: up.sh, run.sh, follow.sh, logs.sh, down.sh and node.sh, or files for Slurm or
    Kubernetes. Nothing is started, and no value of a secret is read or written."""
    job = load_job(job_file)
    require_volumes(job)
    start = render(job, folder, str(job_file))
    if as_json:
        print_json({"job": job.name, "provider": job.provider, "folder": str(folder), "start": start})
    else:
        typer.echo(f"the scripts of job {job.name} are in {folder}; start it: {start}")
