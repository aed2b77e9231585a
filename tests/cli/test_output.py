"""Test the output of tables, sentences and commands in terminals and in pipes."""

import re
import shlex
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from tests.run.record.test_report import run_summary, write_start
from tests.scripts.test_commands import fault
from verl_patches.__main__ import EXAMPLES, app
from verl_patches.cli import output
from verl_patches.cli.output import print_command, print_table

NAMES = ("id", "kind", "target", "why")
TARGET = "verl.workers.sharding_manager.megatron_vllm:MegatronVLLMShardingManager.__enter__"
ROWS = [("reshard.direct", "override", TARGET, "it moves 1.3 TB of weights"), ("x", "[bold]", "\x1b[2J", "")]


def test_a_pipe_gets_a_table_of_plain_lines_that_is_no_wider_than_its_width(capsys):
    print_table("rows", NAMES, [*ROWS, ("y", "", TARGET * 3, "words " * 40)], red=[0])
    title, head, *lines = capsys.readouterr().out.splitlines()
    assert title == "rows" and head.split() == list(NAMES)
    assert max(map(len, lines)) <= output.PIPE_COLUMNS and [line for line in lines if line != line.rstrip()] == []
    assert lines[0].startswith("reshard.direct  override  verl.") and "".join(lines).isascii()
    (other,) = (line for line in lines if line.startswith("x "))
    assert "[bold]" in other and r"\x1b[2J" in other  # markup is not read, terminal codes are escaped


def test_a_list_of_names_is_printed_whole_and_one_of_numbers_is_cut(capsys):
    output.print_data({"keys": [f"key.{n}" for n in range(20)], "ranks": list(range(20))}, "plan")
    printed = capsys.readouterr().out
    assert "key.19" in printed and "6, 7, ... (20)" in printed


def test_a_command_can_be_pasted(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    words = ["python", "-c", "import sys; print(sys.argv[1:])", "a=[1,2]", "it's", 'say "x"', "k" * 50]
    print_command(shlex.join(words))
    text = capsys.readouterr().out
    done = subprocess.run(["bash", "-c", text.replace("python", sys.executable, 1)], capture_output=True, text=True)
    assert done.stdout == f"{words[3:]}\n" and text.count(" \\\n") > 1, (text, done.stderr)


def all_commands(command, *words):
    """Yield (its words, command) of each command of ours."""
    if not hasattr(command, "commands"):
        yield words, command
    for name, child in getattr(command, "commands", {}).items():
        yield from all_commands(child, *words, name)


@pytest.mark.parametrize("words", [words for words, _ in all_commands(typer.main.get_command(app))], ids=" ".join)
def test_help_is_one_screen_with_the_whole_text_of_each_option_and_two_examples(words, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    printed = CliRunner().invoke(app, [*words, "--help"]).output
    lines = printed.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 80, printed
    assert len(EXAMPLES) == len(dict(all_commands(typer.main.get_command(app))))
    examples = [line.strip() for line in lines[lines.index("  Examples:") + 1 :] if line]
    assert len(examples) == 2 and [wrong for line in examples if (wrong := fault(shlex.split(line)))] == []
    command, shown = dict(all_commands(typer.main.get_command(app)))[words], "".join(printed.split())
    texts = [option.help for option in command.params if getattr(option, "help", None) and not option.hidden]
    assert [text for text in texts if "".join(text.split()) not in shown] == []  # [text] is no markup


@pytest.mark.parametrize(
    "command",
    [
        "status --switches line=a3,platform=npu",
        "status DIR/r",
        "compare DIR/r DIR/r",
        "plan deepseekv3_128die",
        "plan deepseekv3_16die --all",
        "doctor deepseekv3_tiny_cpu --this-node",
    ],
)
def test_nothing_is_wider_than_a_terminal(command, monkeypatch, tmp_path):
    folder = write_start(tmp_path / "r", run_summary())
    (folder / "metrics.jsonl").write_text('{"step": 1, "critic/score/mean": 0.5}\n')
    for name, value in (("COLUMNS", "80"), ("FORCE_COLOR", "1"), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)
    shown = CliRunner().invoke(app, command.replace("DIR", str(tmp_path)).split()).stdout
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in shown.splitlines()]
    commands = [line for line in lines if line.endswith("\\") or "python -m" in line or "ray start" in line]
    assert len(lines) > 1 and [line for line in lines if len(line) > 80 and line not in commands] == []
