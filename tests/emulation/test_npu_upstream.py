"""The pinned sources on the stand-ins: every name and call that they use is known.

That MindSpeed's own modules compute right on them: tests/model/test_mindspeed_parity.py.
"""

import pytest

from tests.emulation import npu_names
from verl_patches.emulation import op_schemas
from verl_patches.emulation.ascend import packages

TREES = {"MindSpeed": "mindspeed", "MindSpeed-LLM": "mindspeed_llm", "Megatron-LM": "megatron", "verl": "verl"}

pytestmark = pytest.mark.upstream


@pytest.fixture(scope="module")
def used(a3_sources):
    """{name: {"file:line"}} over all four trees."""
    found = {}
    for tree, package in TREES.items():
        for name, places in npu_names.names_used(a3_sources(tree)[0], package).items():
            found.setdefault(name, set()).update(places)
    return found


def is_there(name):
    """Does a stand-in have it?"""
    place = packages
    for part in name.split("."):
        if not hasattr(place, part):
            return False
        place = getattr(place, part)
    return True


def unknown(used):
    """Names that are neither there nor listed, and places that use a listed one elsewhere than the list says."""
    found = []
    for name, places in used.items():
        if is_there(name):
            continue
        if (listed := packages.listed(name)) is None:
            found.append(f"{name}: not known, used at {', '.join(sorted(places))}")
        else:
            elsewhere = [place for place in sorted(places) if not place.startswith(listed[1])]
            found += [f"{name}: listed, but used at {place}" for place in elsewhere]
    return sorted(found)


def test_every_name_is_known(used):
    assert unknown(used) == []
    read = "torch_npu.npu_fusion_attention torch_npu.npu.Stream acl.get_soc_name torchair.ge apex.optimizers.FusedAdam"
    assert set(read.split()) <= set(used)
    assert sum(is_there(name) for name in used) > 30


def test_a_new_name_or_a_new_place_would_be_seen():
    new = unknown({"torch_npu.npu_magic": {"mindspeed/a.py:1"}, "torch_npu.npu.magic": {"mindspeed/a.py:2"}})
    assert len(new) == 2 and "mindspeed/a.py:1" in new[1]
    mc2 = "torch_npu.npu_all_gather_base_mm"
    assert unknown({mc2: {"mindspeed/core/tensor_parallel/layers.py:476"}}) == []
    assert unknown({mc2: {"mindspeed/core/transformer/moe/experts.py:1"}}) == [
        f"{mc2}: listed, but used at mindspeed/core/transformer/moe/experts.py:1"
    ]


def test_every_call_fits_the_schema_of_the_pinned_torch_npu(a3_sources):
    """As written upstream: number of arguments and keywords, of all functions that the wheel's yaml declares."""
    trees = {"MindSpeed": "mindspeed", "MindSpeed-LLM": "mindspeed_llm", "vllm-ascend": "vllm_ascend"}
    calls = [
        call
        for tree, package in trees.items()
        for call in npu_names.calls_made(a3_sources(tree)[0], package, "torch_npu.npu_")
        if not call[0].startswith("torch_npu.npu.")
    ]
    assert {name for name, *_ in calls} >= {"torch_npu.npu_swiglu", "torch_npu.npu_fusion_attention"}
    assert not_fitting(calls) == []
    attend = "torch_npu.npu_fusion_attention"
    wrong = [(attend, "a:1", 5, ("pre_tokens",)), (attend, "a:2", 20, ()), ("torch_npu.npu_magic", "a:3", 0, ())]
    assert len(not_fitting(wrong)) == 3


def not_fitting(calls):
    found = []
    for name, place, count, keywords in calls:
        schemas = op_schemas.read().get(name.rpartition(".")[2], ())
        if not any(takes(schema.signature, count, keywords) for schema in schemas):
            found.append(f"{place}: {name} with {count} arguments and {keywords}, expected one of {schemas}")
    return found


def takes(signature, count, keywords):
    try:
        signature.bind(*range(count), **dict.fromkeys(keywords))
    except TypeError:
        return False
    return True
