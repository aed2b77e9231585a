"""Test the measurement of process groups on four gloo ranks, with right and wrong collectives."""

from unittest import mock

import pytest

from tests.runs import composed
from verl_patches.worker.probe.groups import EXPERTS, MC2, group_kinds, group_probes

LAYOUT = ["recipe.line=a3", "recipe.platform=npu_emulated", "trainer.device=npu", "layout=a3/tp2ep2", "rollout=tp2dp2"]


def test_the_kinds_of_groups_of_16_dies():
    kinds = group_kinds(composed("deepseekv3_16die"))
    sizes = {name: (len(kind.groups), len(kind.groups[0])) for name, kind in kinds.items()}
    assert sizes == {
        "train tp": (4, 4),
        "train pp": (8, 2),
        "train experts": (2, 8),
        "train dp": (8, 2),
        "train tp and pp": (2, 8),
        "rollout tp": (8, 2),
        "rollout dp": (2, 8),
        EXPERTS: (1, 16),
    }
    assert kinds["train tp"].size_bytes == 4096 * 7168 * 2
    assert group_probes(composed("deepseekv3_16die"))[-1] == MC2
    assert MC2 not in group_probes(composed("moonlight_16die"))  # each die has all experts


def measured(spoil):
    """Measure the groups of a layout on these ranks; with `spoil` collectives do nothing."""
    import torch.distributed as dist

    from verl_patches.worker.probe import groups

    run = composed("deepseekv3_tiny_cpu", LAYOUT)
    names = ("all_reduce", "all_to_all_single", "batch_isend_irecv")
    nothing = [mock.patch.object(dist, name, lambda *args, **given: []) for name in names] if spoil else []
    for each in nothing:
        each.start()
    try:
        return {name: groups.measure(run, name, set()) for name in groups.group_kinds(run)}
    finally:
        for each in nothing:
            each.stop()


@pytest.mark.parametrize("spoil", [False, True])
def test_right_values_are_told_from_wrong_ones(ranks4, spoil):
    answers = ranks4.run("tests.worker.probe.test_groups:measured", spoil)
    assert {*answers[0]} >= {"train tp", "train experts", "train dp", "rollout tp", EXPERTS}
    for rank, found in enumerate(answers):
        for name, answer in found.items():
            assert rank in answer["ranks"] and answer["seconds"] > 0 and answer["bytes"] > 0
            assert bool(answer["wrong"]) == spoil, (name, answer)
