"""The folder of a run, outputs/NAME: its id, its lock, and what a start moves to earlier/N.

    run.json       the run's name and id; restarts and resumes keep it (trainer/record.py)
    checkpoints/   of this run only
    earlier/N/     outputs of its earlier parts; of an earlier run of that name also run.json and checkpoints

A start goes on with the run that is there, or begins a new one: config/run_start.py.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from omegaconf import OmegaConf

from verl_patches.config.run_start import checkpoints_of, is_inside, start_of, uses_checkpoints
from verl_patches.errors import ConfigError
from verl_patches.evaluation.record import SUMMARY, read_object, read_summary
from verl_patches.shared_files import locked_folder
from verl_patches.spec import RunSpec, Start
from verl_patches.trainer.record import RUN, new_run_id, run_id, write_json
from verl_patches.values import size_text
from verl_patches.weights.checkpoint_folders import EARLIER, next_aside, recover, resume_from, size_bytes, step_of
from verl_patches.weights.manifest import SAVED

# what a run leaves in its folder, written by launcher and driver; the next part or run of that name moves these aside
OUTPUTS = (
    "config.yaml environment.json driver.log progress.log now.json summary.json metrics.jsonl tensorboard training.png "
    "memory.png report.md report.png rollouts profile ray_logs watch.json stacks attempts"
).split()
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
_FOLDER = "expected a folder that can be written to (recipe.output_root, recipe.run)"


@dataclass(frozen=True)
class RunFolder:
    """A run's folder while its launcher holds it.

    start: where this part of the run starts. said: lines about what was moved, and what is left alone.
    """

    path: Path
    id: str
    start: Start
    said: tuple[str, ...]


def require_output_folder(run: RunSpec) -> None:
    """ConfigError where the run's folder could not be made; nothing is written."""
    folder = run.folder
    try:
        existing = next(place for place in (folder, *folder.parents) if place.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK):
            raise OSError(f"{existing} is no folder that can be written to")
    except OSError as error:
        raise ConfigError(f"{folder}: {_FOLDER}, found: {error}") from error


def require_lasting_folders(run: RunSpec) -> None:
    """ConfigError where a run on NPUs would write in its container's own file system, deleted with it.

    A container is known by the overlay that its root is.
    """
    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    root = Path("/")
    if run.recipe.platform != "npu" or "overlay" not in mounts.get(root, ""):
        return
    inside = []
    for key in ("recipe.output_root", "trainer.default_local_dir"):
        path = OmegaConf.select(run.verl, key)
        real = Path(path).resolve()
        if next(place for place in (real, *real.parents) if place in mounts) == root:
            inside.append(f"{key}: {path}")
    if inside:
        own = ("/proc", "/sys", "/dev", "/etc", "/run", "/usr", "/var")
        folders = [str(place) for place in mounts if place != root and not str(place).startswith(own)]
        raise ConfigError(
            f"{'; '.join(inside)} would be deleted with this container; expected folders of the host, mounted here: "
            f"{', '.join(folders) or 'none is'}. Mount one there (volumes of the job file, or VOLUMES of "
            "scripts/start_container.sh), or give a path in one that is"
        )


def require_start(run: RunSpec) -> Start:
    """How the run would start in its folder; ConfigError where it could not (config/run_start.py). Writes nothing."""
    require_output_folder(run)
    return start_of(run, run.folder)


def start_again(run: RunSpec, folder: Path) -> Start:
    """Where the next try of a run starts, whose `folder` this process holds: from its newest checkpoint now.

    ConfigError as `start_of`.
    """
    if checkpoints_of(run).is_dir() and (own := run_id(folder)):
        recover(checkpoints_of(run), own)
    return start_of(run, folder)


@contextmanager
def open_run_folder(run: RunSpec) -> Iterator[RunFolder]:
    """Lock the run's folder and that of its checkpoints, move files of earlier parts aside, and give the run its id.

    ConfigError where another run holds one of them or the run cannot start; then nothing has moved, but for a save of
    this run that was killed and that has its name now.
    """
    folder, saved = run.folder, checkpoints_of(run)
    with ExitStack() as held:
        held.enter_context(_locked(folder, "--run NAME, recipe.run"))
        there = saved.is_dir() and (uses_checkpoints(run) or is_inside(run, folder))
        if there:
            held.enter_context(_locked(saved, "trainer.default_local_dir"))
        if there and run.verl.trainer.resume_mode != "disable" and (own := run_id(folder)):
            recover(saved, own)  # a save that was killed after its last file is the newest checkpoint
        start = start_of(run, folder)
        said = [*_set_aside(folder, saved, start), *(f"| {text}" for text in start.ignored)]
        if run.verl.trainer.save_freq > 0 and (start.moves or not there):
            held.enter_context(_locked(saved, "trainer.default_local_dir"))
        yield RunFolder(folder, start.id or new_run_id(folder, run.recipe.run), start, tuple(said))


