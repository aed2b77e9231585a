"""Parameter names, reading HF folders, and our Megatron DeepSeek-V3 against transformers' at every layout."""

import json

import pytest
import torch
from safetensors.torch import save_file

from verl_patches.errors import ConfigError
from verl_patches.layout.model_folder import INDEX
from verl_patches.model.weights import HFTensors, local_name, parse_name, te_name, te_names_for_verl

ROW = "model.local_names"
SPELLINGS = [
    ("decoder.layers.3.mlp.experts.local_experts.7.linear_fc1.weight",
     "decoder.layers.3.mlp.experts.linear_fc1.weight7"),
    ("decoder.layers.3.mlp.experts.local_experts.7.linear_fc2.weight",
     "decoder.layers.3.mlp.experts.linear_fc2.weight7"),
    ("decoder.layers.0.self_attention.q_layernorm.weight",
     "decoder.layers.0.self_attention.linear_q_up_proj.layer_norm_weight"),
    ("decoder.layers.0.self_attention.kv_layernorm.weight",
     "decoder.layers.0.self_attention.linear_kv_up_proj.layer_norm_weight"),
    ("decoder.layers.0.input_layernorm.weight", "decoder.layers.0.input_layernorm.weight"),
    ("output_layer.weight", "output_layer.weight"),
]  # fmt: skip


@pytest.mark.parametrize(("local", "te"), SPELLINGS)
def test_spellings_are_each_others_inverse(local, te):
    assert te_name(local) == te
    assert local_name(te) == local
    assert parse_name(local) == parse_name(te)


def test_places():
    assert parse_name("module.module.embedding.word_embeddings.weight") == (("embedding",), None, None)
    assert parse_name("decoder.layers.2.mlp.router.expert_bias") == (("router_bias",), 2, None)
    expert = parse_name("decoder.layers.2.mlp.experts.linear_fc1.weight11")
    assert expert == (("routed_expert_gate", "routed_expert_up"), 2, 11)
    assert parse_name("decoder.layers.0.mlp.linear_fc1.layer_norm_weight").kinds == ("post_attention_norm",)


@pytest.mark.parametrize("name", ["decoder.layers.1.mlp.experts.weight1", "decoder.layers.x.mlp.router.weight", "bias"])
def test_unknown_names_are_refused(name):
    with pytest.raises(ConfigError, match="not one of DeepSeek-V3's"):
        parse_name(name)


def test_row_gives_verl_the_names_it_knows():
    normalize = te_names_for_verl(lambda name, pp_rank, vpp_rank, config: name.replace("layers.0", "layers.4"))
    assert normalize("decoder.layers.0.mlp.experts.local_experts.7.linear_fc1.weight", 1, 0, None) == (
        "decoder.layers.4.mlp.experts.linear_fc1.weight7"
    )


@pytest.mark.slow
def test_verl_converter_needs_the_row(reference, run_ranks, tmp_path):
    (tmp_path / "model").symlink_to(reference["folder"] / "model")
    (tmp_path / "batch.pt").symlink_to(reference["folder"] / "batch.pt")
    (tmp_path / "layouts.json").write_text('{"tp1": {}}')
    with pytest.raises(AssertionError, match="q_layernorm"):
        run_ranks("parity_job.py:layouts_job", tmp_path, world_size=1, switches=f",-{ROW}")


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


LAYOUTS = {
    "pp2": {"pp": 2},  # pipelines first: Megatron forgets to reset the ranks of the embedding groups between layouts
    "pp2uneven": {"pp": 2, "overrides": {"num_layers_in_first_pipeline_stage": 1}},
    "tp1": {},
    "tp2": {"tp": 2},
    "ep2": {"ep": 2},
    "tp2ep2": {"tp": 2, "ep": 2, "etp": 1},
}
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def layouts(reference, run_ranks):
    """Each rank's findings at every layout: one launch for all."""
    (reference["folder"] / "layouts.json").write_text(json.dumps(LAYOUTS))
    return run_ranks("parity_job.py:layouts_job", reference["folder"])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["packed", "padded"])
def test_logits_equal_transformers(reference, layouts, parity, layout, form):
    found = [rank[layout][form] for rank in layouts if rank[layout][form] is not None]
    assert len(found) == (1 if layout.startswith("pp2") else 2)
    assert max(parity.logits_error(reference, logits) for logits in found) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_equal_transformers(reference, layouts, parity, layout):
    errors = parity.gradient_errors(reference["gradients"], parity.whole_gradients(layouts, layout))
    assert max(errors.values()) <= 1e-4, sorted(errors.items(), key=lambda e: -e[1])[:5]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_sent_to_rollout_are_the_files(reference, layouts, layout):
    sent = layouts[0][layout]["synced"]
    assert sent.keys() == reference["weights"].keys()
    wrong = [name for name, tensor in sent.items() if not torch.equal(tensor, reference["weights"][name])]
    assert not wrong


@pytest.mark.slow
def test_leaving_something_out_fails_parity(reference, run_ranks, parity):
    found = run_ranks("parity_job.py:controls_job", reference["folder"], world_size=1)[0]
    errors = {name: parity.logits_error(reference, logits) for name, logits in found.items()}
    assert errors.pop("nothing") <= TOLERANCE
    assert min(errors.values()) > 100 * TOLERANCE, errors


@pytest.mark.slow
def test_correction_bias_stays_fp32_and_still_in_bf16(reference, run_ranks, parity):
    for rank in run_ranks("parity_job.py:bf16_job", reference["folder"]):
        assert "sequence_parallel=True (found False)" in rank["refused"]  # by row model.mla_k_pe_grad
        assert rank["dtypes"] == {"torch.bfloat16"}
        assert len(rank["loaded"]) == 3
        for name, bias in rank["loaded"].items():
            layer = name.split(".")[2]
            expected = reference["weights"][f"model.layers.{layer}.mlp.gate.e_score_correction_bias"]
            assert bias.dtype == torch.float32
            assert torch.equal(bias, expected)
            assert torch.equal(rank["after"][name], expected)
        assert 1e-4 < parity.logits_error(reference, rank["logits"].float()) < 0.5
