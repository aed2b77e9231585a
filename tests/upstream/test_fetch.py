"""fetch-upstream on small local git repositories: pins verified, sources chosen, what exists never changed."""

import pytest

from tests.upstream.small_upstream import NOWHERE, WORKER, WORKER_TEXT, all_fine, commit, git, line_of, run
from verl_patches.boot.install_prelude import LINE
from verl_patches.errors import ConfigError, RecipeError
from verl_patches.patching.report import Finding, Report
from verl_patches.upstream import checkouts
from verl_patches.upstream import fetch as fetch_module
from verl_patches.upstream.fetch import fetch_upstream, sources
from verl_patches.upstream.pins import load_pins

pytestmark = pytest.mark.slow  # each starts processes


def test_a_clone_is_verified_gets_the_prelude_line_once_and_is_then_left_alone(upstream, dest):
    """The commit of a pull request, which no branch contains; another one is noted as not in the pin."""
    pull = {"number": 7, "head": upstream.second, "why": "it would fast-forward"}
    pin = upstream.pin(upstream.pull, pull_requests=[pull])
    report, found = run(dest, pin)
    assert (report.command, report.state, report.exit_code) == ("fetch-upstream", "fine", 0)
    assert found["verl PR 7"].state == "note" and git(dest / "verl", "rev-parse", "HEAD") == upstream.pull
    assert git(dest / "verl", "rev-list", "--count", "HEAD") == "1"  # shallow
    assert git(dest / "verl", "remote", "get-url", "origin") == str(upstream.bare)
    assert (dest / "verl" / WORKER).read_text() == f"{LINE}\n{WORKER_TEXT}"
    assert found["check"].state == "fine"
    assert sorted(entry.name for entry in dest.iterdir()) == [".lock", "verl"]

    before = (dest / "verl" / WORKER).stat().st_mtime_ns
    upstream.bare.rename(upstream.bare.with_name("away"))  # what exists needs no source
    report, found = run(dest, pin)
    assert report.exit_code == 0 and found["verl"].found.startswith("exists")
    assert (dest / "verl" / WORKER).stat().st_mtime_ns == before


@pytest.mark.parametrize("ref", ["main", None])
def test_of_a_server_that_serves_no_single_commits_the_history_is_fetched(upstream, dest, monkeypatch, ref):
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "protocol.version")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "0")
    git(dest.parent, "init", "-q", "probe")
    with pytest.raises(RecipeError, match="not our ref|unadvertised"):  # the control: this server does refuse
        checkouts.git(dest.parent / "probe", "fetch", str(upstream.bare), upstream.first)
    assert run(dest, upstream.pin(upstream.first, ref=ref))[0].exit_code == 0
    assert git(dest / "verl", "rev-parse", "HEAD") == upstream.first


def test_a_clone_that_was_interrupted_is_made_again(upstream, dest, monkeypatch):
    pin = upstream.pin(upstream.first)

    def interrupted(path, pin):
        (path / ".git" / "index.lock").touch()  # as a killed git leaves it
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(fetch_module, "_verify", interrupted)
        run(dest, pin)
    assert (dest / ".verl.partial").is_dir() and not (dest / "verl").exists()
    assert run(dest, pin)[0].exit_code == 0
    assert sorted(entry.name for entry in dest.iterdir()) == [".lock", "verl"]


@pytest.mark.parametrize(("file", "text"), [("new.py", "mine\n"), (WORKER, f"{LINE}\nmine\n{WORKER_TEXT}")])
def test_a_changed_clone_is_refused_and_not_touched(upstream, dest, file, text):
    run(dest, upstream.pin(upstream.first))
    (dest / "verl" / file).write_text(text)
    for pin in (upstream.pin(upstream.first), upstream.pin(upstream.second)):
        report, found = run(dest, pin)
        assert report.exit_code == 1 and file in found["verl"].found and "stash" in found["verl"].todo
        assert (dest / "verl" / file).read_text() == text
        assert git(dest / "verl", "rev-parse", "HEAD") == upstream.first
    mine = commit(dest / "verl", {})
    report, found = run(dest, upstream.pin(upstream.first))  # the change is committed
    assert report.exit_code == 1 and git(dest / "verl", "rev-parse", "HEAD") == mine
    git(dest / "verl", "reset", "-q", "--hard", upstream.first)
    report, found = run(dest, upstream.pin(upstream.second))
    assert report.exit_code == 1 and upstream.second in found["verl"].found and "move" in found["verl"].todo


def test_files_that_are_no_clone_are_refused_even_inside_another_repository(upstream, tmp_path, dest):
    git(tmp_path, "init", "-q")  # dest lies in a repository, as upstream/ does in this one
    (dest / "verl").mkdir(parents=True)
    (dest / "verl" / "notes.txt").write_text("mine")
    pins = {"verl": upstream.pin(upstream.first), "second": upstream.pin(upstream.second, packages=[])}
    report = fetch_upstream("test", line_of(**pins), dest, all_fine)
    assert [(f.name, f.state) for f in report.findings] == [("verl", "problem"), ("second", "fine")]
    assert "no git clone" in report.findings[0].found and (dest / "verl" / "notes.txt").read_text() == "mine"


