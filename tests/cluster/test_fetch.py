"""fetch-upstream on small local git repositories: pins kept, sources chosen, interruptions survived, nothing lost."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.small_upstream import NOWHERE, WORKER, WORKER_TEXT, commit, git, line_of, run
from verl_patches.cluster import fetch as fetch_module
from verl_patches.cluster import git_tree, upstream_tree
from verl_patches.cluster.fetch import fetch_upstream
from verl_patches.cluster.mirrors import candidates, sources
from verl_patches.cluster.pins import Repository, load_pins
from verl_patches.errors import ConfigError, RecipeError
from verl_patches.patching.install_prelude import LINE

pytestmark = pytest.mark.slow  # each starts processes, or plans 256 ranks


def test_a_fresh_tree_is_verified_and_carries_the_prelude_line_once(upstream, dest):
    pin = upstream.pin(upstream.first)
    report, found = run(dest, pin)
    assert (report.command, report.state, report.exit_code) == ("fetch-upstream", "fine", 0)
    assert found["verl"].found.startswith("made, clean")
    assert git(dest / "verl", "rev-parse", "HEAD") == upstream.first
    assert (dest / "verl" / WORKER).read_text() == f"{LINE}\n{WORKER_TEXT}"
    assert (found["check"].state, "nothing was checked" in found["check"].found) == ("note", True)
    assert sorted(entry.name for entry in dest.iterdir()) == [".lock", "verl"]
    assert git(dest / "verl", "remote", "get-url", "origin") == str(upstream.bare)

    before = (dest / "verl" / WORKER).stat().st_mtime_ns
    upstream.bare.rename(upstream.bare.with_name("away"))  # a right tree needs no source
    report, found = run(dest, pin)
    assert report.exit_code == 0 and found["verl"].found.startswith("already right")
    assert found["prelude line"].found == "already installed"
    assert (dest / "verl" / WORKER).stat().st_mtime_ns == before


def test_a_clone_is_shallow_and_a_missing_tree_hash_is_said(upstream, dest):
    pin = upstream.pin(upstream.second).model_copy(update={"tree": None})
    _, found = run(dest, pin)
    assert git(dest / "verl", "rev-list", "--count", "HEAD") == "1"
    assert found["verl tree"].state == "note"
    assert git(dest / "verl", "rev-parse", "HEAD^{tree}") in found["verl tree"].found


def test_a_wrong_tree_hash_leaves_nothing_under_the_name(upstream, dest):
    report, found = run(dest, upstream.pin(upstream.first, tree="0" * 40))
    assert report.exit_code == 1
    assert "expected tree " + "0" * 40 in found["verl"].found
    assert not (dest / "verl").exists()
    assert "prelude line" not in found and "check" not in found


@pytest.mark.parametrize("ref", ["pull/7/head", "main", None])
def test_a_commit_that_no_branch_holds(upstream, dest, ref):
    """By its pull-request ref; by the bare hash where the ref is elsewhere, or there is none."""
    report, _ = run(dest, upstream.pin(upstream.pull, ref=ref))
    assert report.exit_code == 0
    assert (dest / "verl" / "verl" / "b.py").is_file()


def test_a_server_that_gives_no_bare_hashes_is_asked_for_the_history(upstream, dest, monkeypatch):
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "protocol.version")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "0")
    with pytest.raises(RecipeError, match="not our ref|unadvertised"):  # the control: this server does refuse
        git(dest.parent, "init", "-q", "probe")
        git_tree.fetch(dest.parent / "probe", str(upstream.bare), upstream.first)
    report, _ = run(dest, upstream.pin(upstream.first, ref="main"))
    assert report.exit_code == 0
    assert git(dest / "verl", "rev-parse", "HEAD") == upstream.first


@pytest.mark.parametrize("killed_at", ["fetch", "checkout"])
def test_a_killed_run_is_taken_up_again(upstream, dest, tmp_path, killed_at):
    fake = tmp_path / "bin" / "git"  # kills its caller, as a node that goes down would
    fake.parent.mkdir()
    real = subprocess.run(["which", "git"], capture_output=True, text=True, check=True).stdout.strip()
    fake.write_text(f'#!/bin/sh\ncase " $* " in *" {killed_at} "*) kill -9 $PPID; exit 1;; esac\nexec {real} "$@"\n')
    fake.chmod(0o755)
    pin = upstream.pin(upstream.first)
    code = ("import sys\nfrom pathlib import Path\nfrom verl_patches.cluster.pins import *\n"
            "from verl_patches.cluster.upstream_tree import make\n"
            "make(Path(sys.argv[1]), Repository.model_validate_json(sys.argv[2]), sys.argv[3], lambda n: None)")
    dest.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code, str(dest / "verl"), pin.model_dump_json(), str(upstream.bare)],
        cwd=Path(__file__).parents[2], env={**os.environ, "PATH": f"{fake.parent}:{os.environ['PATH']}"}, timeout=60)
    assert done.returncode == -9
    assert [entry.name for entry in dest.iterdir()] == [".verl.partial"]
    if killed_at == "checkout":  # all was there already: finished without its source
        (dest / ".verl.partial" / ".git" / "index.lock").unlink(missing_ok=True)
        upstream.bare.rename(upstream.bare.with_name("away"))
    report, _ = run(dest, pin)
    assert report.exit_code == 0
    assert not (dest / ".verl.partial").exists()


def test_a_damaged_partial_clone_is_made_anew(upstream, dest):
    pin = upstream.pin(upstream.first)
    partial = dest / ".verl.partial"
    partial.mkdir(parents=True)
    git(partial, "init", "-q")
    git(partial, "fetch", "-q", str(upstream.bare), upstream.first)
    (partial / ".git" / "index.lock").touch()  # what a checkout that was killed leaves
    report, _ = run(dest, pin)
    assert report.exit_code == 0


@pytest.mark.parametrize(
    ("file", "text"), [("verl/a.py", "mine\n"), ("new.py", "mine\n"), (WORKER, f"{LINE}\nmine\n{WORKER_TEXT}")]
)
def test_a_dirty_tree_is_never_touched(upstream, dest, file, text):
    run(dest, upstream.pin(upstream.first))
    (dest / "verl" / file).write_text(text)
    for pin in (upstream.pin(upstream.first), upstream.pin(upstream.second)):
        report, found = run(dest, pin)
        assert report.exit_code == 1
        assert file in found["verl"].found and "stash" in found["verl"].todo
        assert (dest / "verl" / file).read_text() == text
        assert git(dest / "verl", "rev-parse", "HEAD") == upstream.first


def test_ignored_files_are_no_dirt(upstream, dest):
    run(dest, upstream.pin(upstream.first))
    (dest / "verl" / "verl" / "a.pyc").touch()
    assert run(dest, upstream.pin(upstream.first))[0].exit_code == 0


def ignore_by(how, tree, name, monkeypatch, tmp_path):
    if how == "repository":
        (tree / ".git" / "info").mkdir(exist_ok=True)
        (tree / ".git" / "info" / "exclude").write_text(name)
    else:  # a person's own setting, which must count for nothing
        (tmp_path / "mine").write_text(name)
        for variable, value in {"COUNT": "1", "KEY_0": "core.excludesFile", "VALUE_0": str(tmp_path / "mine")}.items():
            monkeypatch.setenv(f"GIT_CONFIG_{variable}", value)


@pytest.mark.parametrize("how", ["repository", "person"])
def test_a_move_never_writes_over_an_ignored_file(upstream, dest, monkeypatch, tmp_path, how):
    run(dest, upstream.pin(upstream.first))
    tree, new = dest / "verl", "verl/b.py"
    ignore_by(how, tree, new, monkeypatch, tmp_path)
    (tree / new).write_text("my own settings")
    assert new not in git(tree, "status", "--porcelain")  # the control: plain git sees nothing to lose
    report, found = run(dest, upstream.pin(upstream.pull, ref="pull/7/head"))
    assert report.exit_code == 1 and new in found["verl"].found and "another --dest" in found["verl"].todo
    assert (tree / new).read_text() == "my own settings"
    assert git(tree, "rev-parse", "HEAD") == upstream.first and LINE in (tree / WORKER).read_text()


def test_a_prelude_line_that_is_staged_is_in_nobodys_way(upstream, dest):
    run(dest, upstream.pin(upstream.first))
    git(dest / "verl", "add", WORKER)
    for at in (upstream.first, upstream.second):
        assert run(dest, upstream.pin(at))[0].exit_code == 0
        assert (dest / "verl" / WORKER).read_text() == f"{LINE}\n{WORKER_TEXT}"


def test_a_clean_tree_at_another_commit_is_moved(upstream, dest):
    run(dest, upstream.pin(upstream.first))
    report, found = run(dest, upstream.pin(upstream.second, ref="main"))
    assert report.exit_code == 0 and found["verl"].found.startswith("moved to the pin")
    assert git(dest / "verl", "rev-parse", "HEAD") == upstream.second
    assert (dest / "verl" / WORKER).read_text().count(LINE) == 1
    assert run(dest, upstream.pin(upstream.first))[0].exit_code == 0  # and back


def test_a_commit_of_ones_own_is_never_lost(upstream, dest):
    run(dest, upstream.pin(upstream.first))
    mine = commit(dest / "verl", {"mine.py": "x = 1\n"})
    report, found = run(dest, upstream.pin(upstream.second))
    assert report.exit_code == 1
    assert "on no remote branch" in found["verl"].found
    assert git(dest / "verl", "rev-parse", "HEAD") == mine


def test_files_that_are_no_clone_are_refused_even_inside_another_repository(upstream, tmp_path, dest):
    git(tmp_path, "init", "-q")  # dest lies in a repository, as upstream/ does in this one
    (dest / "verl").mkdir(parents=True)
    (dest / "verl" / "notes.txt").write_text("mine")
    report, found = run(dest, upstream.pin(upstream.first))
    assert report.exit_code == 1 and "no git clone" in found["verl"].found
    assert (dest / "verl" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("place", ["verl", "verl.git", "owner+verl", "Owner+verl/repo"])
def test_each_way_to_name_a_mirror(upstream, tmp_path, dest, place):
    mirror = tmp_path / "mirrors"
    (mirror / place).parent.mkdir(parents=True)
    bare = ["--mirror"] if place != "verl" else []  # a plain clone with a work tree is one too
    git(tmp_path, "clone", "-q", *bare, str(upstream.bare), str(mirror / place))
    at = upstream.pull if bare else upstream.second
    pin = upstream.pin(at, ref="pull/7/head" if bare else "main").model_copy(update={"url": NOWHERE})
    report, found = run(dest, pin, mirror=str(mirror))
    assert report.exit_code == 0, found
    assert git(dest / "verl", "remote", "get-url", "origin") == NOWHERE


def test_a_mirror_can_be_the_beginning_of_a_url(upstream, dest):
    pin = upstream.pin(upstream.first).model_copy(update={"url": NOWHERE})
    assert run(dest, pin, mirror=upstream.bare.parent.as_uri())[0].exit_code == 0
    assert sources({"verl": pin}, "git@host:group") == {"verl": "git@host:group/verl.git"}


def test_missing_mirrors_are_listed_at_once_with_the_commands_that_make_them(upstream, tmp_path, dest):
    old = tmp_path / "mirrors" / "verl.git"
    git(tmp_path, "clone", "-q", "--mirror", str(upstream.bare), str(old))
    pin = upstream.pin(upstream.first)
    pins = {"verl": pin.model_copy(update={"commit": "1" * 40}), "other": pin}
    with pytest.raises(ConfigError) as error:
        fetch_upstream("test", line_of(**pins), dest, str(old.parent))
    text = str(error.value)
    assert "does not hold verl's commit " + "1" * 40 in text and "no mirror of other" in text
    assert f"git clone --mirror {upstream.bare} {old.parent}/other.git" in text
    assert [entry.name for entry in dest.iterdir()] == [".lock"]
    with pytest.raises(ConfigError, match="expected a folder of git mirrors, or a URL"):
        run(dest, pin, mirror=str(tmp_path / "nowhere"))


def test_an_exact_name_wins_over_one_of_other_case(tmp_path):
    for name in ("VERL", "verl", "Owner+verl"):
        (tmp_path / name).mkdir()
    found = candidates(tmp_path, "verl", "https://host/owner/verl.git")
    assert [place.relative_to(tmp_path).as_posix() for place in found] == [
        "verl", "verl.git", "Owner+verl", "Owner+verl/repo"]


@pytest.fixture
def silent_server():
    """A git:// address that accepts and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.5)
        yield server, f"git://127.0.0.1:{server.getsockname()[1]}/owner/verl.git"


