"""Manage the folders of a run: each start makes one of its own, NAME/0001, NAME/0002, ..., which is never renamed.

    NAME/0002/start.json    {run, start, from}; from: the start and the step that this one continues, or null
              config.yaml, summary.json, metrics.jsonl, rollouts/, ...    outputs of this start alone
              checkpoints/global_step_N
    NAME/latest             a link to the newest start
    NAME/.lock              held while a start is live

The folder of one start is not moved alone, nor shared with another start. A start and its ancestors are a chain, which
is the run; an ancestor contributes only its steps up to the one that the next start continues. A record names its
parent by the start's name and not by a path, so a folder NAME can be copied or moved whole. Where checkpoints lie
elsewhere, in DIR, DIR/NAME has the same starts with the same record, and NAME/0002/start.json says where.

A folder global_step_N is a checkpoint if it has a manifest.json, which a save writes last and a removal removes first;
folders without it are ignored. A save that was killed leaves such a folder; the chain's next save removes it.

Launcher, controller and readers call the same functions, which need neither torch nor a configuration.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_patches.errors import ConfigError
from verl_patches.shared_files import replacing, write_whole
from verl_patches.values import loading_errors
from verl_patches.weights.manifest import (
    CHECKPOINT_NAME,
    CRITIC,
    MANIFEST,
    Manifest,
    has_manifest,
    read_manifest,
    require_file,
)

START_FILE, LATEST_LINK, CHECKPOINTS = "start.json", "latest", "checkpoints"
_START_NUMBER = re.compile(r"[0-9]{4,9}")
_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True)
class Start:
    """Describe one start of a run.

    parent: (name, step), the start of the same run that it continues and the step after which it does; None for a
    start at step 1 and for one from a checkpoint of another run. source: the path of that checkpoint. saves_in: the
    start's folder for checkpoints, where that is another one.
    """

    folder: Path
    parent: tuple[str, int] | None = None
    source: str | None = None
    saves_in: Path | None = None

    @property
    def name(self) -> str:
        """Return the number of the start as text, such as 0001."""
        return self.folder.name


@dataclass(frozen=True)
class Link:
    """Name a folder of a chain (a start's or its checkpoints') and its last step in the chain (None: no limit)."""

    folder: Path
    last_step: int | None = None

    def holds(self, step: int) -> bool:
        """Return whether this folder's output of the step belongs to the chain."""
        return self.last_step is None or step <= self.last_step

    def up_to(self, step: int) -> Link:
        """Return the link of a chain that continues after `step` of this one."""
        return Link(self.folder, step if self.last_step is None else min(step, self.last_step))


def checkpoints_home(home: Path, default_local_dir: str) -> Path:
    """Return the folder whose starts hold the checkpoints: the run's home, or DIR/NAME for a DIR outside of it."""
    saved = Path(default_local_dir).absolute()
    return home if saved.resolve().is_relative_to(home.resolve()) else saved / home.name


def take_start(homes: Sequence[Path], parent: tuple[str, int] | None, source: str | None) -> str:
    """Make the folder of a new start in each of `homes`, and return its name; the last home is that of checkpoints.

    The number is the next one over all homes. Raises OSError where a folder cannot be made.
    """
    numbers = [int(path.name) for home in homes for path in _start_folders(home)]
    number = max(numbers, default=0) + 1
    origin: dict[str, Any] | None = {"checkpoint": source} if source else None
    if parent:
        origin = {"start": parent[0], "step": parent[1]}
    while True:
        name = f"{number:04d}"
        try:
            for home in homes:
                (home / name).mkdir(parents=True)
            break
        except FileExistsError:  # another process has taken it meanwhile
            number += 1
    for home in homes:
        record = {"run": home.name, "start": name, "from": origin}
        if home != homes[-1]:
            record["saves_in"] = str(homes[-1] / name)
        write_whole(home / name / START_FILE, json.dumps(record) + "\n", durable=True)
        with suppress(OSError), replacing(home / LATEST_LINK) as link:  # some file systems have no links
            link.symlink_to(name)
    return name


def read_start(folder: Path) -> Start | None:
    """Return the start of this folder, None for any other folder; a damaged record raises ConfigError."""
    path = folder / START_FILE
    try:
        found = json.loads(path.read_text())
        origin = found["from"] or {}
        parent = (origin["start"], int(origin["step"])) if "start" in origin else None
        if parent and not (_START_NUMBER.fullmatch(parent[0]) and int(parent[0]) < int(found["start"])):
            raise ValueError(f"start {found['start']} cannot come from start {parent[0]}")
        saves_in = found.get("saves_in") and Path(found["saves_in"])
        return Start(folder, parent, origin.get("checkpoint"), saves_in)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path}: expected the record of a start, found {type(error).__name__}: {error}; copy the folder again"
        ) from None


def require_start(folder: Path) -> Start:
    """Return the start of this folder; any other folder, and a damaged record, raises ConfigError."""
    if (start := read_start(folder)) is None:
        raise ConfigError(f"{folder}: expected the folder of a start, with {START_FILE}, found none; name another run")
    return start


