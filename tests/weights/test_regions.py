"""Test regions copied from each kind of folder: bit-equal to complete tensors' regions, few bytes, little memory."""

import random

import pytest
import torch

from tests.weights.cases import QUANTIZED, make_folder, make_fp8_folder, random_case, run
from verl_patches.layout.inventory import build_inventory
from verl_patches.layout.model_folder import QUANTIZATION, SCALE_SUFFIX
from verl_patches.layout.parallel import parse_layout
from verl_patches.layout.sharding import AXES
from verl_patches.model.tiny import tiny_config
from verl_patches.reshard.region import Region
from verl_patches.weights import reader as regions
from verl_patches.weights.reader import WeightReader
from verl_patches.weights.source import FP8_KINDS, open_source, scale_shape

# odd sizes: regions start inside a block, blocks at the edges are smaller
SMALL = {"num_hidden_layers": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
ODD = SMALL | {"hidden_size": 300, "intermediate_size": 290, "moe_intermediate_size": 144, "torch_dtype": "bfloat16"}


def draw_regions(draw, name, shape, axes):
    """Yield the complete tensor, halves and random parts of it along each of `axes`."""
    yield Region(name, 0, 0, shape[0])
    for axis in axes:
        yield Region(name, axis, 0, shape[axis] // 2)
        yield Region(name, axis, shape[axis] // 2, shape[axis])
        start = draw.randrange(shape[axis])
        yield Region(name, axis, start, draw.randint(start + 1, shape[axis]))


def unequal_regions(folder, expected, seed=0, dtype=torch.float32):
    """Return regions of `folder` that differ from those of the tensors `expected`.

    Megatron's folders are read along the axis that layouts cut, other folders along all.
    """
    draw, found, source = random.Random(seed), [], open_source(folder)
    with WeightReader(source) as reader:
        for name, tensor in expected.items():
            axis = AXES[source.inventory.by_name[name].kind] or 0
            axes = [axis] if source.kind == "megatron" else range(tensor.dim())
            for region in draw_regions(draw, name, tuple(tensor.shape), axes):
                part = tensor.narrow(region.axis, region.start, region.rows).to(dtype)
                target = torch.full((part.shape[-1], *part.shape[:-1]), torch.nan, dtype=dtype)  # a strided target
                target = target.movedim(0, -1)
                reader.copy(region, target)
                if not torch.equal(target, part):
                    found.append(region)
    return found


@pytest.fixture(params=[1, 40_000, regions.BAND_BYTES])
def band(request, monkeypatch):
    monkeypatch.setattr(regions, "BAND_BYTES", request.param)
    monkeypatch.setattr(regions, "_LEAST_ROW_BYTES", {1: 1, 40_000: 300}.get(request.param, 4096))


def test_regions_of_fp8_are_those_of_its_conversion_to_bf16(tmp_path, band):
    _, values = make_fp8_folder(tmp_path, tiny_config() | ODD)
    assert (
        unequal_regions(tmp_path / "fp8", values) == []
        and unequal_regions(tmp_path / "fp8", values, 1, torch.bfloat16) == []
    )
    name = "model.layers.0.mlp.down_proj.weight"
    values[name][5, 7] += 1  # control: one value differs
    assert {region.name for region in unequal_regions(tmp_path / "fp8", values)} == {name}


@pytest.mark.parametrize("seed", range(4))
def test_regions_of_megatrons_files_of_any_layout_are_those_of_the_folder(tmp_path, seed):
    config, layout, _ = random_case(seed)
    config |= {"q_lora_rank": 24}
    expected = make_folder(tmp_path / "hf", config, seed)
    assert unequal_regions(tmp_path / "hf", expected, seed) == []
    layouts = {"pypi": layout, "a3": parse_layout("tp2 ep2 etp1 @2" if layout.tp > 1 else "ep2 @2")}
    for line, split in layouts.items():
        run(tmp_path / "hf", tmp_path / line, split, line=line)
        assert unequal_regions(tmp_path / line, expected, seed) == []
        with WeightReader(open_source(tmp_path / line)) as reader:
            places = [reader.position(Region(name, 0, 0, tensor.shape[0])) for name, tensor in expected.items()]
        assert len(set(places)) == len(places) or line == "a3"  # in a3's stacks, gate and up begin at one place


def test_memory_does_not_grow_with_the_folder(tmp_path, run_ranks):
    """Read 210 MB in FP8 with less than 80 MB of host memory: a band, its values in bf16, tables."""
    config = tiny_config() | {"vocab_size": 520, "hidden_size": 4096, "intermediate_size": 8192, **SMALL}
    config |= {"first_k_dense_replace": 2, QUANTIZATION: QUANTIZED}
    stored = {}
    for parameter in build_inventory(config).parameters:
        stored[parameter.name] = torch.zeros(parameter.shape, dtype=torch.bfloat16)
        if parameter.kind in FP8_KINDS:
            stored[parameter.name] = stored[parameter.name].to(torch.float8_e4m3fn)
            scale = parameter.name.removesuffix("weight") + SCALE_SUFFIX
            stored[scale] = torch.ones(scale_shape(parameter.shape, (128, 128)))
    make_folder(tmp_path / "fp8", config, files=3, tensors=stored)
    size = sum(path.stat().st_size for path in (tmp_path / "fp8").glob("*.safetensors"))
    job = "tests.weights.load_job:peak_job", tmp_path / "fp8"
    by_regions, control = (run_ranks(*job, how)[0] for how in (True, False))
    assert size > 200e6 and by_regions < 80e6
    assert control > 0.9 * size


def test_a_sharded_folder_is_read_by_the_bytes_that_a_rank_needs(tmp_path):
    """Read half of the bytes for half of the rows, and for half of the columns unless these are too few."""
    make_folder(tmp_path / "hf", tiny_config() | {"hidden_size": 64, "intermediate_size": 8192})
    run(tmp_path / "hf", tmp_path / "megatron", parse_layout("tp2 @2"))
    name = "model.layers.0.mlp.down_proj.weight"
    for folder in ("hf", "megatron"):
        for columns, read_columns in ((4096, 4096), (4, 8192 if folder == "hf" else 4096)):
            read = []
            with WeightReader(open_source(tmp_path / folder), read.append) as reader:
                reader.copy(Region(name, 1, 0, columns), torch.empty(64, columns))
            assert sum(read) == 64 * read_columns * 2
