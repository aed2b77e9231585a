"""Test the command `plan`: exit codes, JSON, tables, suggestions after a refusal, and that a dry run is the same."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from verl_patches.__main__ import app
from verl_patches.errors import ConfigError, RecipeError
from verl_patches.plan.step_plan import Workload
from verl_patches.run.resolve import CONFIGS_DIR
from verl_patches.step.replay.recording import save_step
from verl_patches.weights.run_folders import take_start

PAGE = Path(__file__).resolve().parents[2] / "docs" / "plan.md"
TINY, NODE, BIG = "deepseekv3_tiny_cpu", "deepseekv3_16die", "deepseekv3_256die_true_weight"
PRESETS = sorted(path.stem for path in CONFIGS_DIR.glob("[!c]*_*die*.yaml") if path.stem != "deepseekv3_256die")


def call(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_a_dry_run_prints_the_same_as_plan():
    done, dry = call("plan", TINY, "--json"), call("train", "--config-name", TINY, "--dry-run", "--json")
    assert done.exit_code == dry.exit_code == 0 and done.stdout == dry.stdout
    plan = json.loads(done.stdout)
    assert plan["ok"] and plan["verdict"].startswith("fits: ") and plan["step"] is plan["ports"] is None
    assert {"checks", "memory", "traffic", "ports", "environment", "commands"} <= set(plan)


FAULTS = ("trainer.nnodes=3", "recipe.memory.host_gib=64", "trainer.save_freq=1", "recipe.watch.action=off")
GIVEN = [(BIG, (word,)) for word in ("level=tuned", "algo=ppo", *FAULTS)]
GIVEN += [(BIG, ("actor_rollout_ref.rollout.gpu_memory_utilization=0.5", *FAULTS[1:])), ("moonlight_32die_8k", FAULTS)]


@pytest.mark.parametrize(("config", "given"), [*((preset, ()) for preset in (TINY, *PRESETS)), *GIVEN])
def test_a_plan_is_one_screen(config, given):
    """Check each preset, and plans that do not fit."""
    done = call("plan", config, *given)
    lines = done.output.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 110, done.output
    assert lines[1].startswith("fits: " if done.exit_code == 0 else "does not fit: ")
    assert ("FAILED" in done.stdout) == (done.exit_code == 1) and "on by default" not in done.output


def test_all_prints_every_section_before_the_screen():
    whole, screen = (call("plan", NODE, *given).stdout.splitlines() for given in (("--all",), ()))
    assert whole[-len(screen) :] == screen and len(whole) > 150 > 40 >= len(screen)
    assert "on by default" not in "\n".join(whole)


def test_seconds_are_a_range_and_the_other_level_stands_beside_them():
    plan = json.loads(call("plan", BIG, "level=tuned", "--json").stdout)
    step, shown = plan["step"], call("plan", BIG, "level=tuned").stdout
    assert step["total_s"] == pytest.approx(sum(phase["seconds"] for phase in step["phases"]), abs=0.01)
    assert step["total_range_s"][0] <= step["total_s"] < step["total_range_s"][1]
    level = plan["level"]
    assert level["other"] == "reference" and level["saves_s"] > 100 and "reference: " in shown
    assert {"trainer.balance_batch", "recipe.tensor_cache.enabled"} & {*level["keys"]} == {"trainer.balance_batch"}


def test_a_published_run_is_planned_by_its_lengths_and_switches():
    """Run the example of docs/plan.md, whose phases are those of the table of published rows."""
    (example,) = re.findall(r"python -m verl_patches (plan \S+ --prompt-tokens .*?--json)", PAGE.read_text(), re.DOTALL)
    plan = json.loads(call(*shlex.split(example.replace("\\\n", " "))).stdout)
    seconds = {phase["phase"]: phase["seconds"] for phase in plan["step"]["phases"]}
    rows = {row["row"].rpartition("1,577 tokens: ")[2]: row for row in plan["step"]["calibration"]}
    for phase in ("ref", "update"):
        assert seconds[phase] == pytest.approx(rows[phase]["modelled_s"], rel=0.005), phase
    assert seconds["rollout"] < rows["rollout"]["modelled_s"]  # over HCCL, which synchronises faster than its Gloo


def test_a_picture_has_the_memory_of_each_phase(tmp_path):
    assert call("plan", NODE, "--plot", str(tmp_path / "memory.png")).exit_code == 0
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_all_of_a_plan_has_the_names_of_its_data():
    done = call("plan", NODE, "--prompt-tokens", "100", "trainer.save_freq=5", "--all")
    assert done.exit_code == 0, done.output
    shown = " ".join(done.stdout.split())
    for words in ("prompt_tokens 100", "decode step, batch 64", "61000, 61143", "plan.disk.parts"):
        assert words in shown, done.stdout
    assert re.search(r"^wake_kv +.*53\.0 GB ", done.stdout, re.MULTILINE) and "modelled True" in shown


def test_a_search_lists_as_many_layouts_as_asked_for():
    done = call("plan", NODE, "--search", "--top", "2", "--json")
    assert done.exit_code == 0, (done.output, done.exception)
    found = json.loads(done.stdout)
    assert found["dies"] == 16 and found["modelled"] and len(found["layouts"]) == 2
    assert found["layouts"][0]["total_s"] <= found["layouts"][1]["total_s"]
    shown = call("plan", NODE, "--search", "--top", "1")
    assert shown.exit_code == 0 and f"\n1: python -m verl_patches plan {NODE} " in shown.stdout
    verdict, note = shown.stdout.splitlines()[-1], "HOST MEMORY NOT COMPARED: a node needs "
    assert verdict.startswith("fits: 1 layouts on 16 dies") and note in verdict
    compared = call("plan", NODE, "--search", "--top", "1", "recipe.memory.host_gib=2000").stdout.splitlines()[-1]
    assert compared.startswith("fits: ") and "NOT COMPARED" not in compared


def next_command(text):
    """Return the arguments of the last command in an output."""
    return shlex.split(re.split(r"\n(?=\S)", text.rpartition("python -m verl_patches ")[2])[0].replace("\\\n", " "))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "hardware"),
    [pytest.param(BIG, "800t_a2", marks=pytest.mark.nightly), (NODE, "800t_a2"), (NODE, "200t_a2_box16"), (NODE, "a3")],
)
def test_what_is_printed_for_4_nodes_of_8_dies_leads_to_a_layout(config, hardware):
    """Follow the commands that are printed, from a config whose layout is for other nodes."""
    done = call("plan", config, f"recipe.hardware={hardware}", "trainer.nnodes=4", "trainer.n_gpus_per_node=8")
    assert done.exit_code == 1 and done.stdout.splitlines()[1].startswith("does not fit: "), done.output
    search = [*next_command(done.stdout), "--top", "1"]
    done = call(*search)
    if config == BIG:
        assert isinstance(done.exception, ConfigError) and "no layout for 32 dies" in str(done.exception)
        assert "use more dies, or fewer layers (recipe.num_hidden_layers)" in str(done.exception)
        search.append("recipe.num_hidden_layers=8")
        done = call(*search)
    assert done.exit_code == 0, (done.output, done.exception)
    row = next(line for line in done.output.splitlines() if line.startswith("1: "))
    assert "trainer.nnodes=4 trainer.n_gpus_per_node=8" in row
    plan = json.loads(call(*next_command(row), "--json").stdout)
    notes = {check["name"]: check["detail"] for check in plan["checks"] if check["note"]}
    assert plan["ok"] and plan["verdict"].startswith("fits: ") and "memory" not in notes
    assert ("recipe.hardware=800t_a2" in notes.get("hardware", "")) == (hardware != "800t_a2")


def test_a_plan_whose_start_is_refused_here_names_no_command_to_start_it():
    done = call("plan", NODE)
    (note,) = [check for check in json.loads(call("plan", NODE, "--json").stdout)["checks"] if check["name"] == "verl"]
    assert note["note"] and "--upstream DIR" in note["detail"]
    shown, words = " ".join(done.stdout.split()), "a start is refused here; next: do what the note on verl says"
    assert words in shown and "--upstream DIR" in shown and "ray start" not in shown
    assert "as long as the note on verl applies:" in call("plan", NODE, "--all").stdout


def test_no_layout_is_searched_where_none_would_help():
    """Name a missing file: the layouts that a search lists would be refused again."""
    done = call("plan", NODE, "data.train_files=/nope.parquet", "--search")
    assert isinstance(done.exception, RecipeError) and "/nope.parquet" in str(done.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((NODE, "--search", "--dies", "24"), "--dies is 24; expected a multiple of 16"),
        ((TINY, "--search", "--dies", "16"), "expected recipe.platform=npu"),
        ((NODE, "--search", "recipe.line=pypi", "recipe.train.balanced_routing=false"), "recipe.line=a3"),
    ],
)
def test_wrong_use_is_refused(arguments, message):
    done = call("plan", *arguments)
    assert isinstance(done.exception, ConfigError) and message in str(done.exception)  # __main__ exits with 2


def recorded_run(folder, load):
    """Make a run's folder with two steps of 4 responses of 7, 8, 9 and 12 of 16 tokens, to prompts of 2 and 4."""
    folder = folder / take_start([folder], None, None)
    (folder / "rollouts").mkdir()
    mask = torch.zeros(4, 4 + 16, dtype=torch.int64)
    for row, (prompt, response) in enumerate(((2, 7), (2, 8), (4, 9), (4, 12))):
        mask[row, 4 - prompt : 4 + response] = 1
    for step in (1, 2):
        save_step(folder / "rollouts", step, {"prompts": mask[:, :4], "responses": mask[:, 4:], "attention_mask": mask})
    steps = [{"step": step, "seconds": {}, "reward": None, "expert_load": load} for step in (1, 2)]
    (folder / "summary.json").write_text(json.dumps({"steps": steps}))
    return str(folder)


