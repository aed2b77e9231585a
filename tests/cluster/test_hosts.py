"""What reaches several hosts from one place; ssh and docker are programs of the test."""

import io
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from verl_patches.cluster import hosts as over_ssh
from verl_patches.cluster import node
from verl_patches.cluster.hosts import Hosts, unsaved
from verl_patches.cluster.job import Job
from verl_patches.config.environment import REPOSITORY
from verl_patches.errors import ConfigError, RecipeError

LOGS = Path("/dev/null/logs")  # where none can be written
BASE = {"name": "j", "dies": 16, "wait_s": 0.1}
VOLUMES = {"/data/j": f"{REPOSITORY}/outputs"}


def hosts(ssh, **changes):
    named = {"hosts": ["10.0.0.1", "10.0.0.2"], "ssh": {"command": [str(ssh)]}, "python": sys.executable}
    if changes.get("image"):
        named["volumes"] = VOLUMES
    return Hosts(Job(**{**BASE, "nodes": 2, "provider": "ssh", **named, **changes}), {})


def alone(program, **changes):
    """One host with containers, whose `ssh` runs each line here."""
    ssh = program("ssh", 'bash -c "$2"')
    return hosts(ssh, **{"image": "a3", "nodes": 1, "hosts": ["10.0.0.1"], **changes})


def fault_of(made):
    """The lines of the error of `up`."""
    with pytest.raises(RecipeError) as raised:
        made.up(lambda text: None, LOGS)
    return str(raised.value).splitlines()


def test_every_host_gets_the_job_its_rank_and_the_secrets_on_standard_input_alone(program, tmp_path):
    ssh = program("ssh", f"cat > {tmp_path}/$1.stdin")
    made = hosts(ssh, secrets=["HF_TOKEN"])
    made.secrets = {"HF_TOKEN": "s3cret"}
    made.up(lambda text: None, LOGS)
    assert "s3cret" not in program.calls() and program.calls().count("cluster up - --node-rank") == 2
    for host in made.job.hosts:
        job, secrets = yaml.safe_load_all((tmp_path / f"{host}.stdin").read_text())
        assert Job(**job).provider == "nodes" and secrets == {"secrets": {"HF_TOKEN": "s3cret"}}


def test_nothing_is_started_anywhere_where_a_host_is_not_reached(program):
    ssh = program("ssh", '[ "$1" = 10.0.0.1 ] || { echo "no route" >&2; exit 255; }')
    assert fault_of(hosts(ssh))[1:] == ["  node 1 (10.0.0.2): no route"]
    assert "cluster up" not in program.calls()


@pytest.mark.parametrize(
    ("where", "said", "code", "ended"),
    [
        ("10.0.0.2", "no route", 255, {"10.0.0.1", "10.0.0.2"}),
        ("10.0.0.2", "job other is up", 2, {"10.0.0.1"}),  # that host is left alone
        ("10.0.0.2", f"{node.ALREADY}, but lost raylet", 1, set()),  # what an earlier `up` has started
        ("10.0.0.*", "another command is at work in /tmp/x", 2, set()),  # beside another `up`
    ],
)
def test_a_host_whose_up_fails_is_named_and_those_that_it_began_on_are_ended(program, where, said, code, ended):
    fails = f'[[ "$1" != {where} || "$2" != *"cluster up"* ]] || {{ echo "{said}" >&2; exit {code}; }}'
    with pytest.raises(RecipeError, match=rf"nodes? (0,)?1.*: {said}"):
        hosts(program("ssh", fails)).up(lambda text: None, LOGS)
    downs = [line.split() for line in program.calls().splitlines() if "cluster down" in line]
    assert {words[1] for words in downs} == ended
    assert [words[-1] for words in downs].count("none") == len(ended)  # once their logs are here


