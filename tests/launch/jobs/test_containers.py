"""Test containers of a job and lost connections, with test programs in place of ssh and docker."""

import io
import os
import signal
import subprocess
import tarfile
from contextlib import suppress

import psutil
import pytest

from tests.launch.jobs.conftest import ended
from verl_patches.launch.jobs.render import OUTPUT_MARKER
from verl_patches.run.environment import REPOSITORY

# a node that answers every verb of node.sh: with the address of `up`, the archive of `logs`, a code for `check`
NODE = f"""echo "Welcome, loading modules"; echo "{OUTPUT_MARKER}"; cat > "$IN.$$"
[[ "$*" != *" check "* ]] || exit $CHECK
case "$*" in *" logs "*) cat "$IN/archive";; *" check "*) echo free 10.0.0.1;; esac"""


@pytest.fixture
def docker(program, tmp_path, monkeypatch):
    """Return docker(text), which sets docker's answers before those of a daemon with the job's container on a host."""
    monkeypatch.setenv("IN", str(tmp_path))
    monkeypatch.setenv("CHECK", "0")
    with tarfile.open(tmp_path / "archive", "w:gz") as made:
        made.add(__file__, "ray/a.log")
    program("ssh", 'export HOST="$1"; bash -c "$2"')

    def make(text=":"):
        program("docker", f'case "$*" in {text};; *--quiet*) echo 1f;; exec*) {NODE};; esac')

    return make


@pytest.fixture
def job(tmp_path, docker):
    (tmp_path / "data").mkdir()
    docker(":) ")
    named = {"name": "j", "provider": "ssh", "nodes": 1, "dies": 16, "hosts": ["10.0.0.1"], "command": ["true"]}
    container = {"image": "registry/a3:1", "volumes": {str(tmp_path / "data"): "/c/outputs"}, "checkout": "/c"}
    return {**named, **container, "logs": str(tmp_path / "logs"), "ssh": {"command": ["ssh"]}}


@pytest.fixture
def digest(scripts):
    """Return digest(job), the digest in the container's label."""
    return lambda job: (scripts(job) / "job.sh").read_text().partition("digest=")[2].split()[0]


def test_a_container_is_started_with_its_labels_and_goes_after_its_logs_and_its_diff(
    job, scripts, call, program, docker
):
    docker("diff*) echo 'A /home/me/notes'; echo 'C /tmp/verl_patches_cluster/ray/x.parquet'; echo 'A /x/.cache/y.pt'")
    made = scripts(job)
    code, _, err = ended(call(made / "up.sh"))
    assert code == 0 and "1 containers of registry/a3:1 run; 1 were started now" in err, err
    (started,) = (line for line in program.docker() if line.startswith("docker run"))
    assert "--name j " in started and "--label verl_patches.job=j --label verl_patches.digest=" in started
    assert f"--volume {next(iter(job['volumes']))}:/c/outputs " in started and "/data:/data" not in started
    count = len(program.docker())
    code, _, err = ended(call(made / "down.sh"))
    assert code == 0 and "node 0 (10.0.0.1): A /home/me/notes" in err and ".cache" not in err, err
    calls = [line for line in program.docker()[count:] if " ps " not in line and " start " not in line]
    verbs = [line.partition("bash -s -- ")[2].rstrip("'") if " exec " in line else line for line in calls]
    assert verbs == ["end 0 ", "logs 0 ", "clean 0 ", "docker diff 1f", "docker rm --force 1f"]
    logs = REPOSITORY / job["logs"] / "node-0-10.0.0.1"
    assert (logs / "ray" / "a.log").exists() and ".cache" in (logs / "docker_diff.txt").read_text()


def test_secrets_come_before_the_scripts_on_standard_input_alone(job, scripts, call, program, tmp_path):
    made = scripts({**job, "secrets": ["HF_TOKEN", "WANDB"]})
    code, _, err = ended(call(made / "up.sh", HF_TOKEN="it's", WANDB="of = file="))
    assert code == 0, err
    sent = [path.read_text() for path in tmp_path.parent.glob(f"{tmp_path.name}.*")]
    begins = {text.partition("# shellcheck")[0] for text in sent}
    assert "export HF_TOKEN=it\\'s\nexport WANDB=of\\ =\\ file=\n" in begins and "" in begins  # "": other verbs
    assert "it's" not in program.calls() and "of = " not in program.calls()
    assert "of = " not in "".join(path.read_text() for path in made.iterdir())
    code, _, err = ended(call(made / "up.sh", HF_TOKEN="x", WANDB=""))
    assert code == 2 and "secret WANDB of job j is unset here: export it first; nothing was started" in err


@pytest.mark.parametrize(
    ("label", "image", "fault"),
    [("j", "a3:1", None), ("other", "a3:1", "not started by up.sh"), ("j", "a3:2", "another image or job file")],
)
def test_a_container_of_somebody_else_or_of_another_image_is_left_alone(
    job, scripts, call, program, docker, digest, label, image, fault
):
    first = digest({**job, "image": "a3:1"})
    docker(f'*format*) echo "{label} {first}."')
    code, _, err = ended(call(scripts({**job, "image": image}) / "up.sh"))
    assert (code, fault is None or fault in err) == (0 if fault is None else 2, True), err
    assert ("docker start j" in program.docker()) is (fault is None)
    assert not [line for line in program.docker() if line.startswith(("docker run", "docker rm"))]


@pytest.mark.parametrize("there", [False, True])
def test_new_containers_are_removed_where_nothing_was_started_and_old_ones_are_not(
    job, scripts, call, program, docker, digest, there
):
    docker(f"*format*) {f'echo j {digest(job)}.' if there else ':'}")
    code, _, err = ended(call(scripts(job) / "up.sh", CHECK="2"))
    assert code == 2 and "nothing was started" in err
    assert ("docker rm --force j" in program.docker()) is not there


