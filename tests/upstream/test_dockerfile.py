"""Test that configs/Dockerfile.a3 has the pinned versions, its commands run, and a container gets every device."""

import os
import re
import subprocess

import pytest

from verl_patches.upstream.pins import PIN_FILE, load_pins

A3 = load_pins().line("a3")
TEXT = (PIN_FILE.parent / "Dockerfile.a3").read_text()
START = PIN_FILE.parents[1] / "scripts" / "start_container.sh"
LOCK = PIN_FILE.parent / "requirements-a3.txt"
INSTRUCTIONS = {"ARG", "FROM", "SHELL", "RUN", "ENV", "COPY", "WORKDIR", "ENTRYPOINT", "CMD"}


# [(instruction, arguments)], continuation lines joined
LINES = re.sub(r"^#.*\n", "", TEXT, flags=re.MULTILINE).replace("\\\n", "").splitlines()
FOUND = [(line.partition(" ")[0], line.partition(" ")[2]) for line in LINES if line]
RUNS = [re.sub(r"^(--mount=\S+\s+)+", "", rest) for word, rest in FOUND if word == "RUN"]
ARGUMENTS = [rest.partition("=") for word, rest in FOUND if word == "ARG"]
DEFAULTS = {name: value.strip('"') for name, given, value in ARGUMENTS if given}


def test_the_arguments_are_the_pins():
    runbook = (PIN_FILE.parents[1] / "docs" / "256-die-runbook.md").read_text()
    (apex,) = re.findall(r"packages/apex checkout --quiet (\w{40})", runbook)
    pinned = {"BASE_IMAGE": A3.container.image, "PIN_PYTHON": A3.container.python, "APEX_REF": apex}
    pinned |= {"PIN_VLLM": A3.repositories["vllm"].version, "PIN_VLLM_ASCEND": A3.repositories["vllm-ascend"].version}
    assert DEFAULTS == pinned | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert A3.container.python in A3.python
    cann = {A3.system[name] for name in ("cann_toolkit", "cann_kernels", "cann_nnal")}
    name, _, tag = A3.container.image.rpartition(":")
    assert name.endswith("/cann") and {tag.split("-")[0]} == {version.lower() for version in cann} and "-a3-" in tag
    assert tag.endswith(f"-py{A3.container.python}")


def test_no_run_loads_torch_npu_without_a_driver():
    """Check this because `import torch` would; an ARG is set in its stage's later RUNs and in stages FROM it."""
    argument = FOUND.index(("ARG", "TORCH_DEVICE_BACKEND_AUTOLOAD=0"))
    before, after = FOUND[:argument], FOUND[argument:]
    assert [rest.rpartition(" AS ")[2] for word, rest in before if word == "FROM"][-1] == "base"
    assert "RUN" not in dict(before) and {rest.partition(" ")[0] for word, rest in after if word == "FROM"} == {"base"}
    assert not any("AUTOLOAD" in rest for word, rest in FOUND if word == "ENV")  # processes of a container load it


