"""Test that damaged, infinite or incomplete weights are refused by name, and that no part of them looks complete."""

import json
import os

import pytest
import torch

from tests.weights.cases import (
    QUANTIZED,
    SMALL,
    SMALL_LAYOUT,
    is_same,
    make_folder,
    make_fp8_folder,
    read_folder,
    rewrite,
    run,
    store,
    write_checkpoint,
)
from verl_patches.errors import ConfigError, RecipeError
from verl_patches.layout.inventory import build_inventory
from verl_patches.layout.model_folder import INDEX, SCALE_SUFFIX
from verl_patches.reshard.region import Region
from verl_patches.weights import manifest as m
from verl_patches.weights.reader import WeightReader
from verl_patches.weights.source import open_source

DOWN, NORM = (f"model.layers.1.{name}.weight" for name in ("mlp.experts.3.down_proj", "input_layernorm"))
HEAD, SCALES = "lm_head.weight", f"{DOWN}_scale_inv"


def is_incomplete(folder):
    """Return whether the folder does not look complete and no unfinished file looks finished."""
    return not list(folder.rglob("*.partial")) and not any((folder / last).exists() for last in (m.TRACKER, INDEX))


# ---- bytes that differ from those written


@pytest.fixture
def checkpoint(tmp_path):
    tensors = make_folder(tmp_path / "plain", SMALL)
    return write_checkpoint(tmp_path / "checkpoint", tensors, SMALL, {"step": 1})


def flip(path, at=-1):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def last_byte(folder, key):
    """Return (file, offset of the last byte) of a stored tensor: one bit there changes a value a little."""
    (file,) = (file for file in m.read_manifest(folder).files if file.tensors)
    end = file.size_bytes
    for tensor in reversed(file.tensors):
        if tensor.key == key:
            return folder / file.name, end - 2
        end -= tensor.size_bytes
    raise AssertionError(key)


@pytest.mark.parametrize("layout", [SMALL_LAYOUT, None])
def test_a_flipped_bit_of_a_checkpoint_is_not_converted(tmp_path, checkpoint, layout):
    run(checkpoint, tmp_path / "control", layout)
    path, at = last_byte(checkpoint, f"weight/{NORM}")
    flip(path, at)
    with pytest.raises(RecipeError, match=rf"{path.name}: {NORM}.*: expected sha256 .*manifest.json.*found"):
        run(checkpoint, tmp_path / "out", layout)
    assert is_incomplete(tmp_path / "out")
    flip(path, at)
    run(checkpoint, tmp_path / "again", layout)  # control: it is read once more
    open_source(tmp_path / "again")


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_a_damaged_small_file_is_not_copied(tmp_path, checkpoint, name):
    path = checkpoint / name
    path.write_text(path.read_text() + "\n")
    with pytest.raises(RecipeError, match=f"{name}: .*expected .* bytes .*, found"):
        run(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---- values that are not finite


def set_element(name, value):
    """Return a change of one element of one tensor."""

    def change(tensors):
        flat = tensors[name].view(-1)
        flat[flat.numel() // 2] = value

    return change


NOT_FINITE = [  # (folder, tensor, value, words of the message)
    ("hf", DOWN, torch.nan, "NaN or infinity"),
    ("hf", "model.layers.1.mlp.gate.e_score_correction_bias", -torch.inf, "NaN or infinity"),
    ("fp8", DOWN, torch.nan, "holds NaN"),
    ("fp8", SCALES, 0.0, "the scale of block"),
]
WRITTEN = [(None, None), (SMALL_LAYOUT, None)]


@pytest.mark.parametrize(
    ("source", "name", "value", "words", "layout", "dtype"),
    [(*case, *written) for case in NOT_FINITE for written in WRITTEN if case[0] == "hf" or written[1] is None],
)
def test_a_value_that_is_not_finite_is_refused(tmp_path, source, name, value, words, layout, dtype):
    make_folder(tmp_path / "hf", SMALL) if source == "hf" else make_fp8_folder(tmp_path, SMALL)
    run(tmp_path / source, tmp_path / "control", layout, dtype)
    rewrite(tmp_path / source, set_element(name, value))
    with pytest.raises(RecipeError, match=f"{name}: .*{words}"):
        run(tmp_path / source, tmp_path / "out", layout, dtype)
    assert is_incomplete(tmp_path / "out")
    weight = build_inventory(SMALL).by_name[name.replace(SCALE_SUFFIX, "weight")]
    with WeightReader(open_source(tmp_path / source)) as reader, pytest.raises(RecipeError, match=f"{name}: .*{words}"):
        reader.copy(Region(weight.name, 0, 0, weight.shape[0]), torch.empty(weight.shape))


def test_large_values_are_finite_and_rounding_to_infinity_is_refused(tmp_path):
    """Accept large values although their sum is infinite; refuse fp32 past the largest bf16, infinite in bf16."""
    wide = {name: tensor.float() for name, tensor in make_folder(tmp_path / "bf16", SMALL).items()}
    wide[DOWN][:] = 3e38
    make_folder(tmp_path / "hf", SMALL | {"torch_dtype": "float32"}, tensors=wide)
    run(tmp_path / "hf", tmp_path / "kept")
    run(tmp_path / "hf", tmp_path / "rounded", dtype="bf16")
    wide[DOWN][1, 1] = torch.finfo(torch.float32).max
    store(tmp_path / "hf", wide)
    run(tmp_path / "hf", tmp_path / "kept_too")
    with pytest.raises(RecipeError, match=f"{DOWN}: holds NaN or infinity"):
        run(tmp_path / "hf", tmp_path / "out", dtype="bf16")


# ---- folders of Hugging Face's cache and of transformers 5


def test_a_folder_of_hugging_faces_cache_is_read(tmp_path):
    """Read it although its files are links out of the folder."""
    tensors = make_folder(tmp_path / "blobs", SMALL)
    snapshot = tmp_path / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for path in (tmp_path / "blobs").iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    run(snapshot, tmp_path / "out")
    assert is_same(read_folder(tmp_path / "out"), tensors)
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())


# ---- incomplete folders, and folders of other models


def change_tensor(name, change):
    """Return a change of one tensor of a folder."""
    return lambda folder: rewrite(folder, lambda tensors: tensors.update({name: change(tensors[name])}))


def edit_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def edit_config(folder, **values):
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | values))


