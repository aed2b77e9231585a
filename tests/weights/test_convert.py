"""Test conversions: bit-equal there and back, named and cut as by Megatron's libraries, and going on after a kill."""

import itertools
import json
import os
import random
import resource
import signal
import time

import pytest
import torch

from tests.layout.native_parameters import pack
from tests.weights.cases import (
    SMALL,
    SMALL_LAYOUT,
    is_same,
    make_folder,
    make_fp8_folder,
    random_case,
    read_folder,
    rewrite,
    run,
    store,
)
from verl_patches.errors import ConfigError, RecipeError
from verl_patches.layout.inventory import build_inventory
from verl_patches.layout.model_folder import INDEX, MTP_LAYERS, QUANTIZATION
from verl_patches.layout.parallel import parse_layout
from verl_patches.model.tiny import tiny_config
from verl_patches.weights import convert as convert_module
from verl_patches.weights.convert import convert
from verl_patches.weights.manifest import LAYOUT_FILE, TRACKER
from verl_patches.weights.megatron import ITERATION_FOLDER, MODEL_FILE, ranks_by_file
from verl_patches.weights.plan import plan_conversion
from verl_patches.weights.source import open_source

LAYOUT = parse_layout("tp2 pp2 ep4 etp1 @8 layers=1,3")


@pytest.fixture
def small(tmp_path):
    make_folder(tmp_path / "hf", SMALL)
    return tmp_path / "hf"


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 30))])
def test_round_trip_of_random_models_and_layouts(tmp_path, seed):
    """Convert HF to Megatron, to Megatron of another layout, to HF: every tensor must be equal."""
    config, layout, other = random_case(seed)
    expected = make_folder(tmp_path / "hf", config, seed, files=1 + seed % 3)
    done = run(tmp_path / "hf", tmp_path / "megatron", layout, line="pypi")
    source = open_source(tmp_path / "megatron")
    assert (source.kind, (tmp_path / "megatron" / LAYOUT_FILE).read_text().strip()) == ("megatron", str(layout))
    assert done.kept == 0
    run(tmp_path / "megatron", tmp_path / "other", other, line="pypi")
    run(tmp_path / "other", tmp_path / "back")
    assert is_same(read_folder(tmp_path / "back"), expected)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config
    assert (tmp_path / "back" / "tokenizer.json").read_text() == "{}"
    name, tensor = next(iter(expected.items()))
    tensor.view(torch.uint8)[0, 0] ^= 1  # control: one bit differs
    assert not is_same(read_folder(tmp_path / "back"), expected), name


RANK_FILES = {  # layout -> (line, storage of tests/layout, file, rank whose parameters it holds)
    "tp2 ep6 etp1 @6": ("a3", "mindspeed", "mp_rank_01_002", 5),
    "tp2 ep2 @4": ("a3", "mindspeed", "mp_rank_00_001", 2),
    "tp2 pp2 ep2 etp1 @4 layers=1,1": ("a3", "mindspeed", "mp_rank_01_001", 3),
    "pp2 vpp2 ep2 @4 layers=1,0,0,1": ("a3", "mindspeed", "mp_rank_00_001_001", 3),
    "tp2 ep2 etp1 @4": ("pypi", "local", "mp_rank_01_001", 1),
}


@pytest.mark.parametrize("text", RANK_FILES)
def test_a_rank_has_its_librarys_parameters_in_megatrons_file(tmp_path, text):
    """Compare names, shapes and bytes with those that tests/layout packs by hand; torch reads with weights_only."""
    (line, storage, place, rank), layout = RANK_FILES[text], parse_layout(text)
    tensors = make_folder(tmp_path / "hf", SMALL)
    run(tmp_path / "hf", tmp_path / "out", layout, line=line)
    assert (tmp_path / "out" / TRACKER).read_text() == "1"
    state = torch.load(tmp_path / "out" / ITERATION_FOLDER / place / MODEL_FILE, weights_only=True)
    expected = pack(tensors, build_inventory(SMALL), layout, rank, storage)
    keys = ["model"] if layout.vpp == 1 else ["model0", "model1"]
    assert {*state} == {*keys, "checkpoint_version", "iteration"}
    assert (state["checkpoint_version"], state["iteration"]) == (3.0, 1)
    assert all(is_same(state[key], chunk) for key, chunk in zip(keys, expected, strict=True))
    run(tmp_path / "out", tmp_path / "back")
    assert is_same(read_folder(tmp_path / "back"), tensors)


