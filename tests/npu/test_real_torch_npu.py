"""Test our attention, references and schemas against the real torch_npu without CANN (scripts/npu_venv.sh).

This proves names, arguments, shapes, dtypes and that there is a gradient, but no numbers, kernel, HCCL or limit of a
device: nothing is computed, the tensors are fake.
"""

import copy
import importlib.util
import re
from pathlib import Path

import pytest

from verl_patches.emulation import op_schemas

pytestmark = pytest.mark.nightly
CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def pins(name):
    lines = (CONFIGS / name).read_text().splitlines()
    return dict(line.split()[0].split("==") for line in lines if line and not line.startswith(("#", " ")))


def test_it_is_the_pinned_wheel_on_one_pretended_die_and_not_in_the_cpu_lines_environment(npu):
    ours, shared = pins("requirements-npu-stubs.txt"), pins("requirements-pypi.txt")
    assert npu["version"] == ours["torch-npu"]
    assert npu["devices"] == 1 and npu["soc"].startswith("Ascend910_93")  # Atlas A3
    assert npu["real tensor"].startswith("OutOfMemoryError")  # one that is not fake cannot exist
    assert importlib.util.find_spec("torch_npu") is None
    assert {name: version for name, version in ours.items() if shared.get(name, version) != version} == {}
    assert set(ours) - set(shared) == {"torch-npu", "decorator"}


# -- shapes and dtypes -------------------------------------------------------------------------------------------------


def differences(real, expected):
    """Return "case, output: found, expected" if shape or dtype differ, or the tensor is not on the device."""
    return [
        f"{case}, {name}: {real[case][name]}, expected {known}"
        for case, outputs in expected.items()
        for name, known in outputs.items()
        if real[case][name] is None or real[case][name] != [*known[:2], "npu"]
    ]


def test_shapes_and_dtypes_are_those_of_the_references(npu, references):
    assert set(npu["cases"]) == set(references) and len(npu["cases"]) > 10
    assert differences(npu["cases"], references) == []
    real = copy.deepcopy(npu["cases"])  # the control
    real["unpermute"]["gradient weights"][0].reverse()
    real["swiglu"]["gradient x"] = None
    assert len(differences(real, references)) == 2


# -- versions ----------------------------------------------------------------------------------------------------------

CALLED = {"npu_fusion_attention", *re.findall(r"\bnpu_\w+", Path(__file__).with_name("cases.py").read_text())}
# What this wheel has and the pin of line a3 has not, by "function.overload": passing one fails in production.
NEWER = {
    "npu_fusion_attention.": {"softmax_layout", "sink", "dropout_mask", "seed", "offset"},
    "npu_grouped_matmul.": {"x_dtype", "weight_dtype", "scale_dtype", "per_token_scale_dtype"},
    "npu_moe_gating_top_k.": {"input_ids", "tid2eid"},
    "npu_rotary_mul.": {"rotate"},
}


def called_schemas(npu):
    """Yield ("function.overload", schema of 2.5.1.post1, schema of the running wheel or None) of called functions."""
    for name in CALLED:
        for old in op_schemas.read_schemas()[name]:
            key = f"{name}.{old.overload}"
            text = npu["schemas"][key]
            yield key, old, text and op_schemas.parse_schema(text)


def test_functions_arguments_and_defaults_of_the_pin_are_still_there(npu):
    """Check that the pin accepts all that the fake device accepts, except NEWER."""
    newer, outputs = {}, set()
    for key, old, new in called_schemas(npu):
        assert new is not None, f"{key} is gone"
        arguments = new.signature.parameters
        here = dict(arguments)
        both = [(argument, here.pop(name, None)) for name, argument in old.signature.parameters.items()]
        wrong = [a.name for a, b in both if b is None or (a.default, a.kind) != (b.default, b.kind)]
        assert wrong == [], f"{key}: {wrong} are gone or have other defaults"
        assert [name for name in arguments if name not in here] == list(old.kinds), f"{key}: another order"
        positional = [name in here for name, a in arguments.items() if a.kind is not a.KEYWORD_ONLY]
        assert positional == sorted(positional), f"{key}: a newer argument stands before an older one"
        newer |= {key: set(here)} if here else {}
        outputs |= {key} if old.outputs != new.outputs else set()
    assert newer == NEWER and outputs == set() and len(CALLED) == 8


def test_the_profiler_and_the_allocators_history_take_what_the_worker_passes(npu):
    passed = {
        "profile": {"activities", "on_trace_ready", "record_shapes", "with_stack"},
        "tensorboard_trace_handler": {"dir_name"},
        "_record_memory_history": {"enabled", "stacks", "max_entries"},
        "_snapshot": set(),
    }
    assert npu["profiler"].keys() == passed.keys()
    assert [name for name, names in passed.items() if not names <= set(npu["profiler"][name])] == []
    assert not {"path"} <= set(npu["profiler"]["tensorboard_trace_handler"])  # control


def unfit(calls):
    """Return calls with arguments that 2.5.1.post1 does not have."""
    found = set()
    for name, positional, named in calls:
        known = list(op_schemas.read_schemas()[name][0].kinds)
        found |= {f"{name} with {other}" for other in {*known[:positional], *named} - set(known)}
        found |= {f"{name} with too many arguments"} if positional > len(known) else set()
    return found


def test_calls_pass_nothing_newer_than_the_pin(npu):
    assert {"npu_grouped_matmul", "npu_fusion_attention", "npu_moe_gating_top_k"} <= {call[0] for call in npu["calls"]}
    assert unfit(npu["calls"]) == set()
    assert unfit([["npu_rotary_mul", 3, ["rotate"]]]) == {"npu_rotary_mul with rotate"}
