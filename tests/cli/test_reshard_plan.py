"""Test the command `reshard-plan`: figures, the path of one parameter, the picture, and refusals."""

import json

import pytest
from typer.testing import CliRunner

from verl_patches.__main__ import app
from verl_patches.errors import ConfigError
from verl_patches.run.resolve import CONFIGS_DIR

TINY = ("--model", str(CONFIGS_DIR / "model" / "deepseekv3_tiny.json"))
LAYOUTS = ("--train", "tp2 pp2 ep4 etp1 @8 layers=1,3", "--rollout", "tp2 ep4 etp1 @8")
GATE = "model.layers.2.mlp.experts.5.gate_proj.weight"


def call(*arguments):
    return CliRunner().invoke(app, ["reshard-plan", *TINY, *arguments])


def answer(*arguments):
    done = call(*LAYOUTS, "--json", *arguments)
    assert done.exit_code == 0, (done.output, done.exception)
    return json.loads(done.stdout)


def test_figures():
    plan = answer()
    assert plan["proven"] and plan["ranks"] == 8 and len(plan["stages"]) == 2
    assert plan["received_over_bound"] < 1.01  # more than 1 by alignment
    assert plan["imbalance"] >= plan["imbalance_bound"] > 1
    stages = {s["stage"]: s["sent_bytes"]["mean"] for s in plan["stages"]}
    assert max(stages.values()) / plan["sent_bytes"]["mean"] == plan["imbalance_bound"]
    assert set(plan["nearness_bytes"]) == {"card", "node", "across"} and plan["nearness_bytes"]["across"] == 0


def test_the_path_of_one_parameter():
    """Follow expert 5 on the second of four EP ranks: rank 5 of stage 1 holds it, ranks 1 and 5 need it in rollout."""
    plan = answer("--param", GATE, "--rank", "1")
    assert plan["holds_in_training"] is None and plan["needs_in_rollout"] == f"{GATE}[0:32]"
    (step,) = plan["steps"]
    assert (step["what"], step["peer"], step["stage"], step["bytes"]) == ("received", 5, 1, 32 * 128 * 2)
    at_sender = answer("--param", GATE, "--rank", "5")["steps"]
    assert [(s["what"], s["peer"]) for s in at_sender] == [("kept", 5), ("sent", 1)]
    assert at_sender[1] == step | {"what": "sent", "peer": 1, "stage": 0}
    assert answer("--param", GATE, "--rank", "0")["steps"] == []
    done = call(*LAYOUTS, "--param", GATE, "--rank", "1")
    assert "holds_in_training  -" in done.stdout and "8192" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--param", GATE), "expected both --param and --rank"),
        (("--param", "model.nothing", "--rank", "1"), "no tensor 'model.nothing'"),
        (("--rollout", "tp2 @4"), "training has 8 ranks"),
    ],
)
def test_refusals(arguments, message):
    done = call(*LAYOUTS, *arguments)
    assert isinstance(done.exception, ConfigError) and message in str(done.exception)