def test_stages_and_shell_commands_are_well_formed():
    assert {word for word, _ in FOUND} <= INSTRUCTIONS
    for command in RUNS:
        done = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True)
        assert done.returncode == 0, (command, done.stderr)
    used = set(re.findall(r"\$\{?(PIN_\w+|APEX_REF)", TEXT))
    assert used == set(DEFAULTS) - {"BASE_IMAGE", "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    assert not re.search(r"(?i)(password|token|secret)=", TEXT) and ":latest" not in TEXT


def test_pip_installs_the_lock_and_what_its_build_needs_first():
    (command,) = [rest for rest in RUNS if "/tmp/requirements-a3.txt" in rest]
    assert ("COPY", "configs/requirements-a3.txt /tmp/requirements-a3.txt") in FOUND
    first = command.partition(" | ")[0].replace("/tmp/requirements-a3.txt", str(LOCK))
    done = subprocess.run(["bash", "-c", first], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert [line.partition("==")[0] for line in lines if line[0] != " "] == ["setuptools", "wheel"]
    assert len(lines) == 2 + done.stdout.count("--hash=sha256:") > 3
    installs = [part for rest in RUNS for part in re.split(r"&&|\|", rest) if "pip install" in part]
    assert len(installs) == 8 and all("--no-deps" in part for part in installs)  # the lock file lists all dependencies


def test_every_bash_of_a_container_has_canns_environment(tmp_path):
    """Run the RUN that writes it, over a folder that stands for the root."""
    (write,) = [rest for rest in RUNS if "DEEPSEEKV3_ENV" in rest]
    for name in ("usr/local/Ascend/ascend-toolkit", "usr/local/Ascend/nnal/atb", "etc/profile.d"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "usr/local/Ascend/ascend-toolkit/set_env.sh").write_text("export TOOLKIT=1\n")
    asked = "export NNAL=1 ASKED=$(printenv TORCH_DEVICE_BACKEND_AUTOLOAD)\n"
    (tmp_path / "usr/local/Ascend/nnal/atb/set_env.sh").write_text(asked)
    for name in ("etc/profile", ".bashrc"):  # contents as in the base image
        (tmp_path / name).write_text(f"export KEPT=1\nsource {tmp_path}/usr/local/Ascend/nnal/atb/set_env.sh\n")
    write = re.sub(r"(?<![\w.$])/(?=usr|etc)", f"{tmp_path}/", write)
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    subprocess.run(["bash", "-c", write], check=True, env=env)
    profile = tmp_path / "etc/profile.d/deepseekv3.sh"
    assert (tmp_path / "etc/profile").read_text() == "export KEPT=1\n"
    assert (tmp_path / ".bashrc").read_text() == f"export KEPT=1\nsource {profile}\n"
    show = 'echo "$TOOLKIT $NNAL $ASKED ${TORCH_DEVICE_BACKEND_AUTOLOAD-unset} $LD_LIBRARY_PATH"'
    done = subprocess.run(["bash", "-c", show], capture_output=True, text=True, env={**env, "BASH_ENV": str(profile)})
    driver = f"{tmp_path}/usr/local/Ascend/driver/lib64"
    assert done.stdout == f"1 1 0 unset {driver}/common:{driver}/driver:\n", done.stderr


def test_every_repository_is_copied_and_installed_or_on_the_path():
    copied = [rest.split()[0] for word, rest in FOUND if word == "COPY" and rest.startswith("upstream/")]
    assert copied == [f"upstream/{name}" for name in A3.repositories]
    path = next(rest for word, rest in FOUND if word == "ENV" and rest.startswith("PYTHONPATH="))
    installed = {name for name, pin in A3.repositories.items() if pin.by_pip}
    on_path = [f"/opt/deepseekv3/upstream/{name}" for name in A3.repositories if name not in installed]
    assert path == f"PYTHONPATH={':'.join(on_path)}${{PYTHONPATH:+:$PYTHONPATH}}"  # CANN's Python packages stay
    commands = re.sub(r"\s+", " ", TEXT)
    assert {name for name in A3.repositories if f"--editable upstream/{name}" in commands} == installed


@pytest.mark.parametrize("dies", [16, 8])
def test_a_container_gets_every_device_and_further_options(tmp_path, dies):
    (tmp_path / "docker").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "docker").chmod(0o755)
    command, env = ["bash", str(START), "--volume", "/other:/other"], {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    env |= {} if dies == 16 else {"DIES_PER_NODE": str(dies)}
    argv = subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout.splitlines()
    devices = [value for option, value in zip(argv, argv[1:], strict=False) if option == "--device"]
    names = [*(f"davinci{n}" for n in range(dies)), "davinci_manager", "devmm_svm", "hisi_hdc"]
    assert devices == [f"/dev/{name}" for name in names]
    mounts = {value for option, value in zip(argv, argv[1:], strict=False) if option == "--volume"}
    assert mounts >= {"/usr/local/Ascend/driver:/usr/local/Ascend/driver:ro", "/data:/data", "/other:/other"}
    assert argv[:2] == ["run", "--interactive"] and argv[-2:] == ["deepseekv3-a3", "/bin/bash"]
    assert "--privileged" not in argv and {"--network", "--shm-size", "--ulimit"} <= set(argv)
