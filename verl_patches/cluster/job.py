"""The job file of `cluster`: which nodes, which image, which command; `cluster` starts it, or renders it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from verl_patches.config.environment import REPOSITORY
from verl_patches.errors import ConfigError
from verl_patches.ray_nodes import HEAD_PORT, RayPorts
from verl_patches.values import is_secret_value, is_secret_variable, parse_yaml, printable, secret_options

MAX_NODES, MAX_DIES = 16_384, 1024  # of a job; of a node
MAX_WAIT_S = 7 * 86_400.0
# of Kubernetes names, which are also names of containers and Slurm jobs
Name = Annotated[str, StringConstraints(pattern=r"^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$")]
Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Address = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9:][-A-Za-z0-9.:]*$")]
PortNumber = Annotated[int, Field(ge=1024, le=65535)]
Size = Annotated[int, Field(ge=1, le=2**20)]  # of a pod: CPUs, GiB
User = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][-A-Za-z0-9_.]*$")]
Interface = Annotated[str, StringConstraints(pattern=r"^[!^=A-Za-z0-9][-A-Za-z0-9_.:,@=]*$")]  # "^=docker": HCCL's
Partition = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][-A-Za-z0-9_.,]*$")]
Time = Annotated[str, StringConstraints(pattern=r"^([0-9]+-)?[0-9]+(:[0-9]{1,2}){0,2}$")]  # Slurm's
Resource = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][-A-Za-z0-9_./]*$")]  # of Kubernetes


def _expect(holds: Callable[[str], bool], expected: str) -> AfterValidator:
    def check(text: str) -> str:
        if not holds(text):
            raise ValueError(f"expected {expected}")
        return text

    return AfterValidator(check)


# of a command, or a variable's value: may have several lines
Word = Annotated[str, _expect(lambda text: "\0" not in text, "text without NUL")]
Line = Annotated[str, _expect(lambda text: text and text.isprintable(), "one line of text without control characters")]
PlainPath = Annotated[Line, _expect(lambda text: text[0] != "-", "a path or name that does not begin with -")]
Option = Annotated[Line, _expect(lambda text: text[0] == "-", "an option, such as --account=NAME")]
Folder = Annotated[Line, StringConstraints(pattern=r"^/[^:,\s]+$")]  # docker and Slurm separate by : and ,
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15")
# what the scripts of public samples export: {variable: field}
FROM_ENVIRONMENT = {"NNODES": "nodes", "DIES_PER_NODE": "dies", "SOCKET_IFNAME": "interface"}
PLACEHOLDER = ".example"  # no host has a name in it (RFC 2606)
MASTER, RANK = "MASTER_ADDR", "NODE_RANK"
# fields in which ${NAME} is the value of a variable
EXPANDED = ("image", "volumes", "env", "env_file", "checkout", "upstream", "python", "folder", "logs", "uploads")
_REFERENCE = re.compile(r"\$\{([^{}]*)\}")
_OUTPUT_ROOT = re.compile(r"""(?:^|[\s+'"])recipe\.output_root=['"]?([^\s'"]+)""")  # also in a line of bash -c


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Ports(_Strict):
    """As RayPorts; `workers` is [first, last]."""

    gcs: PortNumber = HEAD_PORT
    first: PortNumber = HEAD_PORT + 1
    workers: list[PortNumber] = Field([10002, 19999], min_length=2, max_length=2)


class Ssh(_Strict):
    """How hosts are reached. `container_options`: further ones of docker run, where there is an image."""

    user: User | None = None
    command: Annotated[list[Line], Field(min_length=1)] = list(SSH)
    container_options: list[Line] = []


class Kubernetes(_Strict):
    """Of the RayJob. `secret`: the Secret that has the job's secrets as keys."""

    namespace: Name = "default"
    queue: Resource | None = None
    secret: Resource | None = None
    device: Resource = "huawei.com/Ascend910"
    cpus: Size = 64
    memory_gib: Size = 1024
    shared_memory_gib: Size = 256


