"""Test `versions` on a made-up machine that holds the whole a3 line, and with one fault at a time."""

import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from tests.upstream.small_upstream import commit, git
from verl_patches.__main__ import app
from verl_patches.errors import ConfigError
from verl_patches.upstream import modified, versions
from verl_patches.upstream.checkouts import Trees
from verl_patches.upstream.pins import load_pins
from verl_patches.upstream.versions import Machine, compare_pins

TOOLKIT = "ascend-toolkit/latest/aarch64-linux/ascend_toolkit_install.info"
FILES = {  # contents as the installers of CANN 8 write them
    "driver/version.info": "Version=25.2.0\nascendhal_version=7.35.23\nInnerversion=V100R001C22SPC001B220\n",
    "firmware/version.info": "Version=7.7.0.6.236\nfirmware_version=1.0\npackage_version=25.2.0\n",
    TOOLKIT: "package_name=Ascend-cann-toolkit\nversion=8.2.RC1\ninnerversion=V100R001C22SPC001B231\narch=aarch64\n",
    "ascend-toolkit/latest/opp_kernel/version.info": "Version=8.2.0.1.220\nversion_dir=8.2.RC1\n"
    'required_package_opp_version=">=7.6, <=8.2"\n',
    "nnal/atb/latest/version.info": "    Ascend-cann-atb : 8.2.RC1\n"
    "    Ascend-cann-atb Version : 8.2.RC1.B010\n    Platform : aarch64\n",
}


@pytest.fixture
def ascend(tmp_path):
    root = tmp_path / "Ascend"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def clones(tmp_path):
    """Make small clones in place of upstream's, and the pin file with their hashes."""
    pins, made = load_pins(), {}
    for name, pin in pins.line("a3").repositories.items():
        folder = tmp_path / "upstream" / name
        for package in pin.packages:
            (folder / package).mkdir(parents=True)
            (folder / package / "__init__.py").write_text(f'"""{package}"""\n')
        git(folder, "init", "-q")
        made[name] = pin.model_copy(update={"commit": commit(folder, {})})
    line = pins.line("a3").model_copy(update={"repositories": made})
    return tmp_path / "upstream", pins.model_copy(update={"lines": {**pins.lines, "a3": line}})


@pytest.fixture
def machine(ascend, clones, monkeypatch):
    """Return the findings of `compare_pins` on a machine that holds line a3, with some changes of Machine's fields."""
    folder, pins = clones
    packages = {name: version.replace("*", "9") for name, version in pins.line("a3").packages.items()}
    places = {p: folder / name for name, r in pins.line("a3").repositories.items() for p in r.packages}

    monkeypatch.setattr(versions, "load_pins", lambda: pins)
    holds = {"environ": {}, "ascend": ascend, "python": "3.11.4", "distribution": packages.get}

    def report(line="a3", trees=None, root=places.get, **changes):
        monkeypatch.setattr(modified, "installed_root", root)
        return compare_pins(line, Machine(**{**holds, **changes}), trees)

    def problems(**changes):
        return {f.name: f for f in report(**changes).findings if f.state == "problem"}

    return SimpleNamespace(report=report, problems=problems, a3=pins.line("a3"), versions=packages, places=places)


def test_a_machine_that_holds_the_line_is_fine(machine):
    report = machine.report()
    assert machine.problems() == {} and report.exit_code == 0 and report.state == "fine"
    trees = Trees(folders=tuple({machine.places[name] for name in ("verl", "megatron", "mindspeed", "mindspeed_llm")}))
    # trees given as an option have precedence
    assert set(machine.problems(trees=trees, root=lambda _: None)) == {"vllm", "vllm-ascend"}
    fine, notes = ([f.name for f in report.findings if f.state == state] for state in ("fine", "note"))
    assert {*notes} == {"not supported"}
    assert {*fine} >= {"python", *machine.a3.packages, *machine.a3.system, *machine.a3.repositories}
    assert len(fine) == len({*fine})  # vllm, pinned by version and by commit, is listed once


@pytest.mark.parametrize(
    ("file", "old", "new", "name", "found"),
    [
        ("driver/version.info", "25.2.0", "24.1.rc1", "driver", "24.1.rc1"),
        ("nnal/atb/latest/version.info", "atb : 8.2.RC1", "atb : 8.0.0", "cann_nnal", "8.0.0"),
    ],
)
def test_other_ascend_software_is_named_with_its_file(machine, ascend, file, old, new, name, found):
    (ascend / file).write_text(FILES[file].replace(old, new))
    (problem,) = machine.problems().values()
    assert (problem.name, problem.found, problem.expected) == (name, found, machine.a3.system[name])
    assert problem.where == str(ascend / file) and problem.todo


def test_software_elsewhere_is_found_by_its_own_variables(machine, ascend, tmp_path):
    (ascend / "ascend-toolkit/latest").rename(tmp_path / "cann")
    (ascend / "nnal").rename(tmp_path / "nnal")
    missing = machine.problems()
    assert set(missing) == {"cann_toolkit", "cann_kernels", "cann_nnal"} and "set_env.sh" in missing["cann_nnal"].todo
    atb = tmp_path / "nnal/atb/latest/atb/cxx_abi_0"
    environ = {"ASCEND_HOME_PATH": str(tmp_path / "cann"), "ATB_HOME_PATH": str(atb)}
    assert machine.problems(environ=environ) == {}


def test_in_a_container_firmware_is_a_note_and_a_missing_driver_a_problem(machine, ascend):
    (ascend / "firmware/version.info").unlink()
    report = machine.report()
    assert report.exit_code == 0 and next(f for f in report.findings if f.name == "firmware").state == "note"
    (ascend / "driver/version.info").unlink()
    assert set(machine.problems()) == {"driver", "firmware"}


def test_packages_and_python(machine):
    found = {**machine.versions, "torch": "2.5.1+cpu", "transformers": "4.53.0"}
    del found["apex"]
    wrong = machine.problems(distribution=found.get, python="3.12.1")
    assert set(wrong) == {"python", "transformers", "apex"}
    assert (wrong["apex"].found, wrong["transformers"].expected) == ("not installed", "4.52.4")


def test_changed_and_missing_clones(machine, clones):
    (clones[0] / "Megatron-LM/megatron/__init__.py").write_text("changed = 1\n")
    wrong = machine.problems(root={**machine.places, "vllm_ascend": None, "verl": None}.get)
    assert set(wrong) == {"Megatron-LM", "vllm-ascend", "verl"}
    assert wrong["vllm-ascend"].found == "not importable" and "--upstream" in wrong["verl"].todo
    assert wrong["Megatron-LM"].details == ("megatron/__init__.py (modified)",)


@pytest.fixture
def call(monkeypatch):
    monkeypatch.delenv("VERL_PATCHES", raising=False)
    return lambda *arguments: CliRunner().invoke(app, ["versions", *arguments])


def test_the_command_on_the_installed_line_and_on_one_that_is_not(call):
    done = call("--line", "pypi", "--json")
    data = json.loads(done.stdout)
    assert (done.exit_code, data["command"], data["line"], data["state"]) == (0, "versions", "pypi", "fine"), data
    assert {row["name"] for row in data["rows"]} >= set(load_pins().line("pypi").packages)
    done = call("--json")
    assert done.exit_code == 1 and json.loads(done.stdout)["line"] == "a3"
    assert isinstance(call("--line", "a2").exception, ConfigError)
