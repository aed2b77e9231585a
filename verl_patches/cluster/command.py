"""The job's command on the head's node. It runs apart from its starter; its output is a file that callers follow.

Files in the job's folder, until `cluster down`: command.json names the newest start, command-<n>.log has the output of
the n-th, command-<n>.exit its exit code once it has ended. The command has the node's mark, so `down` ends it.
"""

from __future__ import annotations

import json
import select
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from verl_patches.cluster.job import Job
from verl_patches.cluster.node import Started, node_environment, one_command_in, recorded_process
from verl_patches.cluster.upload import command_words
from verl_patches.errors import ConfigError, RecipeError
from verl_patches.patching.report import Finding
from verl_patches.processes import started_at
from verl_patches.shared_files import GrowingFile, write_whole

RECORD = "command.json"
POLL_S = 0.5
# bash writes the exit code of a command whose starter has gone; 128 + n where signal n ended it
_WRITE_CODE = 'file=$1; shift; "$@"; code=$?; echo $code > "$file.new" && mv "$file.new" "$file"'


@dataclass(frozen=True)
class Command:
    """A start of the job's command; pid, started (processes.started_at): of the shell that waits for it."""

    number: int
    words: list[str]
    pid: int
    started: int

    @property
    def runs(self) -> bool:
        """Whether it still does."""
        return recorded_process({"pid": self.pid, "started": self.started}) is not None


def _log(job: Job, number: int) -> Path:
    return Path(job.folder) / f"command-{number}.log"


def newest(job: Job) -> Command | None:
    """The newest start on this node since `cluster up`, running or ended; None without any."""
    try:
        return Command(**json.loads((Path(job.folder) / RECORD).read_text()))
    except FileNotFoundError:
        return None


def code_of(job: Job, command: Command) -> int | None:
    """Its exit code; None while it runs, and where it was killed together with the shell that waits for it."""
    try:
        return int(_log(job, command.number).with_suffix(".exit").read_text())
    except FileNotFoundError:
        return None


def start(job: Job, started: Started, secrets: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Start the command, unless it runs already. ConfigError where another one runs, or the checkout is not there."""
    with one_command_in(Path(job.folder)):
        _start(job, started, secrets, say)


def _start(job: Job, started: Started, secrets: Mapping[str, str], say: Callable[[str], None]) -> None:
    before = newest(job)
    if before is not None and before.runs:
        if before.words != job.command:
            raise ConfigError(
                f"another command of job {job.name} runs (pid {before.pid}): {' '.join(before.words)}. Follow it with "
                "cluster follow, or end it with cluster down"
            )
        say(f"the command of job {job.name} runs already (pid {before.pid}): nothing was started")
        return
    number = before.number + 1 if before else 1
    log = _log(job, number)
    words = ["bash", "-c", _WRITE_CODE, "command", str(log.with_suffix(".exit")), *command_words(job)]
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                words,
                env=node_environment(job, secrets, started.mark),
                cwd=job.checkout,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(f"checkout {job.checkout}: {error.strerror}; nothing was started") from None
    made = Command(number, list(job.command), process.pid, started_at(process.pid))
    write_whole(Path(job.folder) / RECORD, json.dumps(asdict(made)) + "\n")


def follow(job: Job, to: BinaryIO, skip: int = 0) -> int:
    """Write the command's output from byte `skip` on to a stream until it ends; its exit code.

    Ends with 141 where nobody reads the output any more. Raises RecipeError where no command was started, or where it
    ended without an exit code.
    """
    command = newest(job)
    if command is None:
        raise RecipeError(f"no command of job {job.name} was started on this node; cluster up --run starts it")
    output = GrowingFile(_log(job, command.number), skip)
    while True:
        runs = command.runs  # asked before the last read, so that nothing is left
        to.writelines(output.blocks())
        to.flush()
        code = code_of(job, command)
        if code is not None or not runs:
            break
        if _nobody_reads(to, POLL_S):
            raise SystemExit(128 + signal.SIGPIPE)
    if code is None:
        raise RecipeError(f"the command of job {job.name} (pid {command.pid}) was killed; it has no exit code")
    return code


def _nobody_reads(stream: BinaryIO, wait_s: float) -> bool:
    """Wait, at most until the other end of a pipe is closed."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)  # POLLERR and POLLHUP alone
    return bool(poll.poll(wait_s * 1000))


def finding(job: Job) -> Finding | None:
    """What `status` says of the command; None where none was started."""
    command = newest(job)
    if command is None:
        return None
    expected, where = "runs, or ended with exit code 0", str(_log(job, command.number))
    code = code_of(job, command)
    if code is None and command.runs:
        return Finding("command", "fine", where, expected, f"runs (pid {command.pid})")
    found = "was killed" if code is None else ended_with(code)
    state, todo = ("fine", "") if code == 0 else ("problem", "read its output")
    return Finding("command", state, where, expected, found, todo)


def ended_with(code: int) -> str:
    """What `finding` says of an ended command, which callers on other nodes read."""
    return f"ended with exit code {code}"
