"""Test the job file: strict, secrets by name only, completed by the variables of public samples; and the port plan."""

import json
import subprocess
from contextlib import nullcontext

import pytest
import yaml
from typer.testing import CliRunner

from verl_patches.__main__ import app
from verl_patches.errors import ConfigError
from verl_patches.launch.jobs.job import load_job, require_volumes
from verl_patches.launch.jobs.render import START_CONTAINER
from verl_patches.run.compose import CONFIGS_DIR
from verl_patches.run.ray_nodes import RayPorts, ray_start

SMALL = {"name": "j", "nodes": 2, "dies": 16}


@pytest.fixture
def read(tmp_path):
    """Return read(**keys), which reads a job file in `tmp_path`; a key with None is left out."""

    def made(**changes):
        given = {key: value for key, value in {**SMALL, **changes}.items() if value is not None}
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(given))
        return load_job(tmp_path / "job.yaml")

    return made


def test_the_example_is_a_job_of_256_dies():
    job = load_job(CONFIGS_DIR / "cluster_256die.yaml")
    assert job.nodes * job.dies == 256 and len(job.hosts) == job.nodes


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"nodes": None, "node": 2}, "nodes: Field required; node: Extra inputs"),
        ({"provider": "ssh", "hosts": ["10.0.0.1"]}, "hosts has 1 addresses, expected 2, one for each node"),
        ({"provider": "kubernetes"}, "image is missing"),
        ({"image": "a", "volumes": {"/d": "/d,/e"}}, "volumes./d"),
        ({"env": {"MODEL": "hf_" + "x" * 30}}, "env has the value of MODEL"),
        ({"command": ["a"], "uploads": [{"from": "o", "to": "ftp://u:pass@b/x"}]}, "1 addresses have a password"),
        ({"image": "${oc.env:NONE}"}, "variable 'NONE' not found"),
        ({"folder": "/x/${oc.env:HF_TOKEN}"}, "HF_TOKEN is a secret"),
        ({"secrets": 5, "folder": "/x/${HOME}"}, r"write \$\{oc.env:HOME\} in place of"),
        ({"folder": "~/x"}, "folder: String should match"),
        ({"slurm": {"partition": "a\n#SBATCH --uid=0"}}, "slurm.partition"),
        ({"ssh": {"user": "-oProxyCommand=x"}}, "ssh.user"),
        ({"nodes": 2, "provider": "ssh", "hosts": ["a", "a"]}, "hosts has an address twice"),
        ({"command": ["a"], "uploads": [{"from": "o", "to": f"s3://b{end}"} for end in ("", "/")]}, "the same target"),
        ({"image": "a", "volumes": {"/d": "/x", "/e": "/x"}}, "volumes mounts two folders"),
        ({"ports": {"gcs": 6380}}, "overlap at 6380"),
        ({"command": ["a\x1b"]}, "command.0"),
    ],
)
def test_a_wrong_job_is_refused_by_name(read, changes, text):
    with pytest.raises(ConfigError, match=text) as error:
        read(**{"checkout": "/c", **changes})
    assert "xxxxx" not in str(error.value)


IN_DATA = {"provider": "kubernetes", "volumes": {"/data": "/data"}, "logs": "/data/logs"}


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"volumes": {"/d": "/c/outputs"}}, None),
        ({"provider": "nodes"}, None),  # the user starts the containers, with volumes of their own
        ({}, "at /c/outputs, where runs write, found none"),
        ({"volumes": {"/d": "/c/outputs"}, "logs": "/l"}, "at /l, where logs are written, found /c/outputs"),
        ({"volumes": {"/d": "/c/outputs"}, "command": ["train", "recipe.output_root=/r/x"]}, "at /r/x, "),
        ({**IN_DATA, "command": ["train", "recipe.output_root=/data/x"]}, None),
        # the run itself checks a folder that is unknown here
        ({**IN_DATA, "command": ["train", "recipe.output_root=$X"]}, None),
    ],
)
def test_a_job_with_containers_has_a_volume_for_results_and_logs(read, changes, fault):
    job = read(**{"checkout": "/c", "provider": "slurm", "image": "a", "command": ["a"], **changes})
    with pytest.raises(ConfigError, match=fault) if fault else nullcontext():
        require_volumes(job)


def test_a_container_that_is_started_by_hand_has_the_volumes_of_the_example(program):
    program("docker", "")
    subprocess.run(["bash", START_CONTAINER], check=True)
    words = program.calls().split()
    given = [value for option, value in zip(words, words[1:], strict=False) if option == "--volume"]
    volumes = load_job(CONFIGS_DIR / "cluster_256die.yaml").volumes
    own = ("/usr/local/", "/etc/localtime", "/var/log/npu/")  # folders of the host's driver
    assert [value for value in given if not value.startswith(own)] == [":".join(pair) for pair in volumes.items()]


def test_commands_of_several_lines_and_names_that_only_look_like_secrets_are_taken(read):
    assert read(command=["bash", "-c", "a\nb"]).command[2] == "a\nb"
    names = {"TOKENIZERS_PARALLELISM": "false", "HF_TOKEN_PATH": "/run/secrets/hf"}
    assert read(env=names, command=["train", "data.prompt_key=prompt", "+data.x=$HF_TOKEN"]).env == names


def test_a_job_takes_variables_of_the_environment_and_its_command_keeps_its_own(read, monkeypatch):
    for name, value in {"ROOT": "/models", "IMAGE": "a3:1", "NNODES": "4"}.items():
        monkeypatch.setenv(name, value)
    job = read(
        nodes=None,
        replica_count="${oc.decode:${oc.env:NNODES}}",
        image="registry/${oc.env:IMAGE}",
        volumes={"${oc.env:ROOT}": "/models"},
        env={"HF_HOME": "${oc.env:ROOT}/hub"},
        command=["bash", "-c", "echo $HOME/${ROOT}"],
    )
    assert (job.nodes, job.image, job.volumes) == (4, "registry/a3:1", {"/models": "/models"})
    assert job.env == {"HF_HOME": "/models/hub"} and job.command[2] == "echo $HOME/${ROOT}"


def test_render_says_what_starts_the_job_and_writes_over_no_other_files(tmp_path):
    words = ["cluster", "render", str(CONFIGS_DIR / "cluster_256die.yaml"), "-o", str(tmp_path / "made"), "--json"]
    for _ in range(2):
        done = CliRunner().invoke(app, words)
        assert json.loads(done.stdout)["start"].startswith(f"bash {tmp_path}/made/up.sh")
    (tmp_path / "made" / "job.sh").unlink()
    assert "found other files" in str(CliRunner().invoke(app, words).exception)


def test_ray_start_gives_every_service_a_port_of_its_own_and_the_dashboard_the_loopback():
    ports = RayPorts(gcs=7000, first=7001, workers=(7100, 7199))
    head = ray_start("10.0.0.1", "10.0.0.1", True, {"NPU": 16}, ports, dashboard=True)
    given = [int(word.rpartition("=")[2]) for word in head if word.rpartition("=")[2].isdigit()]
    assert sorted(given) == sorted({port for span in ports.spans().values() for port in span})
    assert "--dashboard-host=127.0.0.1" in head
