"""Test that the digest is equal in other processes, hash seeds and folders, and follows changes of its inputs."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAKE = """
from verl_patches.patching.engine import Engine
from verl_patches.patching.spec import PatchSpec
from verl_patches.patching.switches import parse_switches
def row(id, target, **more):
    return PatchSpec(id, target, "wrap", "ours:louder", "why", "exit", **more)
rows = [row("t.f", "up:f"), row("t.g", "up:Thing.g", needs=("t.f",)), row("t.h", "up:h")]
print(Engine(rows, parse_switches("line=pypi,platform=cpu,-t.h")).digest())
"""
UP = '''
def f(x: int, *rest, key=None) -> int:
    """Doc."""
    if x and (y := x) > 1:
        return f"{y!r:>3}"
    with open(x) as a, open(y) as b:
        return [*rest, {**a}]
class Thing:
    async def g(self): yield 1.5e3
def h(): pass
'''


def digest(code, folder, seed="0"):
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(folder), "PYTHONHASHSEED": seed, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd="/", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """Copy the package and a small upstream twice: the same files, written in another order, at another depth."""
    found = []
    for folder in (tmp_path_factory.mktemp("a"), tmp_path_factory.mktemp("b") / "deep" / "er"):
        files = sorted((ROOT / "verl_patches").rglob("*.py"), reverse=bool(found))
        for file in [*files, ROOT / "verl_patches" / "fingerprints.json"]:
            target = folder / file.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
        (folder / "up.py").write_text(UP)
        (folder / "ours.py").write_text("def louder(original): return original\n")
        found.append(folder)
    return found


def test_neither_seed_nor_folder_but_policy_line_switches_provider_target_and_review_are_in_it(copies):
    here, there = copies
    first = digest(FAKE, here, seed="1")
    assert first == digest(FAKE, there, seed="2") and len(first) == 64
    for text in ("drift=warn,-t.h", ""):
        assert digest(FAKE.replace("platform=cpu,-t.h", f"platform=cpu,{text}"), here) != first
    assert digest(FAKE.replace("platform=cpu", "platform=npu"), here) != first
    record = here / "verl_patches" / "fingerprints.json"
    reviewed = record.read_text()
    record.write_text(json.dumps({"pypi": {"up:f": {"hash": "0" * 16}}}))
    assert digest(FAKE, here) != first  # under warn it decides what is marked
    record.write_text(json.dumps({"a3": {"up:f": {"hash": "0" * 16}}}))
    assert digest(FAKE, here) == first
    record.write_text(reviewed)
    for name, old, new in (("up", "1.5e3", "1.5e4"), ("ours", "return original", "return  original")):
        file = here / f"{name}.py"
        text = file.read_text()
        file.write_text(text.replace(old, new))
        assert digest(FAKE, here) != first
        file.write_text(text)
    assert digest(FAKE, here) == first
