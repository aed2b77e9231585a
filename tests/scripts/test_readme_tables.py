"""Test that the generated tables of the READMEs and docs/ are fresh, and that a stale one is found and rewritten."""

from dataclasses import make_dataclass
from pathlib import Path

import pytest
import readme_tables

ROOT = Path(__file__).resolve().parents[2]


def test_the_tables_are_fresh():
    assert readme_tables.stale_files() == []


def test_a_stale_table_is_named_and_written(tmp_path, monkeypatch):
    (tmp_path / "docs" / "zh").mkdir(parents=True)
    for name in readme_tables.FILES:
        (tmp_path / name).write_text((ROOT / name).read_text())
    spoilt = tmp_path / readme_tables.PINS
    spoilt.write_text(spoilt.read_text().replace("2.5.1.post1", "2.5.1.post9"))
    monkeypatch.setattr(readme_tables, "ROOT", tmp_path)
    assert readme_tables.stale_files() == [readme_tables.PINS] == readme_tables.stale_files(write=True)
    assert readme_tables.stale_files() == []
    assert spoilt.read_text() == (ROOT / readme_tables.PINS).read_text()


Undescribed = make_dataclass("Undescribed", [("there", int, 1), ("absent", int, 2)])
Unknown = make_dataclass("Unknown", [("there", int, 1)])
Undescribed.__doc__ = "A section.\n\nthere: is described.\n"
Unknown.__doc__ = "A section.\n\nthere: is described.\ngone: was a key once.\n"


@pytest.mark.parametrize(("section", "named"), [(Undescribed, "absent"), (Unknown, "gone")])
def test_a_key_without_a_description_and_a_description_without_a_key_are_refused(section, named):
    with pytest.raises(ValueError, match=named):
        readme_tables.recipe_lists(section)
