"""The job file: strict, secrets by name only, completed by the variables of public samples; and the port plan."""

import subprocess
from contextlib import nullcontext

import pytest
import yaml
from typer.testing import CliRunner

from verl_patches.__main__ import app
from verl_patches.cluster.hosts import START_CONTAINER
from verl_patches.cluster.job import (
    MAX_NODES,
    Job,
    Kubernetes,
    as_text,
    as_yaml,
    load_job,
    read_job,
    require_secrets,
    require_volumes,
)
from verl_patches.cluster.render import rendered
from verl_patches.config.compose import CONFIGS_DIR
from verl_patches.errors import ConfigError
from verl_patches.ray_nodes import RayPorts, ray_start

SMALL = {"name": "j", "nodes": 2, "dies": 16}


def read(environ=None, **changes):
    return read_job(yaml.safe_dump({**SMALL, **changes}), "job.yaml", environ or {})


def test_the_example_is_a_job_of_256_dies():
    job, secrets = load_job(str(CONFIGS_DIR / "cluster_256die.yaml"), "", {})
    assert job.nodes * job.dies == 256 and len(job.hosts) == job.nodes and secrets == {}


@pytest.mark.parametrize("verb", ["up", "status", "follow", "down"])
def test_placeholders_of_the_example_are_refused_before_anything_is_called(verb, program, tmp_path):
    """The control: its other hosts are called."""
    example = (CONFIGS_DIR / "cluster_256die.yaml").read_text()
    for name in ("docker", "ssh"):
        program(name, "echo no >&2; exit 1")
    for text, called in ((example, False), (example.replace(".example", ""), True)):
        (tmp_path / "job.yaml").write_text(text)
        done = CliRunner().invoke(app, ["cluster", verb, str(tmp_path / "job.yaml")])
        assert bool(program.calls()) == called and done.exit_code != 0
        assert called or isinstance(done.exception, ConfigError) and "node-01.example" in str(done.exception)
    rendered = CliRunner().invoke(app, ["cluster", "up", str(CONFIGS_DIR / "cluster_256die.yaml"), "--render"])
    assert rendered.exit_code == 0 and "node-01.example" in rendered.stdout


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"colour": 1}, "colour"),
        ({"provider": "ssh", "hosts": ["10.0.0.1"]}, "hosts has 1 addresses, expected one of each of the 2 nodes"),
        ({"hosts": ["a", "a"]}, "an address twice"),
        ({"provider": "kubernetes"}, "image is missing"),
        ({"provider": "slurm"}, "command is missing"),
        ({"volumes": {"/d": "/d"}}, "the job has no image"),
        ({"image": "a", "volumes": {"/d": "/d,/e"}}, "volumes./d"),
        ({"env": {"A": "x"}, "secrets": ["A"]}, "env has the value of A"),
        ({"env": {"MODEL": "hf_" + "x" * 30}}, "env has the value of MODEL"),
        ({"nodes": 20_000_000}, f"nodes: .* less than or equal to {MAX_NODES}"),
        ({"slurm": {"partition": "a\n#SBATCH --uid=0"}}, "slurm.partition"),
        ({"slurm": {"options": ["account=a"]}}, "slurm.options.0: .*an option, such as --account=NAME"),
        ({"ssh": {"user": "-oProxyCommand=x"}}, "ssh.user"),
        ({"image": "-v /:/host"}, "image: .*does not begin with -"),
        ({"env": {"A": "a\0b"}}, "env.A: .*without NUL"),
        ({"ports": {"gcs": 6380}}, "overlap at 6380"),
        ({"command": ["a"], "uploads": [{"from": "o", "to": "b"}]}, "uploads.0.to"),
        ({"command": ["a"], "uploads": [{"from": "o", "to": "ftp://u:pass@b/x"}]}, "has a password"),
        ({"image": "${NONE}"}, "image: .*NONE.* is unset; give it in env_file or export it"),
        ({"folder": "/x/${HF_TOKEN}"}, "folder: .*HF_TOKEN.* is a secret"),
        ({"env_file": "no.env"}, "no.env: expected a file of NAME=VALUE lines, found: No such file"),
    ],
)
def test_a_wrong_job_is_refused_by_name(changes, text):
    environ = {"HF_TOKEN": "t"}
    with pytest.raises(ConfigError, match=text) as error:
        read(environ, **{"checkout": "/c", **changes})
    assert "xxxxx" not in str(error.value)


