"""Test that the prelude imports only what it needs, as every process of a run pays for it."""

# imports that cost milliseconds or seconds; ast, hashlib and json are needed only when a target is imported
HEAVY = """
    torch verl vllm megatron ray rich typer omegaconf hydra yaml pydantic numpy asyncio socket ssl subprocess logging
    difflib hashlib json tempfile email importlib.resources importlib.metadata
    verl_patches.patching.fingerprint verl_patches.patching.report
""".split()
CODE = """
import sys
before = set(sys.modules)
{extra}
import verl_patches.prelude_patch
print(*sorted(set(sys.modules) - before), sep="\\n")
"""


def imported(run_python, extra=""):
    return set(run_python(CODE.format(extra=extra), patches="line=pypi,platform=cpu").check().out.split())


def test_the_prelude_imports_nothing_heavy(run_python):
    found = imported(run_python)
    assert "verl_patches.patching.engine" in found and "wrapt" in found
    assert found.isdisjoint(HEAVY)


def test_a_heavy_import_would_be_seen(run_python):
    assert imported(run_python, "import asyncio, omegaconf") & set(HEAVY) >= {"asyncio", "omegaconf"}
