"""The table of tests/mutants.py fits today's files; a mutant whose text is gone, or there twice, is refused."""

import ast

import pytest

from tests.mutants import MUTANTS, ROOT, StaleMutantError, main, mutated


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_can_be_applied(mutant):
    text = (ROOT / "verl_patches" / mutant.file).read_text(encoding="utf-8")
    changed = mutated(text, mutant)
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text))
    assert all((ROOT / path).is_file() for path in mutant.tests.paths)


def test_names_are_unique_and_stale_mutants_are_refused(capsys):
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    for text in ("", MUTANTS[0].old * 2):
        with pytest.raises(StaleMutantError):
            mutated(text, MUTANTS[0])
    with pytest.raises(SystemExit) as exit_code:
        main(["--only", "no-such-mutant"])
    assert exit_code.value.code == 2 and "no-such-mutant" in capsys.readouterr().err
