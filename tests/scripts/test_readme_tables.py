"""The generated tables of the READMEs and docs/ are fresh, and a stale one is seen and written again."""

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from verl_patches.config.recipe import recipe_keys
from verl_patches.upstream.pins import load_pins

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


def test_the_readmes_have_five_of_its_rows():
    short = readme_tables.pins_table(load_pins(), "en", readme_tables.IN_README).splitlines()
    assert len(short) == 2 + 5 and set(short) < set(readme_tables.pins_table(load_pins(), "en").splitlines())


def test_a_stale_table_is_named_and_written(tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()
    for name in readme_tables.FILES:
        (tmp_path / name).write_text((ROOT / name).read_text())
    spoilt = tmp_path / readme_tables.PINS
    spoilt.write_text(spoilt.read_text().replace("2.5.1.post1", "2.5.1.post9"))
    monkeypatch.setattr(readme_tables, "ROOT", tmp_path)
    assert readme_tables.stale() == [readme_tables.PINS] == readme_tables.stale(write=True)
    assert readme_tables.stale() == []
    assert spoilt.read_text() == (ROOT / readme_tables.PINS).read_text()


def test_every_recipe_key_is_described():
    table = readme_tables.recipe_tables()
    assert [key for key, _ in recipe_keys() if f"| `{key}` |" not in table] == []


@dataclass
class Undescribed:
    """A section.

    there: is described.
    """

    there: int = 1
    absent: int = 2


@dataclass
class Unknown:
    """A section.

    there: is described.
    gone: was a key once.
    """

    there: int = 1


@pytest.mark.parametrize(("section", "named"), [(Undescribed, "absent"), (Unknown, "gone")])
def test_keys_and_descriptions_belong_together(section, named):
    with pytest.raises(ValueError, match=named):
        readme_tables.recipe_tables(section)


BEGIN, END = "<!-- pins:begin -->\n", "<!-- pins:end -->\n"


@pytest.mark.parametrize("text", ["no markers", END + BEGIN, BEGIN + BEGIN + END])
def test_markers_that_are_missing_or_twice_are_refused(text):
    with pytest.raises(ValueError, match="expected one <!-- pins:begin -->"):
        readme_tables.with_table(text, "pins", "table")