def test_what_profiles_print_is_no_output_of_a_host(program, tmp_path):
    """A shell's profile prints before each line; the control is a host whose line prints no mark."""
    archive = tmp_path / "made.tar"
    with tarfile.open(archive, "w:gz") as made:
        made.add(__file__, "node-0/a.log")
    python = program(
        "python3.x",
        f"""case "$*" in *status*) echo '{{"rows": []}}';; *down*) cat {archive};;
        *follow*) [[ "$*" != *"skip 0"* ]] && echo cd || {{ echo ab; exit 255; }};; esac""",
    )
    ssh = program("ssh", 'echo "Welcome, loading modules"; bash -c "$2"')
    one = hosts(ssh, hosts=["10.0.0.1"], nodes=1, python=str(python), checkout=str(tmp_path))
    assert one.status() == []
    assert one.down(tmp_path / "logs") == [] and (tmp_path / "logs" / "node-0" / "a.log").exists()
    to = io.BytesIO()
    one._followed(to, lambda text: None, "follow", "--skip", "0")
    assert to.getvalue() == b"ab\ncd\n" and "--skip 3" in program.calls()
    program("ssh", 'echo "Welcome, loading modules"')
    (row,) = one.status()
    assert row.state == "problem" and row.found == "no report"


def test_new_containers_are_removed_where_up_fails_and_old_ones_are_not(program, monkeypatch):
    program(
        "docker",
        'case "$*" in *"container inspect"*) [ -n "$LABEL" ] && echo j $DIGEST;; start*) echo j;; run*) echo 1f;;\n'
        "ps*) echo 1f;; exec*) exit 2;; esac",
    )
    made = alone(program)
    fault_of(made)
    assert program.docker().count("docker rm --force 1f") == 1
    monkeypatch.setenv("LABEL", "j")
    monkeypatch.setenv("DIGEST", made.job.digest)
    fault_of(made)
    assert program.docker().count("docker rm --force 1f") == 1
    program("docker", 'case "$*" in *"container inspect"*) exit 1;; run*) echo "no space left" >&2; exit 125;; esac')
    assert fault_of(made)[-1].endswith("no space left")
    assert program.docker()[-1] == "docker rm j"  # the one that was made and did not start


def test_a_command_that_was_not_reached_is_started_and_no_older_one_followed(program, tmp_path, monkeypatch):
    """The first connection fails. The control is one that is lost once the command has begun."""
    monkeypatch.setattr(over_ssh, "RECONNECT_EVERY_S", 0.01)
    begun = f'echo "{over_ssh.BEGINS}"; {{}}'
    fails = f"[ -e {tmp_path}/tried ] || {{ touch {tmp_path}/tried; exit {over_ssh.SSH_FAILED}; }}"
    ssh = program(
        "ssh",
        f"""case "$2" in *--run*) {fails}; {begun.format("echo new; exit 3")};;
        *follow*) {begun.format("echo old")};; esac""",
    )
    to, said = io.BytesIO(), []
    assert hosts(ssh).run(to, said.append) == 3 and to.getvalue() == b"new\n"
    assert program.calls().count("--run") == 2
    assert said == ["no connection to node 0 (10.0.0.1); trying again"]
    program("ssh", f"""{begun.format('case "$2" in *--run*) exit 255;; *follow*) echo rest;; esac')}""")
    to = io.BytesIO()
    assert hosts(ssh).run(to, said.append) == 0 and to.getvalue() == b"rest\n"
    assert said[1:] == ["the connection to node 0 (10.0.0.1) is lost; the command goes on; trying again"]
    monkeypatch.setattr(over_ssh, "RECONNECT_S", 0.0)
    with pytest.raises(RecipeError, match="not started: cluster up --run again"):
        hosts(program("ssh", "exit 255")).run(to, said.append)


def test_connections_that_are_made_and_lost_while_the_command_is_silent_are_no_lost_host(
    program, tmp_path, monkeypatch
):
    monkeypatch.setattr(over_ssh, "RECONNECT_S", 0.0)
    monkeypatch.setattr(over_ssh, "RECONNECT_EVERY_S", 0.01)
    lost = f'[[ -e {tmp_path}/tried || "$2" != *follow* ]] || {{ touch {tmp_path}/tried; exit 255; }}'
    ssh, to = program("ssh", f'echo "{over_ssh.BEGINS}"; {lost}; echo rest'), io.BytesIO()
    assert hosts(ssh).follow(to, lambda text: None) == 0 and to.getvalue() == b"rest\n"


