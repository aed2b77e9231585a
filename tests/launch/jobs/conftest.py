"""Render the scripts of a job, and put test programs in place of ssh, docker and a scheduler's commands."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from verl_patches.launch.jobs.job import load_job
from verl_patches.launch.jobs.render import render

WAIT_S = 600


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Return program(name, bash), which puts a program on PATH; each call of it is a line of the file `calls`."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def make(name, text):
        path = tmp_path / name
        path.write_text(f'#!/bin/bash\necho "{name} $*" >> {tmp_path}/calls\n{text}\n')
        path.chmod(0o755)
        return path

    make.calls = lambda: (tmp_path / "calls").read_text() if (tmp_path / "calls").exists() else ""
    make.docker = lambda: [line for line in make.calls().splitlines() if line.startswith("docker ")]
    return make


@pytest.fixture
def scripts(tmp_path):
    """Return scripts(job as a dictionary), which renders a job's scripts and returns their folder."""

    def make(job):
        file = tmp_path / "job.yaml"
        file.write_text(yaml.safe_dump(job))
        folder = tmp_path / "scripts"
        render(load_job(file), folder, str(file))
        return folder

    return make


@pytest.fixture
def call():
    """Return call(script, *arguments), which starts a script with pipes in its own process group, as a terminal."""
    started = []

    def begin(script, *arguments, before=(), **environ):
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        words = [*before, "bash", str(script), *arguments]
        started.append(subprocess.Popen(words, start_new_session=True, env={**os.environ, **environ}, **pipes))
        return started[-1]

    yield begin
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def ended(process):
    """Wait for a process to end and return (exit code, output, errors)."""
    out, err = process.communicate(timeout=WAIT_S)
    return process.returncode, out, err


def files_with(text: bytes, *folders):
    """Return the files below folders that contain a text."""
    paths = (path for folder in folders for path in Path(folder).rglob("*"))
    return [path for path in paths if path.is_file() and not path.is_symlink() and text in path.read_bytes()]
