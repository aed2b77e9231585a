"""Read the job file of `cluster render`, which says which nodes run which command in which image."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from verl_patches.errors import ConfigError
from verl_patches.plan.memory_plan import WORKER_BYTES
from verl_patches.run.environment import REPOSITORY
from verl_patches.run.ray_nodes import HEAD_PORT, RayPorts
from verl_patches.shared_files import expand_home
from verl_patches.values import (
    Count,
    Port,
    is_secret_value,
    is_secret_variable,
    printable,
    read_yaml,
    secret_options,
    unknown_key,
)

# a name for Kubernetes, and so also for containers and Slurm jobs
Name = Annotated[str, StringConstraints(pattern=r"^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$")]
Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


def _expect(holds: Callable[[str], bool], expected: str) -> AfterValidator:
    def check(text: str) -> str:
        if not holds(text):
            raise ValueError(f"expected {expected}")
        return text

    return AfterValidator(check)


# a word of a command, or the value of a variable, which may have several lines
Word = Annotated[
    str, _expect(lambda text: text.replace("\n", "").replace("\t", "").isprintable(), "text without control characters")
]
Line = Annotated[str, _expect(lambda text: text and text.isprintable(), "one line of text without control characters")]
PlainText = Annotated[Line, _expect(lambda text: text[0] != "-", "a path or name that does not begin with -")]
Option = Annotated[Line, _expect(lambda text: text[0] == "-", "an option, such as --account=NAME")]
Folder = Annotated[Line, StringConstraints(pattern=r"^/[^:,'\s]+$")]  # docker and Slurm separate folders by : and ,
SSH_COMMAND = "ssh -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=15 -o LogLevel=ERROR".split()
# {environment variable: field of the job that it gives}; scripts of public samples export these names
ENVIRONMENT_FIELDS = {"NNODES": "nodes", "DIES_PER_NODE": "dies", "SOCKET_IFNAME": "interface"}
# fields in which ${NAME} is replaced by the value of a variable
EXPANDED_FIELDS = ("image", "volumes", "env", "env_file", "checkout", "upstream", "python", "folder", "logs", "uploads")
_REFERENCE = re.compile(r"\$\{([^{}]*)\}")
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

    The memory of a pod is pinned_gib (what `plan` says of the fullest node; the default is that of the 256-die
    runs), shared_memory_gib (for Ray's object store) and worker_gib for each die, unless memory_gib is given.
    """

    namespace: Name = "default"
    queue: PlainText | None = None
    secret: PlainText | None = None
    device: PlainText = "huawei.com/Ascend910"
    cpus: Count = 64
    pinned_gib: Count = 719
    shared_memory_gib: Count = 256
    worker_gib: Count = WORKER_BYTES >> 30
    memory_gib: Count | None = None


class Slurm(_Strict):
    """Describe the batch script. `options`: further #SBATCH lines (--account=NAME); `srun_options`: those of srun."""

    partition: PlainText | None = None
    time: PlainText | None = None
    options: list[Option] = []
    srun_options: list[Line] = []


class Upload(_Strict):
    """Describe a copy of results. `from`: a file or folder, relative to the checkout; `to`: its target (upload.py)."""

    source: PlainText = Field(alias="from")
    to: Annotated[Line, StringConstraints(pattern=r"^[a-z][a-z0-9+]*://[^\s]+$")]


