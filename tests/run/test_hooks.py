"""Test the rule about the user's code: files and packages exist, and nothing is run before the controller runs it."""

from dataclasses import replace

import pytest

from tests.runs import composed
from verl_patches.errors import ConfigError
from verl_patches.run import files
from verl_patches.spec import Trees

NONE, TINY = Trees(), "deepseekv3_tiny_cpu"
PATH = "custom_reward_function.path"
NO_PARTS = "recipe.rewards=null"  # removes the config's rewards; the tests use the short form
WORKER, LIBRARY = "recipe.worker_process_setup_hook", "actor_rollout_ref.model.external_lib"


def last_hook(*overrides, must_exist=(), trees=NONE):
    """Return (ok, detail, note) of the last finding about hooks of the tiny config with `overrides`."""
    run = composed(TINY, [NO_PARTS, *overrides], trees)
    *_, check = files.hook_checks(replace(run, given_keys=frozenset(must_exist)))
    return check.ok, check.detail, check.note


def test_the_file_of_an_entry_must_exist_and_is_not_run(tmp_path):
    file = tmp_path / "r.py"
    part = f"recipe.rewards=[{{name: maths}},{{name: python, path: {file}, function: unseen}}]"
    ok, detail, note = last_hook(part)
    assert ok and note and f"{file} is not on this machine" in detail and "(recipe.rewards[1].path)" in detail
    assert not last_hook(part, must_exist=["recipe.rewards"])[0]
    file.write_text("1 / 0\n")
    assert list(files.hook_checks(composed(TINY, [NO_PARTS, part]))) == []


def test_the_package_of_a_hook_by_dotted_name_is_found_in_the_trees_of_the_run(tmp_path):
    (tmp_path / "mine.py").write_text("def set_up(): ...\n")
    trees, given = Trees(folders=(tmp_path,)), [NO_PARTS, f"{WORKER}=mine.set_up"]
    assert list(files.hook_checks(composed(TINY, given, trees))) == []
    ok, detail, _ = last_hook(f"{LIBRARY}=nowhere.hooks", trees=trees)
    assert not ok and detail == f"{LIBRARY}: package nowhere does not exist; expected one on PYTHONPATH"
    assert not last_hook(*given)[0]  # the module is not found without its tree
    with pytest.raises(ConfigError, match="worker_process_setup_hook is 'set_up'; expected package.module.function"):
        composed(TINY, [f"{WORKER}=set_up"])


def test_what_this_machine_lacks_is_a_note():
    assert last_hook(f"{LIBRARY}=not_installed_here", "recipe.platform=npu", "recipe.line=a3")[::2] == (True, True)
    ok, detail, note = last_hook(f"{PATH}=/nowhere.py")
    assert ok and note and "not on this machine" in detail
    assert not last_hook(f"{PATH}=/nowhere.py", must_exist=[PATH])[0]
