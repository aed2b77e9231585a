"""The folders of a run's checkpoints: which are complete, which is the newest, names by rename, what a kill leaves.

    global_step_N                a complete checkpoint, always
    global_step_N.writing-XXXX   one that is being written; complete for the moment before it gets its name
    global_step_N.replaced-XXXX  an older one of the same step, until the new one has its name
    global_step_N.removed-XXXX   one that is being removed

No torch: the launcher looks at a checkpoint before it starts anything.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path

from verl_patches.errors import ConfigError
from verl_patches.weights.manifest import check_headers, has_manifest, read_manifest

_SAVED = re.compile(r"global_step_(\d+)")
_UNNAMED = re.compile(r"(global_step_\d+)\.(writing|replaced|removed)-\w+")


def put_in_place(writing: Path) -> None:
    """Rename a complete folder to its own name; one of that name is removed afterwards."""
    final = writing.with_name(writing.name.partition(".")[0])
    old = None
    if final.exists():
        old = final.with_name(f"{final.name}.replaced-{secrets.token_hex(4)}")
        os.rename(final, old)
    os.rename(writing, final)
    handle = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    if old is not None:
        shutil.rmtree(old)


def complete_ones(folder: Path) -> dict[int, Path]:
    """{step: complete checkpoint} in `folder`, oldest first."""
    found = {}
    for path in folder.glob("global_step_*"):
        if (match := _SAVED.fullmatch(path.name)) and has_manifest(path) and _is_complete(path):
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def recover(folder: Path) -> None:
    """Tidy up after a run that was killed: complete folders get their name, what else has none is removed."""
    left = [path for path in folder.iterdir() if _UNNAMED.fullmatch(path.name)] if folder.is_dir() else []
    for path in sorted(left, key=lambda path: ".writing-" not in path.name):
        name, what = _UNNAMED.fullmatch(path.name).groups()
        if what != "removed" and not (folder / name).exists() and has_manifest(path) and _is_complete(path):
            os.rename(path, folder / name)
        else:
            shutil.rmtree(path)


def newest(folder: Path) -> Path | None:
    """The newest complete checkpoint, None without one."""
    found = complete_ones(folder)
    return found[max(found)] if found else None


def remove_oldest(folder: Path, keep: int | None) -> None:
    """Remove all but the newest `keep` complete checkpoints; none if `keep` is not set."""
    found = list(complete_ones(folder).values())
    for path in found[: max(0, len(found) - keep)] if keep else ():
        hidden = path.with_name(f"{path.name}.removed-{secrets.token_hex(4)}")  # half a folder never has the name
        os.rename(path, hidden)
        shutil.rmtree(hidden)


def _is_complete(folder: Path) -> bool:
    return read_manifest(folder, complete=False).complete


def require_whole(folder: Path) -> None:
    """ConfigError unless `folder` is complete and its files have the sizes and tensors of its manifest; reads headers.

    Bytes of tensors are compared when workers read them (worker/checkpoint.py).
    """
    manifest = read_manifest(folder)
    for entry in manifest.files:
        path = folder / entry.name
        found = f"{path.stat().st_size} bytes" if path.is_file() else "no file"
        if found != f"{entry.size_bytes} bytes":
            raise ConfigError(f"{path}: expected {entry.size_bytes} bytes (manifest), found {found}")
    check_headers(folder, manifest)
