"""Test upstream trees: found or refused by name, and on the path before anything installed."""

import os
import re
import subprocess
from dataclasses import replace

import pytest

from tests.runs import composed
from verl_patches.errors import ConfigError
from verl_patches.plan.plan import run_commands
from verl_patches.run.environment import REPOSITORY, environment_variables
from verl_patches.spec import Trees
from verl_patches.upstream.checkouts import compare_verl_version, find_trees, require_trees, verl_config_dir

TINY, LARGE = "deepseekv3_tiny_cpu", "deepseekv3_256die_true_weight"
PACKAGES = {"verl": "verl", "Megatron-LM": "megatron", "MindSpeed": "mindspeed", "MindSpeed-LLM": "mindspeed_llm"}


@pytest.fixture
def upstream(tmp_path):
    for name, package in PACKAGES.items():
        (tmp_path / name / package).mkdir(parents=True)
    return tmp_path


def test_trees_are_the_repositories_that_pip_does_not_install(upstream):
    folders = tuple(upstream / name for name in PACKAGES)
    assert find_trees(upstream) == Trees(("--upstream", str(upstream)), folders, upstream / "verl")
    (upstream / "MindSpeed" / "mindspeed").rmdir()
    with pytest.raises(ConfigError, match="MindSpeed/mindspeed"):
        find_trees(upstream)


def test_line_and_trees_go_together(upstream):
    pypi, a3, npu = composed(TINY), composed(TINY, ["recipe.line=a3"]), composed(LARGE)
    for run in (replace(a3, trees=find_trees(upstream)), pypi, npu):
        require_trees(run)
    with pytest.raises(ConfigError, match="recipe.line is pypi"):
        require_trees(replace(pypi, trees=find_trees(upstream)))
    with pytest.raises(ConfigError, match=r"fetch_upstream\.sh"):
        require_trees(a3)


def test_trees_are_on_the_path_before_installed_packages_and_after_this_checkout(upstream, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(REPOSITORY), "/users/own", "/users/own"]))
    trees = find_trees(upstream)
    path = next(v for v in environment_variables(replace(composed(TINY), trees=trees)) if v.name == "PYTHONPATH")
    wanted = [REPOSITORY, *trees.folders, "/users/own"]
    assert path.value.split(os.pathsep) == [str(p) for p in wanted] and path.where == "driver"


@pytest.mark.parametrize("given", [True, False], ids=["upstream", "image"])
def test_a_printed_command_has_the_trees_and_all_that_the_image_has_on_its_path(upstream, given):
    """Check the words before `ray start` in a shell; without an earlier value there is no empty entry."""
    run = replace(composed(LARGE), trees=find_trees(upstream) if given else find_trees())
    wanted = [str(path) for path in (REPOSITORY, *run.trees.folders)]
    for printed in run_commands(run, LARGE, ())[:3]:
        prefix = re.split(r"(?=ray start|python -m)", printed["command"])[0]
        for image in ([], ["/image", "/more"]):
            env = {"PATH": "/usr/bin:/bin", **({"PYTHONPATH": os.pathsep.join(image)} if image else {})}
            command = ["bash", "-c", f"{prefix}printenv PYTHONPATH"]
            done = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/", env=env)
            assert done.stdout.strip().split(os.pathsep) == [*wanted, *image], printed


def test_the_verl_of_a_line_is_known_by_its_version(tmp_path):
    taken = f"configuration taken from verl 0.4.0 ({verl_config_dir().parents[1]})"
    assert compare_verl_version("pypi", Trees()) == (True, taken)
    fits, sentence = compare_verl_version("a3", Trees())
    assert not fits and "line a3 pins 0.3.1.dev (54c9b7364c2d)" in sentence and "--upstream DIR" in sentence
    for name in ("version/version", "trainer/config/ppo_megatron_trainer.yaml"):
        (tmp_path / "verl" / name).parent.mkdir(parents=True)
        (tmp_path / "verl" / name).write_text("0.3.1.dev\n")
    assert compare_verl_version("a3", Trees(verl=tmp_path))[0]
    assert "pypi pins 0" in compare_verl_version("pypi", Trees(verl=tmp_path))[1]