def test_with_a_mirror_the_pins_url_is_never_contacted(upstream, dest, silent_server, monkeypatch):
    server, url = silent_server
    pin = upstream.pin(upstream.first, ref="main").model_copy(update={"url": url})
    assert run(dest, pin, mirror=str(upstream.bare.parent))[0].exit_code == 0
    with pytest.raises(TimeoutError):
        server.accept()
    monkeypatch.setattr(git_tree, "QUICK_S", 1)
    report, found = run(dest.with_name("other"), pin)  # the control: without a mirror it is, and silence ends
    server.accept()[0].close()
    assert report.exit_code == 1 and "no answer within 1 s" in found["verl"].found


def test_a_transfer_that_falls_silent_is_ended(tmp_path, silent_server, monkeypatch):
    monkeypatch.setattr(git_tree, "SILENCE_S", 0.5)
    git(tmp_path, "init", "-q")
    with pytest.raises(RecipeError, match="silent for 0.5 s"):
        git_tree.fetch(tmp_path, silent_server[1], "main")


def test_an_unreachable_source_is_a_problem_with_gits_words(upstream, dest):
    report, found = run(dest, upstream.pin(upstream.first).model_copy(update={"url": NOWHERE}))
    assert report.exit_code == 1
    assert "127.0.0.1" in found["verl"].found and not (dest / "verl").exists()


