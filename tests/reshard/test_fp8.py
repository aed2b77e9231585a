"""fp8 weights and block factors against a closed form, and cut over ranks against the whole tensor cut afterwards."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import build_inventory
from verl_patches.layout.parallel import parse_layout
from verl_patches.layout.sharding import local_parameters
from verl_patches.model.tiny import tiny_config
from verl_patches.reshard.fp8 import SCALE, check_cuts, is_quantised, quantise, quantised_tensors, with_block_scales
from verl_patches.reshard.region import Region, region_of
from verl_patches.reshard.train_tensors import TrainTensor

ROOT = Path(__file__).resolve().parents[2]
V3 = json.loads((ROOT / "configs/model/deepseekv3_671b.json").read_text())
# blocks do not divide every axis, as 160 and 200; tp=2 cuts between blocks, tp=4 inside
SMALL = build_inventory(tiny_config({
    "hidden_size": 384, "intermediate_size": 768, "moe_intermediate_size": 256, "q_lora_rank": 160, "kv_lora_rank": 200,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64, "num_hidden_layers": 2, "n_routed_experts": 4,
    "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}))  # fmt: skip


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    """HF name -> whole tensor in training's dtype, of very different sizes."""
    generator = torch.Generator().manual_seed(0)
    return {p.name: (torch.randn(p.shape, generator=generator) * 10 ** torch.randn((), generator=generator)).to(
        getattr(torch, p.dtype)) for p in SMALL.parameters}  # fmt: skip


def held(weights, layout, rank, library) -> dict[str, TrainTensor]:
    """What a rank trains; gate, up and down stored transposed, as in grouped experts."""
    found = {}
    for name, shard in local_parameters(SMALL, layout, rank, library).shards.items():
        region = region_of(shard)
        piece = weights[name].narrow(region.axis, region.start, region.stop - region.start)
        piece = piece.t().contiguous().t() if shard.parameter.expert is not None else piece.clone()
        found[name] = TrainTensor(region, shard.parameter.shape, piece, 0, name, piece)
    return found


def test_quantised_tensors_are_those_of_the_published_checkpoint():
    inventory = build_inventory(V3)
    kinds = {p.kind for p in inventory.parameters if is_quantised(p)}
    assert kinds == {"q_a_proj", "q_b_proj", "kv_a_proj", "kv_b_proj", "o_proj",
                     *(f"{part}_{piece}" for part in ("dense_mlp", "shared_expert", "routed_expert")
                       for piece in ("gate", "up", "down"))}  # fmt: skip
    found = with_block_scales(inventory).by_name
    kv_a = "model.layers.60.self_attn.kv_a_proj_with_mqa.weight"
    assert (found[kv_a].shape, found[kv_a].dtype) == ((576, 7168), "float8_e4m3fn")
    assert (found[kv_a + "_scale_inv"].shape, found[kv_a + "_scale_inv"].dtype) == ((5, 56), "float32")
    assert found["model.layers.3.mlp.experts.255.down_proj.weight_scale_inv"].shape == (56, 16)
    assert found["lm_head.weight"].dtype == found["model.layers.3.mlp.gate.weight"].dtype == "bfloat16"
    projections = sum(is_quantised(p) for p in inventory.parameters)
    assert projections == 61 * 5 + 3 * 3 + 58 * 3 + 58 * 256 * 3
    assert len(found) == len(inventory.parameters) + projections


def test_layouts_of_the_671b_run_cut_between_blocks():
    inventory = build_inventory(V3)
    check_cuts(inventory, parse_layout("tp4 pp8 ep32 etp1 @256 layers=7,7,8,8,8,8,8,7"), "mindspeed")
    check_cuts(inventory, parse_layout("tp2 ep256 etp1 @256"), "vllm-ascend")
    with pytest.raises(
        ConfigError,
        match=r"megatron-local .* cuts model.layers.60.self_attn.kv_a_proj_with_mqa.weight "
        r"\(576, 7168\) at .*\[0:144\].*choose another tp",
    ):
        check_cuts(inventory, parse_layout("tp4 ep8 etp1 @32"), "megatron-local")
    with pytest.raises(ConfigError, match="routed_expert|experts.255.*choose another etp"):
        check_cuts(inventory, parse_layout("tp1 etp32 @32"), "mindspeed")


