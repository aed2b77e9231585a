"""configs/Dockerfile.a3 has the versions of the pin file, its shell commands run, and a container gets every device."""

import os
import re
import subprocess

import pytest
from pydantic import ValidationError

from verl_patches.upstream.pins import PIN_FILE, Line, load_pins

A3 = load_pins().line("a3")
TEXT = (PIN_FILE.parent / "Dockerfile.a3").read_text()
START = PIN_FILE.parents[1] / "scripts" / "start_container.sh"
INSTRUCTIONS = {"ARG", "FROM", "SHELL", "RUN", "ENV", "COPY", "WORKDIR", "CMD"}


def instructions(text):
    """[(instruction, arguments)] with continuation lines joined, as Docker reads them; AssertionError if one is cut."""
    found, open_line = [], ""
    for line in text.splitlines():
        if not open_line and (not line.strip() or line.startswith("#")):
            continue
        assert line.strip(), f"an empty line inside: {open_line}"
        open_line += line.removesuffix("\\")
        if not line.endswith("\\"):
            word, _, rest = open_line.partition(" ")
            assert word in INSTRUCTIONS, open_line
            found.append((word, rest))
            open_line = ""
    assert not open_line, f"cut off: {open_line}"
    return found


FOUND = instructions(TEXT)
RUNS = [re.sub(r"^(--mount=\S+\s+)+", "", rest) for word, rest in FOUND if word == "RUN"]
ARGUMENTS = [rest.partition("=") for word, rest in FOUND if word == "ARG"]
DEFAULTS = {name: value.strip('"') for name, given, value in ARGUMENTS if given}


def pinned():
    """The arguments by the pin file. pip cannot read 0.1*, and the driver is the host's."""
    exact = [f"{name}=={v}" for name, v in A3.packages.items() if "*" not in v.removesuffix(".*")]
    return {
        "BASE_IMAGE": A3.container.image,
        "PIN_PYTHON": A3.container.python,
        "PIN_CANN": A3.system["cann_toolkit"],
        "PIN_TORCH": A3.packages["torch"],
        "PIN_TORCH_NPU": A3.packages["torch_npu"],
        "PIN_VLLM": A3.repositories["vllm"].version,
        "PIN_VLLM_ASCEND": A3.repositories["vllm-ascend"].version,
        "PIN_PACKAGES": exact,
        "APEX_REF": A3.downloads["apex"].commit,
    }


def test_the_arguments_are_the_pins():
    found = {**DEFAULTS, "PIN_PACKAGES": DEFAULTS["PIN_PACKAGES"].split()}
    assert found == pinned()
    assert len({A3.system[name] for name in ("cann_toolkit", "cann_kernels", "cann_nnal")}) == 1  # one argument
    rest = re.sub(r"^(#|ARG ).*\n( +.*\n)*", "", TEXT, flags=re.MULTILINE)  # no version is written a second time
    written = set(re.findall(r"(?<![\w.])\d+\.\d+[\w.]*", rest))
    assert written == {"65.7.0", "77.0.3", "80.0.0", "24.2", "3.26"}  # build tools


def test_the_files_listed_at_the_top_are_those_that_the_build_asks_for(tmp_path):
    """The build's own first check, over a folder that stands for the context."""
    env = {"PATH": os.environ["PATH"], **{name: DEFAULTS[name] for name in DEFAULTS if name != "PIN_PACKAGES"}}
    check = next(rest for rest in RUNS if "for name in" in rest).replace("/packages/", f"{tmp_path}/")
    listed = re.findall(r"^#   (\S+(?:\.run|\.whl|\.git)|apex)(?: .*)?$", TEXT, re.MULTILINE)
    assert len(listed) == 7
    for name in listed:
        done = subprocess.run(["bash", "-c", check], capture_output=True, text=True, env=env)
        assert done.returncode == 1 and f"expected {name}, found none" in done.stderr
        (tmp_path / name.replace("*", "manylinux_")).touch()
    assert subprocess.run(["bash", "-c", check], env=env).returncode == 0


def test_another_python_than_the_argument_is_refused(tmp_path):
    (check,) = [rest for rest in RUNS if "python3 --version" in rest]
    for version, code in (("3.11", 0), ("3.10", 1), ("3.111", 1)):
        for name in ("python3", f"python{version}"):
            (tmp_path / name).write_text(f"#!/bin/sh\necho Python {version}.9\n")
            (tmp_path / name).chmod(0o755)
        env = {"PATH": str(tmp_path), "PIN_PYTHON": A3.container.python}
        done = subprocess.run(["/bin/bash", "-c", check], capture_output=True, text=True, env=env)
        assert done.returncode == code, done.stderr
        assert code == 0 or f"has Python {version}.9, expected 3.11" in done.stderr