class Job(_Strict):
    """Describe a job as its file does; ENVIRONMENT_FIELDS lists fields that variables may give instead.

    Unknown keys are refused. provider: what starts node.sh on the nodes; with `nodes` the user does. volumes: {folder
    of the host: folder of the container}, with an image; only they outlive a container. nodes, dies: how many nodes,
    and dies of each. device: Ray's name of a die. hosts: addresses in the order of ranks (ssh), the first has Ray's
    head. command: words, run on the head's node. env: variables of Ray and the command. secrets: names of variables,
    whose values are in the environment of up.sh and run.sh or in env_file. uploads: of the command's results. checkout,
    upstream, python: the same paths on every node, in the image where there is one. folder: sockets, logs and the
    record of what was started, on each node's own disk. wait_s: the longest wait for nodes.
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
    env_file: PlainText | None = None
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
        if self.provider == "kubernetes" and not self.image:
            raise ValueError("image is missing: provider kubernetes needs one")
        if self.provider == "kubernetes" and self.secrets and not self.kubernetes.secret:
            raise ValueError("kubernetes.secret is missing: it names the Secret whose keys are the job's secrets")
        if self.provider in ("kubernetes", "slurm") and not self.command:
            raise ValueError(f"command is missing: provider {self.provider} needs the command to run")
        if self.provider == "slurm" and self.env_file and self.secrets:
            raise ValueError("env_file gives no secrets to Slurm: remove it, and export them where sbatch is called")
        if self.volumes and not self.image:
            raise ValueError("volumes are mounted into containers, but image is missing: give one, or remove volumes")
        if len(set(self.volumes.values())) != len(self.volumes):
            raise ValueError("volumes mounts two folders at the same folder of the container")
        if len({upload.to.rstrip("/") for upload in self.uploads}) != len(self.uploads):
            raise ValueError("uploads has the same target (to) twice")
        spans = sorted((span, name) for name, span in self.port_plan.spans().items())
        for ((_, last), name), ((first, _), other) in zip(spans, spans[1:], strict=False):
            if first <= last:
                raise ValueError(f"ports: {name} and {other} overlap at {first}; change gcs, first or workers")
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
        """Return 12 hex digits of a hash of the job without command, interface, uploads, env_file, wait_s and logs."""
        text = self.model_dump_json(exclude={"wait_s", "logs", "command", "interface", "uploads", "env_file"})
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


def load_job(path: Path, environ: Mapping[str, str]) -> Job:
    """Read a job file; raise a ConfigError that names the file where it is not valid."""
    given = dict(read_yaml(path))
    source = str(path)
    environ = _expand_variables(given, path, environ)
    for variable, field in ENVIRONMENT_FIELDS.items():
        if environ.get(variable):
            _set_from_variable(given, field, variable, environ[variable], source)
    try:
        return Job.model_validate(given)
    except ValidationError as error:
        faults = (_fault_text(".".join(map(str, each["loc"])), each["type"], each["msg"]) for each in error.errors())
        raise ConfigError(f"{source}: {printable('; '.join(faults))}") from None


def _fault_text(key: str, kind: str, message: str) -> str:
    """Return one of pydantic's errors about a job file as a sentence."""
    if kind == "extra_forbidden":
        below = {name: field.default for name, field in Job.model_fields.items() if isinstance(field.default, _Strict)}
        known = [*Job.model_fields, *(f"{name}.{key}" for name, section in below.items() for key in dict(section))]
        return unknown_key(key, dict.fromkeys(known), "docs/cluster.md lists the keys")
    return f"{key} is missing" if kind == "missing" else f"{key or 'job'}: {message}"


def _expand_variables(given: dict[str, Any], source: Path, environ: Mapping[str, str]) -> Mapping[str, str]:
    """Expand ${NAME} and ~, and rename replica_count to nodes; return the environment with that of env_file.

    A variable of `environ` takes precedence over env_file. Raise ConfigError where one is unset or a secret.
    """
    if "nodes" not in given and "replica_count" in given:
        given["nodes"] = given.pop("replica_count")  # another name of nodes; beside nodes it is an unknown key
    listed = given.get("secrets")
    secrets = listed if isinstance(listed, list) else []

    def expand(node: Any, where: str) -> Any:
        if isinstance(node, dict):
            return {expand(key, where): expand(value, f"{where}.{key}") for key, value in node.items()}
        if isinstance(node, list):
            return [expand(value, where) for value in node]
        if not isinstance(node, str):
            return node
        text = _REFERENCE.sub(lambda match: variable_value(match[1], where), node)
        return text if where.startswith("env.") else expand_home(text)

    def variable_value(name: str, where: str) -> str:
        value = environ.get(name, "")
        if name in secrets or is_secret_variable(name) or is_secret_value(value):
            raise ConfigError(
                f"{source}: {where}: ${{{name}}} is a secret, and its value would be written to files: "
                "list it under secrets"
            )
        if not value:
            raise ConfigError(f"{source}: {where}: ${{{name}}} is unset; give it in env_file or export it")
        return value

    if "env_file" in given:
        named = expand(given["env_file"], "env_file")
        if not isinstance(named, str):
            raise ConfigError(f"{source}: env_file: expected a path, found {named!r}")
        path = source.absolute().parent / named
        given["env_file"] = str(path)
        environ = {**_read_env_file(path), **{k: v for k, v in environ.items() if v}}
    given.update({key: expand(given[key], key) for key in EXPANDED_FIELDS if key in given})
    return environ


def _read_env_file(path: Path) -> dict[str, str]:
    """Return {name: value} of lines NAME=VALUE as docker's --env-file reads them: literal values, # for comments."""
    found = {}
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: expected a file of NAME=VALUE lines, found: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        name, equals, value = line.strip().partition("=")
        if name[:1] == "#" or not line.strip():
            continue
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise ConfigError(f"{path}:{number}: expected NAME=VALUE")
        found[name] = value
    return found


def _set_from_variable(given: dict[str, Any], field: str, variable: str, value: str, source: str) -> None:
    """Fill a field from a variable of the environment; raise ConfigError where the file says otherwise."""
    taken: Any = value
    if field != "interface":
        if not re.fullmatch("[0-9]{1,9}", value):
            raise ConfigError(f"{variable} is {value!r}, expected a whole number")
        taken = int(value)
    if given.get(field) is None or field == "interface":  # nodes may have different interface names
        given[field] = taken
    elif given[field] != taken:
        raise ConfigError(f"{source} has {field}: {given[field]!r}, but {variable} is {value}; remove one of them")


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
