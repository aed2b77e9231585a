"""Texts made from a job: the commands of every node, a KubeRay RayJob, a Slurm batch script.

The RayJob has fields of the custom resource ray.io/v1 alone (KubeRay's config/crd/bases/ray.io_rayjobs.yaml) and the
labels of KubeRay's Volcano integration. `kubectl apply` and `sbatch` take the last two; neither was tried on a cluster.
"""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

from verl_patches.cluster.job import Job, as_text, as_yaml, of_a_node
from verl_patches.cluster.node import start_words
from verl_patches.cluster.place import Place
from verl_patches.cluster.upload import command_words
from verl_patches.errors import ConfigError
from verl_patches.platform.npu import SOCKETS
from verl_patches.ray_nodes import ray_start
from verl_patches.upstream.pins import load_pins

SRUN_WAIT_S = 15  # below the 60 s after which a raylet ends that has lost its head
_RANK = "@node-rank@"  # stands in the command of a node for Slurm's variable
_PLAIN = re.compile(r"[\w\-+=.,:/@%\[\]]+")
KEPT_S = 600  # for which Ray's pods stay after the command's end, so that their logs can be copied
QUEUE, SCHEDULER = "volcano.sh/queue-name", "ray.io/scheduler-name"
HOSTS_OWN = ("/usr/local/dcmi", "/usr/local/bin/npu-smi", "/usr/local/Ascend/driver", "/etc/ascend_install.info")


def instead_of(job: Job, verb: str, job_file: str) -> str | None:
    """The command to type in place of `cluster VERB` where Kubernetes or Slurm has the job; else None."""
    name, space = job.name, f"--namespace {job.kubernetes.namespace}"
    commands_of = {
        "kubernetes": {
            "up": f"python -m verl_patches cluster up {shlex.quote(job_file)} --render | kubectl apply -f -",
            "follow": f"kubectl {space} logs --follow job/{name}",
            "status": f"kubectl {space} get rayjob,pods",
            "down": f"kubectl {space} delete rayjob {name}",
        },
        "slurm": {
            "up": f"python -m verl_patches cluster up {shlex.quote(job_file)} --render | sbatch",
            "follow": f"tail -f {name}-*.log",
            "status": f"squeue --me --name={name}",
            "down": f"scancel --me --name={name}",
        },
    }
    return commands_of.get(job.provider, {}).get(verb)


def rendered(job: Job) -> str:
    """What `cluster up --render` prints."""
    if job.provider == "kubernetes":
        return as_yaml(ray_job(job))
    if job.provider == "slurm":
        return slurm_script(job)
    return commands(job)


def commands(job: Job) -> str:
    """The commands that start Ray by hand, node by node, as a script with comments."""
    head = job.hosts[0] if job.hosts else "HEAD"
    exports = {name: form.format(job.interface) for name, form in SOCKETS.items()} if job.interface else {}
    exports.update(job.env)
    before = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in exports.items())
    before += "".join(f": ${{{name}:?a secret of the job}}\nexport {name}\n" for name in job.secrets)
    before += f"export PYTHONPATH={shlex.quote(job.python_path)}${{PYTHONPATH:+:$PYTHONPATH}}\n"
    where = f", in a container of {job.image} (scripts/start_container.sh)" if job.image else ""
    text = f"# on every node{where}\n{before}"
    for rank in range(job.nodes):
        address = job.hosts[rank] if job.hosts else f"NODE_{rank}"
        words = shlex.join(start_words(job, Place(rank, head, head if rank == 0 else address)))
        text += f"\n# {job.host_of(rank)}\n{words}\n"
    if job.command:
        text += f"\n# {job.host_of(0)}, when all nodes are in\n{shlex.join(command_words(job))}\n"
    return text


def node_command(job: Job, verb: str, *options: str) -> str:
    """One line of a shell that becomes `cluster VERB` on a node, which reads the job from standard input."""
    words = [job.python, "-m", "verl_patches", "cluster", verb, "-", *options]
    path = f"PYTHONPATH={shlex.quote(job.python_path)}${{PYTHONPATH:+:$PYTHONPATH}}"
    return f"cd {shlex.quote(job.checkout)} && {path} exec {shlex.join(words)}"


def _start_params(job: Job, is_head: bool) -> dict[str, str]:
    """The options of a node's `ray start` as KubeRay takes them; it adds the addresses itself."""
    # KubeRay's operator reads the job's state from the dashboard, through the head's service: not the loopback here
    left_out = {"address", "node-ip-address", "temp-dir", "labels", "dashboard-host", "include-dashboard", "head"}
    words = ray_start("HEAD", "NODE", is_head, {job.device: job.dies}, job.port_plan)
    params = {"dashboard-host": "0.0.0.0"} if is_head else {}
    for word in words[2:]:
        name, given, value = word.removeprefix("--").partition("=")
        if name == "resources":
            params[name] = json.dumps(value)  # the operator puts it into a line of a shell as it is
        elif name not in left_out:
            params[name] = value if given else "true"
    return params