def test_stages_and_shell_commands_are_well_formed():
    stages = [rest.rpartition(" AS ")[2] for word, rest in FOUND if word == "FROM"]
    assert stages == ["packages", "base", "apex", "base"] and FOUND[-1] == ("CMD", '["/bin/bash"]')
    for command in RUNS:
        done = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True)
        assert done.returncode == 0, (command, done.stderr)
    declared, used = set(DEFAULTS), set(re.findall(r"\$\{?(PIN_\w+|APEX_REF)", TEXT))
    assert used == declared - {"BASE_IMAGE"}
    assert not re.search(r"(?i)(password|token|secret)=", TEXT) and ":latest" not in TEXT


@pytest.mark.parametrize("broken", ["RUN a && \\\n\n  b", "RUN a && \\", "run a"], ids=["gap", "cut", "case"])
def test_a_broken_dockerfile_would_be_seen(broken):
    with pytest.raises(AssertionError):
        instructions(f"FROM x\n{broken}\n")


def test_the_constraints_file_has_one_package_in_each_line(tmp_path):
    (command,) = [rest for rest in RUNS if "pip-constraints" in rest and "<<<" in rest]
    command = command.replace("/etc/", f"{tmp_path}/")
    subprocess.run(["bash", "-c", command], check=True, env={**os.environ, "PIN_PACKAGES": DEFAULTS["PIN_PACKAGES"]})
    assert (tmp_path / "pip-constraints.txt").read_text().split("\n") == [*pinned()["PIN_PACKAGES"], ""]


def test_every_repository_is_copied_and_installed_or_on_the_path():
    copied = [rest.split()[0] for word, rest in FOUND if word == "COPY" and rest.startswith("upstream/")]
    assert copied == [f"upstream/{name}" for name in A3.repositories]
    path = next(rest for word, rest in FOUND if word == "ENV" and rest.startswith("PYTHONPATH="))
    installed = {name for name, pin in A3.repositories.items() if pin.by_pip}
    on_path = [f"/opt/deepseekv3/upstream/{name}" for name in A3.repositories if name not in installed]
    assert path.removeprefix("PYTHONPATH=").split(":") == on_path
    commands = re.sub(r"\s+", " ", TEXT)
    assert {name for name in A3.repositories if f"--editable upstream/{name}" in commands} == installed


def test_requirements_are_filtered_and_the_last_check_is_python():
    program = re.search(r"sed -E '([^']*)' upstream/vllm-ascend/", TEXT).group(1)
    text = "--pre\n# c\ntorch>=2.5.1\ntorchvision<0.21.0\ntorch-npu==1\ntransformers<4.53.0"
    done = subprocess.run(["sed", "-E", program], input=text, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["# c", "torchvision<0.21.0", "transformers<4.53.0"]
    code = re.search(r'python3 -c "(from importlib.*?or 0\))"', " ".join(RUNS), re.DOTALL).group(1)
    compile(code, "Dockerfile", "exec")


@pytest.mark.parametrize(
    ("key", "value"), [("python", "3.12"), ("image", "quay.io/x/y"), ("image", "quay.io/x/y:latest")]
)
def test_a_python_that_the_line_lacks_and_an_image_without_version_are_refused(key, value):
    data = A3.model_dump()
    data["container"][key] = value
    with pytest.raises(ValidationError, match=key):
        Line.model_validate(data)


def test_a_container_gets_every_device_and_further_options(tmp_path):
    (tmp_path / "docker").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "docker").chmod(0o755)
    command, env = ["bash", str(START), "--volume", "/other:/other"], {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    argv = subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout.splitlines()
    devices = [value for option, value in zip(argv, argv[1:], strict=False) if option == "--device"]
    names = [*(f"davinci{n}" for n in range(16)), "davinci_manager", "devmm_svm", "hisi_hdc"]
    assert devices == [f"/dev/{name}" for name in names]
    mounts = {value for option, value in zip(argv, argv[1:], strict=False) if option == "--volume"}
    assert mounts >= {"/usr/local/Ascend/driver:/usr/local/Ascend/driver:ro", "/data:/data", "/other:/other"}
    assert argv[:2] == ["run", "--interactive"] and argv[-2:] == ["deepseekv3-a3", "/bin/bash"]
    assert "--privileged" not in argv and {"--network", "--shm-size", "--ulimit"} <= set(argv)