@pytest.mark.parametrize(
    ("marked", "ended", "code", "output"), [(False, 255, 3, b"new\n"), (True, 255, 255, b""), (True, 0, 0, b"newest\n")]
)
def test_no_older_command_is_followed_where_the_connection_is_lost_before_the_start(
    program, monkeypatch, tmp_path, marked, ended, code, output
):
    """Without the node's mark the newest command is an older one. The controls are connections lost after it."""
    monkeypatch.setattr(over_ssh, "RECONNECT_EVERY_S", 0.01)
    mark, first = f'echo "{over_ssh.BEGINS}"', f"{tmp_path}/first"
    python = program(
        "python3.x",
        f"""case "$*" in *--run*) [ -e {first} ] || {{ touch {first}; {mark if marked else "true"}; exit 255; }}
        {mark}; echo new; exit 3;; *follow*) echo newest;;
        *status*) echo '{{"rows": [{{"name": "command", "found": "ended with exit code {ended}"}}]}}';; esac""",
    )
    ssh, to = program("ssh", 'bash -c "$2"'), io.BytesIO()
    made = hosts(ssh, hosts=["10.0.0.1"], nodes=1, python=str(python), checkout=str(tmp_path))
    assert (made.run(to, lambda text: None), to.getvalue()) == (code, output)


def test_hosts_with_the_same_fault_are_one_line(program):
    said = 'echo "ssh: connect to host $1 port 22: Connection timed out" >&2'
    ssh = program("ssh", f'if [ "$1" = node-7 ]; then echo "no route" >&2; else {said}; fi; exit 255')
    names = [f"node-{number}" for number in range(16)]
    _, many, one = fault_of(hosts(ssh, image="a3", nodes=16, hosts=names))
    assert "nodes 0,1,2,3,4,5,6,8,9,10,11,12,13,14,15: " in many and "node 7 (node-7): no route" in one


def test_the_head_is_the_jobs_first_host_whatever_a_node_has_in_its_environment(program, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "10.9.9.9")  # of an image, or of an earlier job
    assert "its address 10.0.0.1 is none of this machine" in fault_of(alone(program, image=None))[-1]


def test_containers_are_started_by_the_script_and_only_those_are_removed(program, tmp_path):
    program("docker", 'case "$*" in "container inspect"*) exit 1;; ps*) echo abc;; esac')
    made = alone(program, image="registry/a3:1")
    made.up(lambda text: None, LOGS)
    calls = program.docker()
    (started,) = (line for line in calls if line.startswith("docker run"))
    labels = f"--label verl_patches.job=j --label verl_patches.digest={made.job.digest}"
    assert "--name j " in started and f"{labels} registry/a3:1" in started
    assert any(line.startswith("docker exec -i j bash -lc") for line in calls)
    assert made.down(tmp_path / "logs") == []
    assert f"--volume /data/j:{REPOSITORY}/outputs " in started and "/data:/data" not in started
    assert "docker ps --all --quiet --filter label=verl_patches.job=j\ndocker rm --force abc" in program.calls()


@pytest.mark.parametrize(
    ("label", "image", "fault"),
    [
        ("j", "a3:1", None),
        ("other", "a3:1", "that cluster up did not start"),
        ("j", "a3:2", "another image or job file"),
    ],
)
def test_a_container_of_somebody_else_or_of_another_image_is_left_alone(program, monkeypatch, label, image, fault):
    made = {name: alone(program, image=name) for name in ("a3:1", image)}
    monkeypatch.setenv("LABELS", f"{label} {made['a3:1'].job.digest}")
    program("docker", 'if [[ "$*" = "container inspect"* ]]; then echo "$LABELS"; fi')
    if fault is None:
        made[image].up(lambda text: None, LOGS)
        assert "docker start j" in program.docker()
    else:
        assert fault in fault_of(made[image])[-1]
        assert "docker start j" not in program.docker()
    assert not [line for line in program.docker() if line.startswith(("docker run", "docker rm"))]


