"""Static bytes against the published table of the 256-die run (TP4 PP8, experts over 32 ranks)."""

from pathlib import Path

import pytest

from verl_patches.layout.inventory import build_inventory
from verl_patches.layout.parallel import ParallelLayout, parse_layout
from verl_patches.layout.static_bytes import static_bytes

BIG = build_inventory(Path(__file__).resolve().parents[2] / "configs" / "model" / "deepseekv3_671b.json")
TRAIN = parse_layout("tp4 pp8 ep32 etp1 @256 layers=7,7,8,8,8,8,8,7")

# GB of weights, gradients and optimizer state on a die of each stage, as published for the 256-die run
STATIC_GB = {0: (4.79, 9.59, 18.39), 1: (5.93, 11.85, 30.34), 7: (6.39, 12.78, 30.69)}
STATIC_GB |= dict.fromkeys(range(2, 7), (6.77, 13.55, 34.67))


@pytest.mark.parametrize("stage", range(8))
def test_static_bytes_of_the_256_die_run(stage):
    for dp in (0, 7):
        found = static_bytes(BIG, TRAIN, TRAIN.rank_of(pp=stage, dp=dp, tp=3))
        gb = tuple(round(n / 1e9, 2) for n in (found.param_bytes, found.grad_bytes, found.optimizer_bytes))
        assert gb == STATIC_GB[stage]


def test_worst_die_and_swapped_optimizer():
    ranks = [TRAIN.rank_of(pp=stage) for stage in range(8)]
    worst = max(static_bytes(BIG, TRAIN, rank).total_bytes for rank in ranks)
    swapped = [static_bytes(BIG, TRAIN, rank, swap_optimizer=True) for rank in ranks]
    assert round(worst / 1e9, 2) == 54.99
    assert round(max(s.total_bytes for s in swapped) / 1e9, 2) == 20.32
    assert round(max(s.host_bytes for s in swapped) / 1e9, 2) == 34.67


def test_another_split_costs_something_else():
    """Negative control: a layer more, experts over fewer ranks, or Megatron's cut of down projections all show."""
    rank = TRAIN.rank_of(pp=2)
    published = static_bytes(BIG, TRAIN, rank)
    uneven = ParallelLayout(256, tp=4, pp=8, ep=32, etp=1, layers_per_stage=(7, 7, 9, 7, 8, 8, 8, 7))
    fewer = ParallelLayout(256, tp=4, pp=8, ep=16, etp=1, layers_per_stage=TRAIN.layers_per_stage)
    assert static_bytes(BIG, uneven, rank).total_bytes > published.total_bytes
    assert static_bytes(BIG, fewer, rank).param_bytes > 1.5 * published.param_bytes
    assert static_bytes(BIG, fewer, rank).optimizer_bytes < 1.01 * published.optimizer_bytes  # sharded over edp = 2
    context = ParallelLayout(256, tp=4, cp=2, pp=8, ep=32, etp=1, layers_per_stage=TRAIN.layers_per_stage)
    assert static_bytes(BIG, context, rank) == published  # dp = 4: the optimizer is sharded over dp * cp
    assert static_bytes(BIG, TRAIN, rank, "megatron-te").param_bytes < published.param_bytes
