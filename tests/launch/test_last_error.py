"""Test how the launcher finds the exception that ended a run in the log of its driver."""

import subprocess
import sys

import pytest

from verl_patches.errors import locate_error
from verl_patches.launch.launcher import last_error
from verl_patches.run.environment import CONFIG_FILE, FACTS_FILE

ERRORS = """
Exception: expected value at line 1 column 1
socket.gaierror: [Errno -2] Name or service not known
StopIteration
pyo3_runtime.PanicException: called `Option::unwrap()` on a `None` value
own.make.<locals>.Problem: x
""".strip().splitlines()
FRAMES = 'Traceback (most recent call last):\n  File "/a/reward.py", line 7, in f\n    g()\n    ^^^\n'


@pytest.fixture
def error_in(tmp_path):
    """Return the function that finds the error in a text as the driver's log."""

    def find(text, places=()):
        (tmp_path / "driver.log").write_text(text)
        error = last_error(tmp_path / "driver.log")
        return error and locate_error(*error, places)

    return find


@pytest.mark.parametrize("line", ERRORS)
def test_an_exception_is_known_by_its_place_after_the_frames(error_in, line):
    assert error_in(f"start\n{FRAMES}{line}\nend: of the log\n") == line
    assert error_in(f"start\n{line}\nINFO: {line}\n  {line}\n") is None


def test_the_last_traceback_of_the_driver_counts_with_its_whole_message(error_in):
    """Let the lines of another process stand between those of the driver, as Ray writes them."""
    other = "".join(f"(WorkerDict pid=7, ip=10.0.0.1) {line}\n" for line in [*FRAMES.splitlines(), "KeyError: 'late'"])
    head, *rest = FRAMES.splitlines(keepends=True)
    ours = f"{FRAMES}ValueError: first\n\nDuring handling of the above exception, another exception occurred:\n\n"
    ours += f"{head}{other}{''.join(rest)}own.Problem: a: expected 2, found 3\n  do this\n{other}"
    assert error_in(ours) == "own.Problem: a: expected 2, found 3\n  do this"
    assert error_in(other) == "KeyError: 'late'"


def test_the_error_of_a_remote_process_stands_behind_the_frames_that_ray_adds(error_in):
    remote = "ray::Controller.run() (pid=5, ip=10.0.0.1, actor_id=ab)"
    text = f'{FRAMES}ray.exceptions.RayTaskError(Empty): \x1b[36m{remote}\x1b[39m\n  File "/b.py", line 3, in run\n'
    assert error_in(f"{text}    f()\nqueue.Empty\n") == "queue.Empty"
    assert error_in(text).startswith(f"ray.exceptions.RayTaskError(Empty): {remote}")


def test_a_stack_without_an_error_is_none(error_in):
    stack = FRAMES.removeprefix("Traceback (most recent call last):\n")
    assert error_in(f"WARNING:root:slow\nStack (most recent call last):\n{stack}WARNING:root: next\n") is None
    assert error_in(f"Current thread 0x01 (most recent call first):\n{stack}\nExtension modules: numpy\n") is None


def test_the_line_of_the_users_file_is_named(error_in, tmp_path):
    text = f"{FRAMES}own.Problem: x\n"
    assert error_in(text, ["/a/reward.py"]) == "/a/reward.py:7: own.Problem: x"
    assert error_in(text, ["/a/other.py"]) == "own.Problem: x"
    named = f"{FRAMES}RewardError: python, sample 3: /a/reward.py:7: KeyError: 'x'\n"
    assert error_in(named, ["/a/reward.py"]) == named.splitlines()[-1]


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_the_line_of_the_models_template_or_own_code_is_named(error_in, tmp_path, name):
    """Run jinja2, whose templates have no file, and a model's Python file."""
    (tmp_path / name).touch()
    (tmp_path / "tokenization_own.py").write_text("\ndef f(): return {}['x']\n")
    shown = f"{tmp_path / name}:2: " if name.endswith("jinja") else f"{tmp_path / name}, chat_template:2: "
    for code, location in (
        ("import jinja2; jinja2.Template('a\\n{{ m.x.y }}').render()", f"{shown}jinja2.exceptions.UndefinedError: "),
        ("import jinja2; jinja2.Template('a\\n{% if %}')", f"{shown}jinja2.exceptions.TemplateSyntaxError: "),
        ("import tokenization_own as t; t.f()", f"{tmp_path}/tokenization_own.py:2: KeyError: 'x'"),
    ):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
        assert error_in(done.stderr, [str(tmp_path)]).startswith(location)


REFUSE = """
import runpy, sys, traceback
from ray.exceptions import RayTaskError
from verl_patches import spec
from verl_patches.errors import ConfigError, RecipeError

def refuse(*_):
    try:
        raise {error}("row 5:\\nno prompt")
    except Exception as error:
        raise RayTaskError("run", traceback.format_exc(), error, "ray::Controller.run").as_instanceof_cause() from None

spec.read_run, sys.argv = refuse, ["main", {folder!r}]
runpy.run_module("verl_patches.main", run_name="__main__")
"""


@pytest.mark.parametrize(("error", "code"), [("ConfigError", 2), ("RecipeError", 1)])
def test_an_input_that_a_process_of_the_run_refuses_ends_the_driver_with_2(run_python, tmp_path, error_in, error, code):
    """Raise what Ray hands on: it unwraps the error of a worker that passes through the controller."""
    for name in (CONFIG_FILE, FACTS_FILE):
        (tmp_path / name).write_text("{}")
    env = {"VERL_PATCHES": "line=pypi,platform=cpu"}
    done = run_python(REFUSE.format(error=error, folder=str(tmp_path)), env=env)
    assert done.rc == code
    assert error_in(done.err) == f"verl_patches.errors.{error}: row 5:\n  no prompt"
