import re
import sys
from dataclasses import replace

import pytest

from tests.runs import composed
from verl_patches.errors import ConfigError
from verl_patches.rules import SIZE_RULES
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


CODE = {  # what a file with a function `score` begins with: what is found
    "print('x' * 100_000)\n": None,
    "import os\nos.no_such_name\n": r"r\.py:2: AttributeError: module 'os' has no attribute 'no_such_name'",
    "def inner(:\n": r"r\.py:1: SyntaxError: ",
    "import not_installed_here\n": r"r\.py:1: ModuleNotFoundError: No module named 'not_installed_here'",
    "import json\njson.loads('{')\n": r"r\.py:2: JSONDecodeError",  # the user's line, not that of the library
    "import os\nos._exit(0)\n": "exited while it imported",
}


@pytest.mark.parametrize(("code", "words"), CODE.items())
def test_the_users_own_error_is_named_with_file_and_line(tmp_path, code, words):
    (tmp_path / "r.py").write_text(f"{code}def score(): ...\n")
    ok, detail, note = last_hook(f"{PATH}={tmp_path}/r.py", f"{NAME}=score")
    assert (ok, note) == (words is None, False)
    assert detail == f"score of {tmp_path}/r.py" if ok else re.search(words, detail), detail


def test_a_hook_may_import_what_only_the_prelude_provides(tmp_path):
    """Import verl's worker module, which needs flash_attn, for which a patch stands in."""
    (tmp_path / "r.py").write_text("import verl.workers.megatron_workers\ndef score(): ...\n")
    assert last_hook(f"{PATH}={tmp_path}/r.py", f"{NAME}=score")[:2] == (True, f"score of {tmp_path}/r.py")


def test_a_name_that_is_not_defined_and_a_file_that_changes(tmp_path):
    file = tmp_path / "r.py"
    file.write_text("def score(): ...\n")
    ok, detail, _ = last_hook(f"{PATH}={file}", f"{NAME}=unseen")
    assert not ok and "does not define unseen" in detail and detail.startswith("custom_reward_function: expected")
    part = f"recipe.rewards=[{{name: maths}},{{name: python, path: {file}, function: unseen}}]"
    ok, detail, _ = last_hook(part)
    assert not ok and detail.startswith("recipe.rewards[1]: expected unseen of")
    file.write_text("def score(): ...\nunseen = score\n")
    assert last_hook(f"{PATH}={file}", f"{NAME}=unseen")[0] and last_hook(part)[0]
    file.unlink()
    assert last_hook(part)[2] and not last_hook(part, must_exist=["recipe.rewards"])[0]


def test_hooks_by_dotted_name_are_imported_from_the_trees_of_the_run(tmp_path):
    (tmp_path / "mine.py").write_text("def set_up(): ...\n")
    (tmp_path / "broken.py").write_text("\n1 / 0\n")
    trees = Trees(folders=(tmp_path,))
    assert last_hook(f"{WORKER}=mine.set_up", trees=trees)[0] and last_hook(f"{LIBRARY}=mine", trees=trees)[0]
    for override, words in {
        f"{WORKER}=mine.other": "mine does not define other",
        f"{WORKER}=nowhere.set_up": "found ModuleNotFoundError: No module named 'nowhere'",
        f"{PATH}=/etc/hostname": "ImportError: its name does not end with .py",
        f"{LIBRARY}=broken": r"broken\.py:2: ZeroDivisionError: division by zero",
        f"data.custom_cls.path={tmp_path}/mine.py data.custom_cls.name=Own": "mine.py does not define Own",
    }.items():
        run = composed(TINY, [NO_PARTS, *override.split()], trees)
        (check,) = [check for check in files.hook_checks(run) if not check.ok]
        assert re.search(words, check.detail), check
    assert not last_hook(f"{WORKER}=mine.set_up")[0]  # the module is not found without its tree
    with pytest.raises(ConfigError, match="worker_process_setup_hook is 'set_up'; expected package.module.function"):
        composed(TINY, [f"{WORKER}=set_up"])


def test_what_this_machine_lacks_is_a_note(tmp_path):
    (tmp_path / "r.py").write_text("import mindspeed.none\ndef score(): ...\n")
    overrides = [f"{PATH}={tmp_path}/r.py", f"{NAME}=score"]
    assert not last_hook(*overrides)[0]  # line pypi has no package of that name
    ok, detail, note = last_hook("recipe.line=a3", *overrides)
    assert ok and note and "this machine has no mindspeed" in detail
    (tmp_path / "r.py").write_text("import not_installed_here\ndef score(): ...\n")
    # the prelude of another platform may provide the module
    ok, detail, note = last_hook(*overrides, "recipe.platform=npu", "recipe.line=a3")
    assert ok and note and "not_installed_here" in detail
    ok, detail, note = last_hook(f"{PATH}=/nowhere.py")
    assert ok and note and "not on this machine" in detail
    assert not last_hook(f"{PATH}=/nowhere.py", must_exist=[PATH])[0]


def test_this_process_imports_no_hook_and_a_search_runs_none(tmp_path):
    (tmp_path / "r.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('x')\ndef score(): ...\n")
    run = composed(TINY, [NO_PARTS, f"{PATH}={tmp_path}/r.py", f"{NAME}=score"])
    for rule in SIZE_RULES:  # the rules that a layout search applies
        list(rule(run))
    assert not (tmp_path / "ran").exists()
    for _ in range(2):
        assert all(check.ok for check in files.hook_checks(run))
    assert (tmp_path / "ran").read_text() == "x" and "custom_module" not in sys.modules


def test_an_import_that_does_not_end_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "IMPORT_S", 1)
    (tmp_path / "r.py").write_text("import time\ntime.sleep(600)\n")
    ok, detail, note = last_hook(f"{PATH}={tmp_path}/r.py")
    assert ok and note and "was not checked: its import took more than 1 s" in detail  # a cold disk may be slow