def test_layouts_that_megatrons_names_or_mindspeed_cannot_hold_are_refused():
    for text, library, words in (
        ("tp2 ep3 etp1 @6", "mindspeed", "tp=2, ep=3, etp=1"),
        ("tp4 etp2 @4", "mindspeed", "tp=4, ep=1, etp=2"),
        ("etp2 @2", "megatron-local", "ranks with different experts would write the same file"),
    ):
        with pytest.raises(ConfigError, match=words):
            ranks_by_file(parse_layout(text), library)
    names = ranks_by_file(parse_layout("tp4 pp8 ep32 etp1 @256 layers=7,7,8,8,8,8,8,7"), "mindspeed")
    assert len(names) == 256 and names[f"mp_rank_03_007_007/{MODEL_FILE}"] == 255
    tp, pp, ep = (range(n) for n in (4, 8, 8))
    assert names.keys() == {
        f"mp_rank_{t:02d}_{p:03d}_{e:03d}/{MODEL_FILE}" for t, p, e in itertools.product(tp, pp, ep)
    }


def test_fp8_to_bf16_and_megatron(tmp_path):
    config = SMALL | {"hidden_size": 144, "intermediate_size": 300, "torch_dtype": "bfloat16"}
    _, values = make_fp8_folder(tmp_path, config)
    run(tmp_path / "fp8", tmp_path / "bf16")
    assert is_same(read_folder(tmp_path / "bf16"), values)
    assert json.loads((tmp_path / "bf16" / "config.json").read_text()) == config  # it has no quantization_config
    run(tmp_path / "fp8", tmp_path / "megatron", SMALL_LAYOUT)
    run(tmp_path / "megatron", tmp_path / "from_megatron")
    assert is_same(read_folder(tmp_path / "from_megatron"), values)
    settings = json.loads((tmp_path / "fp8" / "config.json").read_text())
    settings[QUANTIZATION]["scale_fmt"] = "ue8m0"  # as DeepSeek-V3.1 has it, whose scales are powers of two in fp32
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(settings))
    assert open_source(tmp_path / "fp8").block == (128, 128)


def test_fp32_is_kept_or_rounded_and_the_bias_never(tmp_path):
    tensors = make_folder(tmp_path / "bf16", SMALL)
    wide = {name: torch.randn(t.shape) for name, t in tensors.items()}
    make_folder(tmp_path / "hf", SMALL | {"torch_dtype": "float32"}, tensors=wide)
    run(tmp_path / "hf", tmp_path / "kept", SMALL_LAYOUT)
    run(tmp_path / "kept", tmp_path / "back")
    assert is_same(read_folder(tmp_path / "back"), wide)
    run(tmp_path / "kept", tmp_path / "rounded", dtype="bf16")
    expected = {name: t if name.endswith("correction_bias") else t.bfloat16() for name, t in wide.items()}
    assert is_same(read_folder(tmp_path / "rounded"), expected)
    assert json.loads((tmp_path / "rounded" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    wide["lm_head.weight"] = wide["lm_head.weight"].bfloat16()
    store(tmp_path / "hf", wide)
    with pytest.raises(ConfigError, match="lm_head.weight: expected F32 .*found BF16"):
        run(tmp_path / "hf", tmp_path / "mixed", SMALL_LAYOUT)


def test_layers_for_multi_token_prediction_and_rotary_frequencies_are_left_out(tmp_path, small):
    tensors = make_folder(tmp_path / "other", SMALL)
    more = {
        "model.layers.2.eh_proj.weight": torch.ones(2, 2),
        "model.layers.2.mlp.x.weight_scale_inv": torch.ones(1, 1),
    }
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)} | more  # as in Moonlight's files
    store(small, tensors | more)
    (small / "config.json").write_text(json.dumps(SMALL | {MTP_LAYERS: 1}))
    assert open_source(small).left_out == tuple(more)
    run(small, tmp_path / "out")
    assert is_same(read_folder(tmp_path / "out"), tensors)
    assert json.loads((tmp_path / "out" / "config.json").read_text())[MTP_LAYERS] == 0


# ---- conversions that were interrupted, and damage