def list_starts(home: Path) -> list[Start]:
    """Return the starts of a run, oldest first."""
    return [start for path in _start_folders(home) if (start := read_start(path))]


def start_chain(start: Start) -> list[Link]:
    """Return the chain that ends with `start`, oldest first; it begins after an ancestor whose folder is gone."""
    links = [Link(start.folder)]
    while start.parent:
        name, step = start.parent
        if (before := read_start(start.folder.parent / name)) is None:
            break
        start = before
        links.insert(0, Link(start.folder, links[0].last_step).up_to(step))
    return links


def chain_steps(start: Start, list_steps: Callable[[Path], Iterable[tuple[int, Any]]]) -> dict[int, Any]:
    """Return {step: result of `list_steps` in a start's folder} over the chain of `start`, in order of steps."""
    links = start_chain(start)
    found = {step: each for link in links for step, each in list_steps(link.folder) if link.holds(step)}
    return dict(sorted(found.items()))


def find_start(given: Path, root: Path, or_else: str = "") -> Path:
    """Return the folder of the start that a user names; a run stands for its newest start.

    given: a run, as NAME below `root` or the path of its folder, or a start, as NAME/0001 or a path. Raises ConfigError
    for anything else; or_else: what else the caller accepts, for the error.
    """
    with loading_errors(f"{given}: expected a readable folder of a run"):
        for place in (given, root / given):
            if (place / START_FILE).is_file():
                return place.resolve() if place.is_symlink() else place
            if starts := list_starts(place):
                return starts[-1].folder
        found = "a folder without them" if given.is_dir() else "no such folder"
        if given.is_file():
            found = "a file"
        runs = sorted({path.parents[1].name for path in root.glob(f"*/[0-9]*/{START_FILE}")})
        known = ", ".join(runs[:9]) + (", ..." if runs[9:] else "")
    raise ConfigError(
        f"{given}: expected the folder of a run, with starts 0001, 0002, ..., or of one start{or_else}, found {found}; "
        f"give a path, or a name in {root}: {known or 'there is none yet'}"
    )


def _start_folders(home: Path) -> list[Path]:
    """Return the folders of starts by their names, oldest first."""
    found = home.iterdir() if home.is_dir() else ()
    return sorted((path for path in found if _START_NUMBER.fullmatch(path.name)), key=lambda path: int(path.name))


# ---- checkpoints


def checkpoint_folders(folder: Path) -> Iterator[tuple[int, Path]]:
    """Yield (step, path) of all folders global_step_N in `folder`, complete or not."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if (saved := CHECKPOINT_NAME.fullmatch(path.name)) and path.is_dir():
            yield int(saved[1]), path


def complete_checkpoints(folder: Path) -> Iterator[tuple[int, Path]]:
    """Yield (step, folder) of the complete checkpoints in `folder`."""
    return ((step, path) for step, path in checkpoint_folders(folder) if has_manifest(path))


@dataclass(frozen=True)
class CheckpointChain:
    """Hold the checkpoints that belong to a run.

    links: folders that hold checkpoints, oldest first; under the launcher those of a start's chain, otherwise
    trainer.default_local_dir alone. other_starts: starts of the same run outside of the chain.
    """

    links: tuple[Link, ...]
    other_starts: tuple[Start, ...] = ()

    def checkpoints(self) -> dict[int, Path]:
        """Return {step: complete checkpoint}, oldest first."""
        found = {s: path for link in self.links for s, path in complete_checkpoints(link.folder) if link.holds(s)}
        return dict(sorted(found.items()))

    def up_to(self, step: int) -> CheckpointChain:
        """Return the chain of a start that continues after `step` of this one."""
        return CheckpointChain(tuple(link.up_to(step) for link in self.links), self.other_starts)

    def newest(self) -> Path | None:
        """Return the newest complete checkpoint, None without one.

        Raises ConfigError where it is damaged, with the checkpoint to continue from instead.
        """
        if not (found := self.checkpoints()):
            return None
        path = found[max(found)]
        try:
            require_whole_checkpoint(path)
        except ConfigError as error:
            text = f"{path}: the newest checkpoint is damaged: {error}\n{self.fallback_text(path)}"
            raise ConfigError(text) from None
        return path

    def fallback_text(self, path: Path) -> str:
        """Return a text that names the whole checkpoint before `path` to continue from if that cannot be used."""
        found = [*self.checkpoints().values()]
        for older in reversed(found[: found.index(path)]):
            with suppress(ConfigError):
                require_whole_checkpoint(older)
                return f"  To continue from the newest undamaged checkpoint: {resume_overrides(older)}"
        return "  This run has no undamaged older checkpoint; to begin at step 1: trainer.resume_mode=disable"

    def remove_oldest(self, keep: int | None, written: Path) -> None:
        """Remove what killed saves left, and all but the newest `keep` checkpoints (None: keep all), never `written`.

        Checkpoints from which a start outside of the chain began are kept too.
        """
        for link in self.links:
            for _, path in checkpoint_folders(link.folder):
                if path != written and not has_manifest(path):
                    remove_checkpoint(path)
        parents = [(start.folder.parent, start.parent) for start in self.other_starts if start.parent]
        began = {(home / name, step) for home, (name, step) in parents}
        found = self.checkpoints()
        removable = len(found) - keep if keep else 0
        for step in list(found)[: max(0, removable)]:
            if found[step] != written and (found[step].parents[1], step) not in began:
                remove_checkpoint(found[step])


def checkpoint_chain(start: Start) -> CheckpointChain:
    """Return the checkpoints of the chain that ends with `start`, also if they lie in another folder."""
    if start.saves_in:
        start = read_start(start.saves_in) or start
    links = start_chain(start)
    inside = {link.folder for link in links}
    others = tuple(other for other in list_starts(start.folder.parent) if other.folder not in inside)
    return CheckpointChain(tuple(Link(link.folder / CHECKPOINTS, link.last_step) for link in links), others)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint, its manifest first, so that an interrupted removal does not leave a checkpoint."""
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path)