IN_DATA = {"provider": "kubernetes", "volumes": {"/data": "/data"}}


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"volumes": {"/d": "/c/outputs"}}, None),
        ({"provider": "nodes"}, None),  # somebody else has started the containers, whose volumes are theirs
        ({}, "at /c/outputs, where runs write, found none"),
        ({"volumes": {"/d": "/c/outputs"}, "logs": "/l"}, "at /l, where logs are gathered, found /c/outputs"),
        ({"volumes": {"/d": "/c/outputs"}, "command": ["train", "recipe.output_root=/r/x"]}, "at /r/x, "),
        ({**IN_DATA, "command": ["train", "recipe.output_root=/data/x"]}, None),
        ({**IN_DATA, "command": ["train", "recipe.output_root=$X"]}, None),  # the run looks itself
    ],
)
def test_a_job_with_containers_has_a_volume_for_results_and_logs(changes, fault):
    job = read(**{"checkout": "/c", "provider": "slurm", "image": "a", "command": ["a"], **changes})[0]
    with pytest.raises(ConfigError, match=fault) if fault else nullcontext():
        require_volumes(job)


def test_a_job_of_an_older_file_is_not_started_again_and_can_be_ended(tmp_path):
    job = {**SMALL, "provider": "ssh", "image": "a", "hosts": ["10.0.0.1", "10.0.0.2"], "ssh": {"command": ["true"]}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    for options in ([], ["--render"]):
        done = CliRunner().invoke(app, ["cluster", "up", str(tmp_path / "job.yaml"), *options])
        assert isinstance(done.exception, ConfigError) and "where runs write" in str(done.exception)
    done = CliRunner().invoke(app, ["cluster", "down", str(tmp_path / "job.yaml"), "--logs", "none"])
    assert done.exit_code == 0, done.output


def test_a_container_that_is_started_by_hand_has_the_volumes_of_the_example(program):
    program("docker", "")
    subprocess.run(["bash", START_CONTAINER], check=True)
    words = program.calls().split()
    given = [value for option, value in zip(words, words[1:], strict=False) if option == "--volume"]
    volumes = load_job(str(CONFIGS_DIR / "cluster_256die.yaml"), "", {})[0].volumes
    own = ("/usr/local/", "/etc/localtime", "/var/log/npu/")  # of the host's driver
    assert [value for value in given if not value.startswith(own)] == [":".join(pair) for pair in volumes.items()]


def test_values_within_the_bounds_are_taken():
    slurm = {"partition": "a,b", "time": "1-12:30:00", "options": ["--account=a b"], "srun_options": ["--mpi", "none"]}
    job, _ = read(nodes=MAX_NODES, ssh={"user": "ma_1.x"}, slurm=slurm, command=["bash", "-c", "a\nb"], wait_s=1e3)
    assert job.slurm.time == "1-12:30:00" and job.command[2] == "a\nb" and job.nodes == MAX_NODES
    for interface in ("eth0", "bond0.100", "=eth0,eth1", "^=docker"):
        assert read(interface=interface)[0].interface == interface
    names = {"TOKENIZERS_PARALLELISM": "false", "HF_TOKEN_PATH": "/run/secrets/hf"}  # which only look like secrets
    assert read(env=names, command=["train", "data.prompt_key=prompt", "+data.x=$HF_TOKEN"])[0].env == names


def test_a_file_that_is_no_job_is_refused_by_line(tmp_path):
    """What YAML is not read: config/test_values.py. Of standard input the second document has the secrets."""
    path = tmp_path / "job.yaml"
    for text, message in ((b"name: j\n---\nsecrets: {A: b}\n", ": "), (b"- a\n", ": "), (b"", ": ")):
        path.write_bytes(text)
        with pytest.raises(ConfigError, match=f"^{path}{message}expected .*$"):
            load_job(str(path), "", {})
    for sent in ("secrets: [a]", "secrets: {A: 3}", "secrets:"):
        with pytest.raises(ConfigError, match="as the second document"):
            load_job("-", f"{yaml.safe_dump(SMALL)}---\n{sent}\n", {})


def test_variables_of_public_samples_fill_what_the_file_leaves_out():
    environ = {"NNODES": "4", "DIES_PER_NODE": "8", "SOCKET_IFNAME": "eth1"}
    job, _ = read_job("name: j\n", "job.yaml", environ)
    assert (job.nodes, job.dies, job.interface) == (4, 8, "eth1")
    with pytest.raises(ConfigError, match="has nodes: 2, but NNODES is 4"):
        read(environ)
    assert read({"SOCKET_IFNAME": "eth1"}, interface="eth0")[0].interface == "eth1"  # as the node says
    for wrong in ("many", "²", "-1", "9" * 5000):
        with pytest.raises(ConfigError, match="NNODES is .*expected a whole number"):
            read_job("name: j\n", "job.yaml", {"NNODES": wrong})


def test_secrets_come_from_the_environment_or_the_second_document_and_are_required():
    job, secrets = read({"HF_TOKEN": "s3cret"}, secrets=["HF_TOKEN"])
    assert secrets == {"HF_TOKEN": "s3cret"} and "s3cret" not in as_text(job)
    again, sent = load_job("-", as_text(job, secrets), {})
    assert again == job and sent == secrets
    texts = ["1e-6", "1e3", "-2E5", "1_0e5", "12e34", ".5e1", "0x1f", "1:30", "yes", "null", "2026-01-01", "1.5", "~"]
    odd = job.model_copy(update={"env": dict(zip("ABCDEFGHIJKLM", texts, strict=True)), "command": ["run", *texts]})
    again, sent = load_job("-", as_text(odd, {"HF_TOKEN": "1e3"}), {})
    assert again == odd and sent == {"HF_TOKEN": "1e3"}
    with pytest.raises(ConfigError, match="needs HF_TOKEN"):
        require_secrets(job, read({}, secrets=["HF_TOKEN"])[1])


def test_text_is_quoted_where_kubernetes_would_read_a_bool_or_a_number():
    """By the rules of its reader (gopkg.in/yaml.v2, resolve.go). The control are words and numbers themselves."""
    texts = "y Y n N 1e-6 0o17 -0o7 0O17 0X1F 0B1 08 +09 0_8 -.5 +.5e1 yes 0x1f .5 1:30".split()
    assert [text for text in texts if as_yaml({"value": text}) != f"value: '{text}'\n"] == []
    plain = ["yy", "no-op", "v0", ".py", "-x", "0.1.2", "registry/a3:1", True, 0, -8, 0.5, -0.5, 1e-6]
    assert as_yaml(plain).count("'") == as_yaml(plain).count("!") == 0 and yaml.safe_load(as_yaml(plain)) == plain


ENV_FILE = """
# build values
MODELS_ROOT=/models
image=registry/a3:1
WANDB=w4 #ndb
EMPTY=
"""
SEED = """
name: test-ppo-training
image: ${image}
replica_count: 1
dies: 8
env_file: values.env
volumes: {"${MODELS_ROOT}": /models, /o: /c/outputs}
checkout: /c
command: [bash, scripts/smoke.sh, "$HOME/${MODELS_ROOT}"]
env: {HF_HOME: "${MODELS_ROOT}/hub"}
secrets: [WANDB]
uploads: [{from: "outputs/${RUN}", to: "s3://b/${RUN}"}]
"""


def test_a_job_takes_values_from_its_env_file_and_no_secret_is_written(tmp_path):
    """The file is read beside the job; the caller's environment takes precedence; a command keeps its own ${...}."""
    (tmp_path / "values.env").write_text(ENV_FILE)
    (tmp_path / "job.yaml").write_text(SEED)
    job, secrets = load_job(str(tmp_path / "job.yaml"), "", {"RUN": "r1", "image": ""})
    assert (job.image, job.nodes, job.command[2]) == ("registry/a3:1", 1, "$HOME/${MODELS_ROOT}")
    assert job.env == {"HF_HOME": "/models/hub"}
    assert job.volumes == {"/models": "/models", "/o": "/c/outputs"} and job.uploads[0].to == "s3://b/r1"
    assert secrets == {"WANDB": "w4 #ndb"} and job.uploads[0].source == "outputs/r1"
    require_secrets(job, secrets)
    again, sent = load_job("-", as_text(job, secrets), {})
    assert (again, sent) == (job, secrets)
    jobs = [job.model_copy(update={"provider": name}) for name in ("nodes", "slurm", "kubernetes")]
    jobs[2] = jobs[2].model_copy(update={"command": ["train"], "kubernetes": Kubernetes(secret="s")})
    for text in (as_text(job), *map(rendered, jobs)):
        assert "w4 #ndb" not in text and "WANDB" in text and "s3://b/r1" in text
    other, _ = load_job(str(tmp_path / "job.yaml"), "", {"RUN": "r2", "image": "mine"})
    assert other.image == "mine" and other.digest != job.digest


@pytest.mark.parametrize("line", ["A", "export A=b"])
def test_a_line_of_an_env_file_that_is_none_is_named_without_its_value(tmp_path, line):
    (tmp_path / "v.env").write_text(f"B=secretvalue\n{line} secretvalue\n")
    with pytest.raises(ConfigError, match=r"v.env:2: expected NAME=VALUE") as error:
        read(env_file=str(tmp_path / "v.env"))
    assert "secretvalue" not in str(error.value)


def test_the_job_of_another_image_is_another_job():
    assert read()[0].digest == read(wait_s=5.0, logs="x")[0].digest != read(image="other")[0].digest


def test_ports_are_given_to_every_service_of_ray_start_and_the_dashboard_to_the_loopback():
    ports = RayPorts(gcs=7000, first=7001, workers=(7100, 7199))
    head = ray_start("10.0.0.1", "10.0.0.1", True, {"NPU": 16}, ports, dashboard=True)
    other = ray_start("10.0.0.1", "10.0.0.2", False, {"NPU": 16}, ports)
    assert "--port=7000" in head and "--dashboard-host=127.0.0.1" in head and "--include-dashboard=true" in head
    assert "--address=10.0.0.1:7000" in other and not any("dashboard-host" in word for word in other)
    given = {int(word.rpartition("=")[2]) for word in head if word.rpartition("=")[2].isdigit()}
    spans = ports.spans().values()
    assert given == {port for span in spans for port in span}
    assert len({first for first, _ in spans}) == len(spans)


def test_ray_has_every_option_of_the_commands():
    from ray.scripts.scripts import start

    options = {name for parameter in start.params for name in parameter.opts}
    words = ray_start("a", "a", True, {"NPU": 1}, labels={"a": "b"}, temp_dir="/tmp/x")
    words += [*ray_start("a", "b", False, {"GPU": 1}), "--no-such-option=1"]
    unknown = [word for word in words if word.startswith("--") and word.partition("=")[0] not in options]
    assert unknown == ["--no-such-option=1"]
    assert Job(**SMALL).port_plan == RayPorts()
