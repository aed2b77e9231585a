"""Interpreters of the supported Python versions on this machine."""

import functools
import os
import shutil
import subprocess
from pathlib import Path

VERSIONS = ("3.10", "3.11", "3.12", "3.13")


@functools.cache
def interpreter(version):
    """A Python of that version that really runs, from the search path or from pyenv's folder; None if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [shutil.which(f"python{version}"), *map(str, sorted(pyenv.glob(f"{version}.*/bin/python")))]
    for path in filter(None, found):
        command = [path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if done.returncode == 0 and done.stdout.strip() == version:  # a shim may not work
            return path
    return None
