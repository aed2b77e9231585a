"""The commands of `cluster`: start Ray of a run on all its nodes, look at it, end it, from one job file."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from verl_patches.cli.output import Json, leave_with, print_json
from verl_patches.cluster import command, gather, node, upload
from verl_patches.cluster.hosts import BEGUN, Hosts
from verl_patches.cluster.job import Job, load_job, require_hosts, require_secrets, require_volumes
from verl_patches.cluster.place import Place, place_of
from verl_patches.cluster.render import instead_of, rendered
from verl_patches.errors import ConfigError, RecipeError
from verl_patches.patching.report import Finding, Report
from verl_patches.processes import on_end_signals

app = typer.Typer(no_args_is_help=True, help="Ray on all nodes of a run: start it, look at it, end it.")
JOB_HELP = "A job file (configs/cluster_256die.yaml is one), or - for standard input."
RANK_HELP = "Of this node, 0 is Ray's head; default: NODE_RANK, or where the job's hosts have this machine's address."
HEAD_HELP = "Address of Ray's head; default: MASTER_ADDR, or the job's first host."
LOGS_HELP = (
    "Folder for the logs; default: the job's logs. - writes a tar archive to standard output, for a node's own "
    "down (not provider ssh), and the files stay on the node until the next down; none copies nothing."
)
RENDER_HELP = "Print what the nodes run, or the file for kubectl apply or sbatch; start nothing."
BLOCK_HELP = "Stay until a signal or, with --run, the command's end; then end this node's Ray."
JobFile = Annotated[str, typer.Argument(metavar="JOB", help=JOB_HELP)]
NodeRank = Annotated[int | None, typer.Option(help=RANK_HELP)]


def _load(path: str) -> tuple[Job, dict[str, str]]:
    return load_job(path, sys.stdin.buffer.read() if path == "-" else "", os.environ)


def _hosts(job: Job, secrets: dict[str, str], verb: str, job_file: str) -> Hosts | None:
    """The job's hosts; None where each node is called by its own `cluster`. ConfigError for Kubernetes and Slurm."""
    if command := instead_of(job, verb, job_file):
        raise ConfigError(f"job {job.name} has provider {job.provider}, which cluster {verb} does not call: {command}")
    require_hosts(job)
    return Hosts(job, secrets) if job.provider == "ssh" else None


@contextmanager
def _what_goes_on(job: Job, text: str) -> Iterator[None]:
    """At Ctrl-C or SIGTERM, say what goes on without this command and what ends it."""
    try:
        yield
    except SystemExit as error:
        if error.code in (128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGHUP):
            _say(f"job {job.name}: {text}")
        raise


COMMAND_GOES_ON = "the command goes on; cluster follow shows its output again, cluster down ends it and Ray"
UP_GOES_ON = "hosts may still be starting Ray; cluster down ends it on all of them"
LOGS_STAY = "they stay in the job's folder, and another cluster down (--logs FOLDER) gathers them"


@app.command("up")
def up_command(
    job_file: JobFile,
    node_rank: NodeRank = None,
    head: Annotated[str | None, typer.Option(help=HEAD_HELP)] = None,
    run: Annotated[bool, typer.Option("--run", help="Then run the job's command, on the head's node.")] = False,
    block: Annotated[bool, typer.Option("--block", help=BLOCK_HELP)] = False,
    render: Annotated[bool, typer.Option("--render", help=RENDER_HELP)] = False,
    mark: Annotated[bool, typer.Option("--mark", hidden=True)] = False,
    as_json: Json = False,
) -> None:
    """Start Ray on this node, or over ssh on all, and wait until all nodes are in.

    Exit code 0: all nodes are in. 1: some are not within the job's wait_s; what was started is ended. 2: wrong use, or
    something else is in the way. With --run the command's own.
    """
    job, secrets = _load(job_file)
    require_volumes(job)
    if render:
        if as_json:
            print_json({"provider": job.provider, "text": rendered(job)})
        else:
            typer.echo(rendered(job), nl=False)
        return
    if run and not job.command:
        raise ConfigError(f"job {job.name} has no command, which --run needs")
    hosts = _hosts(job, secrets, "up", job_file)
    require_secrets(job, secrets)
    if hosts is None:
        place = place_of(job, os.environ, node_rank, head)
        raise typer.Exit(_up_here(job, secrets, place, run, block, mark, as_json))
    if node_rank is not None or head is not None or block:
        raise ConfigError(f"--node-rank, --head and --block are for provider nodes; job {job.name} has {job.provider}")
    with _what_goes_on(job, UP_GOES_ON):
        hosts.up(_say, gather.logs_folder(job))
    code = 0
    if run:
        with _what_goes_on(job, COMMAND_GOES_ON):
            code = hosts.run(_output(as_json), _say)
    if as_json:
        print_json({"job": job.name, "provider": job.provider, "nodes": job.nodes, "code": code})
    raise typer.Exit(code)