def _pod(job: Job, is_head: bool) -> dict[str, Any]:
    kubernetes = job.kubernetes
    devices = {kubernetes.device: str(job.dies)} if job.device == "NPU" else {"nvidia.com/gpu": str(job.dies)}
    sizes = {"cpu": str(kubernetes.cpus), "memory": f"{kubernetes.memory_gib}Gi", **devices}
    values = {name: form.format(job.interface) for name, form in SOCKETS.items()} if job.interface else {}
    values |= job.env
    if job.upstream:  # it replaces the image's own, which has the image's sources
        values["PYTHONPATH"] = ":".join(filter(None, [job.python_path, job.env.get("PYTHONPATH")]))
    env: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in values.items()]
    for name in job.secrets:
        env.append({"name": name, "valueFrom": {"secretKeyRef": {"name": kubernetes.secret, "key": name}}})
    hosts = dict.fromkeys(HOSTS_OWN) if job.device == "NPU" else {}
    hosts = {path: path for path in hosts} | job.volumes
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    shm = {"medium": "Memory", "sizeLimit": f"{kubernetes.shared_memory_gib}Gi"}
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": shm}]
    for number, (path, mount) in enumerate(hosts.items()):
        volumes.append({"name": f"host-{number}", "hostPath": {"path": path}})
        read_only = {} if path in job.volumes else {"readOnly": True}
        mounts.append({"name": f"host-{number}", "mountPath": mount, **read_only})
    container: dict[str, Any] = {"name": "ray-head" if is_head else "ray-worker", "image": job.image, "env": env}
    container["resources"] = {"limits": sizes, "requests": dict(sizes)}
    container["volumeMounts"] = mounts
    if is_head:
        named = {"gcs-server": job.ports.gcs, "dashboard": job.port_plan.options(True)["dashboard-port"]}
        container["ports"] = [{"name": name, "containerPort": port} for name, port in named.items()]
    # HCCL reaches other nodes' dies by the hosts' own addresses
    spec = {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet", "containers": [container], "volumes": volumes}
    return {"spec": spec}


def _entrypoint(job: Job) -> str:
    """One simple command: KubeRay puts the text, as it is, behind `ray job submit ... --` into a line of bash.

    ConfigError for words that this shell, or that of the head, would change.
    """
    words = ["env", f"--chdir={job.checkout}", *command_words(job)]
    odd = [word for word in words if not _PLAIN.fullmatch(word)]
    if odd:
        raise ConfigError(
            f"job {job.name}: command or checkout has {odd[0]!r}; with provider kubernetes expected letters, digits "
            "and _-+=.,:/@%[] alone, as two shells read the words: put other values into a config file"
        )
    return " ".join(words)


def ray_job(job: Job) -> dict[str, Any]:
    """The RayJob of a job: one pod a node, all of them or none where Volcano has a queue for it."""
    labels = {SCHEDULER: "volcano", QUEUE: job.kubernetes.queue} if job.kubernetes.queue else {}
    cluster: dict[str, Any] = {
        "rayVersion": load_pins().line("a3").packages["ray"],
        "headGroupSpec": {"rayStartParams": _start_params(job, True), "template": _pod(job, True)},
    }
    if job.nodes > 1:
        count = {"replicas": job.nodes - 1, "minReplicas": job.nodes - 1, "maxReplicas": job.nodes - 1}
        workers = {"groupName": "nodes", **count, "rayStartParams": _start_params(job, False)}
        cluster["workerGroupSpecs"] = [{**workers, "template": _pod(job, False)}]
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": job.name, "namespace": job.kubernetes.namespace, "labels": labels},
        "spec": {
            "entrypoint": _entrypoint(job),
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": KEPT_S,
            "backoffLimit": 0,
            "rayClusterSpec": cluster,
        },
    }


def slurm_script(job: Job) -> str:
    """The batch script: one task a node, which holds its Ray; that of the first node runs the command, and when it ends
    srun ends the others, which end their Ray. The job reaches them by the environment, secrets too."""
    slurm = job.slurm
    lines = [f"--job-name={job.name}", f"--nodes={job.nodes}", "--ntasks-per-node=1", "--exclusive"]
    lines += [f"--partition={slurm.partition}"] if slurm.partition else []
    lines += [f"--time={slurm.time}"] if slurm.time else []
    lines += ["--output=%x-%j.log", *slurm.options]
    header = "".join(f"#SBATCH {line}\n" for line in lines)
    needed = "".join(f': "${{{name}:?a secret of the job, which sbatch must inherit}}"\n' for name in job.secrets)
    image = [f"--container-image={job.image}"] if job.image else []  # of the plugin pyxis
    if job.volumes:
        image.append("--container-mounts=" + ",".join(f"{host}:{folder}" for host, folder in job.volumes.items()))
    words = [
        "srun",
        "--ntasks-per-node=1",
        f"--wait={SRUN_WAIT_S}",
        "--kill-on-bad-exit=1",
        *image,
        *slurm.srun_options,
    ]
    task = node_command(job, "up", "--node-rank", _RANK, "--run", "--block").replace(_RANK, '"$SLURM_NODEID"')
    return f"""#!/usr/bin/env bash
{header}set -euo pipefail
{needed}read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
VP_JOB=$(cat <<'JOB_FILE'
{as_text(of_a_node(job))}JOB_FILE
)
export MASTER_ADDR VP_JOB
unset NODE_RANK NNODES DIES_PER_NODE # of an outer shell
exec {shlex.join(words)} bash -c {shlex.quote(f'{task} <<< "$VP_JOB"')}
"""
