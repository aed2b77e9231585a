"""Read the job file of `cluster render`, which says which nodes run which command in which image."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from verl_patches.errors import ConfigError
from verl_patches.run.environment import REPOSITORY
from verl_patches.run.ray_nodes import HEAD_PORT, RayPorts
from verl_patches.values import Count, Port, is_secret_value, is_secret_variable, printable, read_yaml, secret_options

# a name for Kubernetes, and so also for containers and Slurm jobs
Name = Annotated[str, StringConstraints(pattern=r"^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$")]
Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Line = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]+$")]  # PlainText: no option, and no ~ to expand
PlainText = Annotated[str, StringConstraints(pattern=r"^[^-~\x00-\x1f\x7f][^\x00-\x1f\x7f]*$")]
Option = Annotated[str, StringConstraints(pattern=r"^-[^\x00-\x1f\x7f]*$")]  # such as --account=NAME
Word = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x08\x0b-\x1f\x7f]*$")]  # may have several lines
Folder = Annotated[str, StringConstraints(pattern=r"^/[^:,'\s]+$")]  # docker and Slurm separate folders by : and ,
SSH_COMMAND = "ssh -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=15 -o LogLevel=ERROR".split()
_VARIABLE = re.compile(r"\$\{\s*oc\.env\s*:\s*(\w+)")
_OUTPUT_ROOT = re.compile(r"""(?:^|[\s+'"])recipe\.output_root=['"]?([^\s'"]+)""")  # also inside a line of bash -c


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Ports(_Strict):
    """Hold the ports of the job's Ray, as RayPorts does: `first` of its services, `workers` from first to last."""

    gcs: Port = HEAD_PORT
    first: Port = HEAD_PORT + 1
    workers: list[Port] = Field([10002, 19999], min_length=2, max_length=2)


class Ssh(_Strict):
    """Describe how ssh reaches hosts. `container_options`: further options of docker run, where there is an image."""

    user: PlainText | None = None
    command: Annotated[list[Line], Field(min_length=1)] = SSH_COMMAND
    container_options: list[Line] = []


class Kubernetes(_Strict):
    """Describe the pods of a job. `secret`: the Secret that has the job's secrets as keys.

    memory_gib: of a pod, shared_memory_gib of it for Ray's object store; `plan` says what a node needs. The defaults
    are those of the 256-die runs.
    """

    namespace: Name = "default"
    queue: PlainText | None = None
    secret: PlainText | None = None
    device: PlainText = "huawei.com/Ascend910"
    cpus: Count = 64
    shared_memory_gib: Count = 256
    memory_gib: Count = 1135


class Slurm(_Strict):
    """Describe the batch script. `options`: further #SBATCH lines (--account=NAME); `srun_options`: those of srun."""

    partition: PlainText | None = None
    time: PlainText | None = None
    options: list[Option] = []
    srun_options: list[Line] = []


class Upload(_Strict):
    """Describe a copy of results. `from`: a file or folder, relative to the checkout; `to`: its target (upload.py)."""

    source: PlainText = Field(alias="from")
    to: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9+]*://[^\s]+$")]


