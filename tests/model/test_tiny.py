"""Test that the tiny DeepSeek-V3 has V3's hard parts, and is written whole, equal for equal seeds, or not at all."""

import json

import pytest
import torch
from safetensors.torch import load_file

from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import build_inventory
from verl_patches.model.tiny import make_tiny_model


@pytest.fixture(scope="module")
def weights(tiny_model):
    """Return {HF name: tensor} as stored."""
    found = {}
    for file in tiny_model.glob("*.safetensors"):
        found.update(load_file(file))
    return found


def test_files_are_a_normal_hf_folder_in_deepseeks_dtypes(tiny_model, weights):
    names = {path.name for path in tiny_model.iterdir()}
    assert names >= {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert len([name for name in names if name.endswith(".safetensors")]) > 1
    index = json.loads((tiny_model / "model.safetensors.index.json").read_text())["weight_map"]
    inventory = build_inventory(tiny_model)
    assert {name: tuple(t.shape) for name, t in weights.items()} == {p.name: p.shape for p in inventory.parameters}
    assert index.keys() == weights.keys()
    assert 0.9e6 < sum(p.count for p in inventory.parameters) < 1.2e6
    biases = {name: t for name, t in weights.items() if name.endswith("e_score_correction_bias")}
    assert {t.dtype for name, t in weights.items() if name not in biases} == {torch.bfloat16}
    assert [bias.dtype for bias in biases.values()] == [torch.float32] * 3
    for bias in biases.values():
        assert bias.min() >= 0  # so that score + bias > 0, where transformers' 0.0 for an excluded group is the lowest
        assert not torch.equal(bias, bias.bfloat16().float())  # a bf16 copy would show


def test_same_seed_same_files_other_seed_other(tiny_model, weights, tmp_path):
    again = make_tiny_model(tmp_path / "again")
    for path in tiny_model.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes(), path.name
    deeper = make_tiny_model(tmp_path / "deeper", overrides={"num_hidden_layers": 5})
    other = make_tiny_model(tmp_path / "other", seed=1)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    read = {}
    for folder in (deeper, other):
        file = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]
        read[folder] = load_file(folder / file)[name]
    assert torch.equal(read[deeper], weights[name])  # overrides elsewhere do not move it
    assert not torch.equal(read[other], weights[name])


def test_existing_folder_is_reused_or_refused(tiny_model, tmp_path):
    before = (tiny_model / "config.json").stat().st_mtime_ns
    assert make_tiny_model(tiny_model) == tiny_model
    assert (tiny_model / "config.json").stat().st_mtime_ns == before
    with pytest.raises(ConfigError, match="another tiny model"):
        make_tiny_model(tiny_model, seed=3)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not a tiny model"):
        make_tiny_model(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"n_expert": 4}, "unknown config key 'n_expert'"),
        ({"vocab_size": 5120}, "tokenizer"),  # seen while it is written
    ],
)
def test_bad_overrides_are_refused_and_leave_nothing(tmp_path, overrides, message):
    with pytest.raises(ConfigError, match=message):
        make_tiny_model(tmp_path / "model", overrides=overrides)
    assert list(tmp_path.iterdir()) == []
