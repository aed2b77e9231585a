"""Test the commands `weights convert`, `export` and `verify`: output and exit codes."""

import json
import os

import pytest
import torch
from typer.testing import CliRunner

from tests.weights.cases import SMALL, make_folder, make_start, write_checkpoint
from verl_patches.__main__ import app
from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import build_inventory
from verl_patches.layout.model_folder import INDEX
from verl_patches.weights.manifest import CRITIC
from verl_patches.weights.source import open_source

LAYOUT = "tp2 pp2 ep6 etp1 @12 layers=1,1"
HEAD = "lm_head.weight"


def call(*arguments, code=0):
    done = CliRunner().invoke(app, ["weights", *map(str, arguments)])
    assert done.exit_code == code, (done.output, done.exception)
    return done


def answer(*arguments, code=0):
    return json.loads(call(*arguments, "--json", code=code).stdout)


@pytest.fixture
def folder(tmp_path):
    make_folder(tmp_path / "hf", SMALL)
    return tmp_path / "hf"


def test_convert_verify_and_export(folder, tmp_path):
    megatron, back = tmp_path / "megatron", tmp_path / "back"
    done = answer("convert", folder, megatron, "--layout", LAYOUT, "--processes", "2")
    assert (done["written"], done["kept"]) == (12, 0)
    assert answer("verify", megatron)["problems"] == [] == answer("verify", folder)["problems"]
    exported = call("export", megatron, back)
    assert "files written" in exported.stdout and (back / INDEX).is_file()
    assert "0 problems" in call("verify", back).stdout

    flip(next(megatron.rglob("*.pt")), -2000)
    (problem,) = answer("verify", megatron, code=1)["problems"]
    assert "model_optim_rng.pt" in problem


def test_verify_finds_a_hf_file_that_is_cut_off_and_exits_with_1(folder):
    plain = folder / "model-1.safetensors"
    os.truncate(plain, plain.stat().st_size - 1)
    assert "not a whole safetensors file" in answer("verify", folder, code=1)["problems"][0]
    assert "problem: " in call("verify", folder, code=1).stdout


def with_critic(folder, actor=True, identity="x"):
    """Make a checkpoint of a run with a critic; `actor`: with a policy too; `identity`: the stated one of critic/."""
    tensors = {
        name: {each.name: torch.zeros(each.shape) for each in build_inventory(SMALL, value=name == CRITIC).parameters}
        for name in ("actor", CRITIC)
    }
    write_checkpoint(folder, tensors["actor"] if actor else {}, SMALL, {"step": 1, CRITIC: identity})
    write_checkpoint(folder / CRITIC, tensors[CRITIC], SMALL, {"step": 1})
    return folder


def flip(path, at=-1):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("actor", [True, False])
def test_verify_checks_the_critic_of_a_checkpoint(tmp_path, actor):
    saved = with_critic(tmp_path / "global_step_1", actor)
    found = answer("verify", saved)
    assert found["problems"] == [] and found["checked"].startswith(f"{6 if actor else 5} files")
    flip(saved / CRITIC / "rank_00000.safetensors")
    (problem,) = answer("verify", saved, code=1)["problems"]
    assert f"{CRITIC}/rank_00000.safetensors, weight/" in problem and "expected sha256" in problem
    flip(saved / CRITIC / "rank_00000.safetensors")
    (saved / CRITIC / "manifest.json").unlink()
    (problem,) = answer("verify", saved, code=1)["problems"]
    assert problem.startswith(f"{saved / CRITIC}: ") and "manifest.json, found none" in problem
    other = with_critic(tmp_path / "other", actor, identity="y")
    (problem,) = answer("verify", other, code=1)["problems"]
    assert problem.startswith(f"{CRITIC}/manifest.json: expected identity y") and "found x" in problem


def test_a_checkpoint_of_a_value_model_alone_names_where_its_weights_are(tmp_path):
    saved = with_critic(tmp_path / "global_step_1", actor=False)
    done = CliRunner().invoke(app, ["weights", "export", str(saved), str(tmp_path / "out")])
    assert isinstance(done.exception, ConfigError) and f"give {saved / CRITIC}" in str(done.exception)
    assert open_source(saved / CRITIC).kind == "checkpoint"
    assert open_source(with_critic(tmp_path / "both")).kind == "checkpoint"  # control: with an actor it opens


def test_verify_of_no_folder_is_wrong_use_and_claims_no_check(folder, tmp_path):
    for wrong in (tmp_path / "absent", folder / "config.json"):
        done = CliRunner().invoke(app, ["weights", "verify", str(wrong)])
        assert isinstance(done.exception, ConfigError) and done.stdout == ""
        assert str(wrong) in str(done.exception) and "nothing was checked" in str(done.exception)
    assert "checked: names" in call("verify", folder).stdout


def test_wrong_use_is_named(folder, tmp_path):
    error = CliRunner().invoke(app, ["weights", "convert", str(folder), str(tmp_path / "out")]).exception
    assert isinstance(error, ConfigError) and "expected one of --hf and --layout" in str(error)  # main() exits with 2
    assert not (tmp_path / "out").exists()


def test_an_export_of_a_run_without_a_checkpoint_says_how_to_save_one(tmp_path):
    done = CliRunner().invoke(app, ["weights", "export", str(make_start(tmp_path / "r")), str(tmp_path / "out")])
    assert "found none; save one with trainer.save_freq=N" in str(done.exception)
