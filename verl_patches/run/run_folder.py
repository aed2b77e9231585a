"""Lock the folders of a run while its launcher lives, and make each start's folder (weights/run_folders.py)."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
from omegaconf import OmegaConf

from verl_patches.errors import ConfigError
from verl_patches.run.run_start import recipe_saves_checkpoints, run_checkpoints_home
from verl_patches.shared_files import LOCK, can_write_below, locked_folder
from verl_patches.spec import NextStart, RunSpec
from verl_patches.trainer.record import Progress
from verl_patches.weights.run_folders import take_start

_NO_LOCK_ERRNOS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
_WRITABLE_FOLDER = "expected a writable folder (recipe.output_root, recipe.run)"


def require_lasting_folders(run: RunSpec) -> None:
    """Refuse a run on NPUs that would write into its container's own file system, which is deleted with it.

    A container is recognized by its root, which is an overlay.
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
            f"{'; '.join(inside)} would be deleted with this container; expected paths in folders that are mounted "
            f"from the host: {', '.join(folders) or 'none is here'}. Give a path in one of these, or mount another "
            "(volumes of the job file, or VOLUMES of scripts/start_container.sh)"
        )


def require_start(run: RunSpec) -> NextStart:
    """Return where the run would start, without writing; raise ConfigError where it could not (run/run_start.py)."""
    if not can_write_below(str(run.home)):
        raise ConfigError(f"{run.home}: {_WRITABLE_FOLDER}, found one that this user cannot write, or no folder")
    if run.no_start:
        raise ConfigError(run.no_start)
    return run.start


@contextmanager
def lock_run(run: RunSpec) -> Iterator[None]:
    """Hold the locks of the run's folders, so that no other start of its name is live.

    Raise ConfigError where one is, or where a folder cannot be written.
    """
    with ExitStack() as held:
        for home in _start_homes(run):
            keys = "--run NAME, recipe.run" if home == run.home else "trainer.default_local_dir"
            held.enter_context(lock_folder(home, keys))
        yield


def make_start_folder(run: RunSpec, start: NextStart) -> str:
    """Make the folder of a start, note in its progress.log if it finds no checkpoint, and return its name."""
    homes = _start_homes(run)
    source = None if start.parent or not start.resumed else str(start.resumed)
    try:
        name = take_start(homes, start.parent, source)
    except OSError as error:
        raise ConfigError(f"{homes[0]}: {_WRITABLE_FOLDER}, found: {error}") from error
    if run.verl.trainer.resume_mode == "auto" and start.resumed is None and recipe_saves_checkpoints(run):
        fresh = f"| trainer.resume_mode=auto: no start of {run.recipe.run} has a checkpoint, starting from step 1"
        Progress(homes[0] / name).say(fresh)
    return name


def begin_without_launcher(run: RunSpec, held: ExitStack) -> RunSpec:
    """Make the record folder of a start that verl's own entry point makes; return the run with the start's name.

    A run without a name gets no folder. Checkpoints stay in trainer.default_local_dir, which is locked until `held` is
    closed; raise ConfigError where another run has it.
    """
    saved = Path(run.verl.trainer.default_local_dir).absolute()
    if run.verl.trainer.save_freq > 0 or (run.verl.trainer.resume_mode == "auto" and saved.is_dir()):
        held.enter_context(lock_folder(saved, "trainer.default_local_dir"))
    if run.recipe.run is None:
        return run
    return replace(run, start=NextStart(name=take_start([run.home], None, None)))


def _start_homes(run: RunSpec) -> list[Path]:
    """Return the run's folder, and that of its checkpoints if it is another one and verl itself does not save them."""
    home, saved = run.home, run_checkpoints_home(run)
    return [home] if home.resolve() == saved.resolve() or not recipe_saves_checkpoints(run) else [home, saved]


def lock_folder(folder: Path, keys: str) -> AbstractContextManager:
    """Hold `locked_folder` of a folder; raise ConfigError with the `keys` to change where another run has it."""

    def unusable(error: OSError) -> ConfigError:
        if error.errno in _NO_LOCK_ERRNOS:
            return ConfigError(
                f"{folder}: its file system has no file locks ({error.strerror}), which keep two runs out of one "
                f"folder; mount it with locks (Lustre: -o flock; NFS: lockd), or give a folder on another one ({keys})"
            )
        return ConfigError(f"{folder}: {_WRITABLE_FOLDER}, found: {error}")

    def busy() -> ConfigError:
        holder = (folder / LOCK).read_text() or "an unknown process"
        return ConfigError(
            f"{folder} is being written by another run, of {holder}; wait for it, or give this one another folder "
            f"({keys}). If that machine has crashed, an NFS server ends its lock after its lease (about 90 s; NFS 3: "
            "once the machine is up again); to go on before, give another folder and trainer.resume_mode=resume_path"
        )

    return locked_folder(folder, busy, unusable)