def resize(name, size):
    """Return a change of the size of a file."""
    return lambda folder: os.truncate(folder / name, size)


FAULTS = {
    "missing tensor": (lambda f: rewrite(f, lambda t: t.pop(DOWN)), f"1 tensors are missing, such as {DOWN}"),
    "unknown tensor": (
        lambda f: rewrite(f, lambda t: t.update(x=torch.ones(1))),
        "not in config.json's model, such as x",
    ),
    "shape": (change_tensor(HEAD, lambda t: t[1:]), rf"{HEAD}: expected .*\(512, 128\)"),
    "fp8 head": (change_tensor(HEAD, lambda t: t.to(torch.float8_e4m3fn)), f"{HEAD}: expected F32, .*found F8_E4M3"),
    "duplicate": (
        lambda f: (
            (f / "model-3.safetensors").write_bytes((f / "model-2.safetensors").read_bytes())
            and edit_index(f, lambda m: m.update(x="model-3.safetensors"))
        ),
        "is in two files",
    ),
    "file without index entry": (
        lambda f: (f / "old.safetensors").write_bytes((f / "model-2.safetensors").read_bytes()),
        "old.safetensors is not one of them",
    ),
    "missing file": (lambda f: (f / "model-2.safetensors").unlink(), "model-2.safetensors is missing"),
    "truncated": (resize("model-2.safetensors", 100_000), "model-2.safetensors is not a whole safetensors file"),
    "no index": (lambda f: (f / INDEX).unlink(), "or without it model.safetensors alone"),
    "another model": (lambda f: edit_config(f, model_type="llama"), "model_type is 'llama', expected 'deepseek_v3'"),
    "web page": (lambda f: (f / "tokenizer.json").write_bytes(b"<!doctype html>"), "tokenizer.json is a web page"),
    "gptq": (lambda f: edit_config(f, quantization_config={"quant_method": "gptq"}), "only DeepSeek's FP8"),
}
FP8_FAULTS = {
    "fmt": (
        lambda f: edit_config(f, quantization_config=QUANTIZED | {"fmt": "e5m2"}),
        "expected fmt e4m3 and weight_bl",
    ),
    "missing scale": (lambda f: rewrite(f, lambda t: t.pop(SCALES)), f"expected {SCALES}, its scales"),
    "scale shape": (
        change_tensor(SCALES, lambda t: torch.ones(2, 2)),
        rf"{SCALES}: expected F32 \(1, 1\).*found F32 \(2, 2\)",
    ),
    "no quantization_config": (lambda f: edit_config(f, quantization_config=None), "found no such key"),
    "scale of bf16": (change_tensor(DOWN, torch.Tensor.bfloat16), f"{SCALES}: expected the scales of an FP8 weight"),
}


@pytest.mark.parametrize("fault", [*FAULTS, *FP8_FAULTS])
def test_a_bad_source_is_refused_by_name_before_anything_is_written(tmp_path, fault):
    if fault in FAULTS:
        make_folder(tmp_path / "hf", SMALL)
        folder, (spoil, words) = tmp_path / "hf", FAULTS[fault]
    else:
        make_fp8_folder(tmp_path, SMALL)
        folder, (spoil, words) = tmp_path / "fp8", FP8_FAULTS[fault]
    open_source(folder)  # control: the folder is accepted
    spoil(folder)
    with pytest.raises(ConfigError, match=words):
        run(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
