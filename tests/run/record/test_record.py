"""Test reading the files of a run: whole, damaged, and with texts that a terminal would interpret."""

import json

import pytest

from tests.run.record.test_report import run_summary, write_start
from verl_patches.errors import ConfigError
from verl_patches.run.record import record

HOSTILE = "a[red]b[/c]\x1b[31m\x07 $\\frac|<b>"


def test_a_record_is_read_as_it_was_written(tmp_path):
    made = run_summary(more=1)
    folder = write_start(tmp_path / "r", made)
    assert record.read_summary(folder) == made and record.read_object(folder / "now.json") == {}
    (folder / "now.json").write_text('{"step": 3, "since": NaN}')
    assert record.read_object(folder / "now.json") == {"step": 3, "since": None}
    assert record.last_lines(folder, 5) == []
    (folder / "progress.log").write_text("| proven\n- row\n| step 2: a \x1b[31mnote\n| three\n")
    assert record.last_lines(folder, 2) == [r"step 2: a \x1b[31mnote", "three"]


@pytest.mark.parametrize("content", ['{"steps": [', "[1]", None])
def test_a_damaged_file_is_one_sentence(call, tmp_path, content):
    folder = write_start(tmp_path / "r", run_summary())
    if content is None:
        (folder / "summary.json").unlink()
        (folder / "summary.json").mkdir()
    else:
        (folder / "summary.json").write_text(content)
    with pytest.raises(ConfigError, match="summary.json: expected a JSON object as a run writes it, found "):
        record.read_summary(folder)
    code, out, err = call(["report", str(folder)])
    assert code == 2 and not out and err.startswith("verl_patches: ") and err.count("\n") == 1


def test_texts_of_a_run_are_shown_as_text(call, tmp_path):
    """Check Rich's markup, and escapes of a terminal."""
    folder = write_start(tmp_path / "r", run_summary(r"a[red]$\frac|b", exit=HOSTILE))
    code, out, _ = call(["status", str(folder)])
    assert code == 1 and r"a[red]b[/c]\x1b[31m\x07 $\frac|<b>" in out and "\x1b" not in out
    assert json.loads(call(["status", str(folder), "--json"])[1])["exit"] == record.read_summary(folder)["exit"]
