"""docs/ascend.md: every row, key, variable and test of its table exists, and every option of vllm-ascend is in it."""

import ast
import re

import pytest

from tests.conftest import ROOT
from verl_patches.catalog import all_rows
from verl_patches.recipe.schema import recipe_keys
from verl_patches.upstream.pins import load_pins

PAGE = ROOT / "docs" / "ascend.md"
HEAD = "| feature | row or key | pypi, cpu | a3, cpu | a3, npu | evidence |"
SHOWN = {"run", "emulated", "imported", "modelled", "refused", "-"}


def table(text):
    """The cells of each line of the table of features."""
    lines = text.partition(HEAD)[2].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[: lines.index("")]]


def faults(text):
    """What the table names that does not exist, or is not in it."""
    rows, keys = {row.id for row in all_rows()}, {key for key, _ in recipe_keys()}
    known, named, found = rows | keys | load_pins().environment.keys(), set(), []
    for feature, switches, *shown, evidence in table(text):
        names = set(re.findall(r"`([^`]+)`", switches))
        named |= names
        found += [f"{feature}: {name}" for name in names - known]
        found += [f"{feature}: {cell}" for cell in shown if re.split(r"[ ,;]", cell)[0] not in SHOWN]
        found += [f"{feature}: {test}" for test in re.findall(r"`([^`]+)`", evidence) or [""] if not is_test(test)]
    expected = {name for name in rows | keys if name.startswith(("rollout.ascend_", "recipe.rollout.ascend."))}
    return found + [f"not in the table: {name}" for name in sorted(expected - named)]


def is_test(name):
    """Whether a name is a folder, a file, or FILE::FUNCTION of tests/."""
    file, _, function = name.partition("::")
    path = ROOT / file
    if not file.startswith("tests/") or not path.exists():
        return False
    body = ast.parse(path.read_text()).body if function else []
    return not function or any(isinstance(node, ast.FunctionDef) and node.name == function for node in body)


def test_every_name_of_the_table_exists():
    assert len(table(PAGE.read_text())) > 50 and faults(PAGE.read_text()) == []


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("`rollout.ascend_decode_kv`", "`rollout.ascend_kv`", "rollout.ascend_kv"),
        ("`recipe.rollout.ascend.kv_nz`", "`HCCL_BUFFSIZE`", "not in the table: recipe.rollout.ascend.kv_nz"),
        ("::test_256_dies`", "::test_512_dies`", "test_512_dies"),
        ("`tests/planning/test_activations.py`", "`tests/gone`", "tests/gone"),
        ("| imported (real wheel) |", "| proved |", "proved"),
    ],
)
def test_a_wrong_name_is_found(old, new, words):
    text = PAGE.read_text()
    assert old in text and any(words in fault for fault in faults(text.replace(old, new)))
