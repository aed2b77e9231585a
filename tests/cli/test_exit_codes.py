"""Test the exit codes of every command: 0 fine, 1 a problem was found, 2 wrong use or input."""

import json
import re
import sys
from pathlib import Path

import pytest
import typer

from verl_patches.__main__ import app, main

TINY, SWITCHES = "deepseekv3_tiny_cpu", "--switches line=pypi,platform=cpu"
WRONG_BATCH = "data.train_batch_size=3"
PAGES = [Path(__file__).resolve().parents[2] / "docs" / folder / "operate.md" for folder in (".", "zh")]
ENDS = {  # {command: {exit code: its words}}; DIR is a folder of the test
    "status": {0: SWITCHES, 2: "--run DIR/absent"},
    "explain": {0: f"update.recipe_worker {SWITCHES}", 2: f"no.row {SWITCHES}"},
    "digest": {0: SWITCHES, 2: "--switches line=none"},
    "install-prelude": {2: "--verl-path DIR/absent"},  # 0 would change this Python
    "check": {2: "--upstream DIR/absent"},
    "smoke": {2: WRONG_BATCH},
    "train": {2: f"--config-name {TINY} {WRONG_BATCH}", 1: f"--config-name {TINY} --dry-run {WRONG_BATCH}"},
    "plan": {0: TINY, 1: f"{TINY} {WRONG_BATCH}", 2: "absent"},
    "bringup": {2: "deepseekv3_tiny_cpu --to nowhere"},
    "doctor": {2: "absent"},
    "config": {0: f"--config-name {TINY}", 2: f"--config-name {TINY} +actor_rollout_ref.model.lora_rank=8"},
    "reshard-plan": {2: "--train absent --rollout tp2"},
    "report": {2: "DIR/absent"},
    "samples": {2: "DIR/absent"},
    "compare": {0: "DIR/run.jsonl DIR/run.jsonl", 1: "DIR/far.jsonl DIR/run.jsonl", 2: "DIR/absent DIR/run.jsonl"},
    "generate": {2: "DIR/absent DIR/in.jsonl DIR/out.jsonl"},
    "chat": {2: "DIR/absent"},
    "eval": {2: "DIR/absent DIR/out.jsonl"},
    "versions": {2: "--line none"},
    "cluster render": {2: "DIR/absent -o DIR/out"},
    "data build": {2: "DIR/absent"},
    "data from-rollouts": {2: "DIR/absent -o DIR/out"},
    "weights convert": {2: "DIR/absent DIR/out --hf"},
    "weights export": {2: "DIR/absent DIR/out"},
    "weights verify": {1: "DIR/damaged", 2: "DIR/absent"},
}


def command_names(group, *before):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from command_names(command, *before, name)
        else:
            yield " ".join((*before, name))


def test_every_command_is_tried_with_wrong_input():
    assert {*command_names(typer.main.get_command(app))} == ENDS.keys()
    assert all(2 in ends for ends in ENDS.values())


@pytest.mark.parametrize(("command", "code"), [(command, code) for command, ends in ENDS.items() for code in ends])
def test_the_exit_code_of_a_command(command, code, monkeypatch, capsys, tmp_path):
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text("{}")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"\0")
    for name, loss in (("run", 1.0), ("far", 9.0)):
        text = "\n".join(json.dumps({"step": step, "loss": loss}) for step in (1, 2, 3))
        (tmp_path / f"{name}.jsonl").write_text(text)
    words = [*command.split(), *ENDS[command][code].replace("DIR", str(tmp_path)).split()]
    monkeypatch.setattr(sys, "argv", ["verl_patches", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert (ended.value.code or 0) == code, said
    assert code == 0 or "Traceback" not in said and "Usage: " not in said
    assert code != 2 or said.startswith("verl_patches: "), said


@pytest.mark.parametrize("page", PAGES)
def test_the_table_of_exit_codes_has_each_code(page):
    assert re.findall(r"^\| (0|1|2|128 \+ n) \|", page.read_text(), re.MULTILINE) == ["0", "1", "2", "128 + n"]