def _up_here(job: Job, secrets: dict[str, str], place: Place, run: bool, block: bool, mark: bool, as_json: bool) -> int:
    """`mark`: write BEGUN once the command runs, for a caller over ssh."""
    upload.require_stores(upload.uploads_of(job))
    started = node.up(job, place, secrets, _say)
    code = 0
    try:
        if run and place.rank == 0:
            command.start(job, started, secrets, _say)
            if mark:
                sys.stdout.buffer.write(BEGUN)
                sys.stdout.flush()
            with _what_goes_on(job, "the command is ended with this node" if block else COMMAND_GOES_ON):
                code = command.follow(job, _output(as_json))
        elif block:
            code = node.stay(job, started)
    finally:
        if block:
            on_end_signals(lambda number: None)  # a second one must not end the cleanup
            keep = True
            try:
                gather.gather(job, gather.logs_folder(job), place.rank)
                keep = False
            except OSError as error:
                _say(f"logs could not be gathered: {error}; {LOGS_STAY}")
            finally:
                node.down(job, place.rank, keep_logs=keep)
    if as_json:
        print_json({"job": job.name, "rank": place.rank, "address": place.address, "head": place.head, "code": code})
    return code


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _output(as_json: bool) -> BinaryIO:
    """Where the command's output goes: with --json standard output is for the report alone."""
    return (sys.stderr if as_json else sys.stdout).buffer


@app.command("follow")
def follow_command(
    job_file: JobFile,
    node_rank: NodeRank = None,
    skip: Annotated[int, typer.Option(min=0, help="Begin after so many bytes of the output.")] = 0,
    as_json: Json = False,
) -> None:
    """Print the output of the job's command (`up --run`) until it ends, and exit with its code.

    Ctrl-C or SIGTERM end this command alone. Exit code 1 too where no command was started, or it was killed.
    With --json the output goes to standard error.
    """
    job, secrets = _load(job_file)
    hosts = _hosts(job, secrets, "follow", job_file)
    with _what_goes_on(job, COMMAND_GOES_ON):
        to = _output(as_json)
        code = command.follow(job, to, skip) if hosts is None else hosts.follow(to, _say, skip)
    if as_json:
        print_json({"job": job.name, "provider": job.provider, "code": code})
    raise typer.Exit(code)


@app.command("status")
def status_command(job_file: JobFile, node_rank: NodeRank = None, as_json: Json = False) -> None:
    """Are all nodes in Ray, and does all that was started run? Exit code 0 or, with a problem that names it, 1."""
    job, secrets = _load(job_file)
    hosts = _hosts(job, secrets, "status", job_file)
    if hosts is None:
        findings = node.status(job, node_rank)
        if (found := command.finding(job)) is not None:
            findings.append(found)
    else:
        findings = hosts.status()
    leave_with(Report("cluster status", "", tuple(findings), job.name), as_json)


@app.command("down")
def down_command(
    job_file: JobFile,
    node_rank: NodeRank = None,
    logs: Annotated[str | None, typer.Option(help=LOGS_HELP)] = None,
    as_json: Json = False,
) -> None:
    """End what `cluster up` started for the job, and nothing else, after its logs are gathered. Idempotent."""
    job, secrets = _load(job_file)
    hosts = _hosts(job, secrets, "down", job_file)
    folder = Path(logs) if logs and logs not in ("-", "none") else gather.logs_folder(job)
    if hosts is not None:
        if logs == "-":
            raise ConfigError("--logs - is for a node's own cluster down; give a folder")
        faults = hosts.down(None if logs == "none" else folder)
        if faults:
            raise RecipeError("\n  ".join([f"cluster down of job {job.name}:", *faults]))
        said = f"job {job.name} is down on all nodes"
    else:
        not_gathered = None
        try:
            if logs == "-":
                sys.stdout.buffer.write(gather.packed(job, node_rank))
                sys.stdout.flush()
            elif logs != "none":
                gather.gather(job, folder, node_rank)
        except OSError as error:  # a full disk, or the caller has gone: what runs here must end all the same
            not_gathered = error
        stopped = node.down(job, node_rank, keep_logs=logs == "-" or not_gathered is not None)
        said = f"ended: {', '.join(stopped)}" if stopped else f"nothing of job {job.name} ran here"
        if not_gathered is not None:
            raise RecipeError(f"{said}; but logs could not be gathered: {not_gathered}; {LOGS_STAY}")
    written = f"; logs in {folder}" if logs not in ("-", "none") and folder.is_dir() else ""
    if as_json and logs != "-":
        finding = Finding(job.name, "fine", "", "nothing left", said + written)
        report = Report("cluster down", "", (finding,), job.name)
        print_json(report.as_dict())
    else:
        _say(said + written)