def test_the_container_of_a_host_whose_logs_did_not_arrive_stays(program, tmp_path, monkeypatch):
    """Three hosts: one with logs, one whose archive is cut, one without a container."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as made:
        made.add(__file__, "node-0/a.log")
    (tmp_path / "10.0.0.1.tar").write_bytes(archive.getvalue())
    (tmp_path / "10.0.0.2.tar").write_bytes(archive.getvalue()[:40])
    program(
        "docker",
        f"""case "$*" in ps*) [ "$HOST" = 10.0.0.3 ] || echo "$HOST";;
        exec*) echo "{over_ssh.BEGINS}"; cat {tmp_path}/$HOST.tar;; esac""",
    )
    ssh = program("ssh", 'HOST=$1 bash -c "$2"')
    (fault,) = hosts(ssh, image="a3", nodes=3, hosts=["10.0.0.1", "10.0.0.2", "10.0.0.3"]).down(tmp_path / "logs")
    assert fault.startswith("node 1 (10.0.0.2): its logs: expected a tar archive, found 40 bytes")
    removed = [line for line in program.docker() if line.startswith("docker rm")]
    assert removed == ["docker rm --force 10.0.0.1"] and (tmp_path / "logs" / "node-0" / "a.log").exists()
    execs = [line.rpartition(" --node-rank ")[2] for line in program.docker() if line.startswith("docker exec")]
    assert sorted(execs) == ["0 --logs -", "0 --logs none", "1 --logs -"]  # files go when their copy has arrived
    assert program.docker().count("docker start j") == 3  # a stopped one is started for its logs
    program("docker", 'case "$*" in ps*) exit 1;; esac')  # its daemon does not answer
    (fault,) = hosts(ssh, image="a3").down(None)
    assert fault.startswith("nodes 0,1: ")


@pytest.fixture
def container(program, tmp_path):
    """A folder that stands for what a container has written beside its image; `docker rm` deletes it."""
    layer, outputs = tmp_path / "layer", tmp_path / "layer" / f"{REPOSITORY}/outputs".lstrip("/")
    outputs.mkdir(parents=True)  # Docker makes the places of mounts there
    program(
        "docker",
        f"""case "$*" in ps*) [ ! -d {layer} ] || echo 1f;; diff*) cd {layer} && find . -mindepth 1 -printf 'A /%P\n';;
        *"container inspect"*) exit 1;; inspect*) echo "M {REPOSITORY}/outputs";; "rm --force"*) rm -r {layer};;
        exec*) ;; esac""",
    )
    return layer


def written(layer, path):
    file = layer / (path if path.startswith("/") else f"{REPOSITORY}/{path}").lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("of a run")
    return file


@pytest.mark.parametrize(
    "path",
    [
        "checkpoints/global_step_8/manifest.json",  # a relative trainer.default_local_dir
        "/tmp/checkpoints/global_step_8/rank_0/model.safetensors",
    ],
)
def test_down_does_not_delete_a_container_that_holds_files_of_a_user(program, container, path):
    file = written(container, path)
    (fault,) = alone(program).down(None)
    assert file.exists() and not any(line.startswith("docker rm") for line in program.docker())
    assert "container j holds /" in fault
    assert any(line.startswith("docker exec") for line in program.docker())  # what ran has been ended


def test_down_deletes_a_container_whose_files_are_those_of_programs_or_in_volumes(program, container):
    """The control: Ray's folder, compiled Python and operators, logs that `down` gathers, and a mount's own folder."""
    for path in (
        "/tmp/verl_patches_cluster/ray/session_1/runtime_resources/a.parquet",
        "verl_patches/__pycache__/errors.cpython-311.pyc",
        "kernel_meta_7/op.o",
        "check_result.json",
        "/home/me/ascend/log/debug/plog/plog-1.log",
        "/home/me/.cache/torch_extensions/op.so",
        "/tmp/plan.txt",
        "/usr/lib/python3.11/site-packages/extra.py",
    ):
        written(container, path)
    assert alone(program).down(None) == []
    assert not container.exists()


def test_what_to_copy_out_of_a_container_is_its_new_folder_or_a_changed_file(program):
    changes = "C /opt\nC /opt/r\nA /opt/r/ckpt\nA /opt/r/ckpt/a.pt\nA /opt/r/ckpt/b.pt\nC /opt/r/configs\n"
    changes += "C /opt/r/configs/a.yaml\nC /opt/r/data\nD /opt/r/data/old.json\nWelcome to /etc\n"
    job = hosts(program("ssh", "exit 1"), image="a3", checkout="/opt/r", volumes={"/data/o": "/opt/r/outputs"}).job
    assert unsaved(job, changes) == ["/opt/r/ckpt", "/opt/r/configs/a.yaml"]
    assert unsaved(job, changes + "M /opt/r\n") == []


def test_a_container_whose_changes_are_not_known_stays(program, container):
    written(container, "/tmp/plan.txt")
    program("docker", 'case "$*" in ps*) echo 1f;; diff*) echo "no such driver" >&2; exit 1;; esac')
    (fault,) = alone(program).down(None)
    assert "no such driver" in fault and container.exists()


def test_an_ssh_that_is_not_installed_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no-ssh is not installed here"):
        hosts(tmp_path / "no-ssh").run(io.BytesIO(), lambda text: None)