def test_a_pull_request_that_is_not_merged_says_why(upstream, dest):
    pull = {"number": 7, "head": upstream.pull, "merge": False, "why": "it would fast-forward"}
    _, found = run(dest, upstream.pin(upstream.first, pull_requests=[pull]))
    assert (found["verl PR 7"].state, found["verl PR 7"].found) == ("note", "not merged: it would fast-forward")
    assert not (dest / "verl" / "verl" / "b.py").exists()


def test_a_pull_request_is_merged_only_at_its_pinned_head(upstream, dest):
    pull = {"number": 7, "head": upstream.pull, "merge": True, "why": "needed"}
    tree = git(upstream.bare, "merge-tree", "--write-tree", upstream.second, upstream.pull)
    pin = upstream.pin(upstream.second, tree=tree, pull_requests=[pull])
    report, found = run(dest, pin)
    assert report.exit_code == 0, found
    assert (dest / "verl" / "verl" / "a.py").read_text() == "a = 2\n" and (dest / "verl" / "verl" / "b.py").is_file()
    assert run(dest, pin)[1]["verl"].found.startswith("already right")
    moved = upstream.pin(upstream.second, tree=tree, pull_requests=[{**pull, "head": upstream.first}])
    report, found = run(dest.with_name("other"), moved)
    assert report.exit_code == 1
    assert f"expected head {upstream.first}, found {upstream.pull}" in found["verl"].found


