"""Test MC2's group: one mode only, and in whole engines, whose log-probs are those of transformers."""

import pytest
import torch.distributed as dist

from tests.emulation.test_npu_emulated import model  # noqa: F401  a fixture
from verl_patches.emulation.npu import hccl


@pytest.mark.parametrize("first", [True, False])
def test_mc2_in_a_graph_and_eagerly_on_one_group_is_refused(first, monkeypatch):
    group = hccl.create_group(dist.HashStore(), 0, 1, dist.default_pg_timeout)
    monkeypatch.setattr(hccl.GraphState, "running", first)
    assert hccl.mc2_group(group.name) is hccl.mc2_group(group.name) is group
    monkeypatch.setattr(hccl.GraphState, "running", not first)
    with pytest.raises(ValueError, match=rf"MC2 ran .* before .* on {group.name} of ranks \[0\]"):
        hccl.mc2_group(group.name)


MODES, OWN_GROUP = (False, True), "rollout.ascend_mc2_name"
NIGHTLY = pytest.mark.nightly


@pytest.mark.slow
@pytest.mark.upstream
@pytest.mark.parametrize(
    ("instances", "dp", "tp"), [(1, 2, 1), pytest.param(2, 1, 2, marks=NIGHTLY), pytest.param(1, 2, 2, marks=NIGHTLY)]
)
def test_engines_decode_by_mc2_on_a_group_of_its_own(instances, dp, tp, model, run_emulated):  # noqa: F811
    """Decode without and with graphs; the controls have upstream's group, on which the prompts' all-to-all has run."""
    size, job = instances * dp * tp, "tests.emulation.mc2_rank:engines"
    cases = [{"graphs": graphs, "without": rows} for rows in ([], [OWN_GROUP]) for graphs in MODES]
    found = run_emulated(job, str(model), dp, tp, cases, size=size)
    for rank, engines in enumerate(found):
        first = rank - rank % (dp * tp)
        instance = [*range(first, first + dp * tp)]
        for graphs, right, control in zip(MODES, engines[:2], engines[2:], strict=True):
            assert right["worst"] < 1e-5 and right["same"] and right["in graphs"] is graphs, right
            (ranks, own, size_mib), (of_ep, shared, small_mib) = right["mc2"], right["ep"]
            assert ranks == of_ep == instance and own != shared and (size_mib, small_mib) == (None, 64)
            assert not right["left"] and f"not MC2's ran on {control['ep'][1]} of ranks {instance}" in control["error"]


@pytest.mark.slow
@pytest.mark.upstream
@NIGHTLY
def test_multistream_moe_is_wrong_with_experts_cut_over_tp(model, run_emulated):  # noqa: F811
    """Check why rollout/checks.py refuses it; the control has experts cut as well."""
    cases = {"one stream": {}, "streams": {"enable_multistream_moe": True}}
    for found in run_emulated("tests.emulation.mc2_rank:cut_experts", str(model), cases, size=2):
        assert found["one stream"]["worst"] < 1e-5 and found["one stream"]["same"]
        assert found["streams"]["worst"] > 0.1 and not found["streams"]["same"]
