"""Making the stand-ins for CANN and CUDA: what is asked of the libraries."""

import shutil
import subprocess
import sys

import pytest

from tests.npu import make_stubs


def compiled(folder, name, code, *options):
    source, made = folder / f"{name}.c", folder / f"lib{name}.so"
    source.write_text(code)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", made, source, *options], check=True)
    return made


@pytest.mark.skipif(not all(map(shutil.which, ("gcc", "nm", "ldd"))), reason="needs gcc, nm and ldd")
def test_only_what_nothing_here_defines_is_missing(tmp_path):
    """libuser wants a library that is there, one that is gone, and the C library."""
    here = compiled(tmp_path, "here", "int here(void) { return 1; }")
    gone = compiled(tmp_path, "gone", "int gone(void) { return 1; } int unused(void) { return 2; }")
    code = "#include <stdlib.h>\nint here(void); int gone(void); int user(void) { return abs(here() + gone()); }"
    user = compiled(tmp_path, "user", code, f"-L{tmp_path}", "-lhere", "-lgone")
    gone.unlink()
    assert make_stubs.missing([user], [here]) == (["libgone.so"], ["gone"])


@pytest.mark.skipif(not all(map(shutil.which, ("gcc", "nm", "ldd"))), reason="needs gcc, nm and ldd")
def test_symbols_have_the_versions_that_they_are_asked_for_by(tmp_path, monkeypatch):
    """As CUDA's; the loader refuses a library under its name that lacks them."""
    (tmp_path / "script").write_text('"libgone.so" { gone; };')
    gone = compiled(tmp_path, "gone", "int gone(void) { return 1; }", f"-Wl,--version-script={tmp_path / 'script'}")
    user = compiled(tmp_path, "user", "int gone(void); int user(void) { return gone(); }", f"-L{tmp_path}", "-lgone")
    gone.unlink()
    monkeypatch.setattr(make_stubs, "wheel_files", lambda package: [user] if package == "torch" else [])
    load = [sys.executable, "-c", "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).user())", str(user)]
    made = []
    for versions in (make_stubs.versions, lambda *_: ""):
        monkeypatch.setattr(make_stubs, "versions", versions)
        make_stubs.make(tmp_path / "out", "torch")
        env = {"LD_LIBRARY_PATH": str(tmp_path / "out"), "PATH": ""}
        made.append(subprocess.run(load, capture_output=True, text=True, env=env))
    assert made[0].stdout == "0\n", made[0].stderr
    assert made[1].returncode != 0  # the control
