"""Test shards and groups against real Megatron models, rank by rank (tests/reshard/test_destination_vllm.py: vLLM's).

GPTModels are built by upstream's own code in one process, under torch's fake process group (build_megatron.py), so that
256-rank layouts are checked too. Tensors must match exactly: names, local shapes, dtypes; so must layer ids, expert ids
and the first row of the embedding.
"""

import json
from pathlib import Path

import pytest
import torch

from tests.layout.native_parameters import pack
from verl_patches.layout.inventory import build_inventory
from verl_patches.layout.parallel import ParallelLayout, parse_layout
from verl_patches.layout.sharding import AXES, local_parameters
from verl_patches.reshard.parameters import parse_name

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
TINY = json.loads((HERE.parents[1] / "configs" / "model" / "deepseekv3_tiny.json").read_text())
# the depth and the number of experts of the 671B model, everything else tiny
DEEP = TINY | {"num_hidden_layers": 61, "first_k_dense_replace": 3, "n_routed_experts": 256, "n_group": 8}
TRAIN = "tp4 pp8 ep32 etp1 @256 layers=7,8,8,8,8,8,8,6"


def _case(layout, config=TINY, ranks=None, **overrides):
    layout = parse_layout(layout)
    return config, layout, ranks or list(range(layout.world_size)), overrides


MEGATRON = {
    "tp1": _case("@1"),
    "pp2": _case("pp2 @2"),
    "tp2ep2": _case("tp2 ep2 etp1 @2"),
    "ep2pp2": _case("ep2 pp2 @4"),
    "tp4 etp2 ep2 dp2": _case("tp4 ep2 etp2 @8"),
    "pp2 uneven": _case("pp2 @2 layers=1,3", num_layers_in_first_pipeline_stage=1),
    "pp2 vpp2 tp2": _case("tp2 pp2 vpp2 @4"),
    "cp2 ep4": _case("cp2 ep4 etp1 @4"),
    "no q_lora tp2": _case("tp2 @2", TINY | {"q_lora_rank": None}),
    "two shared tp2": _case("tp2 @2", TINY | {"n_shared_experts": 2}),
    "256 dies": _case(
        TRAIN, DEEP, [0, 37, 130, 255], num_layers_in_first_pipeline_stage=7, num_layers_in_last_pipeline_stage=6
    ),
}


@pytest.fixture(scope="module")
def megatron(run_ranks):
    options = {"patches": "line=pypi,platform=cpu", "backend": None}
    return run_ranks("tests.layout.build_megatron:tensors_by_case", MEGATRON, **options)[0]


def _packed_tensors(inventory, layout, rank):
    """Return {name: [shape, dtype, cut axis]} of each chunk."""
    tensors = {p.name: torch.empty(p.shape, dtype=getattr(torch, p.dtype), device="meta") for p in inventory.parameters}
    return [
        {
            name: [list(t.shape), str(t.dtype)[6:], AXES[parse_name(name, "megatron-local").kinds[0]]]
            for name, t in chunk.items()
        }
        for chunk in pack(tensors, inventory, layout, rank, "local")
    ]


def _first_word(inventory, layout, rank):
    return local_parameters(inventory, layout, rank, "megatron-local").shards["model.embed_tokens.weight"].start


@pytest.mark.parametrize("name", MEGATRON)
def test_megatron_holds_what_we_say(name, megatron):
    config, layout, ranks, _ = MEGATRON[name]
    inventory = build_inventory(config)
    assert [row["rank"] for row in megatron[name]] == ranks
    for row in megatron[name]:
        assert _packed_tensors(inventory, layout, row["rank"]) == [megatrons["tensors"] for megatrons in row["chunks"]]
        for chunk, megatrons in enumerate(row["chunks"]):
            layers = layout.chunk_layers(inventory.model.num_hidden_layers)
            assert list(layers[chunk * layout.pp + layout.coordinates(row["rank"]).pp]) == megatrons["layers"]
            if megatrons["experts"] is not None:
                experts = layout.local_experts(row["rank"], inventory.model.n_routed_experts)
                assert list(experts) == megatrons["experts"]
            if megatrons["first_word"] is not None:
                assert _first_word(inventory, layout, row["rank"]) == megatrons["first_word"]
        for group, ranks in row["groups"].items():
            assert ranks in layout.groups(group) and row["rank"] in ranks, group


def test_another_layout_or_rank_is_noticed(megatron):
    """Check as a negative control that the same comparison fails for the wrong rank or layout."""
    inventory, chunk_tensors = build_inventory(TINY), lambda row: [chunk["tensors"] for chunk in row["chunks"]]
    assert _packed_tensors(inventory, ParallelLayout(2, tp=2), 0) != chunk_tensors(megatron["tp2ep2"][0])
    assert _packed_tensors(inventory, ParallelLayout(2, pp=2), 0) != chunk_tensors(megatron["pp2"][1])
