"""The commands `cluster up`, `follow`, `status` and `down`: Ray of a run on all its nodes, from one job file."""

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
from verl_patches.cluster import command, gather, node
from verl_patches.cluster.backends import Batch, Hosts, Kuberay
from verl_patches.cluster.job import Job, load_job, require_hosts, require_secrets, require_volumes
from verl_patches.cluster.place import place_of
from verl_patches.cluster.render import rendered
from verl_patches.errors import ConfigError, RecipeError
from verl_patches.patching.report import Finding, Report
from verl_patches.yaml_files import MAX_BYTES

app = typer.Typer(no_args_is_help=True, help="Ray on all nodes of a run: start it, look at it, end it.")
JOB_HELP = "A job file (configs/cluster_256die.yaml is one), or - for standard input."
RANK_HELP = "Of this node, 0 is Ray's head; default: NODE_RANK, or where the job's hosts have this machine's address."
HEAD_HELP = "Address of Ray's head; default: MASTER_ADDR, or the job's first host."
LOGS_HELP = (
    "Folder for the logs; default: the job's logs. - writes a tar archive to standard output, and the files stay on "
    "the node until the next down; none copies nothing."
)
RENDER_HELP = "Print what the nodes, Kubernetes or Slurm would be given; start nothing."
BLOCK_HELP = "Stay until a signal or, with --run, the command's end; then end this node's Ray."
JobFile = Annotated[str, typer.Argument(metavar="JOB", help=JOB_HELP)]
NodeRank = Annotated[int | None, typer.Option(help=RANK_HELP)]


def _load(path: str) -> tuple[Job, dict[str, str]]:
    return load_job(path, sys.stdin.buffer.read(MAX_BYTES + 1) if path == "-" else "", os.environ)


def _backend(job: Job, secrets: dict[str, str]) -> Hosts | Kuberay | Batch | None:
    """What reaches the job's nodes; None where each node is called by its own `cluster`."""
    if job.provider in ("ssh", "nodes"):
        require_hosts(job)
    if job.provider == "ssh":
        return Hosts(job, secrets)
    if job.provider == "kubernetes":
        return Kuberay(job)
    return Batch(job) if job.provider == "slurm" else None


@contextmanager
def _what_goes_on(job: Job, text: str) -> Iterator[None]:
    """At Ctrl-C or SIGTERM, say what goes on without this command and what ends it."""
    try:
        yield
    except SystemExit as error:
        if error.code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
            _say(f"job {job.name}: {text}")
        raise


COMMAND_GOES_ON = "the command goes on; cluster follow shows its output again, cluster down ends it and Ray"
UP_GOES_ON = {
    "ssh": "hosts may still be starting Ray; cluster down ends it on all of them",
    "kubernetes": "the RayJob goes on; cluster down deletes it",
    "slurm": "the Slurm job stays in its queue or runs; cluster down cancels it",
}
LOGS_STAY = "they stay in the job's folder, and another cluster down (--logs FOLDER) gathers them"


@app.command("up")
def up_command(
    job_file: JobFile,
    node_rank: NodeRank = None,
    head: Annotated[str | None, typer.Option(help=HEAD_HELP)] = None,
    run: Annotated[bool, typer.Option("--run", help="Then run the job's command, on the head's node.")] = False,
    block: Annotated[bool, typer.Option("--block", help=BLOCK_HELP)] = False,
    render: Annotated[bool, typer.Option("--render", help=RENDER_HELP)] = False,
    as_json: Json = False,
) -> None:
    """Start Ray on this node, or over ssh, KubeRay or Slurm on all, and wait until all nodes are in.

    Exit code 0: all nodes are in. 1: some are not within the job's wait_s; what was started is ended. 2: wrong use, or
    something else is in the way. With --run the command's own.
    """
    job, secrets = _load(job_file)
    require_volumes(job)
    if render:
        print_json({"provider": job.provider, "text": rendered(job)}) if as_json else typer.echo(
            rendered(job), nl=False
        )
        return
    if run and not job.command:
        raise ConfigError(f"job {job.name} has no command, which --run needs")
    backend = _backend(job, secrets)
    if job.provider != "kubernetes":  # there the Secret has the values
        require_secrets(job, secrets)
    if backend is None:
        raise typer.Exit(_up_here(job, secrets, node_rank, head, run, block, as_json))
    if node_rank is not None or head is not None or block:
        raise ConfigError(f"--node-rank, --head and --block are for provider nodes; job {job.name} has {job.provider}")
    with _what_goes_on(job, UP_GOES_ON[job.provider]):
        backend.up(_say, gather.logs_folder(job))
    code = 0
    if run and isinstance(backend, Hosts):
        with _what_goes_on(job, COMMAND_GOES_ON):
            code = backend.run(_output(as_json), _say)
    if as_json:
        print_json({"job": job.name, "provider": job.provider, "nodes": job.nodes, "code": code})
    raise typer.Exit(code)


def _up_here(
    job: Job, secrets: dict[str, str], rank: int | None, head: str | None, run: bool, block: bool, as_json: bool
) -> int:
    place = place_of(job, os.environ, rank, head)
    started = node.up(job, place, secrets, _say)
    code = 0
    try:
        if run and place.rank == 0:
            command.start(job, started, secrets, _say)
            with _what_goes_on(job, "the command is ended with this node" if block else COMMAND_GOES_ON):
                code = command.follow(job, _output(as_json))
        elif block:
            code = node.stay(job, started)
    finally:
        if block:
            not_gathered = None
            try:
                gather.gather(job, gather.logs_folder(job), place.rank)
            except OSError as error:
                not_gathered = error
                _say(f"logs could not be gathered: {error}; {LOGS_STAY}")
            finally:
                node.end_processes(job, place.rank, keep_logs=not_gathered is not None)
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
    backend = _backend(job, secrets)
    if isinstance(backend, Kuberay | Batch):
        instead = "kubectl logs --follow" if isinstance(backend, Kuberay) else f"tail -f {job.name}-ID.log"
        raise ConfigError(
            f"cluster follow is for providers nodes and ssh; job {job.name} has {job.provider}: {instead}"
        )
    with _what_goes_on(job, COMMAND_GOES_ON):
        to = _output(as_json)
        code = command.follow(job, to, skip) if backend is None else backend.follow(to, _say, skip)
    if as_json:
        print_json({"job": job.name, "provider": job.provider, "code": code})
    raise typer.Exit(code)


@app.command("status")
def status_command(job_file: JobFile, node_rank: NodeRank = None, as_json: Json = False) -> None:
    """Are all nodes in Ray, and does all that was started run? Exit code 0 or, with a problem that names it, 1."""
    job, secrets = _load(job_file)
    backend = _backend(job, secrets)
    if backend is None:
        findings = node.status(job, node_rank)
        if (found := command.finding(job)) is not None:
            findings.append(found)
    else:
        findings = backend.status()
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
    backend = _backend(job, secrets)
    folder = Path(logs) if logs and logs not in ("-", "none") else gather.logs_folder(job)
    if backend is not None:
        faults = backend.down(None if logs == "none" else folder)
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
        stopped = node.end_processes(job, node_rank, keep_logs=logs == "-" or not_gathered is not None)
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
