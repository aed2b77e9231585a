"""What each rank holds: published sizes, exact tiling of every tensor over all ranks, static bytes, and refusals."""

import json
import time
from pathlib import Path

import pytest

from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import build_inventory
from verl_patches.layout.parallel import ParallelLayout, parse_layout, rollout_layout
from verl_patches.layout.sharding import AXES, LIBRARIES, local_parameters, static_bytes

MODELS = Path(__file__).resolve().parents[2] / "configs" / "model"
BIG = build_inventory(MODELS / "deepseekv3_671b.json")
TINY_CONFIG = json.loads((MODELS / "deepseekv3_tiny.json").read_text())
TRAIN = parse_layout("tp4 pp8 ep32 etp1 @256 layers=7,7,8,8,8,8,8,7")


def test_what_tensor_parallelism_leaves_whole():
    """MindSpeed keeps 15,140,864 attention values a layer on every TP rank; Megatron 0.12.2 only the two norms."""
    layer = BIG.layers[3]  # on stage 0
    whole = {}
    for library in LIBRARIES:
        shards = local_parameters(BIG, TRAIN, 0, library).shards
        held = [shards[p.name] for p in layer if p.part == "attention"]
        whole[library] = sum(s.count for s in held if s.axis is None)
    assert whole == {
        "megatron-local": 2048,
        "megatron-te": 2048,
        "mindspeed": 15_140_864,
        "vllm": 15_140_864,
        "vllm-ascend": 15_140_864,
    }


def test_what_a_rollout_die_needs():
    """Published: 25.81 GB for EP256 TP2, of which 20.70 dense (shared experts whole) and 5.11 experts."""
    held = local_parameters(BIG, rollout_layout(1, dp=128, tp=2), 17, "vllm-ascend")
    gb = [round(n / 1e9, 2) for n in (held.size_bytes(False), held.size_bytes(True), held.size_bytes())]
    assert gb == [20.70, 5.11, 25.81]
    split = local_parameters(BIG, rollout_layout(1, dp=128, tp=2), 17, "vllm")
    shared = sum(p.count for p in BIG.parameters if p.part == "shared_expert")
    assert held.size_bytes() - split.size_bytes() == 2 * shared // 2


LAYOUTS = [
    "tp4 pp2 ep2 etp2 @16",
    "tp2 pp2 ep8 etp1 @16",
    "ep16 etp1 @16",
    "tp4 cp2 ep4 etp2 @16",
    "tp2 pp2 vpp2 @4",
    "tp2 pp2 ep4 etp1 @8 layers=1,3",
]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("text", LAYOUTS)
def test_shards_of_all_ranks_tile_every_tensor(text, library):
    """Each tensor's rows are held exactly once per replica, over all ranks: nothing lost, nothing doubled."""
    layout, inventory = parse_layout(text), build_inventory(TINY_CONFIG | {"vocab_size": 500})
    pieces = {}
    for rank in range(layout.world_size):
        for name, shard in local_parameters(inventory, layout, rank, library).shards.items():
            pieces.setdefault(name, []).append(shard)
    assert set(pieces) == set(inventory.by_name)
    for name, shards in pieces.items():
        axis, expert = shards[0].axis, shards[0].parameter.expert is not None
        replicas = layout.edp if expert else layout.dp * layout.cp
        if axis is None:
            assert not expert and len(shards) == replicas * layout.tp, name
            continue
        rows = [s.start + i for s in shards for i in range(s.shape[axis] - s.padding)]
        assert sorted(rows) == sorted([*range(shards[0].parameter.shape[axis])] * replicas), name


def test_vllm_pads_the_vocabulary():
    inventory = build_inventory(TINY_CONFIG | {"vocab_size": 500})
    last = local_parameters(inventory, parse_layout("tp4 @4"), 3, "vllm").shards["lm_head.weight"]
    assert (last.shape, last.start, last.padding) == ((128, 128), 384, 12)
    beyond = local_parameters(build_inventory(TINY_CONFIG | {"vocab_size": 60}), parse_layout("tp4 @4"), 3, "vllm")
    assert beyond.shards["lm_head.weight"].shape == (16, 128)
    assert beyond.shards["lm_head.weight"].padding == 4
    empty = local_parameters(build_inventory(TINY_CONFIG | {"vocab_size": 36}), parse_layout("tp4 @4"), 3, "vllm")
    assert empty.shards["lm_head.weight"][1:] == ((16, 128), "bfloat16", 0, 36, 16)  # padding alone, no more than it
    unpadded = local_parameters(inventory, parse_layout("tp4 @4"), 3, "megatron-local").shards["lm_head.weight"]
    assert (unpadded.shape, unpadded.start, unpadded.padding) == ((125, 128), 375, 0)


