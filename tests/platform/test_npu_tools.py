"""Test the parsers of npu-smi and hccn_tool on published outputs, and on other text."""

import pytest

from tests.platform import recorded
from verl_patches.platform.npu.npu_tools import Die, NotUnderstoodError, field_value, parse_npu_smi


def test_a_whole_a3_node():
    smi = parse_npu_smi(recorded.NPU_SMI_A3)
    assert smi.version == "25.2.1" and not smi.processes
    assert [die.number for die in smi.dies] == list(range(16))
    assert [(die.card, die.chip) for die in smi.dies] == [(n // 2, n % 2) for n in range(16)]
    assert {die.health for die in smi.dies} == {"OK"}
    assert smi.dies[15] == Die(7, 1, 15, "Ascend910", "OK", 2879, 65536)


def test_memory_without_figures_is_unknown():
    text = recorded.NPU_SMI_A3.replace("3113 / 65536", "NA   / NA   ")
    assert parse_npu_smi(text).dies[8].total_mb is None


@pytest.mark.parametrize("text", ["", recorded.NPU_SMI_NO_DRIVER])
def test_other_text_is_not_understood(text):
    with pytest.raises(NotUnderstoodError, match="npu-smi info printed"):
        parse_npu_smi(text)


def test_a_field_is_the_text_behind_its_name():
    """Check fields here; test_node_checks.py has those of the other commands."""
    assert field_value(recorded.SUPER_POD, "Super Pod ID") == "3"
    assert field_value("| Super Pod ID     : 3     | Pod ID : 1   |", "Super Pod ID") == "3"


@pytest.mark.parametrize("text", ["", "link status:", "Command execute failed!", recorded.NPU_SMI_NO_DRIVER])
def test_a_field_that_is_not_there_is_not_understood(text):
    with pytest.raises(NotUnderstoodError, match="link status"):
        field_value(text, "link status")
