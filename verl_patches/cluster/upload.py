"""A job's uploads: copies of its results in another store (s3://, or any that fsspec knows), never deleted there.

    python -m verl_patches.cluster.upload JOB SECRETS FROM TO [FROM TO ...] -- COMMAND...

runs the command, sends each checkpoint when it is whole, and the rest at the end. The exit code is the command's, but 1
where that is 0 and a file was not sent. `TO`/MANIFEST lists what was sent, {job, files: {path: {size, sha256, mtime_ns,
etag}}}. A file is not sent again where the store has it with the list's size and ETag, and it is here with the list's
hash (or size and time of change, which spares reading it). S3 and its like show whole objects alone; on a file system
a copy gets its name when it is whole.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from verl_patches.cluster.job import Job
from verl_patches.errors import ConfigError
from verl_patches.patching.report import Finding
from verl_patches.processes import die_with_parent
from verl_patches.shared_files import PARTIAL
from verl_patches.values import is_secret_variable, printable, size_text
from verl_patches.weights.manifest import SAVED

MANIFEST, MANIFEST_BYTES = "verl_patches_uploads.json", 64 << 20
POLL_S, LIST_S = 1.0, 10.0  # between looks for checkpoints, and between writes of the list
GIVE_UP = 3  # faults in a row that end a pass
# names of what is hidden, being written, or about to be removed (weights/checkpoint_folders.py)
_NOT_WHOLE = re.compile(rf"\.|.*\{PARTIAL}$|{SAVED.pattern}\.")
log = logging.getLogger(__name__)


@dataclass
class Sent:
    """What a pass did: files and bytes that were sent, files that were there, {file: why it was not sent}."""

    files: int = 0
    sent_bytes: int = 0
    there: int = 0
    faults: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        text = f"{self.files} files sent ({size_text(self.sent_bytes)}), {self.there} were there"
        shown = "".join(f"; {path}: {why}" for path, why in list(self.faults.items())[:3])
        return text + (f"; {len(self.faults)} NOT SENT{shown}" if shown else "")


def require_stores(targets: Collection[str]) -> None:
    """ConfigError, in one sentence, where nothing that is installed here writes to a target."""
    for to in targets:
        try:
            fsspec.get_filesystem_class(to.partition("://")[0])
        except (ImportError, ValueError) as error:
            text = f"uploads: expected a target that this machine can write, found {to} ({error}); nothing was started"
            raise ConfigError(text) from None


def files_of(source: Path) -> Iterator[tuple[str, Path]]:
    """(path below `source`, file) of all whole files: no hidden ones, links, nor what is being written."""
    if source.is_file():
        yield source.name, source
    for folder, folders, names in os.walk(source):
        folders[:] = sorted(name for name in folders if not _NOT_WHOLE.match(name))
        files = (Path(folder, name) for name in sorted(names) if not _NOT_WHOLE.match(name))
        yield from ((path.relative_to(source).as_posix(), path) for path in files if not path.is_symlink())


def _checkpoints(source: Path) -> set[str]:
    found = (Path(folder, name) for folder, names, _ in os.walk(source) for name in names if SAVED.fullmatch(name))
    return {f"{path.relative_to(source).as_posix()}/" for path in found}


def send(source: Path, to: str, job: str, secrets: Collection[str] = (), below: tuple[str, ...] = ("",)) -> Sent:
    """Send the files of `source`, or those whose path begins as one of `below`, that `to` lacks; nothing is raised.

    Faults do not show the values of variables that are `secrets` or named like one.
    """
    sent, row, store, path = Sent(), 0, None, to
    try:
        source.stat()
        store = _Store(to, job)
        for path, file in files_of(source):
            if not path.startswith(below):
                continue
            try:
                size = store.send(path, file)
            except Exception as error:
                if file.exists():  # else an old checkpoint was removed
                    sent.faults[path], row = _said(error, secrets), row + 1
                if row == GIVE_UP:
                    break
            else:
                row, sent.there = 0, sent.there + (size is None)
                sent.files, sent.sent_bytes = sent.files + (size is not None), sent.sent_bytes + (size or 0)
        store.write_list()
    except Exception as error:  # a store may raise anything: no credentials, no network, no bucket
        sent.faults[str(to)] = _said(error, secrets)
    return sent


def _said(error: BaseException, secrets: Collection[str]) -> str:
    text = str(error) or type(error).__name__
    for name, value in os.environ.items():
        if value and (name in secrets or (is_secret_variable(name) and len(value) > 5)):
            text = text.replace(value, f"${name}")
    return printable(" ".join(text.split()))[:300]


class _Store:
    """A target and its list of what was sent. Errors are those of fsspec's file system."""

    def __init__(self, to: str, job: str):
        self.fs, root = url_to_fs(to)
        self.root, self.job, self.written = root.rstrip("/"), job, time.monotonic()
        self.fs.invalidate_cache()
        self.there: dict[str, Any] = self.fs.find(self.root, detail=True)
        self.sent = self._read_list() if f"{self.root}/{MANIFEST}" in self.there else {}

    def _read_list(self) -> dict[str, dict[str, Any]]:
        try:
            listed = json.loads(self.fs.cat_file(f"{self.root}/{MANIFEST}", end=MANIFEST_BYTES))
            job, files = listed["job"], {path: dict(entry) for path, entry in listed["files"].items()}
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return {}  # damaged: all is sent again
        if job != self.job:
            raise ConfigError(
                f"{self.root} has the results of job {job}, expected those of {self.job}: take another target"
            )
        return files

    def send(self, path: str, file: Path) -> int | None:
        """Send a file; its size in bytes, None where it is there."""
        name, stat, entry = f"{self.root}/{path}", file.stat(), self.sent.get(path, {})
        there = self.there.get(name)
        known = there is not None and (there["size"], there.get("ETag")) == (entry.get("size"), entry.get("etag"))
        if known and (stat.st_size, stat.st_mtime_ns) == (entry["size"], entry.get("mtime_ns")):
            return None
        new = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": _sha256(file)}
        if known and new["sha256"] == entry.get("sha256"):
            self.sent[path] = {**entry, **new}
            return None
        self._put(name, lambda name: self.fs.put_file(str(file), name))
        self.fs.invalidate_cache()
        there = self.fs.info(name)
        if there["size"] != stat.st_size:
            raise OSError(f"the store has {there['size']} bytes of {stat.st_size}: it changed while it was sent")
        self.sent[path] = {**new, "etag": there.get("ETag")}
        if time.monotonic() > self.written + LIST_S:
            self.write_list()
        return stat.st_size

    def write_list(self) -> None:
        """Write the list of what was sent, where anything was."""
        text = json.dumps({"job": self.job, "files": self.sent}, indent=0).encode()
        if self.sent:
            self._put(f"{self.root}/{MANIFEST}", lambda name: self.fs.pipe_file(name, text))
        self.written = time.monotonic()

    def _put(self, name: str, put: Callable[[str], None]) -> None:
        if not isinstance(self.fs, LocalFileSystem):
            put(name)
            return
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        put(f"{name}{PARTIAL}")
        os.replace(f"{name}{PARTIAL}", name)


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(4 << 20):
            digest.update(block)
    return digest.hexdigest()


