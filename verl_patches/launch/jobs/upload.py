"""Upload a job's results to another store (s3:// and others of fsspec), where nothing is deleted.

    python -m verl_patches.launch.jobs.upload FROM TO [FROM TO ...] [-- COMMAND...]

This runs the command and, when it has ended, sends the files that TO lacks. The exit code is the command's, or 1 where
that is 0 and not all was sent. A file is not sent again where its copy has its size and is not older. Object stores
show only whole objects; on a file system a copy gets its name when it is whole. The file MARK_FILE in TO holds the path
of FROM; copies of another FROM are refused there.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import fsspec
from fsspec.core import url_to_fs

from verl_patches.errors import ConfigError
from verl_patches.launch.jobs.job import Job
from verl_patches.processes import die_with_parent, on_end_signals
from verl_patches.shared_files import PARTIAL
from verl_patches.values import is_secret_variable, printable, size_text
from verl_patches.weights.manifest import CHECKPOINT_NAME, CRITIC, MANIFEST

_PARTIAL_NAME = re.compile(rf"\.|.*\{PARTIAL}$")  # names of hidden files and of files being written
MARK_FILE = ".verl_patches_upload"
log = logging.getLogger(__name__)


def command_words(job: Job) -> list[str]:
    """Return the job's command, run by this module where the job has uploads, each to a folder of the job's name."""
    pairs = []
    for each in job.uploads:
        pairs += [str(Path(job.checkout, each.source)), f"{each.to.rstrip('/')}/{job.name}"]
    return [job.python, "-m", __name__, *pairs, "--", *job.command] if pairs else list(job.command)


def _whole_files(source: Path) -> Iterator[tuple[str, Path]]:
    """Yield (path below `source`, file) of all whole files, without hidden files, links and files being written.

    A checkpoint without its manifest is left out.
    """
    if not source.is_dir():
        yield source.name, source
    for folder, folders, names in os.walk(source):
        killed = CHECKPOINT_NAME.fullmatch(Path(folder).name) and MANIFEST not in names
        folders[:] = [] if killed else sorted(name for name in folders if not _PARTIAL_NAME.match(name))
        files = (Path(folder, name) for name in sorted(names) if not killed and not _PARTIAL_NAME.match(name))
        yield from ((str(path.relative_to(source)), path) for path in files if path.is_file() and not path.is_symlink())


def _upload_order(file: tuple[str, Path]) -> int:
    """Return a sort key that puts a checkpoint's manifest, which makes it a checkpoint, after all its other files."""
    path = file[1]
    if path.name != MANIFEST:
        return 0
    return 1 if path.parent.name == CRITIC else 2


def send_files(source: Path, to: str) -> bool:
    """Send the files that a target lacks, log how many, and return whether all arrived. The first failure ends it."""
    sizes, fault = [], ""
    try:
        for size in _send_missing_files(source, to):
            sizes.append(size)
    except Exception as error:  # a store may raise anything: no credentials, no network, no bucket
        fault = f"; some were not sent: {_redacted_text(error)}"
    log.info("%s to %s: %d files sent (%s)%s", source, to, len(sizes), size_text(sum(sizes)), fault)
    return not fault


def _send_missing_files(source: Path, to: str) -> Iterator[int]:
    """Send the files that `to` lacks and yield the size of each in bytes; raises errors of fsspec, and ConfigError."""
    if not source.exists():
        raise ConfigError(f"{source}: expected a file or a folder to upload, found none")
    store, root = url_to_fs(to, **({"auto_mkdir": True} if to.startswith(("file:", "local:")) else {}))
    there = {name: found for name, found in store.find(root, detail=True).items() if not name.endswith(PARTIAL)}
    mark, own = f"{root}/{MARK_FILE}", str(source.resolve())
    if not there:
        store.pipe_file(mark, own.encode())
    elif (owner := store.cat_file(mark).decode() if mark in there else f"files without {MARK_FILE}") != own:
        raise ConfigError(f"{to}: expected no files, or copies of {own}, found {owner}; give another target")
    for path, file in sorted(_whole_files(source), key=_upload_order):
        name, facts = f"{root}/{path}", file.stat()
        copy = there.get(name)
        if not copy or copy["size"] != facts.st_size or _modified_time(store, name, copy) < facts.st_mtime:
            if "file" in store.protocol:  # on a file system the copy has another name until it is whole
                store.put_file(str(file), name + PARTIAL)
                store.mv(name + PARTIAL, name)
            else:
                store.put_file(str(file), name)
            yield facts.st_size


def _modified_time(store: fsspec.AbstractFileSystem, name: str, copy: Mapping[str, Any]) -> float:
    """Return when a copy was written, in s since 1970, from its listing if possible (ossfs.modified is local time)."""
    return (copy.get("LastModified") or store.modified(name)).timestamp()


def _redacted_text(error: Exception) -> str:
    """Return an error as one line, with values of secret variables replaced by the variables' names."""
    text = f"{type(error).__name__}: {error}"
    for name, value in os.environ.items():
        if is_secret_variable(name) and len(value) > 5:
            text = text.replace(value, f"${name}")
    return printable(" ".join(text.split()))[:300]


def main(words: Sequence[str]) -> int:
    """Run the words of `command_words` and return their exit code, 128 + n where signal n ended the command."""
    logging.basicConfig(format="%(message)s", stream=sys.stdout, level=logging.INFO)
    end = words.index("--") if "--" in words else len(words)
    pairs, command = words[:end], words[end + 1 :]
    uploads = dict(zip(pairs[1::2], pairs[::2], strict=False))
    if len(pairs) != 2 * len(uploads) or not uploads:
        log.error("uploads: expected FROM TO [FROM TO ...] [-- COMMAND...], each TO once, found %s", shlex.join(pairs))
        return 2
    for to in uploads:
        try:
            fsspec.get_filesystem_class(to.partition("://")[0])
        except (ImportError, ValueError) as error:
            log.error(
                "uploads: expected a target that this machine can write, found %s (%s); nothing was started", to, error
            )
            return 2
    code = _run_command(command) if command else 0
    sent = [send_files(Path(source), to) for to, source in uploads.items()]
    if not all(sent):
        again = shlex.join([sys.executable, "-m", "verl_patches.launch.jobs.upload", *pairs])
        log.error("uploads: some files were not sent; the command ended with %d. To send them: %s", code, again)
        code = code or 1
    return code


def _run_command(command: Sequence[str]) -> int:
    process = None

    def end(number: int) -> None:
        if process is None or process.returncode is not None:
            raise SystemExit(128 + number)
        process.send_signal(number)

    on_end_signals(end)
    process = subprocess.Popen(command, preexec_fn=die_with_parent)
    code = process.wait()
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
