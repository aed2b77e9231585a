"""Options of HCCL's groups: which groups get a small buffer, and that torch hands it to the backend."""

from types import SimpleNamespace

import pytest

from verl_patches.emulation.npu import hccl
from verl_patches.platform.npu import groups

ROLLOUT = """
import json, sys
import torch.distributed as dist
import verl_patches.prelude_patch
from vllm.distributed import parallel_state
from verl_patches.platform.npu.groups import SmallGroups
from verl_patches.emulation.npu import hccl

dist.init_process_group("hccl", store=dist.HashStore(), rank=0, world_size=1)
new_group = dist.new_group
for SmallGroups.mib, names in ((64, ("tp", "dp", "ep")), (None, ("tp",))):
    for name in names:
        made = parallel_state.init_model_parallel_group([[0]], 0, "hccl", group_name=name)
assert dist.new_group is new_group
print("FOUND" + json.dumps([group["config"] for group in hccl.groups()]))
"""


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(groups.SmallGroups, "mib", 64)


def named(get_nccl_options):
    """As MindSpeed-LLM's wrapper."""

    def wrapper(pg_name, nccl_comm_cfgs):
        options = hccl.ProcessGroupHCCL.Options()
        options.hccl_config = {"group_name": pg_name}
        return options

    return wrapper


def test_groups_of_training_keep_their_names_and_those_without_experts_are_small(small, monkeypatch):
    options_of = groups.options_of_training(named)(lambda *given: None)
    assert options_of("tp", {}).hccl_config == {"group_name": "tp", "hccl_buffer_size": 64}
    assert [options_of(name, {}).hccl_config for name in ("exp", "tp_exp")] == [
        {"group_name": "exp"},
        {"group_name": "tp_exp"},
    ]
    monkeypatch.setattr(groups.SmallGroups, "mib", None)
    assert options_of("tp", {}).hccl_config == {"group_name": "tp"}


@pytest.mark.slow
@pytest.mark.upstream
@pytest.mark.parametrize("row", ["", ",-rollout.ascend_small_groups"])
def test_groups_of_vllm_hand_their_options_to_the_backend(run_python, request, row):
    env = {"PYTHONPATH": str(request.config.getoption("--upstream") / "vllm-ascend"), "VLLM_LOGGING_LEVEL": "ERROR"}
    done = run_python(ROLLOUT, patches=f"line=a3,platform=npu_emulated{row}", env=env, timeout_s=120).check()
    small = [{"group_name": f"vllm_{name}", "hccl_buffer_size": 64} for name in ("tp", "dp")]
    expected = [{}, *([{}, {}] if row else small), {}, {}]  # all ranks; tp, dp; ep; tp without a size
    assert done.out.partition("FOUND")[2].strip() == str(expected).replace("'", '"')


@pytest.mark.parametrize("config", [{"hccl_buffer_size": "64"}, {"hccl_buffer_size": 64.0}, {"buffer": 64}])
def test_what_torch_npu_does_not_take_is_refused(config):
    options = hccl.ProcessGroupHCCL.Options()
    with pytest.raises(ValueError, match="hccl_config holds .*hccl_buffer_size.*group_name"):
        options.hccl_config = config


def test_a_group_outside_hccl_gets_no_options(small, monkeypatch):
    import torch.distributed as dist

    given = []
    monkeypatch.setattr(dist, "new_group", lambda *args, **kwargs: given.append(kwargs))
    options = SimpleNamespace()
    with groups._new_groups_with(options):
        dist.new_group([0], backend="gloo")
        dist.new_group([0], backend="hccl")
        dist.new_group([0], backend="hccl", pg_options=None)  # MC2's
    hccl_given = [{"backend": "hccl", "pg_options": each} for each in (options, None)]
    assert given == [{"backend": "gloo"}, *hccl_given]
