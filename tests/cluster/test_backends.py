"""What reaches several nodes from one place; ssh, docker, kubectl and Slurm's programs are those of the test."""

import json
import os
import subprocess
import sys

import pytest
import yaml

from verl_patches.cluster import node
from verl_patches.cluster.backends import Batch, Hosts, Kuberay
from verl_patches.cluster.job import Job
from verl_patches.errors import ConfigError, RecipeError

BASE = {"name": "j", "dies": 16, "wait_s": 0.1}


@pytest.fixture
def program(tmp_path, monkeypatch):
    """program(name, bash): a program on PATH; each call is a line of the file `calls`."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def make(name, text):
        path = tmp_path / name
        path.write_text(f'#!/bin/bash\necho "{name} $*" >> {tmp_path}/calls\n{text}\n')
        path.chmod(0o755)
        return path

    make.calls = lambda: (tmp_path / "calls").read_text() if (tmp_path / "calls").exists() else ""
    return make


def hosts(ssh, **changes):
    named = {"hosts": ["10.0.0.1", "10.0.0.2"], "ssh": {"command": [str(ssh)]}, "python": sys.executable}
    return Hosts(Job(**{**BASE, "nodes": 2, "provider": "ssh", **named, **changes}), {})


def test_every_host_gets_the_job_its_rank_and_the_secrets_on_standard_input_alone(program, tmp_path):
    ssh = program("ssh", f"cat > {tmp_path}/$1.stdin")
    made = hosts(ssh, secrets=["HF_TOKEN"])
    made.secrets = {"HF_TOKEN": "s3cret"}
    made.up(lambda text: None)
    assert "s3cret" not in program.calls() and program.calls().count("cluster up - --node-rank") == 2
    for host in made.job.hosts:
        job, secrets = yaml.safe_load_all((tmp_path / f"{host}.stdin").read_text())
        assert Job(**job).provider == "nodes" and secrets == {"secrets": {"HF_TOKEN": "s3cret"}}


def test_a_host_that_fails_is_named_and_the_others_are_ended(program):
    ssh = program("ssh", 'if [ "$1" = 10.0.0.2 ] && [[ "$2" = *" up "* ]]; then echo "no route" >&2; exit 255; fi')
    with pytest.raises(RecipeError, match=r"node 1 \(10\.0\.0\.2\): no route"):
        hosts(ssh).up(lambda text: None)
    assert program.calls().count("cluster down") == 2


def test_nothing_is_started_anywhere_where_a_host_is_not_reached(program):
    ssh = program("ssh", '[ "$1" = 10.0.0.1 ] || { echo "no route" >&2; exit 255; }')
    with pytest.raises(RecipeError, match=r"node 1 \(10\.0\.0\.2\): no route; nothing was started"):
        hosts(ssh).up(lambda text: None)
    assert "cluster up" not in program.calls()


def test_a_host_where_something_else_is_up_is_left_alone(program):
    refuses = '[ "$1" = 10.0.0.1 ] || [[ "$2" != *"cluster up"* ]] || { echo "job other is up" >&2; exit 2; }'
    ssh = program("ssh", refuses)
    with pytest.raises(RecipeError, match="job other is up"):
        hosts(ssh).up(lambda text: None)
    assert [line.split()[1] for line in program.calls().splitlines() if "cluster down" in line] == ["10.0.0.1"]


def test_a_second_up_that_fails_ends_nothing_of_the_first(program):
    lost = f'{{ echo "node 1 {node.ALREADY}, but lost raylet" >&2; exit 1; }}'
    ssh = program("ssh", f'[ "$1" = 10.0.0.1 ] || [[ "$2" != *"cluster up"* ]] || {lost}')
    with pytest.raises(RecipeError, match="node 1 .10.0.0.2.: .*lost raylet"):
        hosts(ssh).up(lambda text: None)
    assert "cluster down" not in program.calls()


def test_new_containers_are_removed_where_up_fails_and_old_ones_are_not(program, monkeypatch):
    program(
        "docker",
        'case "$*" in *"container inspect"*) [ -n "$LABEL" ] && echo j;; start*) echo j;; run*) echo 1f;;\n'
        "ps*) echo 1f;; exec*) exit 2;; esac",
    )
    made = hosts(program("ssh", 'bash -c "$2"'), image="a3", hosts=["10.0.0.1"], nodes=1)
    with pytest.raises(RecipeError):
        made.up(lambda text: None)
    assert program.calls().count("docker rm --force 1f") == 1
    monkeypatch.setenv("LABEL", "j")
    with pytest.raises(RecipeError):
        made.up(lambda text: None)
    assert program.calls().count("docker rm --force 1f") == 1


def test_the_head_is_the_jobs_first_host_whatever_a_node_has_in_its_environment(program, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "10.9.9.9")  # of an image, or of an earlier job
    with pytest.raises(RecipeError, match="its address 10.0.0.1 is none of this machine"):
        hosts(program("ssh", 'bash -c "$2"'), hosts=["10.0.0.1"], nodes=1).up(lambda text: None)


def test_ssh_itself_says_why_a_host_is_not_reached():
    try:
        subprocess.run(["ssh", "-V"], capture_output=True)
    except FileNotFoundError:
        pytest.skip("no ssh here")
    options = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-p", "1", "-F", "none"]
    job = Job(**{**BASE, "nodes": 1, "provider": "ssh", "hosts": ["127.0.0.1"], "ssh": {"command": ["ssh", *options]}})
    with pytest.raises(RecipeError, match=r"node 0 \(127\.0\.0\.1\): .*port 1"):
        Hosts(job, {}).up(lambda text: None)
    (row,) = Hosts(job, {}).status()
    assert row.state == "problem" and row.name == "node 0 (127.0.0.1)"


def test_containers_are_started_by_the_script_and_only_those_are_removed(program, tmp_path):
    """`ssh` runs the line here; `docker` has no container, then one of ours, then one of somebody else."""
    docker = 'if [[ "$*" = "container inspect"* ]]; then [ -n "$LABEL" ] && echo "$LABEL"; exit; fi\n'
    docker += 'if [ "$1" = ps ]; then echo abc; fi'
    program("docker", docker)
    ssh = program("ssh", 'bash -c "$2"')
    made = hosts(ssh, image="registry/a3:1", hosts=["10.0.0.1"], nodes=1)
    made.up(lambda text: None)
    calls = [line for line in program.calls().splitlines() if line.startswith("docker")]
    (started,) = (line for line in calls if line.startswith("docker run"))
    assert "--name j " in started and "--label verl_patches.job=j registry/a3:1" in started
    assert any(line.startswith("docker exec -i j bash -lc") for line in calls)
    assert made.down(tmp_path / "logs") == []
    assert "docker ps --all --quiet --filter label=verl_patches.job=j\ndocker rm --force abc" in program.calls()


@pytest.mark.parametrize(("label", "ours"), [("j", True), ("other", False)])
def test_a_container_of_somebody_else_is_left_alone(program, monkeypatch, label, ours):
    monkeypatch.setenv("LABEL", label)
    program("docker", 'if [[ "$*" = "container inspect"* ]]; then echo "$LABEL"; fi')
    made = hosts(program("ssh", 'bash -c "$2"'), image="a3", hosts=["10.0.0.1"], nodes=1)
    if ours:
        made.up(lambda text: None)
        assert "docker start j" in program.calls()
    else:
        with pytest.raises(RecipeError, match="a container j exists that cluster up did not start"):
            made.up(lambda text: None)
    assert "docker run" not in program.calls()


KUBE = {"image": "a3", "command": ["true"], "nodes": 2, "provider": "kubernetes"}


def kubectl(program, state, pods=()):
    found = {"status": {"jobDeploymentStatus": state, "rayClusterName": "j-x"}}
    rayjob, listed = json.dumps(found), json.dumps({"items": list(pods)})
    program(
        "kubectl",
        f"""case "$*" in *apply*) touch "$0.applied";; *"get rayjob"*) [ ! -e "$0.applied" ] || echo '{rayjob}';;
        *"get pods"*) echo '{listed}';; esac; cat >/dev/null""",
    )
    return Kuberay(Job(**BASE, **KUBE))


def test_a_ray_job_that_runs_is_up_and_is_deleted(program, tmp_path):
    made = kubectl(program, "Running")
    made.up(lambda text: None)
    assert made.status()[0].state == "fine" and made.down(tmp_path) == []
    assert "apply -f -" in program.calls() and "delete rayjob j --ignore-not-found" in program.calls()


@pytest.mark.parametrize("state", ["Initializing", "Failed"])
def test_pods_that_are_not_ready_are_named_with_the_reason_and_the_job_is_deleted(program, state):
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no Ascend910"}
    pods = [
        {
            "metadata": {"name": "j-head"},
            "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
        },
        {"metadata": {"name": "j-worker"}, "status": {"phase": "Pending", "conditions": [unscheduled]}},
    ]
    made = kubectl(program, state, pods)
    with pytest.raises(
        RecipeError, match=f"RayJob j is {state}.*pod j-worker is Pending, Unschedulable: no Ascend910"
    ) as e:
        made.up(lambda text: None)
    assert "j-head" not in str(e.value) and "delete rayjob j" in program.calls()
    assert any(row.state == "problem" for row in made.status())


@pytest.mark.parametrize("state", ["Complete", "Failed"])
def test_a_ray_job_that_ended_before_is_refused_and_stays(program, state):
    made = kubectl(program, state)
    subprocess.run(["kubectl", "apply"], input="", text=True, check=True)
    with pytest.raises(RecipeError, match=f"RayJob j is {state} already; cluster down keeps its logs"):
        made.up(lambda text: None)
    assert "delete" not in program.calls() and program.calls().count("apply") == 1


def test_a_batch_job_is_submitted_once_and_cancelled(program, tmp_path):
    state = tmp_path / "state"
    program("squeue", f"cat {state} 2>/dev/null || true")
    program("sbatch", f"cat > {tmp_path}/script; echo '7|RUNNING|n1' > {state}; echo 7")
    program("scancel", f"rm {state}")
    made = Batch(Job(**BASE, nodes=2, provider="slurm", command=["true"]))
    said = []
    made.up(said.append)
    assert (tmp_path / "script").read_text().startswith("#!/usr/bin/env bash") and "Slurm job 7 is RUNNING" in said
    made.up(said.append)
    assert program.calls().count("sbatch") == 1 and made.status()[0].state == "fine"
    assert made.down(None) == [] and made.status()[0].state == "problem"
    assert made.down(None) == []  # idempotent
    state.write_text("8|PENDING|Resources\n")
    with pytest.raises(RecipeError, match="Slurm job 8 is PENDING after 0.1 s: Resources"):
        made.up(said.append)
    assert program.calls().count("scancel") == 1 and state.exists()  # it was not this call that submitted it
    state.unlink()
    program("sbatch", f"cat > {tmp_path}/script; echo '9|PENDING|Resources' > {state}; echo 9")
    with pytest.raises(RecipeError, match="Slurm job 9 is PENDING"):
        made.up(said.append)
    assert program.calls().count("scancel") == 2 and not state.exists()


def test_a_program_that_is_not_installed_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="squeue is not installed here"):
        Batch(Job(**BASE, nodes=2, provider="slurm", command=["true"])).status()
