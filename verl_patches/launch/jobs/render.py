"""Write the files of a job for `cluster render`: the scripts of templates/, job.sh, and those of Slurm and Kubernetes.

The scripts are the same for every job; job.sh has the job's values. slurm.sh is written for `sbatch`, kubernetes.yaml
for `kubectl apply`; neither was tried on a cluster.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

from verl_patches.errors import ConfigError
from verl_patches.launch.jobs.job import Job
from verl_patches.launch.jobs.upload import command_words
from verl_patches.patching.switches import PATCHES_VAR
from verl_patches.run.environment import DROPPED_VARIABLES, REPOSITORY
from verl_patches.run.ray_nodes import ray_start

TEMPLATES = Path(__file__).parent / "templates"
START_CONTAINER = REPOSITORY / "scripts" / "start_container.sh"
OUTPUT_MARKER = "verl_patches: output begins"  # printed before a node's output, after what a shell's profiles print
START_S, RECONNECT_S, RETRY_S = 120, 900, 10  # longest `ray start`; how long, and how often, a lost connection is tried
DRIVER_PATHS = ("/usr/local/dcmi", "/usr/local/bin/npu-smi", "/usr/local/Ascend/driver", "/etc/ascend_install.info")


def render(job: Job, folder: Path, source: str) -> str:
    """Write the scripts of a job into a folder and return the command that starts it. source: the job file's name.

    Raise ConfigError where the folder has other files. A second call writes the scripts anew.
    """
    job_sh, names = folder / "job.sh", ["node.sh"]
    if folder.exists() and not job_sh.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder}: expected a new folder, or one that `cluster render` wrote; found other files")
    start = f"NODE_RANK=0 MASTER_ADDR=ADDRESS bash {shlex.quote(str(folder))}/node.sh serve, with its rank on each node"
    folder.mkdir(parents=True, exist_ok=True)
    job_sh.write_text(job_values(job, source))
    if job.provider == "ssh":
        names += ["ssh.sh", "up.sh", "run.sh", "follow.sh", "logs.sh", "down.sh"]
        shutil.copyfile(START_CONTAINER, folder / START_CONTAINER.name)
        start = f"bash {shlex.quote(str(folder))}/up.sh, then run.sh there"
    for name in names:
        shutil.copyfile(TEMPLATES / name, folder / name)
    if job.provider == "slurm":
        (folder / "slurm.sh").write_text(slurm_script(job, folder.absolute()))
        start = f"sbatch {shlex.quote(str(folder))}/slurm.sh"
    if job.provider == "kubernetes":
        scripts = {name: (folder / name).read_text() for name in ("job.sh", "node.sh")}
        (folder / "kubernetes.yaml").write_text(kubernetes_file(job, scripts))
        start = f"kubectl apply -f {shlex.quote(str(folder))}/kubernetes.yaml"
    return start


def job_values(job: Job, source: str) -> str:
    """Return the text of job.sh, which has the names of secrets but no values of them."""
    logs = str(REPOSITORY / job.logs_folder) if job.provider == "ssh" else job.logs_folder
    srun = list(job.slurm.srun_options)
    if job.image and job.provider == "slurm":  # options of Slurm's plugin pyxis
        srun.append(f"--container-image={job.image}")
        srun += ["--container-mounts=" + ",".join(f"{host}:{to}" for host, to in job.volumes.items())]
    values: dict[str, str | int | list[str]] = {
        "job": job.name,
        "digest": job.digest,
        "nodes": job.nodes,
        "dies": job.dies,
        "device": job.device,
        "hosts": job.hosts,
        "interface": job.interface or "",
        "image": job.image or "",
        "volumes": [f"{host}:{folder}" for host, folder in job.volumes.items()],
        "container_options": job.ssh.container_options,
        "checkout": job.checkout,
        "python": job.python,
        "paths": os.pathsep.join([job.checkout, *job.upstream]),  # these come before a node's own PYTHONPATH
        "folder": job.folder,
        "written": [str(Path(job.checkout, folder)) for folder in job.written_folders],
        "logs": logs,
        "wait_s": job.wait_s,
        "start_s": START_S,
        "reconnect_s": RECONNECT_S,
        "retry_s": RETRY_S,
        "begins": OUTPUT_MARKER,
        "ssh": job.ssh.command,
        "user": job.ssh.user or "",
        "srun_options": srun,
        "secrets": job.secrets,
        "variables": [f"{name}={value}" for name, value in job.env.items()],
        "dropped": sorted({*DROPPED_VARIABLES} - {PATCHES_VAR}),
        "gcs": job.ports.gcs,
        "head_ports": _service_ports(job, is_head=True),
        "node_ports": _service_ports(job, is_head=False),
        "head_options": _ray_options(job, is_head=True),
        "node_options": _ray_options(job, is_head=False),
        "command": command_words(job),
    }
    text = "".join(f"{name}={_quoted(value)}\n" for name, value in values.items())
    return f"""# shellcheck shell=bash disable=SC2034
