"""Test facts of machines: the path of jemalloc on each system, and stale locks of compiled extensions."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from verl_patches.platform.npu import machine as npu
from verl_patches.platform.npu.machine import ld_preload, stale_locks, start_notes

PLACES = {
    ("aarch64", "Ubuntu"): "usr/lib/aarch64-linux-gnu",
    ("x86_64", "Ubuntu"): "usr/lib/x86_64-linux-gnu",
    ("aarch64", "openEuler"): "usr/lib64",
}


@pytest.mark.parametrize(("machine", "system"), PLACES)
def test_jemalloc_is_found_on_each_system_and_comes_first(tmp_path, monkeypatch, machine, system):
    def set_machine(name):
        monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine=name))

    set_machine(machine)
    monkeypatch.setattr(npu, "JEMALLOC", [f"{tmp_path}{folder}" for folder in npu.JEMALLOC])
    assert ld_preload({}) == "" and ld_preload({"LD_PRELOAD": "/a.so"}) == "/a.so"
    library = tmp_path / PLACES[machine, system] / "libjemalloc.so.2"
    library.parent.mkdir(parents=True)
    library.touch()
    assert ld_preload({}) == str(library) and ld_preload({"LD_PRELOAD": "/a.so"}) == f"{library}:/a.so"
    assert ld_preload({"LD_PRELOAD": "/mine/libjemalloc.so.1"}) == "/mine/libjemalloc.so.1"
    set_machine({"aarch64": "x86_64", "x86_64": "aarch64"}[machine])
    assert (ld_preload({}) == "") == (system == "Ubuntu")  # a library for another processor is not loaded


HOLD_LOCK_CODE = """
import sys
from torch.utils.file_baton import FileBaton
baton = FileBaton(sys.argv[1])
assert baton.try_acquire()
print("held", flush=True)
sys.stdin.read()
"""


def test_a_lock_is_stale_when_its_process_was_killed_and_not_while_it_compiles(tmp_path):
    """Use torch's own lock, with TORCH_EXTENSIONS_DIR and without it, in the folder that has Python's version."""
    folder = tmp_path / "cache" / "torch_extensions" / "py311_cpu" / "my op"
    folder.mkdir(parents=True)
    lock, given = folder / "lock", {"TORCH_EXTENSIONS_DIR": str(folder.parent)}
    words = [sys.executable, "-c", HOLD_LOCK_CODE, str(lock)]
    holder = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"held\n" and lock.exists()
    assert stale_locks(given) == [] == start_notes(given, npu=False)
    holder.kill()
    holder.communicate()
    assert stale_locks(given) == [lock] == stale_locks({"XDG_CACHE_HOME": str(tmp_path / "cache")})
    (note,) = start_notes(given, npu=False)
    command = note.partition(": ")[2].partition(" (")[0]
    subprocess.run(["bash", "-c", command], check=True)
    assert not lock.exists() and start_notes(given, npu=False) == []


def test_absent_jemalloc_is_said_on_npus_alone(tmp_path):
    environ = {"TORCH_EXTENSIONS_DIR": str(tmp_path), "LD_PRELOAD": "/usr/lib64/libjemalloc.so.2"}
    assert start_notes(environ, npu=True) == []
    if not ld_preload({}):
        (note,) = start_notes({**environ, "LD_PRELOAD": ""}, npu=True)
        assert "apt install libjemalloc2" in note and "yum install jemalloc" in note
    assert start_notes({**environ, "LD_PRELOAD": ""}, npu=False) == []
