"""What a container holds outside its volumes, which would be deleted with it: results, data, edited files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from verl_patches.cluster.gather import PLOG_VARIABLE
from verl_patches.cluster.job import Job

# of container $id: "A PATH" (added since its image), "C" (changed), "D" (deleted), and "M" for its mounts
CHANGES = """docker diff $id && docker inspect --format '{{range .Mounts}}{{println "M" .Destination}}{{end}}' $id"""
_LINE = re.compile(r"([ACDM]) (/.+)")
_SYSTEM = re.compile(r"/(bin|boot|dev|etc|lib|lib64|proc|run|sbin|sys|tmp|usr|var)(/|$)")
# what runs write or read, and so is sought in those folders too
_KINDS, _NAMES = {".safetensors", ".parquet", ".pt", ".jsonl"}, {"summary.json", "manifest.json"}
# hidden files, caches, logs and traces of Ascend's runtime, compiled operators
_GENERATED = re.compile(
    r"/(\.[^/]+|__pycache__|ascend/(log|atrace)|kernel_meta[^/]*|atc_data|extra-info|(fusion|check)_result\.json)(/|$)"
)
_SHOWN = 3


def unsaved(job: Job, changes: str) -> list[str]:
    """The files and folders that somebody may miss, by the output of CHANGES.

    A folder that is new in the container is named in place of its files.
    """
    lines = (_LINE.fullmatch(line) for line in changes.splitlines())  # a shell's profiles may print others
    kinds = {PurePosixPath(line[2]): line[1] for line in lines if line}
    folders = {parent for path in kinds for parent in path.parents}
    gathered = {PurePosixPath(folder) for folder in (job.folder, job.env.get(PLOG_VARIABLE)) if folder}
    saved = gathered | {path for path, kind in kinds.items() if kind == "M"}
    found: dict[str, None] = {}
    for path, kind in kinds.items():
        if kind in "AC" and path not in folders and not saved & {path, *path.parents} and _may_be_missed(path):
            new = (folder for folder in reversed(path.parents) if kinds.get(folder) == "A")
            found[str(next(new, path))] = None
    return list(found)


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
