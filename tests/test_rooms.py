"""Rooms (packages of verl_patches) import only lower ones and never in a cycle; the torch-free ones import no torch."""

import ast
import re
from pathlib import Path

import networkx
import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "verl_patches"
FLOORS = (
    {"current", "errors", "processes", "values", "yaml_files"},
    {"patching", "layout"},
    {"platform"},
    {"model", "reshard", "memory", "weights", "watch"},
    {"boot", "rollout"},
    {"batches", "replay", "log_probs", "rewards"},
    {"trainer", "worker"},
    {"config", "planning", "upstream"},
    {"launch", "cluster", "doctor", "evaluation"},
    {"cli", "catalog", "prelude_patch", "main_grpo", "__main__", "__init__"},
    {"emulation"},  # test equipment: loaded by name, on a platform without a device
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def room_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(tree):
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.split(".")
            if parts[0] == "verl_patches" and len(parts) > 1 and parts[1] in FLOOR:
                yield parts[1], node.lineno


def wrong_imports(path, tree):
    here, place = FLOOR[room_of(path)], path.relative_to(PACKAGE)
    higher = {(room, line) for room, line in imported_rooms(tree) if FLOOR[room] > here}
    return [f"verl_patches/{place}:{line} imports {room}" for room, line in sorted(higher)]


def cycles(imports):
    """Sorted tuples of rooms that reach each other; `imports`: {room: rooms that it imports}."""
    graph = networkx.DiGraph(imports)
    return {tuple(sorted(group)) for group in networkx.strongly_connected_components(graph) if len(group) > 1}


@pytest.fixture(scope="module")
def trees():
    files = list(PACKAGE.rglob("*.py"))
    assert {room_of(f) for f in files} <= set(FLOOR)
    return {f: ast.parse(f.read_text()) for f in files}


def test_upper_floors_import_only_lower_ones(trees):
    assert [fault for f, tree in trees.items() for fault in wrong_imports(f, tree)] == []
    tree = ast.parse("def f():\n    from verl_patches.launch import launcher")  # negative control
    assert wrong_imports(PACKAGE / "layout/parallel.py", tree) == ["verl_patches/layout/parallel.py:2 imports launch"]


def test_one_line_loads_the_emulation():
    """Outside of it no file names the package but platform/__init__.py, once; so no run on a device imports it."""
    named = re.compile(r"verl_patches[./]emulation")
    texts = {file: file.read_text() for file in PACKAGE.rglob("*.py") if room_of(file) != "emulation"}
    found = {file: len(named.findall(text)) for file, text in texts.items() if named.search(text)}
    assert found == {PACKAGE / "platform/__init__.py": 1}


def test_no_run_on_a_device_imports_the_emulation(run_python):
    code = "import sys, verl_patches.catalog as c\nc.rows_of({!r})\nprint('verl_patches.emulation' in sys.modules)"
    for platform, loaded in (("npu", "False"), ("cpu", "True")):
        assert run_python(code.format(platform)).check().out.split()[-1] == loaded


def test_no_rooms_import_each_other(trees):
    imports = {}
    for file, tree in trees.items():
        others = {room for room, _ in imported_rooms(tree)} - {room_of(file)}
        imports.setdefault(room_of(file), set()).update(others)
    assert cycles(imports) == set()
    planning = {*imports["config"], "planning"}  # the control: config imports planning, which imports it
    assert cycles({**imports, "config": planning}) == {("config", "planning")}
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == {("a", "b", "c")}


@pytest.mark.parametrize(
    "module",
    "prelude_patch catalog __main__ layout.inventory planning.plan doctor.doctor weights.manifest "
    "watch.watcher".split(),
)
def test_torch_free_rooms_do_not_import_torch(module, run_python):
    code = f"import sys, verl_patches.{module}\nassert not {{'torch', 'verl', 'vllm', 'megatron'}} & set(sys.modules)"
    run_python(code, patches="line=pypi,platform=cpu").check()
