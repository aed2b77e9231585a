"""The nodes of a job with provider ssh, reached from one place.

Every host runs `cluster up|status|down` for itself, with the job on its standard input. Ray's own launcher
(`ray up`, provider local; 2.42.1) is not used: it returns once the head is up, starts the other nodes from the head's
monitor with a private key that must be there, reports their failures in that monitor's log alone, and ends nodes with
`ray stop`, which ends every Ray of the user (ray/autoscaler/_private/commands.py:449).
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from verl_patches.cluster.command import ended_with
from verl_patches.cluster.gather import PLOG_VARIABLE, unpack
from verl_patches.cluster.job import Job, as_text, of_a_node
from verl_patches.cluster.node import ALREADY
from verl_patches.cluster.render import node_command
from verl_patches.config.environment import REPOSITORY
from verl_patches.errors import ConfigError, RecipeError
from verl_patches.patching.report import Finding
from verl_patches.watch.heartbeat import ranks_text

BLOCK_BYTES = 1 << 16
MARGIN_S = 180.0  # for a host's connection, container and processes, beyond the job's own wait
LOGS_S = 900.0  # for the logs of a node, beyond MARGIN_S
SSH_FAILED, NO_END = 255, 124  # exit codes: ssh's own, which a command may have too; of a call beyond its limit
RECONNECT_S, RECONNECT_EVERY_S = 900.0, 10.0
LABEL, DIGEST = "verl_patches.job", "verl_patches.digest"  # labels of containers that `cluster up` started
# what a shell's profiles print comes before this line, and of `up --run` all that comes before the command's start
BEGINS = "verl_patches: output begins"
BEGUN = f"{BEGINS}\n".encode()
MARK = "--mark"  # `up` prints BEGINS itself
START_CONTAINER = REPOSITORY / "scripts" / "start_container.sh"
# what container $id holds outside its volumes, which would be deleted with it:
# "A PATH" (added since its image), "C" (changed), "D" (deleted), and "M" for its mounts
CHANGES = """docker diff $id && docker inspect --format '{{range .Mounts}}{{println "M" .Destination}}{{end}}' $id"""
_LINE = re.compile(r"([ACDM]) (/.+)")
_SYSTEM = re.compile(r"/(bin|boot|dev|etc|lib|lib64|proc|run|sbin|sys|tmp|usr|var)(/|$)")
# what runs write or read, and so is sought in those folders too
_KINDS, _NAMES = {".safetensors", ".parquet", ".pt", ".jsonl"}, {"summary.json", "manifest.json"}
# hidden files, caches, the logs and reports of Ascend's runtime, compiled operators
_GENERATED = re.compile(
    r"/(\.[^/]+|__pycache__|ascend/(log|atrace)|kernel_meta[^/]*|atc_data|extra-info|FE"
    r"|(fusion|check)_result\.json)(/|$)"
)
_SHOWN = 3


@dataclass(frozen=True)
class Answer:
    """How a command ended; `fault` is its last line of error, empty with code 0."""

    code: int
    output: bytes
    error: str

    @property
    def fault(self) -> str:
        lines = [line.strip() for line in self.error.splitlines() if line.strip()]
        return "" if self.code == 0 else (lines[-1] if lines else f"exit code {self.code}")


def _forwarded(words: Sequence[str], stdin: str, to: BinaryIO) -> tuple[int, bool, int]:
    """(exit code, whether BEGINS came, bytes after it) of a host's program; those bytes go to a stream while it runs.

    It ends with this call.
    """
    begun, size = False, 0
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            with suppress(BrokenPipeError):  # it has ended already, and its exit code says why
                process.stdin.write(stdin.encode())
                process.stdin.close()
            for line in process.stdout:
                if begun := line.endswith(BEGUN):
                    break
            while block := process.stdout.read1(BLOCK_BYTES):
                to.write(block)
                to.flush()
                size += len(block)
        except BaseException:
            process.kill()
            raise
    code = SSH_FAILED if process.returncode < 0 else process.returncode  # below 0: a signal has ended ssh
    return code, begun, size


class Hosts:
    """The job's hosts, over ssh."""

    def __init__(self, job: Job, secrets: Mapping[str, str]):
        self.job, self.secrets = job, secrets

    def _words(self, rank: int, line: str) -> list[str]:
        """ConfigError where the job's ssh is not installed here."""
        program = self.job.ssh.command[0]
        if shutil.which(program) is None:
            raise ConfigError(f"{program} is not installed here, which this provider needs")
        host = self.job.hosts[rank]
        return [*self.job.ssh.command, f"{self.job.ssh.user}@{host}" if self.job.ssh.user else host, line]

    def _on(self, rank: int, line: str, stdin: str, limit_s: float) -> Answer:
        """Run a line of a host's shell; the call never ends later than `limit_s`."""
        words = self._words(rank, line)
        try:
            done = subprocess.run(words, input=stdin.encode(), capture_output=True, timeout=limit_s)
        except subprocess.TimeoutExpired as error:
            return Answer(NO_END, error.stdout or b"", f"no end within {limit_s:g} s")
        return Answer(done.returncode, done.stdout, done.stderr.decode(errors="replace"))

    def _inside(self, line: str) -> str:
        """The line in the job's container, where it has an image; a login shell there sets CANN's variables."""
        return f"docker exec -i {self.job.name} bash -lc {shlex.quote(line)}" if self.job.image else line

    def _line(self, rank: int, verb: str, *options: str) -> str:
        """A line that runs `cluster VERB` on a host; its own MASTER_ADDR and NODE_RANK do not count."""
        head = ["--head", self.job.hosts[0]] if verb == "up" else []
        line = node_command(self.job, verb, "--node-rank", str(rank), *head, *options)
        return self._inside(line if MARK in options else f"echo {shlex.quote(BEGINS)}; {line}")

    def _reach(self, rank: int) -> Answer:
        """Are checkout and Python there?"""
        checkout, python = shlex.quote(self.job.checkout), shlex.quote(self.job.python)
        missing = f"{{ echo {shlex.quote(f'no program {self.job.python} (python)')} >&2; exit 1; }}"
        line = f"cd {checkout} && {{ command -v {python} > /dev/null || {missing}; }}"
        return self._on(rank, self._inside(line), "", MARGIN_S)

    def _stdin(self, verb: str) -> str:
        return as_text(of_a_node(self.job), self.secrets if verb == "up" else None)

    def _cluster(self, rank: int, verb: str, *options: str, limit_s: float, before: str = "") -> Answer:
        """`cluster VERB` on one host, behind a line of its shell."""
        answer = self._on(rank, before + self._line(rank, verb, *options), self._stdin(verb), limit_s)
        return replace(answer, output=answer.output.partition(BEGUN)[2])

    def _each(self, call: Callable[[int], Answer], ranks: Sequence[int] | None = None) -> dict[int, Answer]:
        """{rank: answer} of all hosts at once, or of those of `ranks`."""
        chosen = range(self.job.nodes) if ranks is None else ranks
        with ThreadPoolExecutor(self.job.nodes) as threads:
            return dict(zip(chosen, threads.map(call, chosen), strict=True))

    def _faults(self, answers: Mapping[int, Answer]) -> str:
        """A line for each fault, to stand below a sentence that ends with a colon."""
        lines = self._lines({rank: answer.fault for rank, answer in answers.items() if answer.code})
        return "".join(f"\n  {line}" for line in lines)

    def _lines(self, faults: Mapping[int, str]) -> list[str]:
        """A line for each fault, with the ranks of all hosts that have it; HOST stands for their own names there."""
        ranks: dict[str, list[int]] = {}
        for rank, fault in faults.items():
            own = rf"(?<![\w.-]){re.escape(self.job.hosts[rank])}(?![\w.-])"
            ranks.setdefault(re.sub(own, "HOST", fault), []).append(rank)
        return [
            f"nodes {ranks_text(same)}: {fault}" if len(same) > 1 else f"{self.job.host_of(same[0])}: {faults[same[0]]}"
            for fault, same in ranks.items()
        ]

    def up(self, say: Callable[[str], None], logs: Path) -> None:
        """Start containers and Ray on all hosts; RecipeError that names those where it failed, with logs in a folder.

        Each host ends what it started where nodes are missing. Hosts of which that is not known, and new containers,
        are ended here, unless an earlier `up` has started the job.
        """
        new: list[int] = []
        if self.job.image:
            answers = self._each(self._container)
            new = [rank for rank, a in answers.items() if a.code == 0 and a.output.split()[-1:] == [b"new"]]
            if fault := self._faults(answers):
                fault += self._left_of(new)
                lost = [rank for rank, a in answers.items() if a.code in (SSH_FAILED, NO_END) and BEGUN in a.output]
                if lost:
                    fault += f"\n  docker may still be at work on nodes {ranks_text(lost)}: cluster down removes it"
                raise RecipeError(f"cluster up of job {self.job.name}, containers:{fault}")
            say(f"{self.job.nodes} containers of {self.job.image} run, {len(new)} of them new")
        answers = self._each(self._reach)  # a host that is not reached is known before the others wait for it
        if fault := self._faults(answers):
            fault += self._left_of(new)
            raise RecipeError(f"cluster up of job {self.job.name}; nothing was started:{fault}")
        limit_s = self.job.wait_s + MARGIN_S
        answers = self._each(lambda rank: self._cluster(rank, "up", limit_s=limit_s))
        if fault := self._faults(answers):
            if not any(ALREADY in answer.error for answer in answers.values()):
                began = [rank for rank, answer in answers.items() if answer.code != 2]
                self._gather(logs, began, limit_s=0.0)
                self._each(self._down, began)
                fault += self._left_of(new)
                fault += f"\n  logs in {logs}" if logs.is_dir() else ""
            raise RecipeError(f"cluster up of job {self.job.name}:{fault}")
        say(f"all {self.job.nodes} nodes of job {self.job.name} are in Ray")

    def _down(self, rank: int, logs: str = "none", limit_s: float = 0.0) -> Answer:
        """A host without the job's container has nothing to end; a stopped container is started for its logs."""
        before = ""
        if self.job.image:
            started = f"docker start {self.job.name} > /dev/null"
            before = f'ids=$({self._listed}) || exit 1; [ -n "$ids" ] || exit 0; {started} && '
        return self._cluster(rank, "down", "--logs", logs, limit_s=MARGIN_S + limit_s, before=before)

    def _container(self, rank: int) -> Answer:
        """Start the job's container on a host; the last word of its output is "new", or "old" for one that was there.

        Another user's container, or one made from an older job file, is refused with code 2.
        """
        job, labels = self.job, "".join(f'{{{{index .Config.Labels "{label}"}}}} ' for label in (LABEL, DIGEST))
        found = f"docker container inspect --format {shlex.quote(labels)} {job.name} 2> /dev/null"
        options = shlex.join(
            ["--label", f"{LABEL}={job.name}", "--label", f"{DIGEST}={job.digest}", *job.ssh.container_options]
        )
        volumes = " ".join(f"{host}:{folder}" for host, folder in job.volumes.items())
        foreign = f"a container {job.name} exists that cluster up did not start"
        other = f"container {job.name} was started for another image or job file: cluster down, then cluster up"
        # one that could not be started is no use to the next call; docker rm leaves a running one alone
        failed = f"{{ code=$?; docker rm {job.name} > /dev/null 2>&1; exit $code; }}"
        line = f"""if found=$({found}); then
            read -r label digest <<< "$found"
            [ "$label" = {job.name} ] || {{ echo {shlex.quote(foreign)} >&2; exit 2; }}
            [ "$digest" = {job.digest} ] || {{ echo {shlex.quote(other)} >&2; exit 2; }}
            docker start {job.name} > /dev/null && echo old
        else
            NAME={job.name} IMAGE={shlex.quote(str(job.image))} VOLUMES={shlex.quote(volumes)} \
                bash -s -- {options} > /dev/null || {failed}
            echo new
        fi"""
        line = f"echo {shlex.quote(BEGINS)}; bash -c {shlex.quote(line)}"
        limit_s = max(MARGIN_S, self.job.wait_s)  # docker may have to pull the image
        return self._on(rank, line, START_CONTAINER.read_text(), limit_s)

    @property
    def _listed(self) -> str:
        """A line that prints the job's containers on a host."""
        return f"docker ps --all --quiet --filter label={LABEL}={self.job.name}"

    def _remove_containers(self, ranks: Sequence[int] | None = None) -> dict[int, Answer]:
        """Delete the job's containers on hosts, except those that hold files of a user outside their volumes."""
        listed = f"ids=$({self._listed}) || exit 1; "
        changes = f"{listed}for id in $ids; do {CHANGES} || exit 1; done"
        answers = self._each(lambda rank: self._on(rank, changes, "", MARGIN_S), ranks)
        for rank, answer in answers.items():
            if answer.code == 0 and (left := unsaved(self.job, answer.output.decode(errors="replace"))):
                answers[rank] = Answer(1, b"", refusal(self.job, left))
        line = listed + 'if [ -n "$ids" ]; then docker rm --force $ids; fi'
        free = [rank for rank, answer in answers.items() if answer.code == 0]
        return answers | self._each(lambda rank: self._on(rank, line, "", MARGIN_S), free)

    def _left_of(self, new: Sequence[int]) -> str:
        """Delete the containers that this call started; lines that say why one stays."""
        return self._faults(self._remove_containers(new))

    def run(self, to: BinaryIO, say: Callable[[str], None]) -> int:
        """Start the job's command on the head's host and write its output to a stream; its exit code."""
        return self._followed(to, say, "up", "--run", MARK)

    def follow(self, to: BinaryIO, say: Callable[[str], None], skip: int = 0) -> int:
        """Write the output of the job's command from byte `skip` to its end to a stream; its exit code."""
        return self._followed(to, say, "follow", "--skip", str(skip), seen=skip)

    def _followed(self, to: BinaryIO, say: Callable[[str], None], verb: str, *options: str, seen: int = 0) -> int:
        """Follow the command on the head's host, with a new connection where one is lost; its exit code.

        A call that is lost before it has started the command is made again as it was: an `up --run` that has started it
        all the same joins it while it runs. RecipeError where there is no connection for RECONNECT_S.
        """
        connected = time.monotonic()
        while True:
            began = time.monotonic()
            code, begun, size = _forwarded(self._words(0, self._line(0, verb, *options)), self._stdin(verb), to)
            seen += size
            if code != SSH_FAILED:
                return code
            if begun and (ended := self._ended_with_that_code()) is not None:
                return ended
            if begun or time.monotonic() > began + MARGIN_S:
                connected = time.monotonic()
            if begun:
                verb, options = "follow", ("--skip", str(seen))
                say(f"the connection to {self.job.host_of(0)} is lost; the command goes on; trying again")
            elif time.monotonic() > connected + RECONNECT_S:
                state = "The command was not started: cluster up --run again"
                if verb == "follow":
                    state = "The command goes on there: cluster follow joins it, cluster down ends it"
                raise RecipeError(f"no connection to {self.job.host_of(0)} for {RECONNECT_S:g} s. {state}")
            else:
                say(f"no connection to {self.job.host_of(0)}; trying again")
            time.sleep(RECONNECT_EVERY_S)

    def _ended_with_that_code(self) -> int | None:
        """SSH_FAILED where the command itself ended with it, and not ssh; else None."""
        try:
            rows = json.loads(self._cluster(0, "status", "--json", limit_s=MARGIN_S).output)["rows"]
        except (ValueError, LookupError):
            return None
        ended = any(row["name"] == "command" and row["found"] == ended_with(SSH_FAILED) for row in rows)
        return SSH_FAILED if ended else None

    def status(self) -> list[Finding]:
        """What every host says of itself, and what is said of all nodes once."""
        findings: dict[tuple[str, str], Finding] = {}
        answers = self._each(lambda rank: self._cluster(rank, "status", "--json", limit_s=MARGIN_S))
        for rank, answer in answers.items():
            try:
                rows = json.loads(answer.output)["rows"]
            except (ValueError, LookupError):
                todo = shlex.join([*self.job.ssh.command, self.job.hosts[rank]])
                name, said = self.job.host_of(rank), answer.fault or "no report"
                rows = [{"name": name, "state": "problem", "expected": "a report", "found": said, "todo": todo}]
            for row in rows:
                finding = Finding(**{**row, "details": tuple(row.get("details", ()))})
                if finding.name == "this node":
                    finding = Finding(**{**row, "name": self.job.host_of(rank), "details": ()})
                findings.setdefault((finding.name, finding.found), finding)
        return list(findings.values())

    def down(self, logs: Path | None) -> list[str]:
        """End what was started on every host, gather logs; what failed on which host.

        Logs of a host that did not arrive stay there, and its container.
        """
        faults = self._gather(logs, range(self.job.nodes), LOGS_S) if logs else {}
        ended = self._each(self._down, [rank for rank in range(self.job.nodes) if rank not in faults])
        faults |= {rank: answer.fault for rank, answer in ended.items() if answer.code}
        if self.job.image:
            kept = f"; a container of the job stays there: cluster down again, or docker rm --force {self.job.name}"
            removed = self._remove_containers([rank for rank in ended if rank not in faults])
            faults = {rank: fault + kept for rank, fault in faults.items()}
            faults |= {rank: answer.fault for rank, answer in removed.items() if answer.code}
        return self._lines(dict(sorted(faults.items())))

    def _gather(self, logs: Path, ranks: Sequence[int], limit_s: float) -> dict[int, str]:
        """End the processes of hosts and write their logs, which stay there too; {rank: what failed}."""
        answers = self._each(lambda rank: self._down(rank, "-", limit_s), ranks)
        faults = {rank: answer.fault for rank, answer in answers.items() if answer.code}
        for rank, answer in answers.items():
            if answer.code == 0 and (answer.output or not self.job.image):  # or it has no container
                try:
                    unpack(answer.output, logs)
                except (OSError, RecipeError) as error:
                    faults[rank] = f"its logs: {error}; they stay there for another cluster down (--logs FOLDER)"
        return faults


