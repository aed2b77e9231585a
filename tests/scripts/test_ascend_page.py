"""docs/ascend.md: every row, key, variable and test of its table exists, and every option of vllm-ascend is in it."""

import ast
import re

import pytest

from tests.conftest import ROOT
from verl_patches.catalog import ROWS
from verl_patches.config.recipe import recipe_keys
from verl_patches.upstream.pins import load_pins

PAGE = ROOT / "docs" / "ascend.md"
FAMILIES, SIDES = {"MoE", "EP", "memory offload", "batches", "communication"}, {"training", "rollout", "both"}


def table(text):
    """The cells of each line of the table."""
    lines = [line for line in text.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def faults(text):
    """What the table names that does not exist, or is not in it."""
    rows, keys = {row.id for row in ROWS if "a3" in row.lines}, {key for key, _ in recipe_keys()}
    known, named, found = rows | keys | load_pins().environment.keys(), set(), []
    for family, side, what, switches, evidence in table(text):
        names = set(re.findall(r"`([^`]+)`", switches))
        named |= names
        found += [f"{what}: {name}" for name in names - known]
        found += [f"{what}: {family}, {side}"] if family not in FAMILIES or side not in SIDES or not names else []
        found += [f"{what}: {test}" for test in re.findall(r"`([^`]+)`", evidence) or [""] if not is_test(test)]
    expected = {name for name in rows | keys if name.startswith(("rollout.ascend_", "recipe.rollout.ascend."))}
    return found + [f"not in the table: {name}" for name in sorted(expected - named)]


def is_test(name):
    file, _, function = name.partition("::")
    path = ROOT / file
    if not function or not path.is_file():
        return False
    return any(isinstance(node, ast.FunctionDef) and node.name == function for node in ast.parse(path.read_text()).body)


def test_every_name_of_the_table_exists():
    assert len(table(PAGE.read_text())) > 20 and faults(PAGE.read_text()) == []


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("`rollout.ascend_decode_kv`", "`rollout.ascend_kv`", "rollout.ascend_kv"),
        ("`recipe.rollout.ascend.kv_nz`", "`HCCL_BUFFSIZE`", "not in the table: recipe.rollout.ascend.kv_nz"),
        ("::test_256_dies`", "::test_512_dies`", "test_512_dies"),
        ("| EP | training |", "| EP | both sides |", "EP, both sides"),
    ],
)
def test_a_wrong_name_is_found(old, new, words):
    text = PAGE.read_text()
    assert old in text and any(words in fault for fault in faults(text.replace(old, new)))
