"""The two commands as a user types them, up to the point where a run would start."""

import json

import pytest
import typer
from typer.testing import CliRunner

from verl_patches.catalog import ROWS
from verl_patches.cluster import cli, launch
from verl_patches.errors import ConfigError

LARGE = "grpo_deepseekv3_256die_true_weight"


@pytest.fixture
def call():
    app = typer.Typer()
    cli.register(app, lambda: ROWS)
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


def test_help_lists_the_options(call):
    text = call("smoke", "--help").output
    for option in ("--train-layout", "--rollout-tp", "--rollout-dp", "--steps", "--dtype", "--replay", "--learn"):
        assert option in text


def test_a_start_that_would_ignore_keys_is_refused(call):
    error = call("train", "--config-name", LARGE).exception
    assert isinstance(error, ConfigError)
    assert "recipe.train.layers_per_stage, recipe.train.swap_optimizer" in str(error)
    error = call("train", "--config-name", LARGE, "recipe.line=a3").exception
    rows_of_a3 = [row for row in ROWS if "a3" in row.lines]
    assert isinstance(error, ConfigError) and (rows_of_a3 or "no row yet" in str(error))


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
    outcome = launch.Outcome(code, reason, tmp_path, 12.3, {"total": 3 << 30})
    with pytest.raises(typer.Exit) as ended:
        cli._report(outcome, as_json=False)
    told = capsys.readouterr()
    assert ended.value.exit_code == (code if code > 128 else min(code, 1))  # 128 + n: ended by signal n
    assert ("ok in 12 s, peak memory 3.0 GiB" in told.out) is (code == 0)
    assert (f"{reason}\n  log: {tmp_path / 'driver.log'}" in told.err) is (code != 0)
    with pytest.raises(typer.Exit):
        cli._report(outcome, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"exit": reason}
