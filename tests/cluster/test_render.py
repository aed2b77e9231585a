"""What Kubernetes and Slurm are given, against KubeRay's schema and bash; the fields are those of ray.io/v1."""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from tests.cluster.namespaces import Nodes
from verl_patches.__main__ import app
from verl_patches.cluster.job import Job
from verl_patches.cluster.render import instead_of, ray_job, rendered
from verl_patches.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
VOLUMES = {"/data": "/data", "/data/j": "/c/outputs"}
IMAGE = {"image": "registry/a3:1", "volumes": VOLUMES, "checkout": "/c"}
JOB = {"name": "j", "nodes": 4, "dies": 16, "command": ["python", "train.py"], **IMAGE}
KUBERNETES = {"provider": "kubernetes", "kubernetes": {"queue": "rl", "secret": "tokens"}}
# of KubeRay's config/crd/bases/ray.io_rayjobs.yaml, version v1, at commit feeaf72f: field -> type or fields; "*": any
POD = {
    "spec": {
        "hostNetwork": bool,
        "dnsPolicy": str,
        "volumes": [{"name": str, "emptyDir": {"medium": str, "sizeLimit": str}, "hostPath": {"path": str}}],
        "containers": [
            {
                "name": str,
                "image": str,
                "env": [{"name": str, "value": str, "valueFrom": {"secretKeyRef": {"name": str, "key": str}}}],
                "resources": {"limits": {"*": str}, "requests": {"*": str}},
                "volumeMounts": [{"name": str, "mountPath": str, "readOnly": bool}],
                "ports": [{"name": str, "containerPort": int}],
            }
        ],
    }
}
COUNTS = dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), int)
RAY_JOB = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str, "namespace": str, "labels": {"*": str}},
    "spec": {
        "entrypoint": str,
        "shutdownAfterJobFinishes": bool,
        "ttlSecondsAfterFinished": int,
        "backoffLimit": int,
        "rayClusterSpec": {
            "rayVersion": str,
            "headGroupSpec": {"rayStartParams": {"*": str}, "template": POD},
            "workerGroupSpecs": [{"groupName": str, **COUNTS, "rayStartParams": {"*": str}, "template": POD}],
        },
    },
}


def faults(value, schema, place=""):
    if isinstance(schema, list):
        assert isinstance(value, list), place
        return [f for number, entry in enumerate(value) for f in faults(entry, schema[0], f"{place}[{number}]")]
    if isinstance(schema, dict):
        known = [(key, schema.get(key, schema.get("*"))) for key in value]
        unknown = [f"{place}.{key}" for key, kind in known if kind is None]
        return unknown + [f for key, kind in known if kind for f in faults(value[key], kind, f"{place}.{key}")]
    return [] if type(value) is schema else [f"{place} is {value!r}"]