def test_factors_and_values_follow_the_closed_form(weights):
    for name in ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", "model.layers.1.mlp.experts.2.up_proj.weight"):
        weight = weights[name].float()
        values, factors = quantise(weights[name])
        assert values.dtype == torch.float8_e4m3fn and values.shape == weight.shape
        assert factors.dtype == torch.float32
        assert factors.shape == tuple(math.ceil(n / 128) for n in weight.shape)
        for i in range(factors.shape[0]):
            for j in range(factors.shape[1]):
                block = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
                largest = weight[block].abs().max()
                assert factors[i, j] == largest / 448
                back = values[block].float() * factors[i, j]
                # three bits of mantissa: half a step is 2^-4 of the value, and 2^-10 below the smallest normal, 2^-6
                bound = torch.maximum(weight[block].abs() * 2**-4, factors[i, j] * 2**-10) * (1 + 1e-6)
                assert ((back - weight[block]).abs() <= bound).all()
                assert values[block].float().abs().max() == 448


def test_zeros_stay_zeros():
    weight = torch.zeros(130, 200, dtype=torch.bfloat16)
    weight[129, 199] = 3.0
    values, factors = quantise(weight)
    assert torch.equal(values.float() * torch.tensor(3.0 / 448), weight.float())
    assert factors.isfinite().all() and factors[1, 1] == torch.tensor(3.0) / 448


@pytest.mark.parametrize(
    ("text", "library"),
    [("@1", "mindspeed"), ("tp2 @2", "mindspeed"), ("tp2 ep2 etp1 @2", "mindspeed"), ("pp2 ep2 @4", "megatron-local")],
)
def test_ranks_make_the_bytes_of_the_whole_tensor(weights, text, library):
    layout, planned = parse_layout(text), with_block_scales(SMALL)
    check_cuts(SMALL, layout, library)
    whole = {}
    for name, weight in weights.items():
        whole[name] = weight
        if is_quantised(SMALL.by_name[name]):
            whole[name], whole[name + SCALE] = quantise(weight)
    for rank in range(layout.world_size):
        found = quantised_tensors(held(weights, layout, rank, library), SMALL)
        shards = local_parameters(planned, layout, rank, library).shards
        assert {name: t.region for name, t in found.items()} == {name: region_of(s) for name, s in shards.items()}
        for name, tensor in found.items():
            region = tensor.region
            expected = whole[name].narrow(region.axis, region.start, region.stop - region.start)
            read = tensor.read(region)
            assert read.dtype == expected.dtype == getattr(torch, shards[name].dtype)
            assert torch.equal(read.float(), expected.float()), (name, rank)


def test_parts_of_a_rank_and_later_weights(weights):
    tensors = held(weights, parse_layout("tp2 @2"), 1, "mindspeed")
    found = quantised_tensors(tensors, SMALL)
    name = "model.layers.0.mlp.down_proj.weight"  # columns 384:768 of [384, 768]
    values, factors = quantise(weights[name])
    assert torch.equal(found[name].read(Region(name, 1, 512, 640)).float(), values[:, 512:640].float())
    assert torch.equal(found[name + SCALE].read(Region(name + SCALE, 1, 4, 5)), factors[:, 4:5])
    tensors[name].tensor.mul_(2)
    assert torch.equal(found[name + SCALE].read(Region(name + SCALE, 1, 3, 6)), 2 * factors[:, 3:6])
    assert not found[name].is_view and found["model.norm.weight"].is_view


@pytest.mark.parametrize("region", [(1, 448, 640), (1, 512, 600), (0, 0, 64)])
def test_parts_of_blocks_are_refused(weights, region):
    name = "model.layers.0.mlp.down_proj.weight"
    found = quantised_tensors(held(weights, parse_layout("@1"), 0, "mindspeed"), SMALL)
    with pytest.raises(ConfigError, match="does not consist of whole blocks"):
        found[name].read(Region(name, *region))


def test_layouts_that_cut_blocks_are_refused(weights):
    layout = parse_layout("tp4 etp1 ep4 @4")
    with pytest.raises(ConfigError, match=r"cuts model.layers.1.*\[:, 0:64\], expected cuts at multiples of 128"):
        check_cuts(SMALL, layout, "mindspeed")
    with pytest.raises(ConfigError, match="does not consist of whole blocks"):
        quantised_tensors(held(weights, layout, 0, "mindspeed"), SMALL)


def test_planning_needs_no_torch():
    code = "import sys, verl_patches.reshard.fp8; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
