"""The job file of `cluster`: which nodes, which image, which command. All backends are fed from it."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from verl_patches.config.environment import REPOSITORY
from verl_patches.config.ray_start import HEAD_PORT, RayPorts
from verl_patches.errors import ConfigError

# of Kubernetes names, which are also names of containers and Slurm jobs
Name = Annotated[str, StringConstraints(pattern=r"^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$")]
Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Address = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9:][-A-Za-z0-9.:]*$")]
Folder = Annotated[str, StringConstraints(pattern=r"^/[^:,\s]+$")]  # docker and Slurm separate by : and ,
PortNumber = Annotated[int, Field(ge=1024, le=65535)]
Count = Annotated[int, Field(ge=1)]
# what the scripts of public samples export: {variable: field}
FROM_ENVIRONMENT = {"NNODES": "nodes", "DIES_PER_NODE": "dies", "SOCKET_IFNAME": "interface"}
MASTER, RANK = "MASTER_ADDR", "NODE_RANK"
_SECRET_PARTS = {"TOKEN", "SECRET", "PASSWORD", "PASSWD", "KEY", "CREDENTIALS"}  # between underscores


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Ports(_Strict):
    """As RayPorts; `workers` is [first, last]."""

    gcs: PortNumber = HEAD_PORT
    first: PortNumber = HEAD_PORT + 1
    workers: list[PortNumber] = Field([10002, 19999], min_length=2, max_length=2)


class Ssh(_Strict):
    """How hosts are reached. `container_options`: further ones of docker run, where there is an image."""

    user: str | None = None
    command: list[str] = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15"]
    container_options: list[str] = []


class Kubernetes(_Strict):
    """Of the RayJob. `secret`: the Secret that has the job's secrets as keys."""

    namespace: Name = "default"
    queue: str | None = None
    secret: str | None = None
    device: str = "huawei.com/Ascend910"
    cpus: Count = 64
    memory_gib: Count = 1024
    shared_memory_gib: Count = 256


class Slurm(_Strict):
    """Of the batch script. `options`: further #SBATCH lines, such as --account=NAME; `srun_options`: of its srun."""

    partition: str | None = None
    time: str | None = None
    options: list[str] = []
    srun_options: list[str] = []


class Job(_Strict):
    """One job file, completed from the environment of the seeds' scripts; unknown keys are refused.

    provider: how nodes are reached. volumes: {folder of the host: folder of the container}, with an image; nothing else
    outlives a container. nodes, dies: how many, and how many dies each. device: Ray's name of a die.
    hosts: addresses in the order of ranks (ssh), the first has Ray's head. command: words, run on the head's node.
    env: variables of Ray and the command. secrets: names of variables, whose values are in the caller's environment.
    checkout, upstream, python: the same paths on every node, in the image where there is one. folder: of sockets, logs
    and the record of what was started, on each node. wait_s: the longest wait for nodes.
    """

    name: Name
    provider: Literal["nodes", "ssh", "kubernetes", "slurm"] = "nodes"
    image: str | None = None
    volumes: dict[Folder, Folder] = {}
    nodes: Count
    dies: Count
    device: Literal["NPU", "GPU"] = "NPU"
    hosts: list[Address] = []
    command: list[str] = []
    env: dict[Variable, str] = {}
    secrets: list[Variable] = []
    interface: str | None = None
    checkout: str = str(REPOSITORY)
    upstream: list[str] = []
    python: str = "python"
    folder: str = "/tmp/verl_patches_cluster"
    logs: str | None = None
    wait_s: Annotated[float, Field(gt=0)] = 900.0
    dashboard: bool = False
    ports: Ports = Ports()
    ssh: Ssh = Ssh()
    kubernetes: Kubernetes = Kubernetes()
    slurm: Slurm = Slurm()

    @model_validator(mode="after")
    def _whole(self) -> Job:
        if self.provider == "ssh" and len(self.hosts) != self.nodes:
            raise ValueError(f"hosts has {len(self.hosts)} addresses, expected one of each of the {self.nodes} nodes")
        if len(set(self.hosts)) != len(self.hosts):
            raise ValueError("hosts has an address twice")
        if self.provider == "kubernetes" and not self.image:
            raise ValueError("image is missing, which provider kubernetes needs")
        if self.provider == "kubernetes" and self.secrets and not self.kubernetes.secret:
            raise ValueError("kubernetes.secret is missing: the name of the Secret that has the job's secrets as keys")
        if self.provider in ("kubernetes", "slurm") and not self.command:
            raise ValueError(f"command is missing, which provider {self.provider} starts")
        self._require_volumes()
        known = set(self.env) & set(self.secrets)
        shown = [name for name in self.env if _SECRET_PARTS & set(name.upper().split("_"))]
        if known or shown:
            names = ", ".join(sorted({*known, *shown}))
            raise ValueError(f"env has the value of {names}: give secrets by name only, under secrets:")
        spans = sorted((span, name) for name, span in self.port_plan.spans().items())
        for ((_, last), name), ((first, _), other) in zip(spans, spans[1:], strict=False):
            if first <= last:
                raise ValueError(f"ports: those of {name} and {other} overlap at {first}")
        return self

    def _require_volumes(self) -> None:
        if self.volumes and not self.image:
            raise ValueError("volumes are folders of containers, but the job has no image")
        if len(set(self.volumes.values())) != len(self.volumes):
            raise ValueError("volumes has a folder of the container twice")
        if not self.image or self.provider == "nodes":
            return
        needed = {"outputs": "runs write"}
        if self.provider == "slurm":  # its tasks gather logs in their own containers
            needed[self.logs or f"outputs/{self.name}/cluster"] = "logs are gathered"
        for folder, why in needed.items():
            place = str(PurePosixPath(self.checkout, folder))
            if not self.is_mounted(place):
                raise ValueError(
                    f"volumes: expected a folder of the hosts at {place}, where {why}, found "
                    f"{', '.join(self.volumes.values()) or 'none'}: it would be deleted with the containers. Add "
                    f"/data/{self.name}/{PurePosixPath(folder).name}: {place}, or another folder that all hosts share"
                )

    def is_mounted(self, path: str) -> bool:
        """Whether a path of the container lies in one of its volumes."""
        return any(PurePosixPath(path).is_relative_to(folder) for folder in self.volumes.values())

    @property
    def port_plan(self) -> RayPorts:
        """The ports of each node."""
        return RayPorts(self.ports.gcs, self.ports.first, (self.ports.workers[0], self.ports.workers[1]))

    @property
    def digest(self) -> str:
        """Twelve hex digits: two jobs are the same if everything but waiting and logs is."""
        text = self.model_dump_json(exclude={"wait_s", "logs", "command", "interface"})
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def python_path(self) -> str:
        """What stands before a node's own PYTHONPATH."""
        return os.pathsep.join([self.checkout, *self.upstream])

    @property
    def command_text(self) -> str:
        """The command as one line of a shell."""
        return shlex.join(self.command)

    def host_of(self, rank: int) -> str:
        """ "node 3 (10.0.0.4)", or without the address where the job has none."""
        return f"node {rank} ({self.hosts[rank]})" if rank < len(self.hosts) else f"node {rank}"