def test_a_ray_job_has_fields_of_the_custom_resource_alone():
    made = yaml.safe_load(rendered(Job(**JOB, **KUBERNETES, secrets=["HF_TOKEN"], env={"A": "1"}, interface="eth0")))
    assert faults(made, RAY_JOB) == []
    assert faults({**made, "spec": {**made["spec"], "odd": 1, "entrypoint": 2}}, RAY_JOB) == [
        ".spec.odd",
        ".spec.entrypoint is 2",
    ]
    assert made["metadata"]["labels"] == {"ray.io/scheduler-name": "volcano", "volcano.sh/queue-name": "rl"}
    cluster = made["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == 3
    for group in (cluster["headGroupSpec"], workers):
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["huawei.com/Ascend910"] == "16"
        places = {
            volume["name"]: volume.get("hostPath", {}).get("path") for volume in group["template"]["spec"]["volumes"]
        }
        found = {places[mount["name"]]: mount["mountPath"] for mount in container["volumeMounts"] if len(mount) == 2}
        assert found == {None: "/dev/shm", **VOLUMES}  # the others are read-only
        env = {entry["name"]: entry for entry in container["env"]}
        assert env["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "tokens", "key": "HF_TOKEN"}
        assert env["HCCL_SOCKET_IFNAME"]["value"] == "=eth0" and "PYTHONPATH" not in env  # the image has its own
        words = shlex.split(f"--resources={group['rayStartParams']['resources']}")  # as the operator's shell reads it
        assert json.loads(words[0].removeprefix("--resources=")) == {"NPU": 16}
        assert group["rayStartParams"]["node-manager-port"] == "6380"
    assert cluster["headGroupSpec"]["rayStartParams"]["port"] == "6379"


def test_the_entrypoint_is_one_simple_command_for_the_shell_of_the_operator():
    """KubeRay makes `... ray job submit ... -- ENTRYPOINT ; fi` of it. Control: words that a shell would change."""
    job = {**JOB, **KUBERNETES, "command": ["python", "train.py", "recipe.patches=[-a.b]"]}
    text = ray_job(Job(**job))["spec"]["entrypoint"]
    line = f"if true ; then printf '%s\\n' -- {text} ; fi"
    done = subprocess.run(["bash", "-ce", line], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[1:-1] == ["env", "--chdir=/c", *job["command"]]
    for word in ("a b", "a;b", "$HOME", "it's", "a&&b", "(a)", "a*"):
        with pytest.raises(ConfigError, match="two shells read the words"):
            ray_job(Job(**{**job, "command": ["python", word]}))


def test_upstream_trees_of_the_job_replace_those_of_the_image():
    made = ray_job(Job(**{**JOB, "nodes": 1}, provider="kubernetes", upstream=["/u"]))
    cluster = made["spec"]["rayClusterSpec"]
    (container,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    assert "workerGroupSpecs" not in cluster  # of one node
    assert {"name": "PYTHONPATH", "value": "/c:/u"} in container["env"]
    own = rendered(Job(**JOB, **KUBERNETES, upstream=["/u"], env={"PYTHONPATH": "/mine", "LR": "1e-6"}))
    assert own.count("name: PYTHONPATH\n") == 2 and own.count("value: /c:/u:/mine\n") == 2  # of head and workers
    assert own.count("value: '1e-6'\n") == 2  # YAML 1.2 has it as a number


@pytest.mark.parametrize("provider", ["nodes", "slurm", "kubernetes"])
def test_no_rendered_text_has_a_secret_and_scripts_are_bash(monkeypatch, provider):
    monkeypatch.setenv("HF_TOKEN", "s3cret")
    named = {**JOB, **KUBERNETES, "provider": provider, "env": {"A": "it's"}, "interface": "eth0"}
    text = rendered(Job(**named, secrets=["HF_TOKEN"]))
    assert "s3cret" not in text and "HF_TOKEN" in text
    assert ("# on every node, in a container of registry/a3:1" in text) is (provider == "nodes")
    for script, is_bash in ((text, True), (text + "if\n", False)) if provider != "kubernetes" else ():
        assert (subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0) == is_bash


def test_the_batch_script_gives_every_task_the_job_its_rank_and_the_head(program, tmp_path):
    """srun and scontrol are programs of the test: two tasks, one after the other, print what they are given."""
    log = tmp_path / "log"
    programs = {
        "scontrol": "echo first; echo second",
        "srun": 'while [ "$1" != bash ]; do shift; done; for i in 0 1; do SLURM_NODEID=$i "$@" || exit 1; done',
        "python": f'echo "$* head=$MASTER_ADDR rank=$NODE_RANK path=$PYTHONPATH" >> {log}; cat >> {log}',
    }
    for name, text in programs.items():
        program(name, text)
    places = {"checkout": str(tmp_path), "volumes": {**VOLUMES, "/data/j": f"{tmp_path}/outputs"}}
    slurm = {"options": ["--account=x"]}
    job = Job(**{**JOB, **places}, provider="slurm", env={"A": "it's $HOME"}, slurm=slurm)
    text = rendered(job)
    assert "#SBATCH --nodes=4\n" in text and "#SBATCH --account=x\n" in text
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "x", "NODE_RANK": "7"}
    done = subprocess.run(["bash"], input=text, text=True, capture_output=True, env=env)
    assert done.returncode == 0, done.stderr
    assert f"--container-mounts=/data:/data,/data/j:{tmp_path}/outputs bash" in program.calls()
    for rank, part in enumerate(log.read_text().split("-m verl_patches ")[1:]):
        line, _, given = part.partition("\n")
        assert line == f"cluster up - --node-rank {rank} --run --block head=first rank= path={tmp_path}"
        task = Job(**yaml.safe_load(given.replace("-m verl_patches", "")))
        assert task.env == job.env and task.provider == "nodes"  # each starts its own Ray


SRUN = """#!{python}
# a task on each of two nodes, with its rank; when that of the first node has ended, the other gets SIGTERM
import os, subprocess, sys
words = sys.argv[sys.argv.index("bash"):]
nodes = {nodes}
tasks = [
    subprocess.Popen([*node, *words], env={{**os.environ, "SLURM_NODEID": str(rank)}}, stderr=stderr, text=True)
    for rank, (node, stderr) in enumerate(zip(nodes, (None, subprocess.PIPE)))
]
for line in tasks[1].stderr:
    print(line, file=sys.stderr, end="")
    if "are in Ray" in line:
        open("{gate}", "w").close()
        break
code = tasks[0].wait()
tasks[1].terminate()
print(tasks[1].communicate()[1], file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.slow
def test_the_batch_script_starts_ray_on_two_nodes_and_ends_both_with_the_commands_code(tmp_path):
    """The rendered script with the real `cluster`; srun and scontrol are programs of the test."""
    with tempfile.TemporaryDirectory(prefix="vp-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        with Nodes(2, Path(folder)) as nodes:
            words, gate = [nodes.words(number) for number in range(2)], tmp_path / "gate"
            for name, text in (
                ("srun", SRUN.format(python=sys.executable, nodes=words, gate=gate)),
                ("scontrol", f"#!/bin/bash\nprintf '%s\\n' {' '.join(nodes.hosts)}\n"),
            ):
                (tmp_path / name).write_text(text)
                (tmp_path / name).chmod(0o755)
            named = {"name": "batch", "dies": 1, "nodes": 2, "device": "GPU", "wait_s": 240.0}
            line = f'while [ ! -e {gate} ]; do sleep 0.1; done; echo "$GREETING from ${{CLUSTER_NODE_MARK%-*}}"; exit 5'
            paths = {"checkout": str(ROOT), "python": sys.executable, "folder": str(nodes.shared)}
            job = Job(
                **{**named, **paths, "provider": "slurm", "command": ["bash", "-c", line]},
                env={"GREETING": "hello"},
                interface="eth0",
                logs=str(tmp_path / "logs"),
            )
            env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "x"}
            env["NODE_RANK"] = "7"  # of an outer shell
            done = subprocess.run(["bash"], input=rendered(job), text=True, capture_output=True, env=env, timeout=600)
            assert done.returncode == 5 and done.stdout.startswith("hello from batch-0"), done.stderr
            assert "all 2 nodes of job batch are in Ray" in done.stderr
            assert nodes.processes(0) == nodes.processes(1) == []
            found = {path.name for path in (tmp_path / "logs").iterdir()}
            assert found == {f"node-{rank}-{host}" for rank, host in enumerate(nodes.hosts)}


@pytest.mark.parametrize(("provider", "verb"), [("kubernetes", "up"), ("slurm", "status")])
def test_a_job_of_a_scheduler_is_refused_with_the_command_to_type(tmp_path, provider, verb):
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump({**JOB, **KUBERNETES, "provider": provider, "logs": "/c/outputs"}))
    done = CliRunner().invoke(app, ["cluster", verb, str(file)])
    command = instead_of(Job(**yaml.safe_load(file.read_text())), verb, str(file))
    assert isinstance(done.exception, ConfigError) and str(done.exception).endswith(f": {command}")
    assert instead_of(Job(**JOB), verb, str(file)) is None


def test_render_prints_and_starts_nothing(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump({**JOB, **KUBERNETES, "folder": str(tmp_path / "f")}))
    command = ["cluster", "up", str(file), "--render"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0 and yaml.safe_load(done.stdout)["kind"] == "RayJob" and not (tmp_path / "f").exists()
    assert json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)["provider"] == "kubernetes"
    file.write_text("nodes: 2\n")
    error = CliRunner().invoke(app, command).exception
    assert isinstance(error, ConfigError) and f"{file}: name: Field required; dies: Field required" in str(error)
