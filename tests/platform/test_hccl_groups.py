"""Test options of HCCL's groups: which groups get a small buffer, and that torch hands it to the backend."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist  # must precede hccl: in a rank its import starts the emulated device

from tests.conftest import emulated_npu
from verl_patches.emulation.npu import hccl
from verl_patches.platform.npu import groups


def vllm_group_configs():
    """Return hccl_config of all ranks' group, of tp, dp and ep, and of a tp group without a size."""
    from vllm.distributed import parallel_state

    dist.init_process_group("hccl", store=dist.HashStore(), rank=0, world_size=1)
    new_group = dist.new_group
    for groups.small_groups_mib.value, names in ((64, ("tp", "dp", "ep")), (None, ("tp",))):
        for name in names:
            parallel_state.init_model_parallel_group([[0]], 0, "hccl", group_name=name)
    assert dist.new_group is new_group
    return [group["config"] for group in hccl.group_configs()]


@pytest.fixture
def small():
    with groups.small_groups_mib.set(64):
        yield


@pytest.mark.slow
@pytest.mark.upstream
@pytest.mark.parametrize("row", ["", ",-rollout.ascend_small_groups"])
def test_groups_of_vllm_hand_their_options_to_the_backend(run_emulated, row):
    job = "tests.platform.test_hccl_groups:vllm_group_configs"
    (found,) = run_emulated(job, patches=emulated_npu() + row, backend=None)
    small = [{"group_name": f"vllm_{name}", "hccl_buffer_size": 64} for name in ("tp", "dp")]
    assert found == [{}, *([{}, {}] if row else small), {}, {}]


def test_a_group_outside_hccl_gets_no_options(small, monkeypatch):
    given = []
    monkeypatch.setattr(dist, "new_group", lambda *args, **kwargs: given.append(kwargs))
    options = SimpleNamespace()
    with groups._default_hccl_options(options):
        dist.new_group([0], backend="gloo")
        dist.new_group([0], backend="hccl")
        dist.new_group([0], backend="hccl", pg_options=None)  # as the MC2 group does
    hccl_given = [{"backend": "hccl", "pg_options": each} for each in (options, None)]
    assert given == [{"backend": "gloo"}, *hccl_given]
