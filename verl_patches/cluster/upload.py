"""A job's uploads: copies of its results in another store (s3:// and others of fsspec), never deleted there.

    python -m verl_patches.cluster.upload [--secrets=NAME,...] FROM TO [FROM TO ...] [-- COMMAND...]

runs the command and, when it has ended, sends what TO lacks. The exit code is the command's, but 1 where that is 0 and
not all was sent. A file is there where its copy has its size and is not older. Object stores show whole objects alone;
on a file system a copy gets its name when it is whole. MARK in TO names the FROM whose copies are there.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from verl_patches.cluster.job import Job
from verl_patches.errors import ConfigError
from verl_patches.processes import die_with_parent, on_end_signals
from verl_patches.shared_files import PARTIAL, replacing
from verl_patches.values import is_secret_variable, printable, size_text
from verl_patches.weights.manifest import CRITIC, MANIFEST, SAVED

_NOT_WHOLE = re.compile(rf"\.|.*\{PARTIAL}$")  # names of what is hidden or being written
SCHEMES = "file", "local", "memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "oss"  # whose objects are seen when whole
MARK, SECRETS = ".verl_patches_upload", "--secrets="
log = logging.getLogger(__name__)


def uploads_of(job: Job) -> dict[str, Path]:
    """{target: file or folder} of a job, which has a folder of its own name in each target."""
    return {f"{each.to.rstrip('/')}/{job.name}": Path(job.checkout, each.source) for each in job.uploads}


def require_stores(targets: Collection[str]) -> None:
    """ConfigError, in one sentence, where nothing that is installed here writes to a target."""
    for to in targets:
        try:
            if (scheme := to.partition("://")[0]) not in SCHEMES:
                raise ValueError(f"schemes are {', '.join(SCHEMES)}")
            fsspec.get_filesystem_class(scheme)
        except (ImportError, ValueError) as error:
            text = f"uploads: expected a target that this machine can write, found {to} ({error}); nothing was started"
            raise ConfigError(text) from None


def _whole_files(source: Path) -> Iterator[tuple[str, Path]]:
    """(path below `source`, file) of all whole files: no hidden ones, links, pipes, nor what is being written.

    A checkpoint without its manifest is left out.
    """
    if not source.is_dir():
        yield source.name, source
    for folder, folders, names in os.walk(source):
        killed = SAVED.fullmatch(Path(folder).name) and MANIFEST not in names
        folders[:] = [] if killed else sorted(name for name in folders if not _NOT_WHOLE.match(name))
        files = (Path(folder, name) for name in sorted(names) if not killed and not _NOT_WHOLE.match(name))
        yield from ((str(path.relative_to(source)), path) for path in files if path.is_file() and not path.is_symlink())


def _manifests_last(file: tuple[str, Path]) -> int:
    """Order files so that a copy of a checkpoint has its manifest, which makes it one, after all others."""
    path = file[1]
    return 0 if path.name != MANIFEST else 1 if path.parent.name == CRITIC else 2


def send(source: Path, to: str, secrets: Collection[str] = ()) -> bool:
    """Send the files that a target lacks, and log how many; whether all are there. A failure ends it.

    secrets: names of variables whose values are not logged, beside those that are secrets by name.
    """
    sizes, fault = [], ""
    try:
        for size in _sent(source, to):
            sizes.append(size)
    except Exception as error:  # a store may raise anything: no credentials, no network, no bucket
        fault = f"; NOT ALL: {_without_secrets(error, secrets)}"
    log.info("%s to %s: %d files sent (%s)%s", source, to, len(sizes), size_text(sum(sizes)), fault)
    return not fault


def _sent(source: Path, to: str) -> Iterator[int]:
    """Send the files that `to` lacks; the size of each in bytes. Errors are fsspec's, and ConfigError."""
    if not (source.is_dir() or source.is_file()):
        raise ConfigError(f"{source}: expected a file or a folder, found none")
    store, root = url_to_fs(to)
    store.invalidate_cache()
    there = {name: found for name, found in store.find(root, detail=True).items() if not name.endswith(PARTIAL)}
    mark, own = f"{root}/{MARK}", str(source.resolve())
    if not there:
        _write(store, mark, partial(store.pipe_file, value=own.encode()))
    elif (owner := store.cat_file(mark).decode() if mark in there else f"files without {MARK}") != own:
        raise ConfigError(f"{to}: expected no files, or copies of {own}, found {owner}; give another target")
    for path, file in sorted(_whole_files(source), key=_manifests_last):
        name, facts = f"{root}/{path}", file.stat()
        copy = there.get(name)
        if not copy or copy["size"] != facts.st_size or _modified(store, name, copy) < facts.st_mtime:
            _write(store, name, partial(store.put_file, str(file)))
            yield facts.st_size


def _modified(store: fsspec.AbstractFileSystem, name: str, copy: Mapping[str, Any]) -> float:
    """Seconds since 1970 when a copy was written; of a listing where it has them (ossfs.modified gives local time)."""
    found = copy.get("LastModified") or store.modified(name)
    return found if isinstance(found, int | float) else found.timestamp()


def _write(store: fsspec.AbstractFileSystem, name: str, put: Callable[[str], None]) -> None:
    """Let `put` write a file, on a file system under another name until it is whole."""
    if isinstance(store, LocalFileSystem):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        with replacing(Path(name)) as new:
            put(str(new))
    else:
        put(name)


def _without_secrets(error: Exception, secrets: Collection[str]) -> str:
    """One line of text, with names in place of the values of variables that are secrets."""
    text = f"{type(error).__name__}: {error}"
    for name, value in os.environ.items():
        if value and (name in secrets or (is_secret_variable(name) and len(value) > 5)):
            text = text.replace(value, f"${name}")
    return printable(" ".join(text.split()))[:300]


def command_words(job: Job) -> list[str]:
    """The job's command, run by this module where the job has uploads."""
    pairs = [word for to, source in uploads_of(job).items() for word in (str(source), to)]
    secrets = [SECRETS + ",".join(job.secrets)] if job.secrets else []
    return [job.python, "-m", __name__, *secrets, *pairs, "--", *job.command] if pairs else job.command


def main(words: Sequence[str]) -> int:
    """Run the words of `command_words`; their exit code, 128 + n where signal n ended the command."""
    logging.basicConfig(format="%(message)s", stream=sys.stdout, level=logging.INFO)
    end = words.index("--") if "--" in words else len(words)
    pairs, command = [word for word in words[:end] if not word.startswith(SECRETS)], words[end + 1 :]
    secrets = [name for word in words[:end] if word not in pairs for name in word.removeprefix(SECRETS).split(",")]
    uploads = dict(zip(pairs[1::2], pairs[::2], strict=False))
    if len(pairs) != 2 * len(uploads) or not (pairs or command):
        found = shlex.join(pairs) or "none"
        log.error("uploads: expected FROM TO [FROM TO ...] [-- COMMAND...], each TO once, found %s", found)
        return 2
    try:
        require_stores(uploads)
        code = _run(command) if command else 0
    except (ConfigError, OSError) as error:
        log.error("%s", error)
        return 2
    sent = [send(Path(source), to, secrets) for to, source in uploads.items()]
    if not all(sent):
        again = shlex.join([sys.executable, "-m", "verl_patches.cluster.upload", *words[:end]])
        log.error("uploads: not all was sent; the command ended with %d. To send the rest: %s", code, again)
        code = code or 1
    return code


def _run(command: Sequence[str]) -> int:
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