def send_all(job: Job) -> list[Finding]:
    """Send all that the targets of the job's uploads lack; a finding of each upload."""
    require_stores([upload.to for upload in job.uploads])
    findings = []
    for upload in job.uploads:
        sent = send(Path(job.checkout, upload.source), upload.to, job.name, job.secrets)
        state, todo = ("problem", "call it again: it goes on") if sent.faults else ("fine", "")
        findings.append(Finding(upload.source, state, upload.to, "all files are there", str(sent), todo))
    return findings


def command_words(job: Job) -> list[str]:
    """The job's command, run by this module where the job has uploads."""
    if not job.uploads:
        return job.command
    pairs = [word for upload in job.uploads for word in (upload.source, upload.to)]
    return [job.python, "-m", __name__, job.name, ",".join(job.secrets) or "-", *pairs, "--", *job.command]


def run(job: str, secrets: Collection[str], uploads: Mapping[str, str], command: Sequence[str]) -> int:
    """Run a command with uploads {target: source}, as the module describes; 128 + n where signal n ended it."""
    require_stores(uploads)
    process = subprocess.Popen(command, preexec_fn=die_with_parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, _frame: process.send_signal(n))

    def say(to: str, *below: str) -> bool:
        sent = send(Path(uploads[to]), to, job, secrets, below or ("",))
        log.info("uploads: %s to %s: %s", uploads[to], to, sent)
        return not sent.faults

    known: dict[str, set[str]] = {to: set() for to in uploads}
    while process.poll() is None:
        for to, source in uploads.items():
            if new := _checkpoints(Path(source)) - known[to]:
                known[to] |= new
                say(to, *new)
        time.sleep(POLL_S)
    code = 128 - process.returncode if process.returncode < 0 else process.returncode
    whole = [say(to) for to in uploads]
    if not all(whole):
        log.error("uploads: not all was sent; the command ended with %d; `cluster upload` sends the rest", code)
        code = code or 1
    return code


def main(words: Sequence[str]) -> int:
    """Run the words of `command_words`; their exit code."""
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    log.setLevel(logging.INFO)
    job, secrets, *rest = words
    end = rest.index("--")
    try:
        uploads = dict(zip(rest[1:end:2], rest[:end:2], strict=True))
        return run(job, secrets.split(","), uploads, rest[end + 1 :])
    except (ConfigError, OSError) as error:
        log.error("%s", error)
        return 127 if isinstance(error, FileNotFoundError) else 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
