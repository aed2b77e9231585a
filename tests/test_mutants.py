"""Each mutant of tests/mutants.py applies to the current files; text that is not there exactly once is refused."""

import ast

import pytest

from tests.mutants import MUTANTS, ROOT, StaleMutantError, mutated


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_can_be_applied(mutant):
    text = (ROOT / "verl_patches" / mutant.file).read_text(encoding="utf-8")
    assert ast.dump(ast.parse(mutated(text, mutant))) != ast.dump(ast.parse(text))
    assert all((ROOT / path).is_file() for path in mutant.tests.paths)


def test_names_are_unique_and_stale_mutants_are_refused():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 60
    for text in ("", MUTANTS[0].old * 2):
        with pytest.raises(StaleMutantError):
            mutated(text, MUTANTS[0])
