"""Test that packages of verl_patches (rooms) are small and import only lower ones, without a cycle, some no torch."""

import ast
import re
from collections import Counter
from pathlib import Path

import networkx
import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "verl_patches"
FLOORS = (  # packages, and modules beside them
    ("current", "errors", "processes", "shared_files", "values"),
    ("patching", "layout", "platform", "reference", "upstream", "recipe", "spec"),
    ("heartbeat",),
    ("model", "reshard", "weights", "memory", "rollout", "rewards"),
    ("step",),
    ("worker", "trainer"),
    ("run",),
    ("plan", "launch"),
    ("tools",),
    ("cli", "catalog", "rules", "prelude_patch", "main", "import_alone", "__main__", "__init__"),
)
EMULATION_ROOM = "emulation"  # loaded by name, only on a platform without a device
MAX_FLOORS, MAX_PACKAGES = 10, 21
# tests of whole runs, of the real torch_npu, and of scripts and docs
FOLDERS_WITHOUT_PACKAGE = {"loop", "npu", "scripts"}
MAX_FILES = 12
FLOOR_NUMBERS = {room: number for number, rooms in enumerate((*FLOORS, (EMULATION_ROOM,))) for room in rooms}


def room_name(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(tree):
    """Return (name, line) of every import, also inside functions and of types alone (`if TYPE_CHECKING:`)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def imported_rooms(tree):
    for name, line in imported_names(tree):
        parts = name.split(".")
        if parts[0] == "verl_patches" and len(parts) > 1 and parts[1] in FLOOR_NUMBERS:
            yield parts[1], line


def imported_modules(file, tree, modules):
    """Return the files among `modules` that one imports; for `from package import module` the module alone."""
    named = {name for name, _ in imported_names(tree)} & modules.keys()
    return {name for name in named if not any(other.startswith(f"{name}.") for other in named)} - {module_name(file)}


def wrong_imports(path, tree):
    here, place = FLOOR_NUMBERS[room_name(path)], path.relative_to(PACKAGE)
    higher = {(room, line) for room, line in imported_rooms(tree) if FLOOR_NUMBERS[room] > here}
    return [f"verl_patches/{place}:{line} imports {room}" for room, line in sorted(higher)]


def import_cycles(imports):
    """Return sorted tuples of rooms that reach each other; `imports`: {room: rooms that it imports}."""
    graph = networkx.DiGraph(imports)
    return {tuple(sorted(group)) for group in networkx.strongly_connected_components(graph) if len(group) > 1}


@pytest.fixture(scope="module")
def trees():
    files = list(PACKAGE.rglob("*.py"))
    assert {room_name(f) for f in files} <= set(FLOOR_NUMBERS)
    return {f: ast.parse(f.read_text()) for f in files}


def test_upper_floors_import_only_lower_ones(trees):
    assert [fault for f, tree in trees.items() for fault in wrong_imports(f, tree)] == []
    tree = ast.parse("def f():\n    from verl_patches.launch import launcher")  # negative control
    assert wrong_imports(PACKAGE / "layout/parallel.py", tree) == ["verl_patches/layout/parallel.py:2 imports launch"]


def test_one_line_loads_the_emulation():
    """Check that outside of it only platform/__init__.py names the package, once; so no run on a device imports it."""
    named = re.compile(r"verl_patches[./]emulation")
    texts = {file: file.read_text() for file in PACKAGE.rglob("*.py") if room_name(file) != EMULATION_ROOM}
    found = {file: len(named.findall(text)) for file, text in texts.items() if named.search(text)}
    assert found == {PACKAGE / "platform/__init__.py": 1}


def test_no_run_on_a_device_imports_the_emulation(run_python):
    code = (
        "import sys, verl_patches.catalog as c\nc.platform_rows({!r})\nprint('verl_patches.emulation' in sys.modules)"
    )
    for platform, loaded in (("npu", "False"), ("cpu", "True")):
        assert run_python(code.format(platform)).check().out.split()[-1] == loaded


def test_no_rooms_and_no_files_import_each_other(trees):
    """Check imports of types too: code that needs the other's type is in the wrong room."""
    rooms, modules = {}, {module_name(file): file for file in trees}
    for file, tree in trees.items():
        others = {room for room, _ in imported_rooms(tree)} - {room_name(file)}
        rooms.setdefault(room_name(file), set()).update(others)
    files = {module_name(file): imported_modules(file, tree, modules) for file, tree in trees.items()}
    assert import_cycles(rooms) == import_cycles(files) == set()
    assert len(files["verl_patches.patching.engine"]) > 3
    control = {**rooms, "run": {*rooms["run"], "plan"}}  # plan imports run
    assert import_cycles(control) == {("plan", "run")}
    assert import_cycles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == {("a", "b", "c")}
    of_types = ast.parse("if TYPE_CHECKING:\n    from verl_patches.trainer.run import TrainerRun")
    assert {room for room, _ in imported_rooms(of_types)} == {"trainer"}


def test_the_top_level_is_few_rooms_on_few_floors(trees):
    packages = {room_name(file) for file in trees if file.parent != PACKAGE}
    assert 1 < len(packages) <= MAX_PACKAGES and len(FLOORS) <= MAX_FLOORS
    graph = networkx.DiGraph()
    for file, tree in trees.items():
        graph.add_edges_from((room_name(file), room) for room, _ in imported_rooms(tree) if room != room_name(file))
    chain = networkx.dag_longest_path(graph.subgraph(packages - {EMULATION_ROOM}))
    assert 1 < len(chain) <= MAX_FLOORS, f"the longest chain of imports has {len(chain)} packages: {' > '.join(chain)}"


def test_tests_lie_under_the_name_of_what_they_test():
    found = {file.parent.relative_to(ROOT / "tests") for file in (ROOT / "tests").rglob("test_*.py")} - {Path()}
    others = {folder for folder in found if not (PACKAGE / folder / "__init__.py").is_file()}
    assert others == {Path(name) for name in FOLDERS_WITHOUT_PACKAGE}


def crowded_folders(sizes):
    return {folder: count for folder, count in sizes.items() if count > MAX_FILES}


def test_no_room_has_more_files_than_a_reader_can_name():
    """Count by folder, __init__.py too: a larger one is two rooms, or has helpers that belong in their callers.

    A file beside the folders is a room of its own.
    """
    files = (file for file in PACKAGE.rglob("*.py") if file.parent != PACKAGE)
    sizes = Counter(str(file.parent.relative_to(ROOT)) for file in files)
    assert sizes["verl_patches/patching"] > 1 and crowded_folders(sizes) == {}
    control = {"verl_patches/helpers": MAX_FILES + 1}
    assert crowded_folders(control) == control


@pytest.mark.parametrize(
    "module",
    "prelude_patch catalog __main__ layout.inventory plan.plan memory.ledger launch.doctor.doctor weights.manifest "
    "heartbeat.heartbeat launch.supervise.watcher run.compose run.record.report".split(),
)
def test_torch_free_rooms_do_not_import_torch(module, run_python):
    code = f"import sys, verl_patches.{module}\nassert not {{'torch', 'verl', 'vllm', 'megatron'}} & set(sys.modules)"
    run_python(code, patches="line=pypi,platform=cpu").check()
