"""Reading slices from safetensors folders, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import save_file

from verl_patches.errors import ConfigError
from verl_patches.layout.model_folder import INDEX
from verl_patches.model.hf_tensors import HFTensors


@pytest.fixture()
def folder(tmp_path):
    """Two files with an index."""
    save_file({"a": torch.arange(12.0).view(4, 3), "model.layers.2.x": torch.ones(2)}, tmp_path / "1.safetensors")
    save_file({"b": torch.arange(8.0).view(2, 4)}, tmp_path / "2.safetensors")
    index = {"weight_map": {"a": "1.safetensors", "model.layers.2.x": "1.safetensors", "b": "2.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    return tmp_path


def test_reads_wholes_and_parts(folder):
    with HFTensors(folder) as tensors:
        assert tensors.shape("a") == (4, 3)
        assert torch.equal(tensors.read("a"), torch.arange(12.0).view(4, 3))
        assert torch.equal(tensors.read("a", axis=0, part=1, parts=2), torch.arange(6.0, 12.0).view(2, 3))
        assert torch.equal(tensors.read("b", axis=1, part=0, parts=2), torch.tensor([[0.0, 1.0], [4.0, 5.0]]))
        with pytest.raises(ConfigError, match="axis 1 has size 3, which 2 ranks"):
            tensors.read("a", axis=1, part=0, parts=2)
        with pytest.raises(ConfigError, match="no tensor named 'c'"):
            tensors.read("c")


def test_single_file_without_index(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    with HFTensors(tmp_path) as tensors:
        tensors.check_names(["a"], num_layers=1)
        assert tensors.read("a").item() == 1


def test_names_must_be_exactly_those_of_the_config(folder):
    with HFTensors(folder) as tensors:
        tensors.check_names(["a", "b", "model.layers.2.x"], num_layers=3)
        tensors.check_names(["a", "b"], num_layers=2)  # layer 2 is multi-token prediction then
        with pytest.raises(ConfigError, match="1 missing, as c"):
            tensors.check_names(["a", "b", "c"], num_layers=2)
        with pytest.raises(ConfigError, match="1 not known to the config, as b"):
            tensors.check_names(["a"], num_layers=2)


def test_fp8_is_refused(tmp_path):
    """By the names of scales before anything is read, and by the dtype of each tensor that is read."""
    weights = {"a.weight": torch.ones(1).to(torch.float8_e4m3fn), "b.weight": torch.ones(1)}
    save_file({**weights, "a.weight_scale_inv": torch.ones(1)}, tmp_path / "model.safetensors")
    with HFTensors(tmp_path) as tensors:
        for refused in (lambda: tensors.check_names(weights, num_layers=1), lambda: tensors.read("a.weight")):
            with pytest.raises(ConfigError, match="1 tensors are stored in fp8, as a.weight"):
                refused()
        assert tensors.read("b.weight").item() == 1


def test_broken_folders_are_refused(folder, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(ConfigError, match="found neither"):
        HFTensors(empty)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["b"] = "1.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    with HFTensors(folder) as tensors, pytest.raises(ConfigError, match="the index puts 'b' here"):
        tensors.read("b")
    (folder / "1.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"1 file\(s\) it names are missing, as 1.safetensors"):
        HFTensors(folder)