def resume_overrides(path: Path | str) -> str:
    """Return the overrides that continue from a checkpoint."""
    return f"trainer.resume_mode=resume_path trainer.resume_from_path={path}"


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder; files that vanish during the walk are skipped."""
    size = 0
    for where, _, files in os.walk(folder):
        for name in files:
            with suppress(OSError):
                size += os.lstat(os.path.join(where, name)).st_size
    return size


def value_model_folder(folder: str | Path) -> Path:
    """Return the folder of a value model's weights: critic/ of a checkpoint, otherwise `folder` itself."""
    critic = Path(folder, CRITIC)
    return critic if critic.is_dir() else Path(folder)


# ---- rules for resuming, shared by the launcher, the controller and the readers


def path_to_resume(resume_mode: str, resume_from_path: Any) -> Path | None:
    """Return the checkpoint of trainer.resume_mode=resume_path, None in other modes; no path raises ConfigError."""
    if resume_mode != "resume_path":
        return None
    if not resume_from_path or not isinstance(resume_from_path, str):
        raise ConfigError("trainer.resume_mode=resume_path needs trainer.resume_from_path=FOLDER/global_step_N")
    path = Path(resume_from_path).absolute()
    start = path.parents[1]
    if start.is_symlink():  # NAME/latest, which the resuming start will change
        path = start.with_name(os.readlink(start)) / path.relative_to(start)
    return path


def require_whole_checkpoint(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint; raises ConfigError unless its files have the manifest's sizes and tensors.

    Only headers are read. Bytes of tensors are compared when workers read them (worker/checkpoint.py).
    """
    manifest = read_manifest(folder)
    manifests = {folder: manifest}
    if CRITIC in manifest.facts:
        manifests[folder / CRITIC] = read_manifest(folder / CRITIC)
    for place, each in manifests.items():
        for entry in each.files:
            require_file(place, entry)
    return manifest


def require_steps_left(folder: Path, step: int, total: int | None, key: str) -> None:
    """Raise ConfigError if the checkpoint has reached a run's total of steps, which is set by `key`."""
    if total is not None and step >= total:
        raise ConfigError(
            f"{folder}: step {step} is complete, and the run has reached its total of {total} ({key}); nothing was "
            "started. For more steps raise trainer.total_training_steps (smoke: --steps); for a new run give another "
            "name (--run NAME, recipe.run) or trainer.resume_mode=disable"
        )


def data_facts(train_files: str | Sequence[str] | None) -> dict[str, Any]:
    """Return {files, rows, sha256} of a run's data: the number of parquet rows and the digest of all bytes in order.

    Files that are not on this machine's disks are left out; without files the digest is None.
    """
    from pyarrow import parquet

    files = [train_files] if isinstance(train_files, str) else train_files or ()
    paths = [path for path in map(Path, files) if path.is_file()]
    digest, rows = hashlib.sha256(), 0
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
        if path.suffix == ".parquet":
            rows += parquet.read_metadata(path).num_rows
    return {"files": [*map(str, paths)], "rows": rows or None, "sha256": digest.hexdigest() if paths else None}


def require_same_data(folder: Path, manifest: Manifest, now: Mapping[str, Any], allowed: bool) -> None:
    """Raise ConfigError if the run's data (`data_facts`) differ from the checkpoint's, unless that is `allowed`."""
    before = manifest.facts.get("data") or {}
    if allowed or None in (before.get("sha256"), now["sha256"]) or before["sha256"] == now["sha256"]:
        return
    saved, own = (f"{each['rows']} rows in {', '.join(each['files'])}" for each in (before, now))
    raise ConfigError(
        f"{folder}: was saved with {saved}; this run has {own} (data.train_files) with another sha256, so the saved "
        f"position in the data does not fit. Give the same files, or recipe.resume_other_data=true to continue anyway"
    )
