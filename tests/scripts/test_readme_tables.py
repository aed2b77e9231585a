"""The generated tables of the READMEs and docs/ are fresh, and a stale one is seen and written again."""

from dataclasses import make_dataclass
from pathlib import Path

import pytest
import readme_tables

from verl_patches.upstream.pins import load_pins

ROOT = Path(__file__).resolve().parents[2]


def test_the_tables_are_fresh():
    assert readme_tables.stale() == []


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_pin_is_in_the_table_and_five_rows_in_the_readmes(language):
    pins = load_pins()
    table = readme_tables.pins_table(pins, language)
    short = readme_tables.pins_table(pins, language, readme_tables.IN_README).splitlines()
    assert len(short) == 2 + 5 and set(short) < set(table.splitlines())
    assert {row.count(" | ") for row in table.splitlines() if not row.startswith("|---")} == {2}
    for line in pins.lines.values():
        texts = {*line.packages.values(), *line.system.values(), *line.python}
        texts |= {getattr(line.use, language), getattr(line.state, language)}
        texts |= {pin.commit[:12] for pin in line.repositories.values()}
        assert not [text for text in texts if text not in table]


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


Undescribed = make_dataclass("Undescribed", [("there", int, 1), ("absent", int, 2)])
Unknown = make_dataclass("Unknown", [("there", int, 1)])
Undescribed.__doc__ = "A section.\n\nthere: is described.\n"
Unknown.__doc__ = "A section.\n\nthere: is described.\ngone: was a key once.\n"


@pytest.mark.parametrize(("section", "named"), [(Undescribed, "absent"), (Unknown, "gone")])
def test_a_key_without_a_description_and_a_description_without_a_key_are_refused(section, named):
    with pytest.raises(ValueError, match=named):
        readme_tables.recipe_tables(section)


BEGIN, END = "<!-- pins:begin -->\n", "<!-- pins:end -->\n"


@pytest.mark.parametrize("text", ["no markers", END + BEGIN, BEGIN + BEGIN + END])
def test_markers_that_are_missing_or_twice_are_refused(text):
    with pytest.raises(ValueError, match="pins:begin"):
        readme_tables.with_table(text, "pins", "table")
