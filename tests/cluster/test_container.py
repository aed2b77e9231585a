"""The Dockerfile and the start command come from the pin file and from nowhere else, and hang together."""

import json
import re
import subprocess

import pytest
import yaml
from pydantic import ValidationError

from verl_patches.cluster import container
from verl_patches.cluster.pins import PIN_FILE, Line, load_pins
from verl_patches.errors import ConfigError

INSTRUCTIONS = {"ARG", "FROM", "SHELL", "RUN", "ENV", "COPY", "WORKDIR", "CMD"}
VERSION = re.compile(r"(?<![\w.])v?\d+\.\d+[\w.]*")  # 2.5.1, 3.10, v0.9.1-dev...; not the 3 of python3
A3 = load_pins().line("a3")


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, arguments) with continuation lines joined, as Docker reads them; AssertionError if one is cut."""
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


def changed(*path: str, value: object) -> Line:
    """Line a3 with one value of the pin file replaced."""
    data = A3.model_dump()
    place = data
    for key in path[:-1]:
        place = place[key]
    assert path[-1] in place
    place[path[-1]] = value
    return Line.model_validate(data)


def test_the_kept_dockerfile_is_the_generated_one():
    kept = container.dockerfile_path("a3")
    again = "write it with: python -m verl_patches dockerfile --line a3 --write"
    assert kept == PIN_FILE.parent / "Dockerfile.a3"
    assert kept.is_file() and kept.read_text() == container.dockerfile("a3", A3), f"{kept} is stale; {again}"


def test_it_is_a_dockerfile_and_says_that_it_was_not_built():
    text = container.dockerfile("a3", A3)
    found = instructions(text)
    assert [word for word, _ in found][:2] == ["ARG", "FROM"] and found[-1] == ("CMD", '["/bin/bash"]')
    stages = [rest.rpartition(" AS ")[2] for word, rest in found if word == "FROM"]
    assert stages == ["packages", "base", "apex", "base"]
    for _, rest in found:  # what is read from another stage was made before
        assert set(re.findall(r"(?:--from=|from=)(\w+)", rest)) <= {"packages", "apex"}
    assert "Not built here" in text and "not pinned by hash" in text
    assert ":latest" not in text and not re.search(r"(?i)(password|token|secret)=", text)
    assert "git clone" not in "".join(rest for _, rest in found)


@pytest.mark.parametrize(
    "broken", ["RUN a && \\\n\n  b", "RUN a && \\", "run a", "INSTALL a"], ids=["gap", "cut", "case", "unknown"])
def test_a_broken_dockerfile_would_be_seen(broken):
    with pytest.raises(AssertionError):
        instructions(f"FROM x\n{broken}\n")


def test_every_run_instruction_is_bash():
    runs = [rest for word, rest in instructions(container.dockerfile("a3", A3)) if word == "RUN"]
    for command in (re.sub(r"^(--mount=\S+\s+)+", "", rest) for rest in runs):
        done = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True)
        assert done.returncode == 0, (command, done.stderr)
    assert len(runs) > 8
    assert subprocess.run(["bash", "-n", "-c", "for a in b; do"], capture_output=True).returncode  # the control


def foreign_versions(text: str, line: Line) -> set[str]:
    known = json.dumps(line.model_dump())
    return {found.rstrip(".") for found in VERSION.findall(text) if found.rstrip(".") not in known}


def test_no_version_is_written_anywhere_but_in_the_pin_file():
    text = container.dockerfile("a3", A3)
    assert len(set(VERSION.findall(text))) > 10
    assert foreign_versions(text, A3) == set()
    assert foreign_versions(text + "\nRUN pip install foo==7.8.9", A3) == {"7.8.9"}  # the control
    for name, version in {**A3.packages, **A3.system}.items():
        if "*" not in version and name not in ("driver", "firmware"):  # these two are the host's
            assert version in text, name


@pytest.mark.parametrize("path", [
    ("packages", "torch"), ("packages", "torch_npu"), ("packages", "ray"), ("packages", "vllm"),
    ("packages", "transformers"), ("system", "cann_toolkit"), ("system", "cann_kernels"), ("system", "cann_nnal"),
    ("repositories", "vllm", "version"), ("repositories", "vllm-ascend", "version"),
    ("container", "jemalloc"), ("container", "apex", "url"), ("container", "apex", "ref"),
    ("container", "apex", "base_url"), ("container", "build_libraries"),
], ids="/".join)
def test_a_changed_pin_changes_dockerfile_and_tag(path):
    line = changed(*path, value="9.8.7")
    assert "9.8.7" not in container.dockerfile("a3", A3)
    assert "9.8.7" in container.dockerfile("a3", line)
    assert container.image_tag("a3", line) != container.image_tag("a3", A3)


def test_a_changed_base_image_and_a_hash_of_apex_are_followed():
    text = container.dockerfile("a3", changed("container", "image", value="quay.io/x/y:v9"))
    assert "ARG BASE_IMAGE=quay.io/x/y:v9\n" in text
    text = container.dockerfile("a3", changed("container", "apex", "commit", value="a" * 40))
    assert "git checkout --quiet " + "a" * 40 in text and "(commit " + "a" * 40 in text


def test_the_build_takes_the_python_that_the_tag_has_and_refuses_another(tmp_path):
    """The Dockerfile's own check, with a python3 that answers as the base image's does by the pin file."""
    runs = [rest for word, rest in instructions(container.dockerfile("a3", A3)) if word == "RUN"]
    (check,) = [rest for rest in runs if "python3 --version" in rest]
    tag, other = A3.container.python, next(v for v in A3.python if v != A3.container.python)
    for version, code in ((tag, 0), (other, 1), (f"{tag}1", 1)):
        for name in ("python3", f"python{version}"):
            (tmp_path / name).write_text(f"#!/bin/sh\necho Python {version}.9\n")
            (tmp_path / name).chmod(0o755)
        done = subprocess.run(["/bin/bash", "-c", check], capture_output=True, text=True, env={"PATH": str(tmp_path)})
        assert done.returncode == code, done.stderr
        assert code == 0 or f"BASE_IMAGE has Python {version}.9, expected {tag}: give another" in done.stderr


def test_the_other_python_of_the_line_is_followed_and_a_third_is_refused():
    text = container.dockerfile("a3", changed("container", "python", value="3.10"))
    assert "torch-2.5.1-cp310-cp310-" in text and "--python=3.10" in text and "311" not in text
    with pytest.raises(ValidationError, match=r"container.python is 3.12.*expected one of the line's 3.11, 3.10"):
        changed("container", "python", value="3.12")


@pytest.mark.parametrize("image", ["quay.io/x/y", "quay.io/x/y:latest"])
def test_an_image_without_a_version_is_refused(image):
    with pytest.raises(ValidationError, match="image"):
        changed("container", "image", value=image)


def test_packages_are_installed_in_the_order_that_they_need():
    text = container.dockerfile("a3", A3)
    order = ["--build-context packages=DIR", "cann-toolkit_8.2.RC1_linux-aarch64.run --quiet --install",
             "cann-kernels_8.2.RC1_linux-aarch64.run --quiet", "source /usr/local/Ascend/ascend-toolkit/set_env.sh",
             "cann-nnal_8.2.RC1_linux-aarch64.run --quiet", "source /usr/local/Ascend/nnal/atb/set_env.sh",
             "install /packages/torch-2.5.1-cp311-cp311-", "scripts/build.sh --python=3.11",
             "VLLM_TARGET_DEVICE=empty", "COMPILE_CUSTOM_KERNELS=1", "LD_PRELOAD="]
    places = [text.index(words) for words in order]
    assert places == sorted(places)
    path = re.search(r"^ENV PYTHONPATH=(.*)$", text, re.M).group(1).split(":")
    assert path == [f"/opt/deepseekv3/upstream/{n}" for n in ("verl", "Megatron-LM", "MindSpeed", "MindSpeed-LLM")]


def test_requirements_are_filtered_as_sed_does_it():
    text = "--pre\n# c\ntorch>=2.5.1\ntorchvision<0.21.0\ntorch-npu==1\npytest\npytest-x\ntransformers<4.53.0"
    program = container.without(("torch", "torch-npu", "pytest"))
    done = subprocess.run(["sed", "-E", program], input=text, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["# c", "torchvision<0.21.0", "pytest-x", "transformers<4.53.0"]


def test_missing_packages_are_named_before_anything_is_installed(tmp_path):
    """The build's own first check, run here over a folder that stands for the context."""
    runs = [rest for word, rest in instructions(container.dockerfile("a3", A3)) if word == "RUN"]
    check = next(rest for rest in runs if "for name in" in rest).partition(" ")[2].replace("/packages/", f"{tmp_path}/")
    for name in container.package_files(A3, A3.container):
        done = subprocess.run(["bash", "-c", check], capture_output=True, text=True)
        assert done.returncode == 1 and f"packages has no {name};" in done.stderr
        (tmp_path / name.replace("*", "manylinux_")).touch()
    assert subprocess.run(["bash", "-c", check]).returncode == 0


