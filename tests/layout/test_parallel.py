"""Test ParallelLayout against Megatron's own rank arithmetic, and the rollout layout against vLLM's rank order."""

import ast
import importlib.util
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_patches.errors import ConfigError
from verl_patches.layout.parallel import ParallelLayout, parse_layout, rollout_layout

EXPERT_NAMES = {"etp": "tp", "edp": "dp"}


def _rank_generator():
    """Return megatron.core.parallel_state.RankGenerator from the installed file: importing it would take seconds."""
    root = Path(importlib.util.find_spec("megatron").submodule_search_locations[0])
    tree = ast.parse((root / "core" / "parallel_state.py").read_text())
    wanted = {"generate_masked_orthogonal_rank_groups", "RankGenerator"}
    tree.body = [node for node in tree.body if getattr(node, "name", None) in wanted]
    assert len(tree.body) == 2
    space = {"List": list}
    exec(compile(tree, "parallel_state.py", "exec"), space)
    return space["RankGenerator"]


RankGenerator = _rank_generator()


def _megatron_generators(tp, cp, ep, etp, pp, world_size, order="tp-cp-ep-dp-pp"):
    """Return the two generators of initialize_model_parallel (0.12.2, decoder only), None where it refuses."""
    if world_size % (tp * cp * pp) or world_size % (etp * ep * pp):
        return None
    dp, edp = world_size // (tp * cp * pp), world_size // (etp * ep * pp)
    dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
    expert = RankGenerator(tp=etp, ep=ep, dp=edp, pp=pp, cp=1, order=order)
    if dense.get_ranks("pp") != expert.get_ranks("pp"):
        return None
    return dense, expert


SIZES = st.sampled_from([1, 1, 2, 3, 4])


@settings(max_examples=300, deadline=None)
@given(tp=SIZES, cp=SIZES, ep=SIZES, etp=SIZES, pp=SIZES, replicas=st.sampled_from([1, 2, 4, 6]))
def test_groups_equal_megatrons(tp, cp, ep, etp, pp, replicas):
    world_size = tp * cp * pp * replicas
    generators = _megatron_generators(tp, cp, ep, etp, pp, world_size)
    if generators is None:
        with pytest.raises(ConfigError):
            ParallelLayout(world_size, tp=tp, cp=cp, ep=ep, etp=etp, pp=pp)
        return
    layout = ParallelLayout(world_size, tp=tp, cp=cp, ep=ep, etp=etp, pp=pp)
    dense, expert = generators
    for name in ("tp", "cp", "dp", "pp", "tp-pp", "tp-cp", "dp-cp", "tp-dp", "tp-dp-cp"):
        assert layout.groups(name) == dense.get_ranks(name), name
    for name in ("etp", "ep", "edp", "etp-ep", "etp-ep-pp"):
        megatron_name = "-".join(EXPERT_NAMES.get(part, part) for part in name.split("-"))
        assert layout.groups(name) == expert.get_ranks(megatron_name), name
    for axis in ("tp", "cp", "dp", "pp", "etp", "ep", "edp"):
        for group in layout.groups(axis):
            assert [getattr(layout.coordinates(rank), axis) for rank in group] == list(range(len(group)))


def test_a_wrong_order_is_noticed():
    """Check as a negative control that the comparison fails for a layout that numbers ranks another way."""
    dense, _ = _megatron_generators(2, 1, 1, 2, 2, 16, "tp-pp-cp-ep-dp")
    assert ParallelLayout(16, tp=2, pp=2, ep=4, etp=1).groups("dp") != dense.get_ranks("dp")


def test_the_three_layouts_of_256_dies():
    train = parse_layout("tp4 pp8 ep32 etp1 @256 layers=7,7,8,8,8,8,8,7")
    assert (train.dp, train.edp) == (8, 1)
    assert train.stage_layers(7, 61) == tuple(range(54, 61))
    assert train.local_experts(31, 256) == range(248, 256)
    random_init, true_weight = rollout_layout(1, dp=128, tp=2), rollout_layout(2, dp=64, tp=2)
    assert (str(random_init), str(true_weight)) == ("tp2 ep256 etp1 @256", "tp2 ep128 etp1 @256")
    assert true_weight.local_experts(128, 256) == range(2)  # first rank of the second instance
    assert true_weight.groups("instance-dp")[0] == list(range(0, 128, 2))


@settings(max_examples=200, deadline=None)
@given(sizes=st.tuples(*[SIZES] * 6), listed=st.booleans())
def test_text_form_round_trips(sizes, listed):
    tp, cp, ep, etp, pp, vpp = sizes
    layers = tuple(range(1, pp * vpp + 1)) if listed else None
    try:
        layout = ParallelLayout(tp * cp * pp * ep * etp, *sizes, layers)
    except ConfigError:
        return
    assert parse_layout(str(layout)) == layout


def test_stages_of_megatrons_interleaved_schedule():
    """Check the example of transformer_block.py: with 8 layers, pp 2 and vpp 2 stage 0 holds [0, 1] and [4, 5]."""
    assert ParallelLayout(2, pp=2, vpp=2).stage_layers(0, 8) == (0, 1, 4, 5)
    uneven = ParallelLayout(2, pp=2, vpp=2, layers_per_stage=(1, 3, 2, 2))
    assert uneven.stage_layers(1, 8) == (1, 2, 3, 6, 7)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: ParallelLayout(8, tp=3), "must divide world_size 8"),
    (lambda: ParallelLayout(8, tp=2, ep=8), "etp\\*ep\\*pp = 2\\*8\\*1"),
    (lambda: ParallelLayout(8, pp=2, layers_per_stage=(4,)), "must hold 2 counts"),
    (lambda: ParallelLayout(8, pp=2, layers_per_stage=(4, 5)).stage_layers(0, 8), "adds up to 9"),
    (lambda: ParallelLayout(8, ep=8, etp=1).local_experts(0, 12), "must divide the number of routed experts"),
    (lambda: ParallelLayout(8).coordinates(8), "0..7, found 8"),
    (lambda: parse_layout("tp2 zp3 @4"), "cannot read 'zp3'"),
    (lambda: parse_layout("tp2"), "@256"),
])  # fmt: skip
def test_mistakes_are_named(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
