"""The command `plan`: exit codes, JSON, tables, what it offers for a refusal, and that a dry run is the same."""

import json

import pytest
from typer.testing import CliRunner

from verl_patches.__main__ import app
from verl_patches.errors import ConfigError, RecipeError

TINY, NODE = "deepseekv3_tiny_cpu", "deepseekv3_16die"


def call(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_a_dry_run_prints_the_same_as_plan():
    done, dry = call("plan", TINY, "--json"), call("train", "--config-name", TINY, "--dry-run", "--json")
    assert done.exit_code == dry.exit_code == 0 and done.stdout == dry.stdout
    plan = json.loads(done.stdout)
    assert (
        plan["ok"]
        and plan["verdict"].startswith("fits: ")
        and plan["step"] is plan["ports"] is plan["inference"] is None
    )
    assert {"checks", "memory", "traffic", "ports", "environment", "commands"} <= set(plan)


def test_tables_of_a_node_say_that_they_are_modelled():
    done = call("plan", NODE, "--prompt-tokens", "100", "--dp-sync", "gloo")
    assert done.exit_code == 0, done.output
    for words in ("step (modelled, not measured)", "prompts of 100.0", "DP syncs over gloo", "decode step, batch 64"):
        assert words in done.stdout, done.stdout
    assert "generate, chat, eval: 1 node(s) of 16 dies hold the weights in bf16" in " ".join(done.stdout.split())
    assert "traffic (modelled) and ports" in done.stdout and "61000 to 61143" in done.stdout


def test_a_search_lists_as_many_layouts_as_asked_for():
    done = call("plan", NODE, "--search", "--top", "2", "--json")
    assert done.exit_code == 0, (done.output, done.exception)
    found = json.loads(done.stdout)
    assert found["dies"] == 16 and found["modelled"] and len(found["layouts"]) == 2
    assert found["layouts"][0]["total_s"] <= found["layouts"][1]["total_s"]
    shown = call("plan", NODE, "--search", "--top", "1")
    assert shown.exit_code == 0 and f"\n1: python -m verl_patches plan {NODE} " in shown.stdout
    assert shown.stdout.splitlines()[-1].startswith("fits: 1 layouts on 16 dies")


def test_no_layout_is_searched_where_none_would_help():
    """A file that is not there: the layouts that a search lists would be refused again."""
    done = call("plan", NODE, "data.train_files=/nope.parquet", "--search")
    assert isinstance(done.exception, RecipeError) and "/nope.parquet" in str(done.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((TINY, "--dies", "16"), "--dies 16 is for --search"),
        ((TINY, "--search"), "--dies is 2; expected a multiple of 16"),
        ((TINY, "--search", "--dies", "16"), "expected recipe.platform=npu"),
        ((TINY, "--dp-sync", "mpi"), "--dp-sync is 'mpi'; expected one of hccl, gloo"),
        (("no_such_config",), "no config of a run"),
    ],
)
def test_wrong_use_is_refused(arguments, message):
    done = call("plan", *arguments)
    assert isinstance(done.exception, ConfigError) and message in str(done.exception)  # __main__ makes it code 2


A2 = ["recipe.hardware=800t_a2", "trainer.nnodes=32", "trainer.n_gpus_per_node=8", "recipe.rollout.instances=4"]
A2 += ["recipe.hccl.expansion_mode=HOST", "recipe.rollout.dp=32"]


def test_a2_is_planned_without_seconds():
    """The control: the same layout on A3 has them, and a larger die."""
    found = {}
    for name, words in (("a2", A2), ("a3", A2[3:4] + A2[5:])):
        done = call("plan", "deepseekv3_256die_true_weight", *words, "--json")
        found[name] = plan = json.loads(done.stdout)
        assert done.exit_code == 0 and plan["ok"], plan["verdict"]
    assert found["a2"]["step"] is None and found["a3"]["step"]["total_s"] > 0
    assert found["a2"]["memory"]["hbm_bytes"] < found["a3"]["memory"]["hbm_bytes"] and found["a2"]["traffic"]
    shown = call("plan", "deepseekv3_256die_true_weight", *A2).stdout
    assert "no seconds of a step: no published run has them for Atlas 800T A2" in shown and "tokens/s" not in shown


def test_a_plan_for_a2_says_what_to_take_and_a_search_is_refused():
    done = call("plan", "deepseekv3_256die_true_weight", A2[0])
    assert done.exit_code == 1 and "take trainer.nnodes=32 trainer.n_gpus_per_node=8" in done.output
    done = call("plan", "deepseekv3_256die_true_weight", *A2, "--search")
    assert isinstance(done.exception, ConfigError) and "search with recipe.hardware=a3" in str(done.exception)