def test_a_runs_own_lengths_and_expert_load_take_the_place_of_assumptions(tmp_path):
    """Check the controls too: balanced routing ignores the load, and a run without the requested record is refused."""
    run = recorded_run(tmp_path / "a", {"train": {"ranks_over_mean": 1.5}, "rollout": {"ranks_over_mean": 2.0}})
    big = "actor_rollout_ref.rollout.ignore_eos=false", "recipe.train.balanced_routing=false"
    (Path(run) / "rollouts" / "step_x.safetensors").touch()  # not the name of a recorded step
    done = call(
        "plan", NODE, *big, "recipe.rollout.balanced_routing=true", "--lengths", run, "--expert-load", run, "--json"
    )
    assert done.exit_code == 0, (done.output, done.exception)
    plan = json.loads(done.stdout)
    assumed = plan["step"]["assumed"]
    assert (assumed["prompt_tokens"], assumed["response_tokens"]) == (3.0, pytest.approx(9.0, abs=1.5))
    assert assumed["lengths"] == f"8 recorded of {run}" and assumed["expert_load"] == {"train": 1.5, "rollout": 1.0}
    done = call("plan", NODE, *big, "recipe.rollout.balanced_routing=false", "--expert-load", run, "--json")
    assert json.loads(done.stdout)["step"]["assumed"]["expert_load"] == {"train": 1.5, "rollout": 2.0}
    other = recorded_run(tmp_path / "b", {"train": {"max_over_mean": 3.0}, "rollout": None})
    shutil.rmtree(Path(other) / "rollouts")
    for option in ("--lengths", "--expert-load"):
        done = call("plan", NODE, option, other)
        assert isinstance(done.exception, ConfigError) and f"{option} " in str(done.exception), done.exception
    done = call("plan", NODE, "--lengths", run, "--response-tokens", "100")
    assert isinstance(done.exception, ConfigError) and "leave out" in str(done.exception)
    (Path(run) / "rollouts" / "step_2.safetensors").write_bytes(b"damaged")
    done = call("plan", NODE, "--lengths", run)
    assert isinstance(done.exception, ConfigError) and "step_2.safetensors" in str(done.exception), done.exception