def test_the_check_at_the_end_of_the_build_is_python_and_compares_with_the_pins():
    text = container.dockerfile("a3", A3)
    code = re.sub(r" *\\\n *", " ", text[text.index('"from importlib') + 1 : text.index('or 0)"') + 5])
    compile(code, "Dockerfile", "exec")
    assert ".line('a3')" in code and "same_version" in code


def test_the_start_command_names_every_device_and_no_more():
    argv = container.start_command("a3", A3)
    devices = [value for option, value in zip(argv, argv[1:], strict=False) if option == "--device"]
    others = ["/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"]
    assert devices == [*(f"/dev/davinci{n}" for n in range(16)), *others]
    assert argv[-2:] == [container.image_tag("a3", A3), "/bin/bash"]
    assert "--privileged" not in argv
    assert "--privileged" in container.start_command("a3", changed("container", "privileged", value=True))
    mounts = {value.split(":")[0] for option, value in zip(argv, argv[1:], strict=False) if option == "--volume"}
    assert mounts >= {"/usr/local/dcmi", "/usr/local/bin/npu-smi", "/usr/local/Ascend/driver",
                      "/var/log/npu/slog/slogd", "/etc/localtime"}
    assert {"--network", "--shm-size", "--ulimit"} <= set(argv)


def test_a_line_without_a_container_is_refused():
    with pytest.raises(ConfigError, match="--line pypi has no container"):
        container.dockerfile("pypi", load_pins().line("pypi"))


@pytest.fixture
def command(run_python):
    code = "import sys\nfrom verl_patches.__main__ import main\nmain()"
    return lambda *args: run_python(code, *args)


def test_the_command(command):
    assert command("dockerfile").check().out == container.dockerfile("a3", A3)
    facts = json.loads(command("dockerfile", "--json").check().out)
    assert facts["built_here"] is False and facts["dockerfile"] == container.dockerfile("a3", A3)
    assert facts["start"] == container.start_command("a3", A3)
    shown = command("dockerfile", "--run").check()
    assert "not built here" in shown.err
    build, start = shown.out.replace("\\\n", " ").strip().split("\n\n")
    assert build.split() == facts["build"] and start.split() == facts["start"]
    refused = command("dockerfile", "--line", "pypi")
    assert refused.rc == 2 and "no container" in refused.err


def test_the_container_is_data_of_the_pin_file():
    raw = yaml.safe_load(PIN_FILE.read_text())["lines"]
    assert "container" in raw["a3"] and "container" not in raw["pypi"]
