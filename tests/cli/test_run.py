"""Test the two commands that start runs as a user types them, up to the start."""

import importlib.util
import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tests.runs import composed
from tests.weights.cases import make_checkpoint, make_start
from verl_patches.__main__ import app
from verl_patches.cli import patches, run
from verl_patches.errors import ConfigError
from verl_patches.launch import launcher
from verl_patches.spec import Trees
from verl_patches.upstream.checkouts import VERL_CONFIG, verl_config_dir
from verl_patches.weights.run_folders import list_starts

LARGE, TINY = "deepseekv3_256die_true_weight", "deepseekv3_tiny_cpu"


def refusal(*arguments):
    """Return the text of the ConfigError with which a command ends."""
    error = CliRunner().invoke(app, list(map(str, arguments))).exception
    assert isinstance(error, ConfigError), error
    return str(error)


@pytest.fixture
def upstream(tmp_path):
    """Make folders named as the line's sources, with verl's configuration alone."""
    folders = "verl/verl/trainer/config Megatron-LM/megatron MindSpeed/mindspeed MindSpeed-LLM/mindspeed_llm"
    for name in folders.split():
        (tmp_path / name).mkdir(parents=True)
    base = verl_config_dir() / f"{VERL_CONFIG}.yaml"
    (tmp_path / "verl/verl/trainer/config" / base.name).write_text(base.read_text())
    return tmp_path


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is here: it would start")
def test_on_line_a3_only_the_machine_is_missing():
    text = refusal("train", "--config-name", LARGE)
    assert "torch_npu is not installed" in text and "--dry-run" in text and "smoke.sh" in text
    assert "VERL_PATCHES" not in text  # it is for the import alone: a run of the launcher refuses it


def test_a_start_over_another_verl_than_the_lines_is_refused(upstream):
    last = ("recipe.line=a3", "trainer.nnodes=2")  # without a Ray for two nodes no run starts
    words = "the upstream sources are not as pinned"
    assert words in refusal("train", "--config-name", TINY, "--upstream", upstream, *last)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("smoke", "--line", "a3"), r"--upstream DIR; bash scripts/fetch_upstream.sh --dest DIR"),
        (("train", "--config-name", TINY, "trainer.nnodes=2"), "recipe.ray_address is null"),
    ],
)
def test_a_start_that_lacks_its_sources_or_a_ray_is_refused(arguments, words):
    assert words in refusal(*arguments)


def test_a_start_with_a_wrong_layout_is_refused():
    assert "3 is not a multiple of 2" in refusal("train", "--config-name", TINY, "data.train_batch_size=3")
    assert "expected all 2; change recipe.rollout.data_parallel_size" in refusal("smoke", "rollout=tp2dp2")


def test_files_that_are_missing_are_refused_by_a_start_and_where_the_user_names_them_by_a_dry_run():
    assert "train.parquet does not exist; expected parquet" in refusal("train", "--config-name", TINY)
    plan, nowhere = ["train", "--config-name", TINY, "--dry-run"], "data.train_files=/nowhere"
    assert CliRunner().invoke(app, plan).exit_code == 0
    wrong = CliRunner().invoke(app, [*plan, nowhere])
    assert wrong.exit_code == 1 and "data.train_files: /nowhere does not exist" in wrong.output
    assert "/nowhere does not exist" in refusal("smoke", nowhere)
    assert "expected a writable folder" in refusal("smoke", "recipe.output_root=/dev/null")


@pytest.mark.parametrize(
    ("code", "exit_code", "reason"),
    [(0, 0, "ok"), (124, 1, "no output for 5 s"), (2, 2, "ConfigError: no"), (137, 137, "")],
)
def test_the_end_of_a_run_is_reported_with_its_exit_code(tmp_path, capsys, code, exit_code, reason):
    tmp_path = make_start(tmp_path / "r")
    (tmp_path / "summary.json").write_text(json.dumps({"exit": reason}))
    outcome = launcher.Outcome(code, reason, tmp_path, 12.3, {"total": 3 << 30})
    with pytest.raises(typer.Exit) as ended:
        run._report_outcome(outcome, composed(TINY), as_json=False)
    printed = capsys.readouterr()
    assert ended.value.exit_code == exit_code
    assert ("ok in 12 s, peak memory 3.0 GiB" in printed.out) is (code == 0)
    assert (f"{reason}\n  log: {tmp_path / 'driver.log'}" in printed.err) is (code != 0)
    with pytest.raises(typer.Exit):
        run._report_outcome(outcome, composed(TINY), as_json=True)
    assert json.loads(capsys.readouterr().out) == {"exit": reason}