# The values of job {job.name} for the scripts beside this file, of {Path(source).name}, by `cluster render`.
# To change one, change the job file and render it again.
{text}"""


def _quoted(value: str | int | list[str]) -> str:
    """Return a value quoted for bash."""
    return f"({shlex.join(value)})" if isinstance(value, list) else shlex.quote(str(value))


def _service_ports(job: Job, is_head: bool) -> list[str]:
    """Return PORT=NAME of each service of Ray on a node; its workers take any free ports of their range."""
    spans = job.port_plan.spans(is_head).items()
    return [f"{first}={name}" for name, (first, last) in spans if first == last]


def _ray_options(job: Job, is_head: bool) -> list[str]:
    """Return the options of a node's `ray start`, without the addresses and labels that node.sh adds."""
    temp = f"{job.folder}/ray"
    words = ray_start("", "", is_head, {job.device: job.dies}, job.port_plan, job.dashboard, temp_dir=temp)
    return [word for word in words[2:] if not word.startswith(("--address=", "--node-ip-address="))]


def slurm_script(job: Job, folder: Path) -> str:
    """Return the batch script of Slurm: one task a node runs node.sh; sbatch's environment has the job's secrets."""
    slurm = job.slurm
    lines = [f"--job-name={job.name}", f"--nodes={job.nodes}", "--ntasks-per-node=1", "--exclusive"]
    lines += [f"--partition={slurm.partition}"] if slurm.partition else []
    lines += [f"--time={slurm.time}"] if slurm.time else []
    lines += ["--output=%x-%j.log", *slurm.options]
    header = "".join(f"#SBATCH {line}\n" for line in lines)
    here = f"here={shlex.quote(str(folder))} # on a file system that the job's first node has\n"
    return f"#!/usr/bin/env bash\n{header}{here}{(TEMPLATES / 'slurm.sh').read_text()}"


def kubernetes_file(job: Job, scripts: Mapping[str, str]) -> str:
    """Return templates/kubernetes.yaml with the job's values, as JSON, which YAML can read; scripts: {name: text}.

    It has fields of batch/v1, v1, networking.k8s.io/v1 and, with a queue, Volcano's scheduling.volcano.sh/v1beta1.
    """
    kubernetes, labels = job.kubernetes, {"verl-patches/job": job.name}
    metadata = {"name": job.name, "namespace": kubernetes.namespace, "labels": labels}
    group: dict[str, Any] = {"apiVersion": "scheduling.volcano.sh/v1beta1", "kind": "PodGroup", "metadata": metadata}
    group["spec"] = {"minMember": job.nodes, "queue": kubernetes.queue}  # Volcano starts all of its pods or none
    device = kubernetes.device if job.device == "NPU" else "nvidia.com/gpu"
    env: list[dict[str, Any]] = [{"name": "MASTER_ADDR", "value": f"{job.name}-0.{job.name}"}]
    for name in job.secrets:
        env.append({"name": name, "valueFrom": {"secretKeyRef": {"name": kubernetes.secret, "key": name}}})
    shared = {"medium": "Memory", "sizeLimit": f"{kubernetes.shared_memory_gib}Gi"}
    own = {"shm": "/dev/shm", "scripts": "/scripts"}
    mounts = [{"name": name, "mountPath": path, "readOnly": False} for name, path in own.items()]
    volumes = [{"name": "shm", "emptyDir": shared}, {"name": "scripts", "configMap": {"name": job.name}}]
    driver = {path: path for path in DRIVER_PATHS} if job.device == "NPU" else {}
    for number, (path, mount) in enumerate({**driver, **job.volumes}.items()):
        volumes.append({"name": f"host-{number}", "hostPath": {"path": path}})
        mounts.append({"name": f"host-{number}", "mountPath": mount, "readOnly": path in driver})
    values = {
        "metadata": metadata,
        "labels": labels,
        "name": job.name,
        "nodes": job.nodes,
        "annotations": {"scheduling.k8s.io/group-name": job.name} if kubernetes.queue else {},
        "scheduler": "volcano" if kubernetes.queue else "default-scheduler",
        "image": job.image,
        "env": env,
        "sizes": {"cpu": str(kubernetes.cpus), "memory": f"{kubernetes.memory_gib}Gi", device: str(job.dies)},
        "mounts": mounts,
        "volumes": volumes,
        "scripts": scripts,
    }
    texts = {name: json.dumps(value) for name, value in values.items()}
    texts["pod_group"] = f"{json.dumps(group)}\n---" if kubernetes.queue else ""
    return Template((TEMPLATES / "kubernetes.yaml").read_text()).substitute(texts, job_name=f"job {job.name}")
