"""Upstream trees: found or refused by name, on the path before anything installed, and told in the summary."""

import os
import re
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest

from verl_patches.config.compose import compose
from verl_patches.config.environment import REPOSITORY, derive
from verl_patches.errors import ConfigError
from verl_patches.launch.plan import commands
from verl_patches.upstream import checkouts
from verl_patches.upstream.checkouts import Trees, require_trees, require_verl, trees_of, verl_check, verl_config_dir

PACKAGES = {"verl": "verl", "Megatron-LM": "megatron", "MindSpeed": "mindspeed", "MindSpeed-LLM": "mindspeed_llm"}


@pytest.fixture
def upstream(tmp_path):
    for name, package in PACKAGES.items():
        (tmp_path / name / package).mkdir(parents=True)
    return tmp_path


def config(line="a3", platform="cpu"):
    return SimpleNamespace(recipe=SimpleNamespace(line=line, platform=platform))


def test_the_repositories_that_pip_does_not_install_in_the_pin_files_order(upstream):
    found = trees_of(upstream)
    assert found.folders == tuple(upstream / name for name in PACKAGES) and found.verl == upstream / "verl"
    assert found.option == ("--upstream", str(upstream))


def test_a_folder_that_lacks_one_is_refused_with_what_to_do(upstream):
    (upstream / "MindSpeed" / "mindspeed").rmdir()
    with pytest.raises(ConfigError, match=r"found no MindSpeed/mindspeed; bash scripts/fetch_upstream.sh"):
        trees_of(upstream)


def test_a_verl_alone_and_nothing_at_all(tmp_path):
    assert trees_of(None, tmp_path) == Trees(("--verl-path", str(tmp_path)), (tmp_path,), tmp_path)
    assert trees_of() == Trees()


def test_two_verls_are_refused(upstream):
    with pytest.raises(ConfigError, match="expected one of them, found both"):
        trees_of(upstream, upstream)


@pytest.mark.parametrize(
    ("given", "line", "platform", "words"),
    [
        (True, "pypi", "cpu", "recipe.line is pypi"),
        (False, "a3", "cpu", "fetch_upstream.sh"),
        (True, "a3", "cpu", None),
        (False, "pypi", "cpu", None),
        (False, "a3", "npu", None),
    ],
)
def test_line_and_trees_go_together(upstream, given, line, platform, words):
    trees = trees_of(upstream) if given else trees_of()
    if words is None:
        require_trees(config(line, platform), trees)
    else:
        with pytest.raises(ConfigError, match=words):
            require_trees(config(line, platform), trees)


def test_trees_come_before_what_is_installed_and_after_this_checkout(upstream, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(REPOSITORY), "/users/own", "/users/own"]))  # each once
    composed, trees = compose("grpo_deepseekv3_tiny_cpu"), trees_of(upstream)
    path = next(v for v in derive(composed, trees=trees) if v.name == "PYTHONPATH")
    wanted = [REPOSITORY, *trees.folders, "/users/own"]
    assert path.value.split(os.pathsep) == [str(p) for p in wanted] and path.where == "driver"
    printed = commands(composed, "grpo_deepseekv3_tiny_cpu", (), trees)[0]["command"]
    assert f"--upstream {upstream}" in printed and f"{upstream}/Megatron-LM" in printed


FOUND = """
import importlib.util, sys
for name in sys.argv[1:]:
    print(name, (importlib.util.find_spec(name) or sys).__dict__.get("submodule_search_locations"))
"""


@pytest.mark.parametrize("given", [True, False], ids=["upstream", "image"])
def test_a_printed_command_finds_the_trees_and_all_that_the_image_has_on_its_path(upstream, tmp_path, given):
    """What stands before `ray start`, as a shell takes it, put before python: packages come from where they should."""
    image = tmp_path / "image"
    for package in (*PACKAGES.values(), "vllm_of_the_image"):
        (image / package).mkdir(parents=True)
        (image / package / "__init__.py").touch()
    for name, package in PACKAGES.items():
        (upstream / name / package / "__init__.py").touch()
    trees = trees_of(upstream) if given else trees_of()
    config = compose("grpo_deepseekv3_256die_true_weight")
    for printed in commands(config, "grpo_deepseekv3_256die_true_weight", (), trees)[:3]:
        prefix = re.split(r"(?=ray start|python -m)", printed["command"])[0]
        names = [*PACKAGES.values(), "vllm_of_the_image", "verl_patches"]
        line = shlex.join([sys.executable, "-c", FOUND, *names])
        done = subprocess.run(
            ["bash", "-c", prefix + line],
            capture_output=True,
            text=True,
            check=True,
            cwd="/",
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(image)},
        )
        found = dict(text.split(" ", 1) for text in done.stdout.splitlines())
        for name, package in PACKAGES.items():
            place = upstream / name if given else image
            assert str(place / package) in found[package], (printed, done.stdout)
        assert str(image / "vllm_of_the_image") in found["vllm_of_the_image"]
        assert str(REPOSITORY / "verl_patches") in found["verl_patches"]
        without = subprocess.run(
            ["bash", "-c", f"{prefix}printenv PYTHONPATH"],
            capture_output=True,
            text=True,
            check=True,
            env={"PATH": "/usr/bin:/bin"},
        )  # nothing set before: no empty entry
        assert "" not in without.stdout.strip().split(os.pathsep)


def test_the_commit_of_a_checkout(tmp_path):
    assert checkouts.commit_of(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@t"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert checkouts.commit_of(tmp_path) == head


def test_the_verl_of_a_line_is_known_by_its_version(tmp_path):
    assert verl_check("pypi", Trees()) == (True, f"composed over verl 0.4.0, {verl_config_dir().parents[1]}")
    fits, said = verl_check("a3", Trees())
    assert not fits and "line a3 pins 0.3.1.dev (54c9b7364c2d)" in said and "--upstream DIR" in said
    for name in ("version/version", "trainer/config/ppo_megatron_trainer.yaml"):
        (tmp_path / "verl" / name).parent.mkdir(parents=True)
        (tmp_path / "verl" / name).write_text("0.3.1.dev\n")
    require_verl("a3", Trees(verl=tmp_path))
    with pytest.raises(ConfigError, match="line pypi pins 0.4.0: omit --upstream"):
        require_verl("pypi", Trees(verl=tmp_path))