@pytest.fixture
def end_errors(tmp_path, capsys):
    """Return end_errors(code, reason, *overrides), the standard error of a run `r` of the tiny config that ended so."""

    def report(code, reason, *overrides):
        given = [f"recipe.output_root={tmp_path}", "recipe.run=r"]
        given += ["trainer.save_freq=2", "trainer.total_training_steps=9"]
        with pytest.raises(typer.Exit):
            folder = tmp_path / "r" / list_starts(tmp_path / "r")[-1].name
            run._report_outcome(
                launcher.Outcome(code, reason, folder, 2.0), composed(TINY, [*given, *overrides]), False
            )
        return capsys.readouterr().err

    return report


@pytest.mark.parametrize("saved", [[], [2, 4], [2, "damaged"], None])
def test_a_run_that_ends_early_names_its_newest_whole_checkpoint_and_how_to_go_on(
    tmp_path, end_errors, monkeypatch, saved
):
    """Check also a run that saves nothing (None); another chain's checkpoint of that name is not this run's."""
    make_start(tmp_path / "r", (20,))
    folder = make_start(tmp_path / "r") / "checkpoints"
    for step in saved or ():
        path = make_checkpoint(folder, 9 if step == "damaged" else step)
        if step == "damaged":
            (path / "rank_00000.safetensors").write_bytes(b"")
    (folder.parent / "summary.json").write_text(json.dumps({"exit": "interrupted by SIGINT"}))
    words = ["smoke", "--run", "r", f"recipe.output_root={tmp_path}", "trainer.resume_mode=disable", "data.seed=a b"]
    monkeypatch.setattr("sys.argv", ["verl_patches", *words])
    text = end_errors(130, "interrupted by SIGINT", f"trainer.save_freq={-1 if saved is None else 2}")
    command = f"-m verl_patches smoke --run r recipe.output_root={tmp_path} 'data.seed=a b' trainer.resume_mode=auto"
    assert (f"newest complete checkpoint: {folder / 'global_step_4'}" in text and command in text) == (saved == [2, 4])
    assert (f"no complete checkpoint of this run in {tmp_path / 'r'}" in text) == (saved == [])
    if saved and "damaged" in saved:
        assert "global_step_9" in text and f"trainer.resume_from_path={folder / 'global_step_2'}" in text
    assert "global_step_20" not in text and ("checkpoint" in text) == (saved is not None)


@pytest.mark.parametrize("step", [8, 9])
def test_a_run_that_has_saved_its_last_step_is_not_resumed(tmp_path, end_errors, step):
    make_start(tmp_path / "r", (step,))
    text = end_errors(137, "")
    assert ("all steps are done and saved" in text, "to resume from it" in text) == (step == 9, step == 8)


def test_the_next_command_names_the_runs_clones():
    saved = composed(TINY, ["trainer.save_freq=2"])
    cloned = replace(saved, trees=Trees(option=("--upstream", "clones")))
    assert run._next_commands(cloned)[-1].endswith("-scores --upstream clones")
    assert run._next_commands(saved)[-1].endswith("-scores")


@pytest.fixture
def run_smoke(monkeypatch, tmp_path):
    """Return run_smoke(code, *arguments), the output of `smoke` over a launcher of four lines that ends with `code`."""

    def launch(spec, show, dirty):
        for text in ("~ starting Ray", "", "", "| proven", "- narrow", "+ all columns", "~ step 1", ""):
            show(text)
        return launcher.Outcome(code[0], "ok" if code[0] == 0 else "it broke", make_start(tmp_path / "r"), 1.0)

    code = []
    monkeypatch.setattr(run.smoke.Inputs, "make", lambda self, say: None)
    monkeypatch.setattr(run, "_file_checks", lambda spec: [])
    monkeypatch.setattr(run, "refuse_modified", lambda spec: {})
    monkeypatch.setattr(launcher, "run", launch)

    def call(ended, *arguments):
        code[:] = [ended]
        return CliRunner().invoke(app, ["smoke", *arguments])

    return call