def _locked(folder: Path, keys: str) -> AbstractContextManager:
    """`locked_folder`; ConfigError with the `keys` to change where another run has it."""

    def unusable(error: OSError) -> ConfigError:
        if error.errno in _NO_LOCKS:
            return ConfigError(
                f"{folder}: its file system has no file locks ({error.strerror}), which keep two runs out of one "
                f"folder; mount it with locks (Lustre: -o flock; NFS: lockd), or give a folder on another one ({keys})"
            )
        return ConfigError(f"{folder}: {_FOLDER}, found: {error}")

    busy = f"{folder} is being written by another run; wait for it, or give this one another folder ({keys})"
    return locked_folder(folder, lambda: ConfigError(busy), unusable)


def _set_aside(folder: Path, saved: Path, start: Start) -> list[str]:
    """Move the outputs of an earlier part to earlier/N, and for a new run the earlier one's checkpoints with them."""
    names = OUTPUTS if start.id else [*OUTPUTS, RUN]
    outputs = [path for name in names if (path := folder / name).exists() or path.is_symlink()]
    aside, said = next_aside(folder), []
    if outputs or start.moves:
        aside.mkdir(parents=True)
    if start.moves:
        size = size_text(size_bytes(saved))
        try:
            saved.rename(aside / saved.name)
        except OSError as error:
            aside.rmdir()
            raise ConfigError(f"{saved}: cannot be moved to {aside} ({error}); move it away by hand") from error
        moved = aside / saved.name
        said.append(f"| checkpoints of the run before, {size}, are now in {moved}")
        if steps := [path for path in moved.glob("global_step_*") if SAVED.fullmatch(path.name)]:
            said.append(
                f"| this run starts from other weights; to go on from them: {resume_from(max(steps, key=step_of))}"
            )
    for path in outputs:
        if path.exists() or path.is_symlink():
            path.rename(aside / path.name)
    if start.id and (part := _last_part(folder, start.id)):
        carry_on(part, folder)
    return said


def _last_part(folder: Path, run: str) -> Path | None:
    """The folder with the newest record of the run: of a part in earlier/, or of a try in its attempts/."""
    parts = sorted((folder / EARLIER).glob("*"), key=_number, reverse=True)
    for part in parts:
        for place in (part, *sorted((part / "attempts").glob("*"), key=_number, reverse=True)):
            with suppress(ConfigError):
                record = read_object(place / SUMMARY)
                if record.get("id") == run and record.get("steps"):
                    return place
    return None


def _number(path: Path) -> int:
    return int(path.name) if path.name.isdecimal() else 0


def carry_on(part: Path, folder: Path) -> None:
    """Leave a run's next part in `folder` the steps and metrics of the part before, whose files were moved to `part`.

    trainer/record.py goes on from them. A damaged record is left out, and the run goes on without it.
    """
    with suppress(ConfigError):
        if read_summary(part).get("steps"):
            record = read_object(part / SUMMARY)  # with all keys
            write_json(folder / SUMMARY, {"id": record.get("id"), "steps": record["steps"], "exit": "running"})
    if (metrics := part / "metrics.jsonl").is_file():
        shutil.copyfile(metrics, folder / metrics.name)


def id_without_launcher(run: RunSpec, held: ExitStack) -> str:
    """The id of a run of verl's own entry point: that of its folder of checkpoints, or a new one, which is kept there.

    The folder is locked until `held` is closed. ConfigError as `start_of`, and where another run holds the folder:
    nothing moves aside without the launcher, so checkpoints of another run are refused.
    """
    saved = checkpoints_of(run)
    if run.verl.trainer.save_freq > 0 or (uses_checkpoints(run) and saved.is_dir()):
        held.enter_context(_locked(saved, "trainer.default_local_dir"))
        if run.verl.trainer.resume_mode != "disable" and (own := run_id(saved)):
            recover(saved, own)
    return start_of(run, saved).id or new_run_id(saved if run.verl.trainer.save_freq > 0 else None, run.recipe.run)
