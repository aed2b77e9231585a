"""The generated tables of both READMEs are fresh, and a stale one is seen and mended."""

import sys
from pathlib import Path

import pytest

from verl_patches.cluster.pins import load_pins

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import readme_tables  # noqa: E402


def test_the_tables_are_fresh():
    assert readme_tables.stale() == []


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_pin_is_in_the_table(language):
    pins = load_pins()
    table = readme_tables.pins_table(pins, language)
    rows = [row.split(" | ") for row in table.splitlines()]
    assert {len(row) for row in rows if not row[0].startswith("|---")} == {3}
    for line in pins.lines.values():
        assert all(version in table for version in (*line.packages.values(), *line.system.values(), *line.python))
        assert all(pin.commit[:12] in table for pin in line.repositories.values())
        assert getattr(line.use, language) in table and getattr(line.state, language) in table


def test_a_stale_table_is_named_and_written(tmp_path, monkeypatch):
    for name in readme_tables.LANGUAGES:
        (tmp_path / name).write_text((ROOT / name).read_text().replace("2.5.1.post1", "2.5.1.post9"))
    (tmp_path / "README.md").write_text((ROOT / "README.md").read_text())
    monkeypatch.setattr(readme_tables, "ROOT", tmp_path)
    assert readme_tables.stale() == ["README_zh.md"] == readme_tables.stale(write=True)
    assert readme_tables.stale() == []
    assert (tmp_path / "README_zh.md").read_text() == (ROOT / "README_zh.md").read_text()


BEGIN, END = "<!-- pins:begin -->\n", "<!-- pins:end -->\n"


@pytest.mark.parametrize("text", ["no markers", END + BEGIN, BEGIN + BEGIN + END])
def test_markers_that_are_missing_or_twice_are_refused(text):
    with pytest.raises(ValueError, match="expected one <!-- pins:begin -->"):
        readme_tables.with_table(text, "pins", "table")
