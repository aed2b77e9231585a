"""Logs of a node: Ray's, which hold the workers' output, those of Ascend's runtime and HCCL (plog), the command's."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from verl_patches.cluster.job import Job
from verl_patches.cluster.node import RAY_TEMP, Started, of_job
from verl_patches.config.environment import REPOSITORY
from verl_patches.errors import RecipeError
from verl_patches.launch.launcher import copy_ray_logs

PLOG_VARIABLE = "ASCEND_PROCESS_LOG_PATH"  # else ~/ascend/log
MOST_BYTES = 64 << 20  # of one plog file


def logs_folder(job: Job) -> Path:
    """Where the logs of all nodes go: job.logs, relative to the checkout, or outputs/<name>/cluster there."""
    return REPOSITORY / (job.logs or f"outputs/{job.name}/cluster")


def gather(job: Job, to: Path, rank: int | None = None) -> list[Path]:
    """Copy the logs of what was started here to `to`/node-<rank>-<address>; the folders that were written."""
    folders = []
    for started in of_job(job, rank):
        folder = to / f"node-{started.rank}-{started.address}"
        copy_ray_logs(Path(job.folder) / RAY_TEMP, folder / "ray")
        if started.rank == 0:
            for log in Path(job.folder).glob("command-*.log"):
                _copy(log, folder / log.name)
        _copy_plog(started, folder / "plog", {**os.environ, **job.env})
        if folder.is_dir():
            folders.append(folder)
    return folders


def _copy(source: Path, target: Path) -> None:
    """Copy a file, unless it was removed meanwhile (rotated away) or is another user's."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError, PermissionError):
        shutil.copy2(source, target)


def _copy_plog(started: Started, to: Path, environ: Mapping[str, str]) -> None:
    """Copy the files of Ascend's logs that were written since the node's Ray was started."""
    place = Path(environ.get(PLOG_VARIABLE) or Path.home() / "ascend" / "log")
    for source in sorted(place.glob("**/*.log")):
        try:
            stat = source.stat()
        except OSError:  # rotated away
            continue
        if stat.st_mtime >= started.started and 0 < stat.st_size <= MOST_BYTES:
            _copy(source, to / source.relative_to(place))


def packed(job: Job, rank: int | None = None) -> bytes:
    """The logs of this node as a tar archive, for another node."""
    buffer = io.BytesIO()
    with tempfile.TemporaryDirectory() as temp, tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        gather(job, Path(temp), rank)
        for path in sorted(Path(temp).iterdir()):
            archive.add(path, path.name)
    return buffer.getvalue()


def unpack(data: bytes, to: Path) -> None:
    """Write what `packed` made below `to`; RecipeError for anything else, OSError where it cannot be written."""
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
            to.mkdir(parents=True, exist_ok=True)
            archive.extractall(to, filter="data")  # neither absolute paths nor links out of it
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise RecipeError(f"expected a tar archive, found {len(data)} bytes: {error}") from None
