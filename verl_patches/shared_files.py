"""Replace, lock and follow files that several processes use, and name the faults of files that were downloaded."""

from __future__ import annotations

import codecs
import errno
import fcntl
import os
import secrets
import shutil
import socket
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from verl_patches.errors import ConfigError, RecipeError

PARTIAL = ".partial"  # suffix of a file that is being written
LOCK = ".lock"  # name of a folder's lock file
_DISK_FULL_ERRNOS = errno.ENOSPC, errno.EDQUOT, errno.EFBIG
_FLOCK_FORMAT = "hhqqi"  # struct flock: type, whence, start, length, pid
_WEB_PAGE_STARTS = b"<!doctype html", b"<html", b"<?xml"  # object stores answer errors in XML
_LAST_BYTES = {".parquet": (b"PAR1",), ".json": (b"}", b"]")}  # what the last bytes of a whole file are


def file_fault(path: Path) -> str:
    """Return what is wrong with a file of data, weights or a tokenizer, and what to do; empty where no fault is found.

    Faults: a link to nothing, unreadable, empty, a Git LFS pointer, a web page, cut off. At most 1 KiB is read, so a
    file without a fault here may still be damaged.
    """
    if path.is_symlink() and not path.exists():
        return f"is a link to {os.readlink(path)}, which does not exist; download it again"
    if not path.is_file():
        return ""
    try:
        with path.open("rb") as file:
            start = file.read(512).removeprefix(codecs.BOM_UTF8).strip().lower()
            file.seek(max(0, path.stat().st_size - 512))
            end = file.read().rstrip()
    except OSError as error:
        return f"cannot be read: {error.strerror}; correct its permissions, or download it again"
    if not start and not end.removeprefix(codecs.BOM_UTF8):
        return "is empty; download or write it again"
    if start.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer in place of the file; run `git lfs pull` in its repository, or download the file"
    if start.startswith(_WEB_PAGE_STARTS):
        return "is a web page in place of the file; download the file itself, from /resolve/ on a hub, not from /blob/"
    if not end.endswith(_LAST_BYTES.get(path.suffix, (b"",))):
        return "is cut off or of another format; download or write it again"
    return ""


@contextmanager
def replacing(path: Path, durable: bool = False) -> Iterator[Path]:
    """Yield the path of a new file beside `path`; it replaces `path` where the block succeeds, else it is removed.

    So `path` has the old content or the new one, also where several nodes write it. With `durable` (fsync) this holds
    after a loss of power too; without it the file may then be absent or unreadable.
    """
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        yield partial
        if durable:
            sync(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    if durable:
        sync(path.parent)


def write_whole(path: Path, content: str | bytes, durable: bool = False) -> None:
    """Write a small file whole, as `replacing` does; text is written as UTF-8."""
    with replacing(path, durable) as new:
        new.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def disk_errors(path: Path, todo: str) -> Iterator[None]:
    """Raise RecipeError for an OSError of code that writes `path`, with free space and `todo` if the disk is full."""
    try:
        yield
    except OSError as error:
        text = f"{path} could not be written: {error.strerror}"
        if error.errno in _DISK_FULL_ERRNOS:
            text += f"; its disk has {free_bytes(path) / 2**20:.1f} MiB left. {todo}"
        raise RecipeError(text) from error


def expand_home(given: str) -> str:
    """Return a path with the folder of `~` or `~USER` at its beginning; ConfigError where the home is unknown."""
    found = os.path.expanduser(given)
    if found[:1] == "~":
        todo = "write the whole path, or ./~ for a name that begins with ~"
        raise ConfigError(f"{given}: expected ~ to stand for a home folder of this machine, found none; {todo}")
    return found


def absolute_path(given: str) -> str:
    """Return a local path of a configuration as an absolute one, with `~` expanded; an address with :// as it is."""
    return given if "://" in given else str(Path(expand_home(given)).absolute())


def can_write_below(path: str) -> bool:
    """Return whether this user could write in a folder, or make it; nothing is made. False for an unknown home."""
    folder = Path(os.path.expanduser(path))
    place = next(place for place in (folder, *folder.absolute().parents) if os.path.exists(place))
    return str(folder)[:1] != "~" and place.is_dir() and os.access(place, os.W_OK)


def disk_folder(path: Path) -> Path:
    """Return the nearest existing folder at or above `path`, whose disk has `path` or will have it."""
    return next(place for place in (path, *path.absolute().parents) if place.is_dir())


def free_bytes(path: Path) -> int:
    """Return the free bytes of the disk that a file or folder is on, or will be."""
    return shutil.disk_usage(disk_folder(path)).free


def sync(path: Path) -> None:
    """Flush a file, or the names of a folder, to the disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def lock_file(path: Path) -> BinaryIO:
    """Return the file `path`, made if absent, open for unbuffered appends and locked until it is closed.

    Raises BlockingIOError where another process has the lock, and OSError where the file cannot be opened or is a
    symbolic link. The lock belongs to the open file (fcntl(2), F_OFD_SETLK): unlike flock's, `is_locked` can see it
    without locking the file.
    """
    file = open(path, "ab", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666))
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack(_FLOCK_FORMAT, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except BaseException:
        file.close()
        raise
    return file


def is_locked(path: Path) -> bool | None:
    """Return whether a process holds `lock_file` of this file, without locking it; None where it is no plain file."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return None
        with path.open("rb") as file:
            query = struct.pack(_FLOCK_FORMAT, fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
            return struct.unpack(_FLOCK_FORMAT, fcntl.fcntl(file, fcntl.F_OFD_GETLK, query))[0] != fcntl.F_UNLCK
    except OSError:
        return None


@contextmanager
def locked_folder(
    folder: Path, busy: Callable[[], Exception | None], unusable: Callable[[OSError], Exception]
) -> Iterator[BinaryIO]:
    """Make a folder and hold the lock of its LOCK file, which is yielded and names this process.

    `busy` is called while another process has the lock; it returns the error to raise, or None to try again. `unusable`
    returns the error to raise where the folder or the lock cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = None
        while lock is None:
            try:
                lock = lock_file(folder / LOCK)
            except BlockingIOError:
                if error := busy():
                    raise error from None
        lock.truncate(0)
        lock.write(f"pid {os.getpid()} on {socket.gethostname()}".encode())
        os.fsync(lock.fileno())  # else a node of a shared file system sees it late
    except OSError as error:
        raise unusable(error) from error
    with lock:
        yield lock


class GrowingFile:
    """Read a file that another process appends to, from byte `skip` on; the file may not exist yet."""

    def __init__(self, path: Path, skip: int = 0):
        self.path, self.offset = path, skip

    def blocks(self, size: int = 1 << 16) -> Iterator[bytes]:
        """Yield the bytes that were appended since the last call, in blocks of at most `size` bytes."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self.offset)
            while block := file.read(size):
                self.offset += len(block)
                yield block