class Slurm(_Strict):
    """Of the batch script. `options`: further #SBATCH lines, such as --account=NAME; `srun_options`: of its srun."""

    partition: Partition | None = None
    time: Time | None = None
    options: list[Option] = []
    srun_options: list[Line] = []


class Upload(_Strict):
    """`from`: a file or folder, relative to the checkout; `to`: where it is copied (cluster/upload.py)."""

    source: PlainPath = Field(alias="from")
    to: Annotated[Line, StringConstraints(pattern=r"^[a-z][a-z0-9+]*://[^\s]+$")]


class Job(_Strict):
    """One job file, completed from the environment of the seeds' scripts; unknown keys are refused.

    provider: how nodes are reached. volumes: {folder of the host: folder of the container}, with an image; nothing else
    outlives a container. nodes, dies: how many, and how many dies each. device: Ray's name of a die.
    hosts: addresses in the order of ranks (ssh), the first has Ray's head. command: words, run on the head's node.
    env: variables of Ray and the command. secrets: names of variables, whose values are in the caller's environment or
    its env_file. uploads: of the command's results.
    checkout, upstream, python: the same paths on every node, in the image where there is one. folder: of sockets, logs
    and the record of what was started, on each node. wait_s: the longest wait for nodes.
    """

    name: Name
    provider: Literal["nodes", "ssh", "kubernetes", "slurm"] = "nodes"
    image: PlainPath | None = None
    volumes: dict[Folder, Folder] = {}
    nodes: Annotated[int, Field(ge=1, le=MAX_NODES)]
    dies: Annotated[int, Field(ge=1, le=MAX_DIES)]
    device: Literal["NPU", "GPU"] = "NPU"
    hosts: list[Address] = []
    command: list[Word] = []
    env: dict[Variable, Word] = {}
    secrets: list[Variable] = []
    uploads: list[Upload] = []
    interface: Interface | None = None
    checkout: PlainPath = str(REPOSITORY)
    upstream: list[PlainPath] = []
    python: PlainPath = "python"
    folder: PlainPath = "/tmp/verl_patches_cluster"
    logs: PlainPath | None = None
    wait_s: Annotated[float, Field(gt=0, le=MAX_WAIT_S)] = 900.0
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
        if self.volumes and not self.image:
            raise ValueError("volumes are folders of containers, but the job has no image")
        if len(set(self.volumes.values())) != len(self.volumes):
            raise ValueError("volumes has a folder of the container twice")
        known = set(self.env) & set(self.secrets)
        shown = [name for name, value in self.env.items() if is_secret_variable(name) or is_secret_value(value)]
        if known or shown:
            names = ", ".join(sorted({*known, *shown}))
            raise ValueError(f"env has the value of {names}: give secrets by name only, under secrets:")
        if self.uploads and not self.command:
            raise ValueError("uploads are of the results of the job's command, which is missing")
        if len({upload.to.rstrip("/") for upload in self.uploads}) != len(self.uploads):
            raise ValueError("uploads has a target twice")
        if shown := [upload.to for upload in self.uploads if is_secret_value(upload.to)]:
            raise ValueError(f"upload {len(shown)} has a password in its address: give it under secrets:")
        slurm = self.slurm.options, self.slurm.srun_options
        for words in (self.command, self.ssh.command, self.ssh.container_options, *slurm):
            if options := secret_options(words):
                raise ValueError(f"a command or option has the value of {', '.join(options)}: give it under secrets:")
        spans = sorted((span, name) for name, span in self.port_plan.spans().items())
        for ((_, last), name), ((first, _), other) in zip(spans, spans[1:], strict=False):
            if first <= last:
                raise ValueError(f"ports: those of {name} and {other} overlap at {first}")
        return self

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
        text = self.model_dump_json(exclude={"wait_s", "logs", "command", "interface", "uploads"})
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def python_path(self) -> str:
        """What stands before a node's own PYTHONPATH."""
        return os.pathsep.join([self.checkout, *self.upstream])

    def host_of(self, rank: int) -> str:
        """ "node 3 (10.0.0.4)", or without the address where the job has none."""
        return f"node {rank} ({self.hosts[rank]})" if rank < len(self.hosts) else f"node {rank}"


