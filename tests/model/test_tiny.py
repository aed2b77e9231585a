"""The tiny DeepSeek-V3 has what makes V3 hard, and is written whole, the same from the same seed, or not at all."""

import json

import pytest
import torch
from safetensors.torch import load_file

from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import build_inventory
from verl_patches.model.tiny import make_tiny_model


@pytest.fixture(scope="module")
def weights(tiny_model):
    """HF name -> tensor, as stored."""
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


def test_logits_are_not_flat_and_bias_changes_choices(tiny_model):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, torch_dtype=torch.float32)
    changed = []
    for layer in model.model.layers[1:]:
        layer.mlp.gate.register_forward_hook(
            lambda gate, args, out: changed.append(share_changed(gate, args[0], out[0]))
        )
    ids = torch.randint(6, 512, (2, 150), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert model(ids).logits.std() >= 1
    assert len(changed) == 3
    assert min(changed) >= 0.1, changed


def share_changed(gate, hidden, chosen):
    """Share of chosen experts that would not have been chosen without the correction bias; checks score + bias > 0."""
    scores = torch.nn.functional.linear(hidden.flatten(0, 1).float(), gate.weight.float()).sigmoid()
    bias = gate.e_score_correction_bias
    assert (scores + bias).min() > 0
    gate.e_score_correction_bias = torch.zeros_like(bias)
    without = gate.get_topk_indices(scores)
    gate.e_score_correction_bias = bias
    kept = (chosen[:, :, None] == without[:, None, :]).any(-1)
    return 1 - kept.float().mean().item()


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


def test_tokenizer_round_trip_and_chat(tiny_model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert len(tokenizer) == 512
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)
    text = "What is 12 + 34? \\boxed{46} é\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer("2468").input_ids) == 4  # digits apart
    messages = [{"role": "user", "content": "1 + 1?"}]
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat == "<|begin|><|user|>1 + 1?<|assistant|>"
