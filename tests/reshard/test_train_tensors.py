"""Test views of training parameters, which are packed by hand as each library does; no Megatron is built."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.layout.native_parameters import GATE, STORAGES, UP, pack, part
from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import build_inventory, read_model_shape
from verl_patches.layout.parallel import parse_layout
from verl_patches.layout.sharding import local_parameters
from verl_patches.model.tiny import tiny_config
from verl_patches.reshard.region import Region, shard_region
from verl_patches.reshard.train_tensors import train_tensors_from_native, views_match_memory

INVENTORY = build_inventory(dataclasses.replace(read_model_shape(tiny_config()), torch_dtype="float32"))
LAYOUTS = (
    "tp4 etp1 ep2 @4",
    "tp2 etp2 ep2 @4",
    "pp2 @2 layers=3,1",
    "tp2 pp2 vpp2 ep2 etp1 @4",
    "pp2 vpp2 @2 layers=1,0,2,1",
)


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    """Return {HF name: whole tensor}."""
    generator = torch.Generator().manual_seed(0)
    return {p.name: torch.randn(p.shape, generator=generator) for p in INVENTORY.parameters}


def views(weights, text, rank, storage, **pack_options):
    native = pack(weights, INVENTORY, parse_layout(text), rank, storage, **pack_options)
    return train_tensors_from_native(native, INVENTORY, parse_layout(text), rank, STORAGES[storage][0]), native


def wrong_names(found, weights) -> list[str]:
    """Return HF names whose view is not the expected slice of the whole tensor."""
    return [name for name, t in found.items() if not torch.equal(t.tensor, part(weights[name], t.region))]


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("text", LAYOUTS)
def test_views_are_the_ranks_slices(weights, text, storage):
    layout, doubled = parse_layout(text), {name: 2 * whole for name, whole in weights.items()}
    for rank in range(layout.world_size):
        found, native = views(weights, text, rank, storage)
        shards = local_parameters(INVENTORY, layout, rank, STORAGES[storage][0]).shards
        assert {name: t.region for name, t in found.items()} == {name: shard_region(s) for name, s in shards.items()}
        assert all(t.tensor.shape == t.region.shape_in(weights[name].shape) for name, t in found.items())
        assert not wrong_names(found, weights)
        for tensor in (t for chunk in native for t in chunk.values()):
            tensor.mul_(2)
        assert not wrong_names(found, doubled)  # views show what is written to parameters


def test_experts_stacked_by_columns_are_not_taken_for_right(weights):
    found, _ = views(weights, "@1", 0, "mindspeed", stack_up=lambda pieces: torch.cat([p.t() for p in pieces], dim=1))
    spoilt = wrong_names(found, weights)
    assert {INVENTORY.by_name[name].kind for name in spoilt} == {GATE, UP}
    assert len(spoilt) == 2 * 3 * 16


EXPERT, BIAS = (
    "decoder.layers.1.mlp.experts.local_experts.0.linear_fc2.weight",
    "decoder.layers.1.mlp.router.expert_bias",
)


def _renamed(old, new):
    return lambda chunk: {EXPERT.replace(old, new): chunk[EXPERT]}


@pytest.mark.parametrize(("change", "message"), [
    (lambda chunk: {EXPERT: chunk[EXPERT].t().contiguous()},
     r"layers.1.mlp.experts.local_experts.0.linear_fc2.weight' on rank 1: expected float32 \(128, 32\), which "
     r"holds model.layers.1.mlp.experts.8.down_proj.weight\[:, 0:32\], found float32 \(32, 128\)"),
    (lambda chunk: {BIAS: chunk[BIAS].bfloat16()}, r"expert_bias' on rank 1: expected float32 .* bfloat16 \(16,\)"),
    (lambda chunk: {EXPERT: None}, "rank 1 lacks 1 HF tensors .* model.layers.1.mlp.experts.8.down_proj"),
    (lambda chunk: {f"module.{EXPERT}": chunk[EXPERT]},
     "rank 1: both .*linear_fc2.weight and module.*linear_fc2.weight hold model.layers.1.mlp.experts.8.down_proj"),
    (_renamed("layers.1", "layers.2"), "on rank 1 holds routed_expert_down of layer 2, expert 8"),
    (None, "rank 1 has 2 model chunks; expected 1"),
])  # fmt: skip
def test_parameters_that_are_not_the_layouts_are_refused(weights, change, message):
    (chunk,) = native = pack(weights, INVENTORY, parse_layout("ep2 pp2 @4"), 1, "local")
    if change is None:
        native.append({})
    else:
        chunk |= change(chunk)
    native = [{name: tensor for name, tensor in chunk.items() if tensor is not None} for chunk in native]
    with pytest.raises(ConfigError, match=message):
        train_tensors_from_native(native, INVENTORY, parse_layout("ep2 pp2 @4"), 1, "megatron-local")


def test_parts_of_a_view(weights):
    found, _ = views(weights, "tp2 @2", 1, "local")
    down, kv = "model.layers.0.mlp.down_proj.weight", "model.layers.0.self_attn.kv_a_layernorm.weight"
    held = found[down]
    assert held.region == Region(down, 1, 128, 256)
    inner = held.read(Region(down, 1, 130, 140))
    assert torch.equal(inner, weights[down][:, 130:140]) and inner.data_ptr() == held.tensor[:, 2].data_ptr()
    assert torch.equal(found[kv].read(Region(kv, 0, 4, 8)), weights[kv][4:8])
    for region in ((down, 1, 120, 130), (down, 1, 250, 257), (down, 0, 0, 4), (kv, 1, 130, 140), (down, 1, 140, 140)):
        with pytest.raises(ConfigError):
            held.read(Region(*region))


def test_views_outlive_offload_by_resize_but_not_other_memory(weights):
    """Offload as verl does DDP: parameters are views of a buffer whose storage is freed and filled again."""
    native = pack(weights, INVENTORY, parse_layout("@1"), 0, "mindspeed")
    buffer = torch.cat([t.flatten() for t in native[0].values()])
    start = 0
    for name, tensor in native[0].items():
        native[0][name] = torch.nn.Parameter(buffer[start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel()
    found = train_tensors_from_native(native, INVENTORY, parse_layout("@1"), 0, "mindspeed")
    saved, size = buffer.clone(), buffer.untyped_storage().nbytes()
    buffer.untyped_storage().resize_(0)
    assert views_match_memory(found, native)
    buffer.untyped_storage().resize_(size)
    buffer.copy_(saved)
    assert views_match_memory(found, native) and not wrong_names(found, weights)
    before = native[0]["output_layer.weight"].data
    for other in (before.clone(), buffer[: before.numel()].view(before.shape), before.t().contiguous().t()):
        native[0]["output_layer.weight"].data = other
        assert not views_match_memory(found, native)
    native[0]["output_layer.weight"].data = before
    assert views_match_memory(found, native)
    del native[0]["output_layer.weight"]
    assert not views_match_memory(found, native)
