"""The job file: strict, secrets by name only, completed by the variables of public samples; and the port plan."""

import os
import subprocess

import pytest
import yaml

from verl_patches.cluster.backends import START_CONTAINER
from verl_patches.cluster.job import Job, as_text, load_job, read_job, require_secrets
from verl_patches.config.compose import CONFIGS_DIR
from verl_patches.config.ray_start import RayPorts, ray_start
from verl_patches.errors import ConfigError

SMALL = {"name": "j", "nodes": 2, "dies": 16}


def read(environ=None, **changes):
    return read_job(yaml.safe_dump({**SMALL, **changes}), "job.yaml", environ or {})


def test_the_example_is_a_job_of_256_dies():
    job, secrets = load_job(str(CONFIGS_DIR / "cluster_256die.yaml"), "", {})
    assert job.nodes * job.dies == 256 and len(job.hosts) == job.nodes and secrets == {}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"colour": 1}, "colour"),
        ({"nodes": "2"}, "nodes"),
        ({"nodes": 0}, "nodes"),
        ({"name": "A b"}, "name"),
        ({"provider": "ssh", "hosts": ["10.0.0.1"]}, "hosts has 1 addresses, expected one of each of the 2 nodes"),
        ({"provider": "ssh", "hosts": ["-oProxyCommand=x", "a"]}, "hosts.0"),  # no option of ssh
        ({"hosts": ["a", "a"]}, "an address twice"),
        ({"provider": "kubernetes"}, "image is missing"),
        ({"provider": "slurm"}, "command is missing"),
        ({"provider": "slurm", "image": "a", "command": ["a"]}, "at /c/outputs, where runs write, found none"),
        (
            {"provider": "slurm", "image": "a", "command": ["a"], "volumes": {"/d": "/c/out"}},
            "at /c/outputs, where runs write, found /c/out",
        ),
        (
            {"provider": "slurm", "image": "a", "command": ["a"], "volumes": {"/d": "/c/outputs"}, "logs": "/l"},
            "at /l, where logs are gathered, found /c/outputs",
        ),
        ({"volumes": {"/d": "/d"}}, "the job has no image"),
        ({"image": "a", "volumes": {"/d": "/d", "/e": "/d"}}, "a folder of the container twice"),
        ({"image": "a", "volumes": {"d": "/d"}}, "volumes.d"),
        ({"image": "a", "volumes": {"/d": "/d,/e"}}, "volumes./d"),
        ({"env": {"HF_TOKEN": "x"}}, "env has the value of HF_TOKEN"),
        ({"env": {"A": "x"}, "secrets": ["A"]}, "env has the value of A"),
        ({"ports": {"gcs": 6380}}, "overlap at 6380"),
        ({"ports": {"first": 10000}}, "overlap at 1000"),
    ],
)
def test_a_wrong_job_is_refused_by_name(changes, text):
    with pytest.raises(ConfigError, match=text):
        read(checkout="/c", **changes)


@pytest.mark.parametrize("folder", ["/c/outputs", "/c"])
def test_a_job_with_containers_has_a_volume_for_results(folder):
    """On nodes whose containers somebody else has started the volumes are theirs."""
    job = read(checkout="/c", provider="slurm", command=["a"], image="a", volumes={"/d": folder})[0]
    assert job.is_mounted("/c/outputs/run") and not job.is_mounted("/d/outputs")
    assert read(checkout="/c", image="a")[0].provider == "nodes"


def test_a_container_that_is_started_by_hand_has_the_volumes_of_the_example(tmp_path):
    (tmp_path / "docker").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "docker").chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = subprocess.run(
        ["bash", START_CONTAINER], env=env, capture_output=True, text=True, check=True
    ).stdout.split()
    given = [value for option, value in zip(words, words[1:], strict=False) if option == "--volume"]
    volumes = load_job(str(CONFIGS_DIR / "cluster_256die.yaml"), "", {})[0].volumes
    own = ("/usr/local/", "/etc/localtime", "/var/log/npu/")  # of the host's driver
    assert [value for value in given if not value.startswith(own)] == [":".join(pair) for pair in volumes.items()]


def test_env_may_have_words_that_only_look_like_secrets():
    assert read(env={"TOKENIZERS_PARALLELISM": "false"})[0].env


def test_variables_of_public_samples_fill_what_the_file_leaves_out():
    environ = {"NNODES": "4", "DIES_PER_NODE": "8", "SOCKET_IFNAME": "eth1"}
    job, _ = read_job("name: j\n", "job.yaml", environ)
    assert (job.nodes, job.dies, job.interface) == (4, 8, "eth1")
    with pytest.raises(ConfigError, match="has nodes: 2, but NNODES is 4"):
        read(environ)
    assert read({"SOCKET_IFNAME": "eth1"}, interface="eth0")[0].interface == "eth1"  # as the node says
    with pytest.raises(ConfigError, match="NNODES is 'many'"):
        read_job("name: j\n", "job.yaml", {"NNODES": "many"})


def test_secrets_come_from_the_environment_or_the_second_document_and_are_required():
    job, secrets = read({"HF_TOKEN": "s3cret"}, secrets=["HF_TOKEN"])
    assert secrets == {"HF_TOKEN": "s3cret"} and "s3cret" not in as_text(job)
    again, sent = load_job("-", as_text(job, secrets), {})
    assert again == job and sent == secrets
    with pytest.raises(ConfigError, match="needs HF_TOKEN"):
        require_secrets(job, read({}, secrets=["HF_TOKEN"])[1])


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
