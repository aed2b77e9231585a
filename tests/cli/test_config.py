"""Test the command `config`: the composed configuration, and the engine's arguments key by key."""

import json

import pytest
from omegaconf import OmegaConf
from typer.testing import CliRunner

from verl_patches.__main__ import app
from verl_patches.errors import ConfigError
from verl_patches.run.compose import compose_config

TINY, RUNS = "deepseekv3_tiny_cpu", ("deepseekv3_256die_random_init", "deepseekv3_256die_true_weight")
STACKED = "actor_rollout_ref.actor.megatron.use_dist_checkpointing=true"


def call(*arguments):
    return CliRunner().invoke(app, ["config", *arguments])


def explained(name, *arguments, code=0):
    done = call("--explain", "--json", "--config-name", name, *arguments)
    assert done.exit_code == code, (done.output, done.exception)
    return json.loads(done.stdout)


def test_the_composed_config_is_printed():
    done = call("--config-name", TINY, "data.train_batch_size=8")
    assert done.exit_code == 0 and OmegaConf.create(done.stdout) == compose_config(TINY, ["data.train_batch_size=8"])
    as_json = json.loads(call("--config-name", TINY, "--json").stdout)
    assert as_json == OmegaConf.to_container(compose_config(TINY))


@pytest.mark.parametrize("name", RUNS)
def test_both_256_die_configs_become_arguments_completely(name):
    found = explained(name)
    assert found["refused"] == [] and found["line"] == "a3"
    arguments = {row["key"]: row["arguments"] for row in found["settings"]}
    assert arguments["recipe.train.layers_per_stage"] == ["--num-layer-list", "7,7,8,8,8,8,8,7"]
    assert arguments["recipe.train.swap_optimizer"] == ["--swap-optimizer"]
    assert arguments["recipe.train.balanced_routing"] == (["--fix-router"] if name == RUNS[0] else [])
    assert arguments["HF num_experts_per_tok"] == ["--moe-router-topk", "8"]  # the model's rows are there


@pytest.mark.upstream
@pytest.mark.parametrize("name", RUNS)
def test_over_the_lines_own_verl_they_become_the_same_arguments(name, pytestconfig):
    folder = str(pytestconfig.getoption("--upstream"))
    assert explained(name, "--upstream", folder) == explained(name)
    assert "note:" not in call("--explain", "--config-name", name, "--upstream", folder).output


def test_a_refused_key_is_named_and_ends_with_1():
    topk = "+actor_rollout_ref.model.override_config.model_config.topk_method=greedy"
    found = explained(RUNS[1], STACKED, topk, code=1)
    assert found["refused"] == ["actor.megatron.use_dist_checkpointing", "HF topk_method"]
    done = call("--explain", "--config-name", RUNS[1], STACKED)
    assert done.exit_code == 1 and "actor.megatron.use_dist_checkpointing is True: " in done.stderr
    assert "refused  actor.megatron.use_dist_checkpointing" in done.stdout


def test_wrong_use():
    error = call("--explain", "--config-name", TINY).exception
    assert isinstance(error, ConfigError) and "recipe.line is pypi: add recipe.line=a3" in str(error)
    assert explained(TINY, "recipe.line=a3")["refused"] == []
    assert isinstance(call("--config-name", "no_such").exception, ConfigError)
    assert call().exit_code == 2