@pytest.mark.slow
@pytest.mark.parametrize("layout", [LAYOUT, None])
@pytest.mark.parametrize("seed", range(3))
def test_a_killed_conversion_goes_on_with_the_files_that_are_missing(tmp_path, seed, layout):
    tensors = make_folder(tmp_path / "hf", tiny_config())
    start = time.perf_counter()
    run(tmp_path / "hf", tmp_path / "whole", layout)
    seconds, out = time.perf_counter() - start, tmp_path / "out"
    child = os.fork()
    if not child:
        try:
            run(tmp_path / "hf", out, layout)
        finally:
            os._exit(0)
    time.sleep(random.Random(seed).random() * seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    finished = {*out.rglob(MODEL_FILE), *out.glob("*.safetensors")}
    before = {path: path.stat().st_mtime_ns for path in finished}
    result = run(tmp_path / "hf", out, layout, processes=2)
    assert result.kept == len(before) and not list(out.rglob("*.partial"))
    assert before == {path: path.stat().st_mtime_ns for path in finished}
    assert contents(out) == contents(tmp_path / "whole") != {}
    run(out, tmp_path / "back")
    assert is_same(read_folder(tmp_path / "back"), tensors)


@pytest.mark.parametrize(("layout", "last"), [(SMALL_LAYOUT, TRACKER), (None, INDEX)])
def test_a_folder_without_the_file_that_is_written_last_is_not_complete(tmp_path, small, layout, last):
    run(small, tmp_path / "out", layout)
    (tmp_path / "out" / last).unlink()
    with pytest.raises(ConfigError, match="or without it model.safetensors alone"):
        open_source(tmp_path / "out")


def test_a_full_disk_is_said_before_and_leaves_nothing_that_looks_complete(tmp_path, small, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(convert_module, "free_bytes", lambda folder: 1000)
        with pytest.raises(RecipeError, match=r"out: expected \d+ free bytes to write, found 1000"):
            run(small, out, SMALL_LAYOUT)
    assert not out.exists()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for layout, file in ((SMALL_LAYOUT, MODEL_FILE), (None, "model-0000")):
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, before[1]))  # a write past this size fails as on a full disk
        try:
            with pytest.raises(RecipeError, match=rf"{file}.*could not be written: .*same command again"):
                run(small, out, layout)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert not list(out.rglob("*.partial")) and not (out / TRACKER).exists()
        with pytest.raises(ConfigError):
            open_source(out)
        run(small, out, layout)
        open_source(out)
        out = tmp_path / "hf again"


def test_a_source_that_is_cut_off_meanwhile_is_named(tmp_path, small):
    plan = plan_conversion(open_source(small), SMALL_LAYOUT)
    os.truncate(small / "model-2.safetensors", 10_000)
    with pytest.raises(RecipeError, match="model-2.safetensors: expected at least .* bytes, found fewer"):
        convert(plan, tmp_path / "out", processes=2)
    assert not (tmp_path / "out" / TRACKER).exists()


# ---- refusals


def test_wrong_use_is_refused_by_name(tmp_path, small):
    make_fp8_folder(tmp_path / "a", SMALL)
    fp8 = tmp_path / "a" / "fp8"
    for source, layout, dtype, words in (
        (fp8, None, "keep", "is stored in FP8; expected bf16"),
        (small, parse_layout("tp3 @3"), None, "tp=3 must divide num_attention_heads 4"),
        (small, parse_layout("tp1 ep4 @4"), None, "ep=4 must divide the number of routed experts 6"),
        (small, parse_layout("pp2 @2 layers=2,2"), None, "adds up to 4, the model has 2 layers"),
    ):
        with pytest.raises(ConfigError, match=words):
            run(source, tmp_path / "out", layout, dtype)
    assert not (tmp_path / "out").exists()


def test_a_folder_of_something_else_is_not_written_to(tmp_path, small):
    run(small, tmp_path / "out")
    assert run(small, tmp_path / "out").written == 0
    with pytest.raises(ConfigError, match="expected a new or empty folder"):
        run(small, small)
    rewrite(small, lambda t: t["lm_head.weight"].add_(1))  # names, shapes and sizes are equal, values differ
    with pytest.raises(ConfigError, match="or one of this conversion"):
        run(small, tmp_path / "out")
