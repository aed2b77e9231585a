"""The job's command on its node, without Ray: it outlives its starter, and every follower gets its output and code."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from verl_patches.cli import cluster as cli
from verl_patches.cluster import command, gather, node
from verl_patches.cluster.hosts import BEGUN
from verl_patches.cluster.job import Job
from verl_patches.cluster.place import place_of
from verl_patches.config.environment import REPOSITORY
from verl_patches.errors import ConfigError, RecipeError

STARTED = node.Started("j", "d", 0, "127.0.0.2", "127.0.0.2", "j-0-mark", 0.0)
ON = 'echo "on $TOKEN"; while [ ! -e "$GATE" ]; do sleep 0.02; done; echo off; exit 3'


@pytest.fixture
def make(tmp_path):
    """make(words) -> a job whose command is a line of bash; GATE is a file that the tests make."""
    jobs = []

    def job(line):
        env = {"GATE": str(tmp_path / "gate")}
        named = {"folder": str(tmp_path), "checkout": str(tmp_path), "command": ["bash", "-c", line], "env": env}
        jobs.append(Job(name="j", nodes=1, dies=1, **named))
        return jobs[-1]

    yield job
    for started in [command.newest(job) for job in jobs]:
        if started is not None and started.runs:
            os.killpg(started.pid, signal.SIGKILL)


def follow(job, skip=0):
    return command.follow(job, sys.stdout.buffer, skip)


def say(text):
    say.last = text


def test_output_from_any_byte_and_the_exit_code(make, capfdbinary, tmp_path):
    job = make(ON)
    assert command.finding(job) is None
    with pytest.raises(RecipeError, match="no command of job j was started on this node; cluster up --run starts it"):
        follow(job)
    command.start(job, STARTED, {"TOKEN": "t"}, say)
    assert command.finding(job).state == "fine" and "runs" in command.finding(job).found
    (tmp_path / "gate").touch()
    assert follow(job) == 3 and capfdbinary.readouterr().out == b"on t\noff\n"
    assert follow(job, skip=5) == 3 and capfdbinary.readouterr().out == b"off\n"
    found = command.finding(job)
    assert found.state == "problem" and found.found == "ended with exit code 3"
    command.start(job, STARTED, {}, say)  # again: an output of its own
    assert follow(job) == 3 and capfdbinary.readouterr().out == b"on \noff\n"
    assert (tmp_path / "command-1.log").read_bytes() == b"on t\noff\n"
    good = make("exit 0")
    command.start(good, STARTED, {}, say)
    assert follow(good) == 0 and command.finding(good).state == "fine"


def test_one_that_runs_is_joined_and_another_one_refused(make, tmp_path):
    job = make(ON)
    command.start(job, STARTED, {}, say)
    first = command.newest(job)
    command.start(job, STARTED, {}, say)
    assert command.newest(job) == first and f"runs already (pid {first.pid})" in say.last
    with pytest.raises(
        ConfigError, match="another command of job j runs .*cluster follow, or end it with cluster down"
    ):
        command.start(make("echo other"), STARTED, {}, say)
    with node.one_command_in(tmp_path), pytest.raises(ConfigError, match="another `cluster` command"):
        command.start(job, STARTED, {}, say)  # two callers at once start one command
    assert psutil.Process(first.pid).environ()[node.MARK] == STARTED.mark  # so `down` ends it
    assert os.getsid(first.pid) == first.pid


@pytest.mark.parametrize(("line", "code"), [("kill -9 $$", 137), ("kill -15 $$", 143), ("no-such-program", 127)])
def test_a_command_that_a_signal_ended_or_that_is_not_there(make, line, code):
    job = make(line)
    command.start(job, STARTED, {}, say)
    assert follow(job) == code


def test_one_that_was_killed_with_its_shell_has_no_code(make):
    job = make(ON)
    command.start(job, STARTED, {}, say)
    os.killpg(command.newest(job).pid, signal.SIGKILL)
    with pytest.raises(RecipeError, match="was killed; it has no exit code"):
        follow(job)
    assert command.finding(job).found == "was killed"


def test_a_follower_ends_when_nobody_reads_it_any_more(make):
    job = make(ON)
    command.start(job, STARTED, {}, say)
    code = "import sys; from verl_patches.cluster import command, job; "
    code += "command.follow(job.Job.model_validate_json(sys.argv[1]), sys.stdout.buffer)"
    words = [sys.executable, "-c", code, job.model_dump_json()]
    follower = subprocess.Popen(words, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
    assert follower.stdout.readline() == b"on \n"
    follower.stdout.close()
    assert follower.wait(timeout=600) == 141 and command.newest(job).runs


def test_a_checkout_that_is_not_there_is_named(make):
    job = make(ON).model_copy(update={"checkout": "/no/checkout"})
    with pytest.raises(ConfigError, match="checkout /no/checkout: No such file or directory"):
        command.start(job, STARTED, {}, say)


@pytest.mark.parametrize("ends", [SystemExit(143), OSError("disk full"), None])
def test_logs_that_were_not_gathered_wholly_stay_when_a_signal_ends_the_node(make, monkeypatch, ends):
    """With --block. The control is the logs of a node that were gathered."""
    order = []

    def ended(*_):
        raise SystemExit(143)

    def gathered(*_):
        order.append("gather")
        if ends is not None:
            raise ends

    monkeypatch.setattr(node, "up", lambda *_: STARTED)
    monkeypatch.setattr(command, "start", lambda *_: None)
    monkeypatch.setattr(command, "follow", ended)
    monkeypatch.setattr(gather, "gather", gathered)
    monkeypatch.setattr(node, "down", lambda job, rank, keep_logs: order.append(("down", keep_logs)))
    monkeypatch.setattr(cli, "on_end_signals", lambda act: order.append(act(signal.SIGTERM)))  # it does nothing
    job = make("exit 0").model_copy(update={"hosts": ["127.0.0.1"]})
    with pytest.raises(SystemExit) as raised:
        cli._up_here(job, {}, place_of(job, {}, 0, "127.0.0.1"), run=True, block=True, mark=False, as_json=False)
    assert raised.value.code == 143
    assert order == [None, "gather", ("down", ends is not None)]


@pytest.mark.parametrize("mark", [True, False])
def test_a_caller_over_ssh_is_told_that_the_command_was_started(make, monkeypatch, capfdbinary, mark):
    """The mark comes after the start and before the output. The control is a caller on the node itself."""
    monkeypatch.setattr(node, "up", lambda *_: STARTED)
    job = make("echo ran").model_copy(update={"hosts": ["127.0.0.1"]})
    start, out = command.start, []
    monkeypatch.setattr(command, "start", lambda *given: (start(*given), out.append(capfdbinary.readouterr().out)))
    assert (
        cli._up_here(job, {}, place_of(job, {}, 0, "127.0.0.1"), run=True, block=False, mark=mark, as_json=False) == 0
    )
    assert out == [b""] and capfdbinary.readouterr().out == (BEGUN if mark else b"") + b"ran\n"