def test_rows_that_the_user_switched_off_are_named_first_and_last(run_smoke):
    off = "recipe.patches=[-model.mla_k_pe_grad,-reward.pass_at_k]"
    first, *_, last, proved, not_proved, follow, one, two, three = run_smoke(0, off).stdout.splitlines()
    off_text = "2 rows off by you: reward.pass_at_k, model.mla_k_pe_grad"
    assert proved.startswith("This proved: ") and not_proved.startswith("It did not prove: ")
    assert first.startswith(off_text) and last.startswith("ok in 1 s") and off_text in last
    assert follow == "next:" and [line.split()[3] for line in (one, two, three)] == ["status", "samples", "plan"]
    assert off_text in run_smoke(1, off).stderr
    assert "off by you" not in run_smoke(0).output  # control: nothing is switched off


def test_the_table_has_all_columns_with_wide(run_smoke):
    assert run_smoke(0).stdout.splitlines()[1:-7] == ["proven", "narrow"]
    assert run_smoke(0, "--wide").stdout.splitlines()[1:-7] == ["proven", "all columns"]


def test_each_stage_of_a_start_is_shown_with_its_seconds_in_a_pipe_and_in_a_terminal(run_smoke, monkeypatch):
    """Check that stages are shown in a pipe until step one; in a terminal they stand below the lines until removed."""
    lines = run_smoke(0).stdout.splitlines()
    (stage,) = [line for line in lines if re.fullmatch(r"\[ +\d+ s\] starting Ray", line)]
    assert not any("step 1" in line for line in lines) and lines.index("proven") > lines.index(stage)
    assert "starting Ray" not in run_smoke(0, "--json").output
    monkeypatch.setattr(run, "Console", partial(run.Console, force_terminal=True, width=80))
    shown = run_smoke(0).stdout
    assert re.search(r"\d:\d\d:\d\d", shown) and "step 1" in shown and "[   0 s]" not in shown


def test_a_run_writes_to_this_repository_from_any_folder(run_smoke, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(run.smoke.Inputs, "make", lambda self, say: seen.append(self.model.parent))
    launch = launcher.run
    monkeypatch.setattr(launcher, "run", lambda spec, *more, **kw: seen.append(spec.home) or launch(spec, *more, **kw))
    outputs = Path(run.__file__).parents[2] / "outputs"
    monkeypatch.chdir(tmp_path)
    assert run_smoke(0).exit_code == 0 and seen == [outputs / "cache", outputs / "smoke"]
    seen.clear()
    assert run_smoke(0, "--run", "r", "recipe.output_root=mine").exit_code == 0
    assert seen == [outputs / "cache", tmp_path / "mine" / "r"]  # all runs share model and data


def test_status_finds_a_run_by_its_folder_and_by_its_name_and_says_why_a_row_is_off(monkeypatch, tmp_path):
    monkeypatch.setattr(patches, "output_root", lambda: tmp_path / "outputs")
    start = make_start(tmp_path / "outputs/named")
    row = {"id": "row.a", "state": "off", "target": "m:f", "reason": "switched off by -row.*"}
    processes = ("controller", *(f"worker {rank}" for rank in range(256)))
    rows = [{**row, "process": process} for process in processes]
    (start / "summary.json").write_text(json.dumps({"exit": "ok", "patches": rows}))
    monkeypatch.chdir(tmp_path)
    for given in ("named", "outputs/named"):
        done = CliRunner().invoke(app, ["status", "--run", given])
        assert done.exit_code == 0 and "row.a" in done.stdout
        assert "switched off by -row.*" in done.stdout and "off: 257 processes" in done.stdout
    text = refusal("status", "--run", "gone")
    assert "gone: " in text and f"in {tmp_path / 'outputs'}: named" in text


@pytest.mark.parametrize(
    ("installed", "line"), [("pypi", "line=pypi,platform=cpu"), ("a3", "line=a3,"), (None, "line=a3,platform=npu")]
)
def test_rows_are_shown_for_the_line_that_is_installed_and_what_was_taken_is_said(monkeypatch, installed, line):
    """Check also None, where no line's pins are all installed: production's rows are shown; then VERL_PATCHES."""
    assert patches.installed_line() == "pypi"  # the line of this Python
    monkeypatch.setattr(patches, "installed_line", lambda: installed)
    for command in (["status", "--json"], ["explain", "model.mla_k_pe_grad", "--json"]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0 and done.stderr.startswith(line) and "VERL_PATCHES is unset" in done.stderr
        switches = re.match(r"\S+", done.stderr)[0]
        assert json.loads(done.stdout) == json.loads(CliRunner().invoke(app, [*command, "--switches", switches]).stdout)
        monkeypatch.setenv("VERL_PATCHES", "line=a3,platform=npu")
        assert CliRunner().invoke(app, command).stderr == ""
        monkeypatch.delenv("VERL_PATCHES")