def test_personal_git_settings_change_nothing_and_are_not_changed(upstream, dest, tmp_path, monkeypatch):
    hooks = tmp_path / "home" / "template" / "hooks"
    hooks.mkdir(parents=True)
    (hooks / "post-checkout").write_text("#!/bin/sh\necho changed > verl/a.py\n")
    (hooks / "post-checkout").chmod(0o755)
    config = tmp_path / "home" / ".gitconfig"
    config.write_text(f"[init]\ntemplateDir = {hooks.parent}\n[core]\nautocrlf = true\nhooksPath = {hooks}\n")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))  # left by an outer git
    before = config.read_text()
    assert upstream_tree.look(dest / "verl", None) == "absent"
    pin = {"url": str(upstream.bare), "commit": upstream.first, "tree": None, "packages": ["verl"], "version": "1"}
    report, _ = run(dest, Repository.model_validate(pin))
    assert report.exit_code == 0
    assert (dest / "verl" / "verl" / "a.py").read_bytes() == b"a = 1\n"
    assert config.read_text() == before and not (tmp_path / "elsewhere").exists()


def test_one_broken_tree_does_not_stop_the_others(upstream, dest):
    (dest / "verl").mkdir(parents=True)
    (dest / "verl" / "x").touch()
    pins = {"verl": upstream.pin(upstream.first), "second": upstream.pin(upstream.second, packages=[])}
    report = fetch_upstream("test", line_of(**pins), dest)
    assert [(f.name, f.state) for f in report.findings] == [("verl", "problem"), ("second", "fine")]


def test_two_at_once_are_kept_apart(upstream, dest):
    with fetch_module._alone(dest), pytest.raises(RecipeError, match="another fetch-upstream"):
        run(dest, upstream.pin(upstream.first))


def test_wrong_use(upstream, dest, tmp_path):
    with pytest.raises(ConfigError, match="expected names among verl"):
        run(dest, upstream.pin(upstream.first), only=["ver1"])
    with pytest.raises(ConfigError, match="has no repositories"):
        fetch_upstream("pypi", load_pins().line("pypi"), dest)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        run(tmp_path / "file", upstream.pin(upstream.first))
