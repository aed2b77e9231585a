"""A folder of checkpoints: which are a run's own, which is the newest, names by rename, what a kill leaves.

    global_step_N                      a complete checkpoint, always
    global_step_N.writing-RUN-XXXX     one that run RUN is writing; complete for the moment before it gets its name
    global_step_N.replaced-RUN-XXXX    an older one of the same step, until the new one has its name
    global_step_N.removed-RUN-XXXX     one that is being removed
    earlier/N/global_step_M            what came after the step that a run went back to

A checkpoint belongs to the run whose id is in its manifest (`facts`, key `id`), one without an id to another run.
Nothing of another run is removed, counted or resumed by itself, and what cannot be read is left where it is.

No torch: the launcher looks at a checkpoint before it starts anything.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from verl_patches.errors import ConfigError
from verl_patches.shared_files import sync
from verl_patches.weights.manifest import CRITIC, SAVED, OtherVersionError, check_headers, read_manifest

EARLIER = "earlier"
_UNNAMED = re.compile(rf"({SAVED.pattern})\.(writing|replaced|removed)-(?:([0-9a-f]+)-)?\w+", re.ASCII)


@dataclass
class Saved:
    """What a folder holds, as one run sees it.

    own: {step: complete checkpoint} of the run, oldest first. others: {checkpoint: id of its run, None without one}.
    damaged: {folder of a checkpoint's name: why its manifest cannot be read}. files: other things of such a name.
    """

    own: dict[int, Path] = field(default_factory=dict)
    others: dict[Path, str | None] = field(default_factory=dict)
    damaged: dict[Path, str] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)

    def ignored(self) -> list[str]:
        """A sentence about each thing that the run leaves alone."""
        sentences = [f"{path}: of run {owner or '(no id)'}" for path, owner in self.others.items()]
        sentences += [f"{path}: no folder" for path in self.files]
        return [f"{text}; left alone" for text in [*sentences, *self.damaged.values()]]

    def after(self, step: int) -> dict[int, Path]:
        """{step: folder} of what is newer than `step`: the run's own checkpoints, and damaged ones."""
        damaged = {step_of(path): path for path in self.damaged}
        return {number: path for number, path in sorted({**self.own, **damaged}.items()) if number > step}


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint's folder."""
    return int(SAVED.fullmatch(path.name)[1])


def saved_in(folder: Path, run: str | None) -> Saved:
    """What `folder` holds for the run of this id; reads manifests."""
    saved = Saved()
    named = (path for path in folder.glob("global_step_*") if SAVED.fullmatch(path.name))
    for path in sorted(named, key=step_of):
        try:
            if not path.is_dir():
                saved.files.append(path)
                continue
            owner = read_manifest(path).facts.get("id")
        except OtherVersionError:
            saved.others[path] = None
            continue
        except (ConfigError, OSError) as error:
            saved.damaged[path] = str(error)
            continue
        if run is not None and owner == run:
            saved.own[step_of(path)] = path
        else:
            saved.others[path] = owner
    return saved


def newest(folder: Path, run: str) -> Path | None:
    """The newest complete checkpoint of the run, None without one.

    ConfigError where its files, or the manifest of a newer one, are damaged: the bad file, and what to go on from.
    """
    saved = saved_in(folder, run)
    for _, path in sorted(saved.after(0).items(), reverse=True):
        try:
            if path in saved.damaged:
                raise ConfigError(saved.damaged[path])
            require_whole(path)
        except ConfigError as error:
            raise ConfigError(
                f"{path} is the newest checkpoint and is damaged: {error}\n{instead_of(path, run)}"
            ) from None
        return path
    return None


def instead_of(path: Path, run: str) -> str:
    """What to go on from where the checkpoint `path` cannot be used: the next older whole one of the run."""
    for step, older in sorted(saved_in(path.parent, run).own.items(), reverse=True):
        if step < step_of(path):
            try:
                require_whole(older)
            except ConfigError:
                continue
            return f"  the next older one is whole; to go on from it: {resume_from(older)}"
    return (
        "  no older one of this run is whole; to start anew: trainer.resume_mode=disable; where "
        "trainer.default_local_dir is not in the run's folder, with another one"
    )


def resume_from(path: Path) -> str:
    """The overrides that go on from a checkpoint."""
    return f"trainer.resume_mode=resume_path trainer.resume_from_path={path}"


def unnamed(final: Path, what: str, run: str | None) -> Path:
    """A name for the checkpoint `final` while it has none: `what` is writing, replaced or removed."""
    owner = "" if run is None else f"{run}-"
    return final.with_name(f"{final.name}.{what}-{owner}{secrets.token_hex(4)}")


def put_in_place(writing: Path, run: str) -> Path:
    """Rename a complete folder to its own name, and return that; the run's own one of that name is removed afterwards.

    Anything else of that name stays, as global_step_N.replaced-XXXX.
    """
    final, old = writing.with_name(writing.name.partition(".")[0]), None
    own = _is_complete(final, run)
    if os.path.lexists(final):
        old = unnamed(final, "replaced", run if own else None)
        os.rename(final, old)
    os.rename(writing, final)
    sync(final.parent)
    if old is not None and own:
        shutil.rmtree(old)
    return final


def recover(folder: Path, run: str) -> list[str]:
    """Tidy up after a save of the run that was killed: what is complete gets its name, the rest is removed.

    Returns a sentence about each such folder that is not the run's, or cannot be removed.
    """
    left = [path for path in folder.iterdir() if _UNNAMED.fullmatch(path.name)] if folder.is_dir() else []
    others = []
    for path in sorted(left, key=lambda path: (".writing-" not in path.name, path.name)):
        name, _, what, owner = _UNNAMED.fullmatch(path.name).groups()
        if owner != run or not path.is_dir() or path.is_symlink():
            others.append(f"{path}: of {f'run {owner}' if owner else 'another run'}; left alone")
        elif what != "removed" and _is_complete(path, run) and not _is_complete(folder / name, run):
            put_in_place(path, run)
        else:
            try:
                shutil.rmtree(path)
            except OSError as error:
                others.append(f"{path}: cannot be removed ({error}); left there")
    return others


def _is_complete(folder: Path, run: str) -> bool:
    """Whether this is a complete checkpoint of the run."""
    try:
        return read_manifest(folder).facts.get("id") == run
    except ConfigError:
        return False


def remove_oldest(folder: Path, keep: int | None, run: str, written: Path) -> None:
    """Remove all but the newest `keep` checkpoints of the run, never the one just `written`; none without `keep`."""
    own = list(saved_in(folder, run).own.values())
    for path in own[: max(0, len(own) - keep)] if keep else ():
        if path != written:
            hidden = unnamed(path, "removed", run)  # half a folder never has the name
            os.rename(path, hidden)
            shutil.rmtree(hidden)


def set_aside_after(step: int, folder: Path, run: str) -> Path | None:
    """Move what is newer than the step that the run goes on from to earlier/N, and return that; None without any."""
    newer = saved_in(folder, run).after(step)
    if not newer:
        return None
    aside = next_aside(folder)
    aside.mkdir(parents=True)
    for path in newer.values():
        path.rename(aside / path.name)
    return aside


def next_aside(folder: Path) -> Path:
    """earlier/N of a folder; N counts up."""
    numbers = (int(path.name) for path in (folder / EARLIER).glob("*") if path.name.isdecimal())
    return folder / EARLIER / str(max(numbers, default=0) + 1)


def size_bytes(folder: Path) -> int:
    """Bytes of all files below a folder, but of what is removed or gets another name meanwhile."""
    size = 0
    for where, _, files in os.walk(folder):
        for name in files:
            with suppress(OSError):
                size += os.lstat(os.path.join(where, name)).st_size
    return size


def value_model_in(folder: str | Path) -> Path:
    """Where the weights of a value model are: critic/ of a checkpoint, else `folder` itself."""
    critic = Path(folder, CRITIC)
    return critic if critic.is_dir() else Path(folder)


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
    if CRITIC in manifest.facts:
        require_whole(folder / CRITIC)