def read_job(
    text: str | bytes, source: str, environ: Mapping[str, str], documents: int = 1
) -> tuple[Job, dict[str, str]]:
    """(the job, values of its secrets) of a job file's text; ConfigError, naming `source`, for anything else.

    Where `documents` is 2, a second one may have the secrets, {secrets: {name: value}}: so they reach other nodes
    without a command line or a file. Else they are in `environ`.
    """
    parsed = parse_yaml(text, source)
    if not 1 <= len(parsed) <= documents or not isinstance(parsed[0], dict):
        raise ConfigError(
            f"{source}: expected a job file with name, nodes and dies; configs/cluster_256die.yaml is one"
        )
    given = dict(parsed[0])
    environ = _completed(given, source, environ)
    for variable, field in FROM_ENVIRONMENT.items():
        if environ.get(variable):
            _take(given, field, variable, environ[variable], source)
    try:
        job = Job.model_validate(given)
    except ValidationError as error:
        faults = (f"{'.'.join(map(str, fault['loc'])) or 'job'}: {fault['msg']}" for fault in error.errors())
        raise ConfigError(f"{source}: {printable('; '.join(faults))}") from None
    sent = parsed[1].get("secrets") if len(parsed) > 1 and isinstance(parsed[1], dict) else {}
    if not isinstance(sent, dict) or not all(isinstance(value, str) for value in sent.values()):
        raise ConfigError(f"{source}: expected {{secrets: {{name: text}}}} as the second document, found other values")
    return job, {name: sent.get(name, environ.get(name, "")) for name in job.secrets}


def _completed(given: dict[str, Any], source: str, environ: Mapping[str, str]) -> Mapping[str, str]:
    """Take env_file and replica_count out of the file, and put values for ${NAME}; the environment with env_file's.

    A variable of the caller's own environment takes precedence. ConfigError where one is unset or a secret.
    """
    if "nodes" not in given and "replica_count" in given:
        given["nodes"] = given.pop("replica_count")  # else it is refused as an unknown key
    secrets = given.get("secrets") if isinstance(given.get("secrets"), list) else []

    def put(node: Any, where: str) -> Any:
        if isinstance(node, dict):
            return {put(key, where): put(value, f"{where}.{key}") for key, value in node.items()}
        if isinstance(node, list):
            return [put(value, where) for value in node]
        return _REFERENCE.sub(lambda match: value_of(match[1], where), node) if isinstance(node, str) else node

    def value_of(name: str, where: str) -> str:
        value = environ.get(name, "")
        if name in secrets or is_secret_variable(name) or is_secret_value(value):
            raise ConfigError(f"{source}: {where}: ${{{name}}} is a secret, whose value would be written into files")
        if not value:
            raise ConfigError(f"{source}: {where}: ${{{name}}} is unset; give it in env_file or export it")
        return value

    if "env_file" in given:
        path = put(given.pop("env_file"), "env_file")
        if not isinstance(path, str):
            raise ConfigError(f"{source}: env_file: expected a path, found {path!r}")
        environ = {**_read_env_file(Path(source).parent / path), **{k: v for k, v in environ.items() if v}}
    given.update({key: put(given[key], key) for key in EXPANDED if key in given})
    return environ


def _read_env_file(path: Path) -> dict[str, str]:
    """{name: value} of lines NAME=VALUE, as docker's --env-file reads them: values as they are, # begins a comment."""
    found = {}
    for number, line in enumerate(_read(path, "a file of NAME=VALUE lines").decode(errors="replace").splitlines(), 1):
        name, equals, value = line.strip().partition("=")
        if name[:1] == "#" or not line.strip():
            continue
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise ConfigError(f"{path}:{number}: expected NAME=VALUE")
        found[name] = value
    return found


