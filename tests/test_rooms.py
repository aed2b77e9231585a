"""The house keeps its floors: a room imports only lower ones, and the rooms that must not import torch do not."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "verl_patches"
FLOORS = (
    {"errors"}, {"patching", "layout"}, {"platform"}, {"model", "reshard", "memory", "comm", "weights"},
    {"rollout", "training", "rewards"}, {"cluster", "evaluation"},
    {"catalog", "prelude_patch", "main_grpo", "contract_cli", "__main__", "__init__"},
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
# the prelude is reached by name from the two places that are called before anything else of ours
DOORS = {"rollout/vllm_plugin.py", "trainer/ray_start.py"}


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
    here = FLOOR[room_of(path)]
    found = dict.fromkeys(imported_rooms(tree))
    return [f"{path.relative_to(ROOT)}:{line} imports {room}" for room, line in found if FLOOR[room] > here]


def test_upper_floors_import_only_lower_ones():
    files = [f for f in PACKAGE.rglob("*.py") if str(f.relative_to(PACKAGE)) not in DOORS]
    assert {room_of(f) for f in files} <= set(FLOOR)
    assert [fault for f in files for fault in wrong_imports(f, ast.parse(f.read_text()))] == []


def test_an_import_upwards_would_be_seen():
    tree = ast.parse("def f():\n    from verl_patches.cluster import launch")
    found = wrong_imports(PACKAGE / "layout" / "parallel.py", tree)
    assert found == ["verl_patches/layout/parallel.py:2 imports cluster"]


@pytest.mark.parametrize("module", [
    "verl_patches.prelude_patch", "verl_patches.catalog", "verl_patches.__main__", "verl_patches.layout.inventory",
    "verl_patches.cluster.launch"])
def test_torch_free_rooms_do_not_import_torch(run_python, module):
    code = (f"import sys, {module}\n"
            "sys.exit(', '.join({'torch', 'verl', 'vllm', 'megatron'} & set(sys.modules)) or None)")
    run_python(code, patches="line=pypi,platform=cpu").check()
