"""Test the output of tables, sentences and commands in terminals and in pipes."""

import shlex
import subprocess
import sys

import typer
from typer.testing import CliRunner

from verl_patches.__main__ import app
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


def test_a_command_can_be_pasted(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    words = ["python", "-c", "import sys; print(sys.argv[1:])", "a=[1,2]", "it's", 'say "x"', "k" * 50]
    print_command(shlex.join(words))
    text = capsys.readouterr().out
    done = subprocess.run(["bash", "-c", text.replace("python", sys.executable, 1)], capture_output=True, text=True)
    assert done.stdout == f"{words[3:]}\n" and text.count(" \\\n") > 1, (text, done.stderr)


def shown_help(words, command):
    """Yield (words of a command, an option's help, the printed help) for a command and those below it."""
    printed = CliRunner().invoke(app, [*words, "--help"]).output
    options = [option for option in command.params if not getattr(option, "hidden", False)]
    yield from ((words, option.help, printed) for option in options if getattr(option, "help", None))
    for name, child in getattr(command, "commands", {}).items():
        yield from shown_help([*words, name], child)


def test_help_shows_the_whole_text_of_each_option():
    """Check because typer reads [text] as markup and drops it."""
    found = list(shown_help([], typer.main.get_command(app)))
    assert len(found) > 50
    assert [(words, text) for words, text, printed in found if not {*text.split()} <= {*printed.split()}] == []