def _take(given: dict[str, Any], field: str, variable: str, value: str, source: str) -> None:
    """A number or name of the environment fills a field; ConfigError where the file says otherwise."""
    taken: Any = value
    if field != "interface":
        if not re.fullmatch("[0-9]{1,9}", value):
            raise ConfigError(f"{variable} is {value!r}, expected a whole number")
        taken = int(value)
    if given.get(field) is None or field == "interface":  # nodes may name their interfaces differently
        given[field] = taken
    elif given[field] != taken:
        raise ConfigError(f"{source} has {field}: {given[field]!r}, but {variable} is {value}; remove one of them")


def load_job(path: str, stdin: str | bytes, environ: Mapping[str, str]) -> tuple[Job, dict[str, str]]:
    """As read_job, of a file or, where `path` is -, of `stdin`."""
    if path == "-":
        return read_job(stdin, "the job file on standard input", environ, documents=2)
    return read_job(_read(Path(path), "a job file"), path, environ)


def _read(path: Path, expected: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: expected {expected}, found: {error.strerror}") from None


def as_text(job: Job, secrets: Mapping[str, str] | None = None) -> str:
    """The job as text for the standard input of another node."""
    documents = [json.loads(job.model_dump_json(by_alias=True)), *([{"secrets": dict(secrets)}] if secrets else [])]
    return as_yaml(*documents)


class _Dumper(yaml.SafeDumper):
    """With quotes around 1e-6, 08, 0o17, -.5 and y, which other readers take for numbers and bools."""


_TAKEN = r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9_]+)[eE][-+]?[0-9]+$"
_TAKEN += r"|[-+]?(?:0[oOxXbB]?[0-9a-fA-F_]+|\.[0-9_]+)$|[yYnN]$"
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(_TAKEN), list("-+.0123456789yYnN"))


def as_yaml(*documents: Any) -> str:
    """The text of documents, which Kubernetes and OmegaConf read as they are."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False)


def of_a_node(job: Job) -> Job:
    """The job as its nodes get it: each starts its own Ray."""
    return job.model_copy(update={"provider": "nodes"})


def require_hosts(job: Job) -> None:
    """ConfigError where hosts are still those of the example."""
    if placeholders := [host for host in job.hosts if host.endswith(PLACEHOLDER)]:
        raise ConfigError(
            f"job {job.name}: hosts: expected addresses of your nodes, found {placeholders[0]}, a placeholder; nothing "
            "was started. Write the addresses into the job file, in the order of ranks"
        )


def require_secrets(job: Job, secrets: Mapping[str, str]) -> None:
    """ConfigError that names the secrets without a value."""
    missing = [name for name in job.secrets if not secrets.get(name)]
    if missing:
        raise ConfigError(f"job {job.name} needs {', '.join(missing)} (secrets:), unset here; export them first")


def require_volumes(job: Job) -> None:
    """ConfigError where what the job's containers write, results or logs, would be deleted with them."""
    if not job.image or job.provider == "nodes":
        return
    given = [match[1] for word in job.command for match in _OUTPUT_ROOT.finditer(word)]
    needed = {folder: "runs write" for folder in given or ["outputs"] if "$" not in folder}  # else the run looks itself
    if job.provider == "slurm":  # its tasks gather logs in their own containers
        needed[job.logs or f"outputs/{job.name}/cluster"] = "logs are gathered"
    for folder, why in needed.items():
        place = str(PurePosixPath(job.checkout, folder))
        if not job.is_mounted(place):
            raise ConfigError(
                f"job {job.name}: volumes: expected a folder of the hosts at {place}, where {why}, found "
                f"{', '.join(job.volumes.values()) or 'none'}: it would be deleted with the containers. Add "
                f"/data/{job.name}/{PurePosixPath(folder).name}: {place}, or another folder that all hosts share"
            )
