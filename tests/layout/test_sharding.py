"""Test each rank's shards: published sizes, exact tiling of each tensor over all ranks, static bytes, refusals."""

import json
from pathlib import Path

import pytest

from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import build_inventory
from verl_patches.layout.parallel import ParallelLayout, parse_layout, rollout_layout
from verl_patches.layout.sharding import LIBRARIES, local_parameters, static_bytes

MODELS = Path(__file__).resolve().parents[2] / "configs" / "model"
BIG = build_inventory(MODELS / "deepseekv3_671b.json")
TINY_CONFIG = json.loads((MODELS / "deepseekv3_tiny.json").read_text())
TRAIN = parse_layout("tp4 pp8 ep32 etp1 @256 layers=7,7,8,8,8,8,8,7")


def test_attention_values_that_tensor_parallelism_does_not_cut():
    """Check the values: MindSpeed has 15,140,864 of a layer on every TP rank; Megatron 0.12.2 only the two norms."""
    uncut = {}
    for library in LIBRARIES:
        shards = local_parameters(BIG, TRAIN, 0, library).shards
        attention = [shards[p.name] for p in BIG.layers[3] if p.part == "attention"]
        uncut[library] = sum(shard.count for shard in attention if shard.axis is None)
    assert uncut == dict.fromkeys(LIBRARIES, 15_140_864) | {"megatron-local": 2048}


def test_bytes_of_a_rollout_die():
    """Check the published 25.81 GB for EP256 TP2: 20.70 dense (shared experts not cut) and 5.11 experts."""
    layout = rollout_layout(1, dp=128, tp=2)
    held = local_parameters(BIG, layout, 17, "vllm-ascend")
    experts = 2 * sum(shard.count for shard in held.shards.values() if shard.parameter.expert is not None)
    assert [round(n / 1e9, 2) for n in (held.size_bytes() - experts, experts)] == [20.70, 5.11]
    shared = sum(p.count for p in BIG.parameters if p.part == "shared_expert")
    # half of them, 2 bytes each
    assert held.size_bytes() - local_parameters(BIG, layout, 17, "vllm").size_bytes() == shared


LAYOUTS = [
    "tp4 pp2 ep2 etp2 @16",
    "tp2 pp2 ep8 etp1 @16",
    "tp4 cp2 ep4 etp2 @16",
    "tp2 pp2 vpp2 @4",
    "tp2 pp2 ep4 etp1 @8 layers=1,3",
]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("text", LAYOUTS)
def test_shards_of_all_ranks_tile_every_tensor(text, library):
    """Check that each tensor's rows are held exactly once per replica, over all ranks."""
    layout, inventory = parse_layout(text), build_inventory(TINY_CONFIG | {"vocab_size": 500})
    shards_by_name = {}
    for rank in range(layout.world_size):
        for name, shard in local_parameters(inventory, layout, rank, library).shards.items():
            shards_by_name.setdefault(name, []).append(shard)
    assert set(shards_by_name) == set(inventory.by_name)
    for name, shards in shards_by_name.items():
        axis, expert = shards[0].axis, shards[0].parameter.expert is not None
        replicas = layout.edp if expert else layout.dp * layout.cp
        if axis is None:
            assert not expert and len(shards) == replicas * layout.tp, name
            continue
        rows = [s.start + i for s in shards for i in range(s.shape[axis] - s.padding)]
        assert sorted(rows) == sorted([*range(shards[0].parameter.shape[axis])] * replicas), name


@pytest.mark.parametrize(("words", "library", "rows", "start", "padding"), [
    (500, "vllm", 128, 384, 12), (60, "vllm", 16, 48, 4), (36, "vllm", 16, 36, 16), (500, "megatron-local", 125, 375, 0)
])  # fmt: skip
def test_vllm_pads_the_vocabulary(words, library, rows, start, padding):
    """Check the last of four TP ranks, to which a vocabulary of 36 leaves only padding."""
    inventory = build_inventory(TINY_CONFIG | {"vocab_size": words})
    head = local_parameters(inventory, parse_layout("tp4 @4"), 3, library).shards["lm_head.weight"]
    assert (head.shape, head.start, head.padding) == ((rows, 128), start, padding)


@pytest.mark.parametrize(("text", "library", "change", "message"), [
    ("tp2 @2", "torch", {}, "unknown library"),
    ("tp3 @3", "vllm", {}, "num_attention_heads"),
    ("tp4 @4", "megatron-local", {"vocab_size": 510}, "must divide 510"),
    ("etp5 @5", "vllm", {}, "etp=5 must divide 32"),
])  # fmt: skip
def test_layouts_that_do_not_fit_are_refused(text, library, change, message):
    with pytest.raises(ConfigError, match=message):
        local_parameters(build_inventory(TINY_CONFIG | change), parse_layout(text), 0, library)


# GB of weights, gradients and optimizer state on a die of each stage, as published for the 256-die run
STATIC_GB = {0: (4.79, 9.59, 18.39), 1: (5.93, 11.85, 30.34), 7: (6.39, 12.78, 30.69)}
STATIC_GB |= dict.fromkeys(range(2, 7), (6.77, 13.55, 34.67))


def first_rank(**coordinates):
    """Return the first rank of TRAIN at these coordinates."""
    at = ((rank, vars(TRAIN.coordinates(rank))) for rank in range(TRAIN.world_size))
    return next(rank for rank, found in at if found.items() >= coordinates.items())


@pytest.mark.parametrize("stage", range(8))
def test_static_bytes_of_the_256_die_run(stage):
    for dp in (0, 7):
        static = static_bytes(BIG, TRAIN, first_rank(pp=stage, dp=dp, tp=3))
        assert tuple(round(n / 1e9, 2) for n in static) == STATIC_GB[stage]


def test_static_bytes_follow_the_layout():
    """Check as negative controls a layer more, experts over fewer ranks, and Megatron's cut of down projections."""
    rank, layers = first_rank(pp=2, dp=0, tp=0), TRAIN.layers_per_stage
    published = static_bytes(BIG, TRAIN, rank)
    assert round(sum(published) / 1e9, 2) == 54.99  # the worst stage
    uneven = ParallelLayout(256, tp=4, pp=8, ep=32, etp=1, layers_per_stage=(7, 7, 9, 7, 8, 8, 8, 7))
    assert sum(static_bytes(BIG, uneven, rank)) > sum(published)
    fewer = static_bytes(BIG, ParallelLayout(256, tp=4, pp=8, ep=16, etp=1, layers_per_stage=layers), rank)
    assert fewer.param_bytes > 1.5 * published.param_bytes
    assert fewer.optimizer_bytes < 1.01 * published.optimizer_bytes  # sharded over edp = 2
    context = ParallelLayout(256, tp=4, cp=2, pp=8, ep=32, etp=1, layers_per_stage=layers)
    assert static_bytes(BIG, context, rank) == published  # dp = 4: the optimizer is sharded over dp * cp
    assert static_bytes(BIG, TRAIN, rank, "megatron-local").param_bytes < published.param_bytes