def unsaved(job: Job, changes: str) -> list[str]:
    """The files and folders that somebody may miss, by the output of CHANGES.

    A folder that is new in the container is named in place of its files.
    """
    lines = (_LINE.fullmatch(line) for line in changes.splitlines())  # a shell's profiles may print others
    kinds = {PurePosixPath(line[2]): line[1] for line in lines if line}
    folders = {parent for path in kinds for parent in path.parents}
    gathered = {PurePosixPath(folder) for folder in (job.folder, job.env.get(PLOG_VARIABLE)) if folder}
    saved = gathered | {path for path, kind in kinds.items() if kind == "M"}
    paths: dict[str, None] = {}
    for path, kind in kinds.items():
        if kind in "AC" and path not in folders and not saved & {path, *path.parents} and _may_be_missed(path):
            new = (folder for folder in reversed(path.parents) if kinds.get(folder) == "A")
            paths[str(next(new, path))] = None
    return list(paths)


def _may_be_missed(path: PurePosixPath) -> bool:
    if _GENERATED.search(str(path)):
        return False
    return not _SYSTEM.match(str(path)) or path.suffix in _KINDS or path.name in _NAMES


def refusal(job: Job, paths: Sequence[str]) -> str:
    """Why a container with `paths` is not deleted, and what to do."""
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return (
        f"container {job.name} holds {', '.join(paths[:_SHOWN])}{more}, which no volume of the job has, so it is not "
        f"deleted. Save what you need (docker cp {job.name}:{paths[0]} FOLDER), then docker rm --force {job.name}"
    )