def test_a_folder_that_a_host_lacks_is_named(job, scripts, call, program, tmp_path):
    """Check this because docker would make the folder as root; the other tests have the folder."""
    code, _, err = ended(call(scripts({**job, "volumes": {f"{tmp_path}/no": "/c/outputs"}}) / "up.sh"))
    assert code == 2 and f"this host has no folder {tmp_path}/no" in err and "docker run" not in program.calls()


def test_down_does_not_delete_a_container_that_holds_files_of_a_run(job, scripts, call, program, docker):
    path = "/c/checkpoints/global_step_8/manifest.json"
    docker(f"diff*) echo 'A {path}'")
    code, _, err = ended(call(scripts(job) / "down.sh"))
    assert code == 1 and f"such as A {path}" in err and "docker cp j:PATH" in err, err
    assert not any(line.startswith("docker rm") for line in program.docker())


def test_the_container_of_a_host_whose_logs_did_not_arrive_stays(job, scripts, call, program, docker, tmp_path):
    """Use three hosts: one with logs, one with a cut archive, one without a container; then no daemon answers."""
    cut = io.BytesIO((tmp_path / "archive").read_bytes()[:40]).getvalue()
    (tmp_path / "cut").write_bytes(cut)
    docker(
        f'*--quiet*) [ $HOST = 10.0.0.3 ] || echo $HOST;; exec*logs*) echo "{OUTPUT_MARKER}"; '
        '[ $HOST = 10.0.0.1 ] && cat "$IN/archive" || cat "$IN/cut"'
    )
    made = scripts({**job, "nodes": 3, "hosts": ["10.0.0.1", "10.0.0.2", "10.0.0.3"]})
    code, _, err = ended(call(made / "down.sh"))
    assert code == 1 and "node 1 (10.0.0.2): " in err and "node 0 (10.0.0.1): " not in err, err
    assert [line for line in program.docker() if line.startswith("docker rm")] == ["docker rm --force 10.0.0.1"]
    docker("ps*) echo no daemon >&2; exit 1")
    code, _, err = ended(call(made / "down.sh"))
    assert code == 1 and err.count("no daemon") == 3


def test_the_command_is_started_once_where_connections_are_lost(job, scripts, call, program, tmp_path):
    """Let the first connection fail, the second break after the start; then the head is not reached at all."""
    job = {key: value for key, value in job.items() if key not in ("image", "volumes")}
    ssh = f"""n=$(cat {tmp_path}/n 2> /dev/null || echo 0); echo $((n + 1)) > {tmp_path}/n; [ $n != 0 ] || exit 255
    cat > /dev/null; echo "Welcome"; echo "{OUTPUT_MARKER}"
    case "$2" in *" run "*) [ $n != 1 ] || exit 255;; *follow*) echo "rest of $2"; exit 3;; esac"""
    program("ssh", ssh)
    made = scripts(job)
    with (made / "job.sh").open("a") as values:
        values.write("retry_s=0\n")
    code, out, err = ended(call(made / "run.sh"))
    assert (code, out) == (3, "rest of bash -s -- follow 0 0\n") and err.count("trying again") == 2, err
    tokens = {line.split()[-1] for line in program.calls().splitlines() if " run " in line}
    assert program.calls().count(" run ") == 3 and len(tokens) == 1
    program("ssh", "exit 255")
    with (made / "job.sh").open("a") as values:
        values.write("reconnect_s=0\n")
    code, _, err = ended(call(made / "run.sh"))
    assert code == 1 and "for 0 s: start run.sh again" in err


@pytest.mark.parametrize("words", [[], ["bash", "-c", "echo 'a  b'; it\"s"]])
def test_run_starts_the_words_that_it_is_given_else_the_jobs_command(words, job, scripts, call, program, tmp_path):
    program("ssh", f'[[ "$2" != *" run 0 "* ]] || exec > {tmp_path}/sent; cat; [[ "$2" != *follow* ]] || exit 0')
    ended(call(scripts(job) / "run.sh", *words))
    show = (tmp_path / "sent").read_text().replace('\nmain "$@"\n', "\nprintf '%s\\n' \"${command[@]}\"\n")
    done = subprocess.run(["bash"], input=show, capture_output=True, text=True)
    assert done.stdout.splitlines() == (words or job["command"]), done.stderr


def test_placeholders_and_an_ssh_that_is_not_installed_are_named_before_anything_is_called(job, scripts, call, program):
    code, _, err = ended(call(scripts({**job, "hosts": ["node-01.example"]}) / "up.sh"))
    assert code == 2 and "found the placeholder node-01.example" in err
    code, _, err = ended(call(scripts({**job, "ssh": {"command": ["no-ssh"]}}) / "down.sh"))
    assert code == 2 and "no-ssh is not installed on this machine" in err and program.calls() == ""


def sleeping(process):
    """Return the descendants of a process that sleep, without those that end while they are listed."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if child.name() == "sleep":
                found.append(child)
    return found


def test_a_signal_ends_the_calls_and_says_what_goes_on(job, scripts, call, program):
    program("ssh", "exec sleep 600")
    process = call(scripts({**job, "nodes": 2, "hosts": ["a", "b"]}) / "up.sh")
    while len(calls := sleeping(process)) < 2:
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGTERM)
    code, _, err = ended(process)
    assert code == 143 and err.splitlines()[-1].startswith("interrupted; nodes may still be starting Ray; run down.sh")
    assert psutil.wait_procs(calls, timeout=600)[1] == []
