"""Test the rule about the user's code: it is read, not run, and an error in it is named with file and line."""

import re
from dataclasses import replace

import pytest

from tests.runs import composed
from verl_patches.errors import ConfigError
from verl_patches.run import files
from verl_patches.spec import Trees

NONE, TINY = Trees(), "deepseekv3_tiny_cpu"
PATH, NAME = "custom_reward_function.path", "custom_reward_function.name"
NO_PARTS = "recipe.rewards=null"  # removes the config's rewards; the tests use the short form
WORKER, LIBRARY = "recipe.worker_process_setup_hook", "actor_rollout_ref.model.external_lib"


def last_hook(*overrides, must_exist=(), trees=NONE):
    """Return (ok, detail, note) of the last hook of the tiny config with `overrides`."""
    run = composed(TINY, [NO_PARTS, *overrides], trees)
    *_, check = files.hook_checks(replace(run, given_keys=frozenset(must_exist)))
    return check.ok, check.detail, check.note


CODE = {  # a file: what is found
    "1 / 0\ndef score(): ...\n": None,  # code is not run
    "from elsewhere import points as score\n": None,
    "from elsewhere import *\n": None,
    "if True:\n    score = print\n": None,
    "import os\ndef score(:\n": r"r\.py:2: SyntaxError: ",
    "def points(): ...\nscores = 1\n": r"r\.py does not define score",
    "print(score)\n": r"r\.py does not define score",
}


@pytest.mark.parametrize(("code", "words"), CODE.items())
def test_syntax_and_name_of_a_users_file_are_checked(tmp_path, code, words):
    (tmp_path / "r.py").write_text(code)
    ok, detail, note = last_hook(f"{PATH}={tmp_path}/r.py", f"{NAME}=score")
    assert (ok, note) == (words is None, False)
    assert detail == f"score of {tmp_path}/r.py" if ok else re.search(words, detail), detail


def test_an_entry_is_named_and_a_file_that_changes_is_read_again(tmp_path):
    file = tmp_path / "r.py"
    file.write_text("def score(): ...\n")
    part = f"recipe.rewards=[{{name: maths}},{{name: python, path: {file}, function: unseen}}]"
    ok, detail, _ = last_hook(part)
    assert not ok and detail.startswith(f"recipe.rewards[1]: {file} does not define unseen")
    file.write_text("def score(): ...\nunseen = score\n")
    assert last_hook(f"{PATH}={file}", f"{NAME}=unseen")[0] and last_hook(part)[0]
    file.unlink()
    assert last_hook(part)[2] and not last_hook(part, must_exist=["recipe.rewards"])[0]


def test_the_package_of_a_hook_by_dotted_name_is_found_in_the_trees_of_the_run(tmp_path):
    (tmp_path / "mine.py").write_text("def set_up(): ...\n")
    (tmp_path / "broken.py").write_text("\n1 /\n")
    trees, given = Trees(folders=(tmp_path,)), [NO_PARTS, f"{WORKER}=mine.set_up"]
    assert list(files.hook_checks(composed(TINY, given, trees))) == []
    for override, words in {
        f"{LIBRARY}=nowhere.hooks": f"{LIBRARY}: package nowhere does not exist; expected one on PYTHONPATH",
        f"{PATH}=/etc/hostname": "expected a name that ends with .py",
        f"data.custom_cls.path={tmp_path}/broken.py data.custom_cls.name=Own": r"broken\.py:2: SyntaxError",
    }.items():
        ok, detail, note = last_hook(*override.split(), trees=trees)
        assert not ok and re.search(words, detail), detail
    assert not last_hook(*given)[0]  # the module is not found without its tree
    with pytest.raises(ConfigError, match="worker_process_setup_hook is 'set_up'; expected package.module.function"):
        composed(TINY, [f"{WORKER}=set_up"])


def test_what_this_machine_lacks_is_a_note():
    assert last_hook(f"{LIBRARY}=not_installed_here", "recipe.platform=npu", "recipe.line=a3")[::2] == (True, True)
    ok, detail, note = last_hook(f"{PATH}=/nowhere.py")
    assert ok and note and "not on this machine" in detail
    assert not last_hook(f"{PATH}=/nowhere.py", must_exist=[PATH])[0]
