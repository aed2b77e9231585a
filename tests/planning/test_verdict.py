"""How a plan ends: the verdict, and a search that works when it is pasted."""

import json
import shlex

import pytest
from typer.testing import CliRunner

from verl_patches.__main__ import app

pytestmark = pytest.mark.slow

NAME, NODE = "deepseekv3_256die_true_weight", "deepseekv3_16die"


def run(*words):
    return CliRunner().invoke(app, list(words))


def plan_of(*words):
    return json.loads(run("plan", *words, "--json").stdout)


@pytest.mark.parametrize(
    ("override", "dies"),
    [
        ("trainer.nnodes=3", 128),  # 61 layers do not fit 48 dies
        ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=3", 256),
    ],
)
def test_what_a_refusal_names_works_when_it_is_pasted(override, dies):
    plan = plan_of(NAME, override)
    assert not plan["ok"] and plan["verdict"].startswith("does not fit: ")
    (search,) = (shlex.split(each["command"]) for each in plan["next"])
    assert search == ["python", "-m", "verl_patches", "plan", NAME, override, "--search", "--dies", str(dies)]
    found = json.loads(run(*search[3:], "--json").stdout)["layouts"]
    assert plan_of(NAME, override, *found[0]["overrides"])["ok"]


@pytest.mark.parametrize(
    "override", ["actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=7", "data.train_files=/absent.parquet"]
)
def test_no_search_is_named_where_no_layout_would_help(override):
    plan = plan_of(NAME, override)
    assert not plan["ok"] and plan["next"] == [] and plan["verdict"].endswith("; next: change what it names")


def test_the_verdict_is_the_last_that_is_printed():
    """A dry run prints the same: tests/cli/test_plan.py."""
    passed = run("plan", NODE)
    last = passed.stdout.splitlines()[-1]
    assert passed.exit_code == 0 and last.startswith("fits: all ") and "HOST MEMORY NOT COMPARED" in last
    assert "NOT COMPARED" not in run("plan", NODE, "recipe.memory.host_gib=4096").stdout.splitlines()[-1]
    failed = run("plan", NODE, "recipe.train.layers_per_stage=[4,5]")
    lines = failed.output.splitlines()
    assert failed.exit_code == 1 and len(lines) <= 24 and "layers: layout: layers_per_stage" in failed.stderr
    assert lines[-1].startswith("does not fit: ") and "--search --dies 16" in lines[-1]


def test_host_memory_of_a_node_is_a_check_where_it_is_known():
    short = plan_of(NODE, "recipe.memory.host_gib=64")
    assert [check["name"] for check in short["checks"] if not check["ok"]] == ["host memory"]
    plan = plan_of(NODE)
    (note,) = (check for check in plan["checks"] if check["name"] == "host memory")
    need = plan["memory"]["host"]["node_bytes"] / 2**30
    assert note["note"] and f"pin {need:.0f} GiB" in note["detail"] and "recipe.memory.host_gib" in note["detail"]
