"""Tables, sentences and commands in terminals and in pipes."""

import io
import shlex
import subprocess
import sys

import pytest
from rich.console import Console

from verl_patches.cli import output
from verl_patches.cli.output import grid, say_command, table

NAMES = ("id", "kind", "target", "why")
TARGET = "verl.workers.sharding_manager.megatron_vllm:MegatronVLLMShardingManager.__enter__"
ROWS = [("reshard.direct", "override", TARGET, "it moves 1.3 TB of weights"), ("x", "[bold]", "\x1b[2J", "")]


def test_a_pipe_gets_a_table_of_plain_lines_that_is_no_wider_than_its_width(capsys):
    table("rows", NAMES, [*ROWS, ("y", "", TARGET * 3, "words " * 40)], red=[0])
    title, head, *lines = capsys.readouterr().out.splitlines()
    assert title == "rows" and head.split() == list(NAMES)
    assert max(map(len, lines)) <= output.PIPE_COLUMNS and [line for line in lines if line != line.rstrip()] == []
    assert lines[0].startswith("reshard.direct  override  verl.") and "".join(lines).isascii()
    (other,) = (line for line in lines if line.startswith("x "))
    assert "[bold]" in other and r"\x1b[2J" in other  # no markup, and no code of a terminal


@pytest.mark.parametrize("columns", [60, 100])
def test_a_terminal_gets_a_table_of_its_width_with_whole_ids_and_red_rows(columns):
    terminal = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=columns)
    terminal.print(grid(NAMES, ROWS, red=[0]))
    plain = Console(file=io.StringIO(), width=columns)
    plain.print(grid(NAMES, ROWS))
    lines = plain.file.getvalue().splitlines()
    assert max(map(len, lines)) <= columns and lines[1].startswith("reshard.direct  ")
    red = [line for line in terminal.file.getvalue().splitlines() if "\x1b[31m" in line]
    assert red and not any("bold" in line for line in red)


def test_a_command_can_be_pasted(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    words = ["python", "-c", "import sys; print(sys.argv[1:])", "a=[1,2]", "it's", 'say "x"', "k" * 50]
    say_command(shlex.join(words))
    text = capsys.readouterr().out
    done = subprocess.run(["bash", "-c", text.replace("python", sys.executable, 1)], capture_output=True, text=True)
    assert done.stdout == f"{words[3:]}\n" and text.count(" \\\n") > 1, (text, done.stderr)
