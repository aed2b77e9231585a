"""The two commands as a user types them, up to the point where a run would start."""

import importlib.util
import json

import pytest
import typer
from typer.testing import CliRunner

from verl_patches.__main__ import app
from verl_patches.cli import run
from verl_patches.errors import ConfigError
from verl_patches.launch import launcher
from verl_patches.upstream.checkouts import VERL_CONFIG, verl_config_dir

LARGE = "grpo_deepseekv3_256die_true_weight"


@pytest.fixture
def call():
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


@pytest.fixture
def upstream(tmp_path):
    """Folders named as the line's sources, with verl's configuration and nothing else."""
    for name, package in {
        "verl": "verl/trainer/config",
        "Megatron-LM": "megatron",
        "MindSpeed": "mindspeed",
        "MindSpeed-LLM": "mindspeed_llm",
    }.items():
        (tmp_path / name / package).mkdir(parents=True)
    base = verl_config_dir() / f"{VERL_CONFIG}.yaml"
    (tmp_path / "verl/verl/trainer/config" / base.name).write_text(base.read_text())
    return tmp_path


def test_a_start_that_would_ignore_keys_is_refused(call):
    pypi = ("recipe.line=pypi", "recipe.train.collective_timeout_minutes=30", "recipe.hccl.expansion_mode=AI_CPU")
    error = call("train", "--config-name", LARGE, *pypi).exception
    assert isinstance(error, ConfigError)
    assert "recipe.train.layers_per_stage" in str(error)


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is here: it would start")
def test_on_line_a3_only_the_machine_is_missing(call):
    error = call("train", "--config-name", LARGE).exception
    assert isinstance(error, ConfigError) and "torch_npu is not installed" in str(error)


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("0.4.0", "composed over verl 0.4.0"),
        (None, "of an unknown version"),
        ("0.3.1.dev", "the upstream sources are not as pinned"),
    ],
)
def test_a_start_over_another_verl_than_the_lines_is_refused(call, upstream, version, words):
    if version:
        file = upstream / "verl/verl/version/version"
        file.parent.mkdir()
        file.write_text(f"{version}\n")
    error = call(
        "train",
        "--config-name",
        "grpo_deepseekv3_tiny_cpu",
        "--upstream",
        str(upstream),
        "recipe.line=a3",
        "trainer.nnodes=2",
    ).exception  # the last: so that nothing starts
    assert isinstance(error, ConfigError) and words in str(error)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("smoke", "--line", "a3"), r"--upstream DIR; bash scripts/fetch_upstream.sh --dest DIR"),
        (("smoke", "--line", "a3", "--upstream", "/no/such"), "found no verl/verl"),
        (("train", "--config-name", "grpo_deepseekv3_tiny_cpu", "recipe.line=a3"), "--upstream DIR"),
    ],
)
def test_line_a3_on_a_cpu_needs_its_sources(call, arguments, words):
    error = call(*arguments).exception
    assert isinstance(error, ConfigError) and words in str(error)


def test_a_key_that_mindspeed_cannot_act_on_is_refused_before_anything_starts(call, upstream):
    error = call(
        "smoke",
        "--line",
        "a3",
        "--upstream",
        str(upstream),
        "--train-layout",
        "tp2",
        "actor_rollout_ref.actor.megatron.sequence_parallel=false",
    ).exception
    assert isinstance(error, ConfigError) and "actor.megatron.sequence_parallel is False" in str(error)


def test_several_nodes_need_a_ray_that_runs(call):
    error = call("train", "--config-name", "grpo_deepseekv3_tiny_cpu", "trainer.nnodes=2").exception
    assert isinstance(error, ConfigError) and "recipe.ray_address is null" in str(error)


def test_a_wrong_layout_ends_with_1_and_wrong_use_with_2(call):
    wrong = call("train", "--config-name", "grpo_deepseekv3_tiny_cpu", "data.train_batch_size=3")
    assert wrong.exit_code == 1 and "3 is not a multiple of 2" in wrong.output
    assert call("smoke", "--no-such-option").exit_code == 2
    assert isinstance(call("smoke", "--rollout-tp", "2", "--rollout-dp", "2").exception, ConfigError)


@pytest.mark.parametrize(("code", "reason"), [(0, "ok"), (124, "no output for 5 s")])
def test_the_end_of_a_run_is_told_and_its_code_kept(tmp_path, capsys, code, reason):
    (tmp_path / "summary.json").write_text(json.dumps({"exit": reason}))
    outcome = launcher.Outcome(code, reason, tmp_path, 12.3, {"total": 3 << 30})
    with pytest.raises(typer.Exit) as ended:
        run._report(outcome, as_json=False)
    told = capsys.readouterr()
    assert ended.value.exit_code == (code if code > 128 else min(code, 1))  # 128 + n: ended by signal n
    assert ("ok in 12 s, peak memory 3.0 GiB" in told.out) is (code == 0)
    assert (f"{reason}\n  log: {tmp_path / 'driver.log'}" in told.err) is (code != 0)
    with pytest.raises(typer.Exit):
        run._report(outcome, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"exit": reason}
