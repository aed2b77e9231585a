"""Upload a job's results to another store (s3:// and others of fsspec), where nothing is deleted.

    python -m verl_patches.launch.jobs.upload FROM TO [FROM TO ...] [-- COMMAND...]

This runs the command and, when it has ended, sends the files that TO lacks, or has with another size. The exit code is
the command's, or 1 where that is 0 and not all was sent; 2 without a start where no package knows a target's scheme.
"""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from verl_patches.errors import ConfigError
from verl_patches.launch.jobs.job import Job
from verl_patches.processes import die_with_parent, on_end_signals
from verl_patches.shared_files import PARTIAL
from verl_patches.values import is_secret_variable, printable, size_text
from verl_patches.weights.manifest import CHECKPOINT_NAME, MANIFEST

log = logging.getLogger(__name__)


def command_words(job: Job) -> list[str]:
    """Return the job's command, run by this module where the job has uploads, each to a folder of the job's name."""
    pairs = []
    for each in job.uploads:
        pairs += [str(Path(job.checkout, each.source)), f"{each.to.rstrip('/')}/{job.name}"]
    return [job.python, "-m", __name__, *pairs, "--", *job.command] if pairs else list(job.command)


def _whole_files(source: Path) -> Iterator[Path]:
    """Yield all whole files, without hidden files, links and files being written.

    A checkpoint without its manifest is left out. The manifest, which makes it a checkpoint, comes after all other
    files, and that of its critic before its own.
    """
    files = [path for path in sorted(source.rglob("*")) if path.is_file()] if source.is_dir() else [source]
    for file in sorted(files, key=lambda path: (path.name == MANIFEST, -len(path.parts))):
        names = file.relative_to(source).parts
        is_temporary = any(name.startswith(".") or name.endswith(PARTIAL) for name in names)
        is_unfinished = any(CHECKPOINT_NAME.fullmatch(p.name) and not (p / MANIFEST).exists() for p in file.parents)
        if not (is_temporary or is_unfinished or file.is_symlink()):
            yield file


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
    from fsspec.core import url_to_fs

    if not source.exists():
        raise ConfigError(f"{source}: expected a file or a folder to upload, found none")
    store, root = url_to_fs(to, **({"auto_mkdir": True} if to.startswith(("file:", "local:")) else {}))
    there = store.find(root, detail=True)
    base = source if source.is_dir() else source.parent
    for file in _whole_files(source):
        name, size = f"{root}/{file.relative_to(base)}", file.stat().st_size
        if name not in there or there[name]["size"] != size:
            store.put_file(str(file), name)
            yield size


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
    try:
        from fsspec import get_filesystem_class

        for to in pairs[1::2]:
            get_filesystem_class(to.partition("://")[0])
    except (ImportError, ValueError) as error:
        log.error("uploads to %s: %s; nothing was started", " ".join(pairs[1::2]), _redacted_text(error))
        return 2
    code = _run_command(command) if command else 0
    sent = [send_files(Path(source), to) for source, to in zip(pairs[::2], pairs[1::2], strict=True)]
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