def test_the_addresses_of_a_pin_are_tried_in_order(upstream, dest):
    logged = []
    pin = upstream.pin(upstream.first).model_copy(update={"urls": (NOWHERE, str(upstream.bare))})
    report, found = run(dest, pin, log=logged.append)
    assert report.exit_code == 0 and found["verl"].found.startswith("cloned")
    fetched = [text.rpartition(" ")[2] for text in logged if "fetching" in text]
    assert fetched == [NOWHERE, str(upstream.bare)] and sum(NOWHERE in text for text in logged) == 2  # and its error

    report, found = run(dest.with_name("none"), pin.model_copy(update={"commit": "1" * 40}))
    assert report.exit_code == 1 and not (dest.with_name("none") / "verl").exists()
    for place in (NOWHERE, str(upstream.bare)):
        assert f"from {place}: " in found["verl"].found
    assert "--mirror" in found["verl"].todo


@pytest.mark.parametrize("place", ["mirrors/verl", "file://owner/verl.git"])
def test_a_mirror_is_a_folder_of_clones_or_the_beginning_of_a_url(upstream, dest, place):
    mirror = upstream.bare.parents[1] / place.removeprefix("file://").rpartition("/")[0]
    if not mirror.exists():  # a plain clone with a work tree is one too
        git(dest.parent, "clone", "-q", str(upstream.bare), str(mirror / "verl"))
    pin = upstream.pin(upstream.second, ref="main").model_copy(update={"urls": (NOWHERE,)})
    logged, mirror = [], mirror.as_uri() if place.startswith("file") else str(mirror)
    report, found = run(dest, pin, mirror=mirror, log=logged.append)
    assert report.exit_code == 0, found
    assert all(f"from {mirror}/verl" in text for text in logged), logged  # the pin's URL, NOWHERE, is not contacted
    assert git(dest / "verl", "remote", "get-url", "origin") == NOWHERE
    assert sources({"verl": pin}, "git@host:group") == {"verl": ("git@host:group/verl.git",)}


def test_all_missing_mirrors_are_listed_with_the_commands_that_make_them(upstream, tmp_path, dest):
    old = tmp_path / "mirrors" / "verl.git"
    git(tmp_path, "clone", "-q", "--mirror", str(upstream.bare), str(old))
    pin = upstream.pin(upstream.first)
    with pytest.raises(ConfigError) as error:
        fetch_upstream("test", line_of(verl=pin, b=pin, c=pin), dest, all_fine, str(old.parent))
    commands = [line.strip() for line in str(error.value).splitlines() if "git clone" in line]
    assert commands == [f"git clone --mirror {upstream.bare} {old.parent}/{name}.git" for name in "bc"]
    assert [entry.name for entry in dest.iterdir()] == [".lock"]
    with pytest.raises(ConfigError, match="nowhere"):
        run(dest, pin, mirror=str(tmp_path / "nowhere"))
    _, found = run(dest, pin.model_copy(update={"commit": "1" * 40}), mirror=str(old.parent))
    assert "has no commit " + "1" * 40 in found["verl"].found and "update the mirror" in found["verl"].todo


def test_personal_git_settings_change_nothing_and_are_not_changed(upstream, dest, tmp_path, monkeypatch):
    hooks = tmp_path / "home" / "template" / "hooks"
    hooks.mkdir(parents=True)
    (hooks / "post-checkout").write_text("#!/bin/sh\necho changed > verl/a.py\n")
    (hooks / "post-checkout").chmod(0o755)
    config = tmp_path / "home" / ".gitconfig"
    config.write_text(f"[init]\ntemplateDir = {hooks.parent}\n[core]\nautocrlf = true\nhooksPath = {hooks}\n")
    pin = upstream.pin(upstream.first)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))  # left by an outer git
    before = config.read_text()
    assert run(dest, pin)[0].exit_code == 0
    assert (dest / "verl" / "verl" / "a.py").read_bytes() == b"a = 1\n"
    assert config.read_text() == before and not (tmp_path / "elsewhere").exists()


def test_two_at_once_a_git_past_its_limit_and_wrong_use_are_refused(upstream, dest, tmp_path):
    with fetch_module._locked(dest), pytest.raises(RecipeError, match="another fetch-upstream"):
        run(dest, upstream.pin(upstream.first))
    with pytest.raises(ConfigError, match="ver1"):
        run(dest, upstream.pin(upstream.first), only=["ver1"])
    with pytest.raises(ConfigError, match="has no repositories"):
        fetch_upstream("pypi", load_pins().line("pypi"), dest, all_fine)
    with pytest.raises(RecipeError, match="did not end within 0 s"):
        checkouts.git(dest, "version", limit_s=0)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        run(tmp_path / "file", upstream.pin(upstream.first))


def test_the_check_runs_over_all_repositories_of_a_line_and_its_problems_are_those_of_the_fetch(upstream, dest):
    row, note = Finding("a.row", "problem", "f.py:3", details=("statement",)), Finding("b", "note")
    report, found = run(dest, upstream.pin(upstream.first), check=lambda *_: Report("check", "test", (row, note)))
    assert report.exit_code == 1 and found["a.row"] == row and "b" not in found
    assert found["check"].state == "problem" and "check --upstream" in found["check"].todo
    report, found = run(dest, upstream.pin(upstream.first), check=lambda *_: Report("check", "test", (note,)))
    assert report.exit_code == 0 and found["check"].state == "fine"
    pins = {"verl": upstream.pin(upstream.first), "second": upstream.pin(upstream.second, packages=[])}
    report = fetch_upstream("test", line_of(**pins), dest, None, only=["verl"])
    assert report.exit_code == 0
    assert report.findings[-1].state == "note" and "no second" in report.findings[-1].found