class Job(_Strict):
    """Describe a job as its file does; unknown keys are refused.

    provider: what starts node.sh on the nodes; with `nodes` the user does. volumes: {folder of the host: folder of the
    container}, with an image; only they outlive a container. nodes, dies: how many nodes, and dies of each. device:
    Ray's name of a die. hosts: addresses in the order of ranks (ssh), the first has Ray's head. command: words, run on
    the head's node. env: variables of Ray and the command. secrets: names of variables, whose values are in the
    environment of up.sh and run.sh. uploads: of the command's results. checkout, upstream, python: the same paths on
    every node, in the image where there is one. folder: sockets, logs and the record of what was started, on each
    node's own disk. wait_s: the longest wait for nodes.
    """

    name: Name
    provider: Literal["nodes", "ssh", "kubernetes", "slurm"] = "nodes"
    image: PlainText | None = None
    volumes: dict[Folder, Folder] = {}
    nodes: Count
    dies: Count
    device: Literal["NPU", "GPU"] = "NPU"
    hosts: list[PlainText] = []
    command: list[Word] = []
    env: dict[Variable, Word] = {}
    secrets: list[Variable] = []
    uploads: list[Upload] = []
    interface: PlainText | None = None
    checkout: PlainText = str(REPOSITORY)
    upstream: list[PlainText] = []
    python: PlainText = "python"
    folder: PlainText = "/tmp/verl_patches_cluster"
    logs: PlainText | None = None
    wait_s: Count = 900
    dashboard: bool = False
    ports: Ports = Ports()
    ssh: Ssh = Ssh()
    kubernetes: Kubernetes = Kubernetes()
    slurm: Slurm = Slurm()

    @model_validator(mode="after")
    def _check_fields(self) -> Job:
        if self.provider == "ssh" and len(self.hosts) != self.nodes:
            raise ValueError(f"hosts has {len(self.hosts)} addresses, expected {self.nodes}, one for each node")
        if len(set(self.hosts)) != len(self.hosts):
            raise ValueError("hosts has an address twice, expected another one for each node")
        if len(set(self.volumes.values())) != len(self.volumes):
            raise ValueError("volumes mounts two folders at the same folder of the container")
        if len({upload.to.rstrip("/") for upload in self.uploads}) != len(self.uploads):
            raise ValueError("uploads has the same target (to) twice")
        spans = sorted((span, name) for name, span in self.port_plan.spans().items())
        for ((_, last), name), ((first, _), other) in zip(spans, spans[1:], strict=False):
            if first <= last:
                raise ValueError(f"ports: {name} and {other} overlap at {first}; change gcs, first or workers")
        if self.provider == "kubernetes" and not self.image:
            raise ValueError("image is missing: provider kubernetes needs one")
        if self.provider == "kubernetes" and self.secrets and not self.kubernetes.secret:
            raise ValueError("kubernetes.secret is missing: it names the Secret whose keys are the job's secrets")
        if self.provider in ("kubernetes", "slurm") and not self.command:
            raise ValueError(f"command is missing: provider {self.provider} needs the command to run")
        if self.volumes and not self.image:
            raise ValueError("volumes are mounted into containers, but image is missing: give one, or remove volumes")
        known = set(self.env) & set(self.secrets)
        shown = [name for name, value in self.env.items() if is_secret_variable(name) or is_secret_value(value)]
        if known or shown:
            names = ", ".join(sorted({*known, *shown}))
            raise ValueError(f"env has the value of {names}: remove it, and list secrets by name, under secrets")
        if self.uploads and not self.command:
            raise ValueError("uploads copies the results of the job's command, but command is missing")
        if shown := [upload.to for upload in self.uploads if is_secret_value(upload.to)]:
            raise ValueError(f"uploads: {len(shown)} addresses have a password: give it as a variable, under secrets")
        slurm = self.slurm.options, self.slurm.srun_options
        for words in (self.command, self.ssh.command, self.ssh.container_options, *slurm):
            if options := secret_options(words):
                raise ValueError(f"a command or option has the value of {', '.join(options)}: list it under secrets")
        return self

    @property
    def port_plan(self) -> RayPorts:
        """Return the port plan of each node."""
        return RayPorts(self.ports.gcs, self.ports.first, (self.ports.workers[0], self.ports.workers[1]))

    @property
    def digest(self) -> str:
        """Return 12 hex digits of a hash of the job without command, interface, uploads, wait_s and logs."""
        text = self.model_dump_json(exclude={"wait_s", "logs", "command", "interface", "uploads"})
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def written_folders(self) -> list[str]:
        """Return the folders that the job's runs write to, relative to the checkout; a path with $ is left out."""
        given = [match[1] for word in self.command for match in _OUTPUT_ROOT.finditer(word)]
        return [folder for folder in given or ["outputs"] if "$" not in folder]

    @property
    def logs_folder(self) -> str:
        """Return the folder of all nodes' logs, relative to the checkout; outputs/NAME/cluster by default."""
        return self.logs or f"outputs/{self.name}/cluster"


def load_job(path: Path) -> Job:
    """Read a job file; raise a ConfigError that names the file where it is not valid.

    ${oc.env:NAME} stands for a variable of the environment, but not in the command, which has the variables of a shell.
    """
    given = read_yaml(path)
    if "nodes" not in given and "replica_count" in given:
        given["nodes"] = given.pop("replica_count")  # another name of nodes; beside nodes it is an unknown key
    command, secrets = given.pop("command", []), given.get("secrets")
    secrets = secrets if isinstance(secrets, list) else []  # anything else is refused below
    if old := re.search(r"\$\{\s*(\w+)\s*\}", str(given)):
        raise ConfigError(f"{path}: write ${{oc.env:{old[1]}}} in place of ${{{old[1]}}}")
    for name in _VARIABLE.findall(str(given)):
        if name in secrets or is_secret_variable(name) or is_secret_value(os.environ.get(name, "")):
            raise ConfigError(
                f"{path}: {name} is a secret, and its value would be written to files: list it under secrets"
            )
    try:
        return Job.model_validate({**_resolve(given), "command": command})
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {printable(' '.join(str(error).split()))}") from None
    except ValidationError as error:
        faults = (f"{'.'.join(map(str, each['loc'])) or 'job'}: {each['msg']}" for each in error.errors())
        raise ConfigError(f"{path}: {printable('; '.join(faults))}") from None


def _resolve(node: Any) -> Any:
    """Return a value of the file with OmegaConf's interpolations resolved, also in keys."""
    if isinstance(node, dict):
        return {_resolve(key): _resolve(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_resolve(value) for value in node]
    return OmegaConf.to_container(OmegaConf.create([node]), resolve=True)[0]


def require_volumes(job: Job) -> None:
    """Refuse a job whose results or logs would be deleted with its containers."""
    if not job.image or job.provider == "nodes":
        return
    needed = dict.fromkeys(job.written_folders, "runs write")
    if job.provider != "ssh":  # each node writes its logs itself, in its container
        needed[job.logs_folder] = "logs are written"
    for folder, why in needed.items():
        place = str(PurePosixPath(job.checkout, folder))
        if not any(PurePosixPath(place).is_relative_to(volume) for volume in job.volumes.values()):
            raise ConfigError(
                f"job {job.name}: volumes: expected a folder of the hosts mounted at {place}, where {why}, found "
                f"{', '.join(job.volumes.values()) or 'none'}. The files would be deleted with the containers. Add "
                f"/data/{job.name}/{PurePosixPath(folder).name}: {place}, or another folder that all hosts share"
            )