def read_job(text: str, source: str, environ: Mapping[str, str]) -> tuple[Job, dict[str, str]]:
    """(the job, values of its secrets) of a job file's text; ConfigError, naming `source`, for anything else.

    A second document of the text may have the secrets, {secrets: {name: value}}: so they reach other nodes without a
    command line or a file. Else they are in `environ`.
    """
    try:
        documents = list(yaml.safe_load_all(text))
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is no YAML: {' '.join(str(error).split())}") from None
    if not documents or not isinstance(documents[0], dict):
        raise ConfigError(
            f"{source}: expected a job file with name, nodes and dies; configs/cluster_256die.yaml is one"
        )
    given = dict(documents[0])
    for variable, field in FROM_ENVIRONMENT.items():
        if environ.get(variable):
            _take(given, field, variable, environ[variable], source)
    try:
        job = Job.model_validate(given)
    except ValidationError as error:
        faults = (f"{'.'.join(map(str, fault['loc'])) or 'job'}: {fault['msg']}" for fault in error.errors())
        raise ConfigError(f"{source}: {'; '.join(faults)}") from None
    values = documents[1].get("secrets", {}) if len(documents) > 1 and isinstance(documents[1], dict) else {}
    return job, {name: values.get(name, environ.get(name, "")) for name in job.secrets}


def _take(given: dict[str, Any], field: str, variable: str, value: str, source: str) -> None:
    """A number or name of the environment fills a field; ConfigError where the file says otherwise."""
    taken: Any = value
    if field != "interface":
        if not value.isdigit():
            raise ConfigError(f"{variable} is {value!r}, expected a whole number")
        taken = int(value)
    if given.get(field) is None or field == "interface":  # nodes may name their interfaces differently
        given[field] = taken
    elif given[field] != taken:
        raise ConfigError(f"{source} has {field}: {given[field]}, but {variable} is {value}; remove one of them")


def load_job(path: str, stdin: str, environ: Mapping[str, str]) -> tuple[Job, dict[str, str]]:
    """As read_job, of a file or, where `path` is -, of `stdin`."""
    if path == "-":
        return read_job(stdin, "the job file on standard input", environ)
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise ConfigError(f"{path}: expected a job file, found: {error.strerror}") from None
    return read_job(text, path, environ)


def as_text(job: Job, secrets: Mapping[str, str] | None = None) -> str:
    """The job as text for the standard input of another node."""
    documents = [json.loads(job.model_dump_json()), *([{"secrets": dict(secrets)}] if secrets else [])]
    return yaml.safe_dump_all(documents, sort_keys=False)


def of_a_node(job: Job) -> Job:
    """The job as its nodes get it: each starts its own Ray."""
    return job.model_copy(update={"provider": "nodes"})


def require_secrets(job: Job, secrets: Mapping[str, str]) -> None:
    """ConfigError that names the secrets without a value."""
    missing = [name for name in job.secrets if not secrets.get(name)]
    if missing:
        raise ConfigError(f"job {job.name} needs {', '.join(missing)} (secrets:), unset here; export them first")
