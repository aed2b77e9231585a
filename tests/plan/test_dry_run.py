"""Test both 256-die scripts with --dry-run, as an operator types them, and the ways in which a plan must fail."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from verl_patches.run.compose import compose_config
from verl_patches.upstream.pins import load_pins

pytestmark = pytest.mark.slow  # each starts processes, or plans 256 ranks

ROOT = Path(__file__).resolve().parents[2]
VERL = load_pins().line("a3").repositories["verl"].version
SCRIPTS = {name: ROOT / "scripts" / f"train_deepseekv3_256die_{name}.sh" for name in ("random_init", "true_weight")}
# checks that are notes here: a plan does not need them, and a machine without dies cannot make them
MACHINE_CHECKS = {"model folder", "data", "host memory"}
# max_num_seqs is lowered; balanced routing computes another model in vLLM
NOTE_CHECKS = {"random_init": {"Ascend scheduler", "truth check"}, "true_weight": {"Ascend scheduler"}}


def dry_run(name, *arguments, cwd=None, env=None):
    command, env = ["bash", str(SCRIPTS[name]), "--dry-run", *arguments], {**os.environ, **(env or {})}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, timeout=600)


@pytest.fixture(scope="module")
def plans():
    done = {name: dry_run(name, "--json") for name in SCRIPTS}
    assert [d.returncode for d in done.values()] == [0, 0], [d.stderr for d in done.values()]
    return {name: json.loads(d.stdout) for name, d in done.items()}


@pytest.mark.parametrize("name", SCRIPTS)
def test_layouts_patches_environment_and_commands(plans, name):
    plan = plans[name]
    assert plan["ok"] and all(check["ok"] for check in plan["checks"])
    train, rollout = plan["train"], plan["rollout"]
    assert [len(layers) for layers in train["layers"]] == [7, 7, 8, 8, 8, 8, 8, 7]
    sizes = {axis: (len(groups), len(groups[0])) for axis, groups in train["groups"].items()}
    assert sizes == {"tp": (64, 4), "dp": (32, 8), "pp": (32, 8), "ep": (8, 32)}
    instances = {"random_init": 1, "true_weight": 2}[name]
    assert (rollout["instances"], rollout["dp_per_instance"]) == (instances, 128 // instances)

    on = {row["id"] for row in plan["patches"] if row["on"]}
    stand_ins = {"platform.flash_attn", "platform.flash_attn_bert_padding"}  # rows that only NPUs have
    assert {row_id for row_id in on if row_id.startswith("platform.")} == stand_ins
    assert on >= {"update.engine_start", "model.mindspeed_config"}
    variables = {v["name"]: v["value"] for v in plan["environment"]}
    assert variables["VLLM_ENABLE_FIX_ROUTE"] == {"random_init": "1", "true_weight": "0"}[name]
    assert variables["VERL_PATCHES"].startswith("line=a3,platform=npu,rows=")
    commands = [command["command"] for command in plan["commands"]]
    assert " ray start --head" in commands[0] and " ray start --address=" in commands[1]
    assert all(command.startswith("PYTHONPATH=") for command in commands[:3])
    assert "python -m verl_patches train --config-name deepseekv3_256die_" + name in commands[2]
    assert not any("0.0.0.0" in command for command in commands)


def test_nothing_is_started_or_written_and_overrides_pass_through(tmp_path, plans):
    before, folders = (ROOT / "outputs").exists(), dict.fromkeys(("HOME", "TMPDIR"), str(tmp_path))
    overrides = ("recipe.run=never", "recipe.patches=[-dispatch.*]")
    done = dry_run("true_weight", "--all", *overrides, cwd=tmp_path, env=folders)
    assert done.returncode == 0, done.stderr
    for word in ("tp4 pp8 ep32 etp1 @256", "HCCL_CONNECT_TIMEOUT", "256die_true_weight recipe.run=never"):
        assert word in done.stdout, done.stdout
    rows = [row["id"] for row in plans["true_weight"]["patches"] if row["on"] and row["id"].startswith("dispatch.")]
    assert rows and not any(row in done.stdout for row in rows)
    assert list(tmp_path.iterdir()) == [] and (ROOT / "outputs").exists() == before


@pytest.mark.parametrize(
    ("override", "code", "message"),
    [
        ("recipe.train.layers_per_stage=[8,8,8,8,8,8,8,7]", 1, "up to 63, the model has 61"),
        ("recipe.patches=[+no.such_row]", 2, "names no row"),
    ],
)
def test_the_scripts_keep_the_exit_code_and_name_the_fault(override, code, message):
    done = dry_run("true_weight", override)
    said = " ".join((done.stdout if code == 1 else done.stderr).split())
    assert done.returncode == code and message in said, done.stdout + done.stderr


def test_the_script_of_one_node_plans_its_own_config():
    script = ROOT / "scripts" / "train_moonlight_16die.sh"
    done = subprocess.run(["bash", script, "--dry-run", "--json"], capture_output=True, text=True, timeout=600)
    plan = json.loads(done.stdout)
    assert done.returncode == 0 and plan["ok"] and plan["config"] == "moonlight_16die"
    (started,) = (command["command"] for command in plan["commands"] if command["where"] == "this machine")
    assert started.endswith("train --config-name moonlight_16die")


@pytest.mark.parametrize(("name", "random"), [("random_init", True), ("true_weight", False)])
def test_the_configs_have_the_settings_of_the_published_run(name, random):
    config = compose_config(f"deepseekv3_256die_{name}")
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert (config.data.train_batch_size, rollout.n, actor.ppo_mini_batch_size) == (512, 16, 512)
    assert (config.data.max_prompt_length, config.data.max_response_length) == (1024, 3072)
    assert (rollout.temperature, rollout.top_p, rollout.top_k) == (0.9, 0.9, 50)
    assert (actor.optim.lr, actor.kl_loss_type, actor.kl_loss_coef) == (1e-6, "low_var_kl", 0.001)
    assert (actor.ppo_micro_batch_size_per_gpu, rollout.gpu_memory_utilization) == (1, 0.8)
    balanced = (config.recipe.rollout.balanced_routing, config.recipe.train.balanced_routing)
    assert (*balanced, rollout.ignore_eos, not actor.load_weight) == (random,) * 4
    assert config.recipe.line == "a3"


def test_another_verl_than_the_lines_is_a_note_as_a_start_would_refuse_it(plans):
    for name, plan in plans.items():
        notes = {check["name"]: check["detail"] for check in plan["checks"] if check["note"]}
        assert set(notes) == {"verl", *MACHINE_CHECKS, *NOTE_CHECKS[name]}
        assert notes["verl"].startswith("a start is refused: configuration taken from verl 0.4.0")
        assert "DeepSeek-V3-hf/config.json" in notes["model folder"] and "parquet" in notes["data"]


@pytest.mark.upstream
@pytest.mark.parametrize("name", SCRIPTS)
def test_over_the_lines_own_verl_nothing_is_left_to_refuse(name, pytestconfig):
    done = dry_run(name, "--json", "--upstream", str(pytestconfig.getoption("--upstream")))
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    checks = {check["name"]: check["detail"] for check in plan["checks"]}
    assert {check["name"] for check in plan["checks"] if check["note"]} == MACHINE_CHECKS | NOTE_CHECKS[name]
    assert f"verl {VERL} (" in checks["verl"]
    assert re.match(r"all [1-9]\d* keys are supported", checks["engine arguments"])
    assert "/Megatron-LM:" in plan["commands"][0]["command"] and "--upstream" in plan["commands"][2]["command"]
