import functools
import importlib.util
from pathlib import Path

import pytest

from verl_patches.cluster.compose import compose
from verl_patches.cluster.environment import derive, process_environment, worker_environment

TINY, LARGE = "grpo_deepseekv3_tiny_cpu", "grpo_deepseekv3_256die_random_init"
READ_NOWHERE = {"VLLM_ENABLE_MC2", "VLLM_ASCEND_ACL_OP_INIT_MODE", "ACL_OP_INIT_MODE"}
A3 = {
    "vllm_ascend/platform.py:170": ("vllm-project/vllm-ascend", "f20869ef"),
    "vllm_ascend/ops/fused_moe.py:945": ("vllm-project/vllm-ascend", "f20869ef"),
    "mindspeed/core/tensor_parallel/layers.py:118": ("Ascend/MindSpeed", "dc83a031"),
    "torch_npu/csrc/core/npu/register/OptionsManager.cpp:144": ("Ascend/pytorch", "v7.1.0-pytorch2.5.1"),
    "torch_npu/csrc/core/npu/register/OptionsManager.cpp:521": ("Ascend/pytorch", "v7.1.0-pytorch2.5.1"),
    "torch_npu/csrc/core/npu/NPUCachingAllocator.cpp:784": ("Ascend/pytorch", "v7.1.0-pytorch2.5.1"),
}


@functools.cache
def config_of(name, *overrides):
    return compose(name, overrides)


def variables(name, *overrides):
    return {v.name: v for v in derive(config_of(name, *overrides), temp_dir="/tmp/vp-x")}


@pytest.mark.parametrize("name", [TINY, LARGE])
def test_every_variable_says_why_and_where_it_is_read(name):
    found = variables(name)
    assert all(v.reason and v.read_by and v.value for v in found.values())
    assert not READ_NOWHERE & set(found)


@pytest.mark.parametrize("name", [TINY, LARGE])
def test_installed_packages_really_read_what_is_set(name):
    """The file named in read_by holds the name, where that package is installed."""
    looked = 0
    for variable in variables(name).values():
        for place in variable.read_by.split("; "):
            file = place.split(" ")[0].partition(":")[0]
            spec = importlib.util.find_spec(file.split("/")[0]) if "/" in file else None
            if spec is None or not spec.submodule_search_locations:
                continue
            path = Path(next(iter(spec.submodule_search_locations))).parent / file
            assert variable.name in path.read_text(), f"{variable.name} is not in {path}"
            looked += 1
    assert looked >= 6


@pytest.mark.upstream
@pytest.mark.parametrize("line", ["pypi", "a3"])
def test_the_ascend_pins_really_read_what_is_set(upstream_text, line):
    for variable in variables(LARGE, f"recipe.line={line}").values():
        for place in variable.read_by.split("; "):
            place = place.split(" ")[0]
            if place in A3:
                file, _, number = place.partition(":")
                lines = upstream_text(*A3[place], file).splitlines()
                near = "\n".join(lines[int(number) - 3 : int(number) + 3])
                assert variable.name in near, f"{variable.name} is not at {place}"


def test_switches_and_routing_follow_the_recipe():
    assert variables(TINY)["VERL_PATCHES"].value == "line=pypi,platform=cpu"
    patched = variables(TINY, "recipe.patches=[+a.b,-c.*]")["VERL_PATCHES"].value
    assert patched == "line=pypi,platform=cpu,+a.b,-c.*"
    both = (LARGE, LARGE.replace("random_init", "true_weight"))
    routes = [variables(name)["VLLM_ENABLE_FIX_ROUTE"].value for name in both]
    assert routes == ["1", "0"]  # never unset: vllm-ascend takes int() of it
    assert "VLLM_ENABLE_FIX_ROUTE" not in variables(TINY) and variables(TINY)["VLLM_USE_V1"].value == "0"


def test_workers_get_what_travels_and_nothing_of_this_machine():
    shipped = worker_environment(config_of(TINY))
    assert {"VERL_PATCHES", "VLLM_USE_V1", "OMP_NUM_THREADS"} <= set(shipped)
    assert not {"PYTHONPATH", "TMPDIR", "RAY_TMPDIR", "RAY_ADDRESS"} & set(shipped)


def test_the_callers_environment_stays_except_what_the_config_decides():
    config = config_of(TINY)
    shell = {"HOME": "/h", "RAY_ADDRESS": "x:1", "VERL_PATCHES": "old"}
    found = process_environment(derive(config, "/tmp/vp-x"), shell)
    assert found["HOME"] == "/h" and "RAY_ADDRESS" not in found
    assert found["VERL_PATCHES"] == "line=pypi,platform=cpu" and found["RAY_TMPDIR"] == "/tmp/vp-x"
    joined = process_environment(derive(config_of(LARGE), "/tmp/vp-x"), {})
    assert joined["RAY_ADDRESS"] == "auto" and "RAY_TMPDIR" not in joined