def test_what_was_given_is_in_the_next_command(tmp_path):
    run = recorded_run(tmp_path / "a", None)
    workload = Workload(lengths=run, expert_load="b", disk_gb_s=20.0)
    assert workload.option == ("--lengths", run, "--expert-load", "b", "--disk-gb-s", "20.0")
    assert Workload().option == ()


def test_a_rate_of_disks_is_above_0():
    assert isinstance(call("plan", NODE, "--disk-gb-s", "0").exception, ConfigError)


A2_OVERRIDES = [
    "recipe.hardware=800t_a2",
    "trainer.nnodes=32",
    "trainer.n_gpus_per_node=8",
    "recipe.rollout.instances=4",
]
A2_OVERRIDES += ["recipe.hccl.expansion_mode=HOST", "recipe.rollout.data_parallel_size=32"]


def test_a2_is_planned_without_seconds():
    """Check as a control that the same layout on A3 has seconds, and a larger die."""
    found = {}
    for name, words in (("a2", A2_OVERRIDES), ("a3", A2_OVERRIDES[3:4] + A2_OVERRIDES[5:])):
        done = call("plan", "deepseekv3_256die_true_weight", *words, "--json")
        found[name] = plan = json.loads(done.stdout)
        assert done.exit_code == 0 and plan["ok"], plan["verdict"]
    assert found["a2"]["step"] is None and found["a3"]["step"]["total_s"] > 0
    assert found["a2"]["memory"]["hbm_bytes"] < found["a3"]["memory"]["hbm_bytes"] and found["a2"]["traffic"]
    shown = call("plan", "deepseekv3_256die_true_weight", *A2_OVERRIDES, "--all").stdout
    assert "no published run reports it for Atlas 800T A2" in shown and "tokens/s" not in shown
