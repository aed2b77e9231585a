"""Shards and groups against real Megatron models, rank by rank; vLLM's: tests/reshard/test_destination_vllm.py.

GPTModels are built by upstream's own code in one fresh process, under torch's fake process group (build_megatron.py),
so that 256-rank layouts are checked too. Tensors must match exactly: names, local shapes, dtypes; so must layer ids,
expert ids and the first row of the embedding.
"""

import json
from pathlib import Path

import pytest
import torch

from tests.layout.native_parameters import pack
from verl_patches.layout.inventory import build_inventory
from verl_patches.layout.parallel import ParallelLayout
from verl_patches.layout.sharding import AXES, local_parameters
from verl_patches.model.weights import parse_name

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
TINY = json.loads((HERE.parents[1] / "configs" / "model" / "deepseekv3_tiny.json").read_text())
NO_Q_LORA = TINY | {"q_lora_rank": None}
TWO_SHARED = TINY | {"n_shared_experts": 2}
# the depth and the number of experts of the 671B model, everything else tiny
DEEP = TINY | {"num_hidden_layers": 61, "first_k_dense_replace": 3, "n_routed_experts": 256, "n_group": 8}


def _megatron(config, world_size, ranks=None, layers=None, **sizes):
    sizes = {"tp": 1, "cp": 1, "pp": 1, "vpp": 1, "ep": 1} | sizes
    case = {"config": config, "world_size": world_size, "ranks": ranks or list(range(world_size)), "layers": layers}
    return case | {"etp": sizes["tp"]} | sizes


MEGATRON = {
    "tp1": _megatron(TINY, 1),
    "pp2": _megatron(TINY, 2, pp=2),
    "tp2ep2": _megatron(TINY, 2, tp=2, ep=2, etp=1),
    "ep2pp2": _megatron(TINY, 4, ep=2, pp=2),
    "tp4 etp2 ep2 dp2": _megatron(TINY, 8, tp=4, ep=2, etp=2),
    "pp2 uneven": _megatron(TINY, 2, pp=2, layers=[1, None]),
    "pp2 vpp2 tp2": _megatron(TINY, 4, tp=2, pp=2, vpp=2),
    "cp2 ep4": _megatron(TINY, 4, cp=2, ep=4, etp=1),
    "no q_lora tp2": _megatron(NO_Q_LORA, 2, tp=2),
    "two shared tp2": _megatron(TWO_SHARED, 2, tp=2),
    "256 dies": _megatron(DEEP, 256, tp=4, pp=8, ep=32, etp=1, layers=[7, 6], ranks=[0, 37, 130, 255]),
}


@pytest.fixture(scope="module")
def megatron(run_ranks):
    return run_ranks("tests.layout.build_megatron:held", MEGATRON, backend=None, timeout_s=400)[0]


def _train_layout(case):
    layers = case["layers"]
    if layers:  # of the first and the last stage (None: all the rest); the others share the rest
        total, between = case["config"]["num_hidden_layers"], case["pp"] - 2
        first, last = layers[0], layers[1] or total - layers[0]
        layers = [first, *[(total - first - last) // max(1, between)] * between, last]
    sizes = {name: case[name] for name in ("tp", "cp", "pp", "vpp", "ep", "etp")}
    return ParallelLayout(case["world_size"], layers_per_stage=layers, **sizes)


def _ours(inventory, layout, rank):
    """Of each chunk: {name: [shape, dtype, cut axis]}."""
    tensors = {p.name: torch.empty(p.shape, dtype=getattr(torch, p.dtype), device="meta") for p in inventory.parameters}
    return [
        {name: [list(t.shape), str(t.dtype)[6:], AXES[parse_name(name).kinds[0]]] for name, t in chunk.items()}
        for chunk in pack(tensors, inventory, layout, rank, "local")
    ]


def _first_word(inventory, layout, rank):
    return local_parameters(inventory, layout, rank, "megatron-local").shards["model.embed_tokens.weight"].start


@pytest.mark.parametrize("name", MEGATRON)
def test_megatron_holds_what_we_say(name, megatron):
    case = MEGATRON[name]
    layout, inventory = _train_layout(case), build_inventory(case["config"])
    assert [row["rank"] for row in megatron[name]] == case["ranks"]
    for row in megatron[name]:
        assert _ours(inventory, layout, row["rank"]) == [megatrons["tensors"] for megatrons in row["chunks"]]
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
    """Negative control: the same comparison fails for the wrong rank or layout."""
    inventory, tensors_of = build_inventory(TINY), lambda row: [chunk["tensors"] for chunk in row["chunks"]]
    assert _ours(inventory, ParallelLayout(2, tp=2), 0) != tensors_of(megatron["tp2ep2"][0])
    assert _ours(inventory, ParallelLayout(2, pp=2), 0) != tensors_of(megatron["pp2"][1])
