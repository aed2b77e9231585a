"""Define fixtures for the tests of patches."""

import json
import textwrap

import pytest

from tests.patching.world import FILES


@pytest.fixture
def tree(tmp_path):
    """Return a folder with the files of world.py."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    return tmp_path


@pytest.fixture
def play(run_python, tree):
    """Return play(code), which runs code in its own process with the names of world.py and returns its `out`."""

    def run(code):
        text = f"import sys\nfrom tests.patching.world import *\ndrift()\nout = None\n{textwrap.dedent(code)}\n"
        return json.loads(
            run_python(f"{text}import json; print(json.dumps(out))", env={"PYTHONPATH": str(tree)}).check().out
        )

    return run


@pytest.fixture
def play_world(run_python, tmp_path):
    """Return play_world(program, *arguments), which runs a program of this folder in an empty folder."""

    def run(program, *arguments):
        code = f"import runpy, sys; sys.argv[0] = {str(program)!r}; runpy.run_path(sys.argv[0], run_name='__main__')"
        return run_python(code, str(tmp_path), *map(str, arguments))

    return run
