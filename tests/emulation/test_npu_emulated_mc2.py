"""MC2's dispatch and combine alone, on gloo ranks, against a plain dense computation; its group in whole engines."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from tests.emulation.mc2_rank import EXPERTS, MOST, K, routed
from tests.emulation.test_npu_emulated import model  # noqa: F401  a fixture
from tests.ranks import Ranks
from verl_patches.emulation.npu import hccl
from verl_patches.emulation.npu.hccl import Graph

JOB = "tests.emulation.mc2_rank:on_rank"


@pytest.fixture(scope="module")
def ranks2():
    with Ranks(2) as ranks:
        yield ranks


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_experts_of_all_ranks_give_what_a_dense_computation_gives(size, request):
    found = request.getfixturevalue(f"ranks{size}").run(JOB, "right")
    assert max(rank["worst"] for rank in found) < 1e-12
    assert sum(rank["used"] for rank in found) == K * sum(MOST - rank for rank in range(size))
    assert all(rank["rest is NaN"] and rank["rows"] == MOST * size * min(EXPERTS // size, K) for rank in found)


@pytest.mark.slow
def test_they_do_not_with_the_weights_of_other_experts(ranks4):
    assert all(rank["worst"] > 0.1 for rank in ranks4.run(JOB, "control", 1))


@pytest.fixture
def group():
    """A group of this process alone."""
    return hccl.create(dist.HashStore(), 0, 1, timedelta(seconds=20))


@pytest.mark.parametrize(
    ("first", "words"), [(True, "in a graph before and eagerly"), (False, "eagerly before and in")]
)
def test_mc2_in_a_graph_and_eagerly_on_one_group_is_refused(first, words, group, monkeypatch):
    monkeypatch.setattr(Graph, "runs", first)
    assert routed(group)["worst"] < 1e-12
    monkeypatch.setattr(Graph, "runs", not first)
    with pytest.raises(ValueError, match=rf"{words}.* on {group.name} of ranks \[0\]"):
        routed(group)


MODES, OWN_GROUP = (False, True), "rollout.ascend_mc2_name"
FULL = pytest.mark.full


@pytest.mark.slow
@pytest.mark.upstream
@pytest.mark.parametrize(
    ("instances", "dp", "tp"), [(1, 2, 1), pytest.param(2, 1, 2, marks=FULL), pytest.param(1, 2, 2, marks=FULL)]
)
def test_engines_decode_by_mc2_on_a_group_of_its_own(instances, dp, tp, model, run_emulated):  # noqa: F811
    """Without and with graphs; the controls have upstream's group, on which the prompts' all-to-all has run."""
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
