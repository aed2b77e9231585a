"""Tables and commands in terminals and in pipes."""

import contextlib
import re
import shlex
import subprocess
import sys

import pytest

from verl_patches.__main__ import main
from verl_patches.cli.output import say_command, table, table_lines

NODE = "deepseekv3_16die"
ROWS = [("reshard.direct", "override", "verl.workers.sharding_manager:Manager.__enter__", "it moves 1.3 TB of weights")]
COMMANDS = {
    "plan": ["plan", NODE],
    "refused": ["plan", NODE, "trainer.nnodes=3"],
    "search": ["plan", NODE, "--search", "--top", "2"],
    "status": ["status", "--switches", "line=a3,platform=npu"],
    "explain": ["explain", "reshard.direct", "--switches", "line=a3,platform=npu"],
    "config": ["config", "--config-name", NODE, "--explain"],
    "versions": ["versions"],
}


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, None])
@pytest.mark.parametrize("name", COMMANDS)
def test_lines_fit_the_terminal_and_have_no_blanks_at_their_end(name, columns, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["verl_patches", *COMMANDS[name]])
    if columns is not None:
        monkeypatch.setenv("COLUMNS", str(columns))
    with contextlib.suppress(SystemExit):
        main()
    lines = [line for printed in capsys.readouterr() for line in printed.splitlines()]
    assert lines and [line for line in lines if line != line.rstrip()] == []
    if columns is None:
        assert max(map(len, lines)) > 120  # the control: what is wrapped in a terminal is whole in a pipe
        return
    whole = re.compile(r"\s+\S+( \\\\)?")  # a word of a command is never broken
    assert [line for line in lines if len(line) > columns and not whole.fullmatch(line)] == []


def test_a_pipe_gets_whole_cells(capsys):
    table("rows", ("id", "kind", "target", "why"), [*ROWS, ("x", "", "", "")])
    assert capsys.readouterr().out.splitlines()[2:] == ["  ".join(ROWS[0]), "x"]


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_no_width_breaks_a_word_that_fits_and_blocks_are_for_those_where_words_do_not(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = [line.plain for line in table_lines(("id", "kind", "target", "why"), ROWS)]
    assert max(map(len, lines)) <= columns
    for word in ("reshard.direct", "override", *ROWS[0][3].split()):
        assert any(word in line for line in lines), (word, lines)
    assert (lines[0] == "reshard.direct") == (columns < 80)
    assert (lines[0].split() == ["id", "kind", "target", "why"]) == (columns >= 80)


def test_red_rows_are_red_and_text_is_no_markup():
    lines = table_lines(("a", "b"), [("[bold]", "1"), ("x", "2")], red=[1])
    assert [line.plain for line in lines] == ["a       b", "[bold]  1", "x       2"]
    assert [str(line.style) for line in lines] == ["bold", "", "red"]


@pytest.mark.parametrize("columns", ["40", "100", None])
def test_a_command_can_be_pasted(monkeypatch, capsys, columns):
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    words = ["python", "-c", "import sys; print(sys.argv[1:])", "a=[1,2]", "it's", 'say "x"', "k" * 50]
    say_command("next:", shlex.join(words))
    text = capsys.readouterr().out.removeprefix("next:")
    done = subprocess.run(["bash", "-c", text.replace("python", sys.executable, 1)], capture_output=True, text=True)
    assert done.stdout == f"{words[3:]}\n", (text, done.stderr)
    assert columns is not None or text.count("\n") == 1