@pytest.mark.parametrize(
    ("text", "library", "change", "message"),
    [
        ("tp2 @2", "torch", {}, "unknown library"),
        ("tp3 @3", "vllm", {}, "num_attention_heads"),
        ("tp4 @4", "megatron-local", {"vocab_size": 510}, "must divide 510"),
        ("tp2 @2", "mindspeed", {"q_lora_rank": None}, "replicated projection"),
        ("etp5 @5", "vllm", {}, "etp=5 must divide 32"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(text, library, change, message):
    with pytest.raises(ConfigError, match=message):
        local_parameters(build_inventory(TINY_CONFIG | change), parse_layout(text), 0, library)


@pytest.mark.slow
def test_every_kind_has_an_axis_and_numbers_come_fast():
    assert {p.kind for p in BIG.parameters} <= set(AXES)
    started = time.process_time()
    every_expert = ParallelLayout(8, tp=8, etp=8)  # the dearest case: all 44,544 expert tensors on each rank
    local_parameters(BIG, every_expert, 0, "vllm").count()
    assert time.process_time() - started < 1.0
    started = time.process_time()
    for rank in range(0, 256, 16):
        local_parameters(BIG, TRAIN, rank, "mindspeed").count()
    assert (time.process_time() - started) / 16 < 0.2


# GB of weights, gradients and optimizer state on a die of each stage, as published for the 256-die run
STATIC_GB = {0: (4.79, 9.59, 18.39), 1: (5.93, 11.85, 30.34), 7: (6.39, 12.78, 30.69)}
STATIC_GB |= dict.fromkeys(range(2, 7), (6.77, 13.55, 34.67))


def rank_at(**coordinates):
    """The first rank of TRAIN at these coordinates."""
    at = ((rank, vars(TRAIN.coordinates(rank))) for rank in range(TRAIN.world_size))
    return next(rank for rank, found in at if found.items() >= coordinates.items())


@pytest.mark.parametrize("stage", range(8))
def test_static_bytes_of_the_256_die_run(stage):
    for dp in (0, 7):
        found = static_bytes(BIG, TRAIN, rank_at(pp=stage, dp=dp, tp=3))
        gb = tuple(round(n / 1e9, 2) for n in (found.param_bytes, found.grad_bytes, found.optimizer_bytes))
        assert gb == STATIC_GB[stage]


def test_worst_die_and_swapped_optimizer():
    found = [static_bytes(BIG, TRAIN, rank_at(pp=stage, dp=0, tp=0)) for stage in range(8)]
    assert round(max(s.total_bytes for s in found) / 1e9, 2) == 54.99
    assert round(max(s.total_bytes - s.optimizer_bytes for s in found) / 1e9, 2) == 20.32
    assert round(max(s.optimizer_bytes for s in found) / 1e9, 2) == 34.67


def test_another_split_costs_something_else():
    """Negative control: a layer more, experts over fewer ranks, or Megatron's cut of down projections all show."""
    rank = rank_at(pp=2, dp=0, tp=0)
    published = static_bytes(BIG, TRAIN, rank)
    uneven = ParallelLayout(256, tp=4, pp=8, ep=32, etp=1, layers_per_stage=(7, 7, 9, 7, 8, 8, 8, 7))
    fewer = ParallelLayout(256, tp=4, pp=8, ep=16, etp=1, layers_per_stage=TRAIN.layers_per_stage)
    assert static_bytes(BIG, uneven, rank).total_bytes > published.total_bytes
    assert static_bytes(BIG, fewer, rank).param_bytes > 1.5 * published.param_bytes
    assert static_bytes(BIG, fewer, rank).optimizer_bytes < 1.01 * published.optimizer_bytes  # sharded over edp = 2
    context = ParallelLayout(256, tp=4, cp=2, pp=8, ep=32, etp=1, layers_per_stage=TRAIN.layers_per_stage)
    assert static_bytes(BIG, context, rank) == published  # dp = 4: the optimizer is sharded over dp * cp
    assert static_bytes(BIG, TRAIN, rank, "megatron-te").param_bytes < published.param_bytes
