"""Compute what a newer transformers says of the family's tiny models, and store it in family_figures.safetensors.

transformers 4.51 cannot build DeepSeek-V3 with q_lora_rank null. To make the file again, in the recipe's environment:
    pip install --no-deps --target NEW transformers==4.57.1 tokenizers==0.22.1 huggingface_hub==0.35.3
    PYTHONPATH=NEW:. python tests/model/family_figures.py

The models are those of configs/model/NAME_tiny.json, made by verl_patches.model.tiny in fp32; Kimi-K2 is built as
deepseek_v3, whose architecture its config.json states. Of each the file holds, as NAME.KEY,
    shapes      {name of each tensor: shape} as zlib-compressed JSON
    logits      sketches of the logits of the batch's real tokens, row by row
    gradients   norms and sketches of the gradients of next_token_loss, in the order of `shapes` without correction
                biases
with parity.sketch, so that all logits and all gradients count but take few bytes.
"""

from __future__ import annotations

import json
import sys
import tempfile
import zlib
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.model.parity import make_batch, next_token_loss, sketch

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_suffix(".safetensors")
SEEDS = {"moonlight": 4, "kimi_k2": 1}  # seeds without a near tie in the batch (tests/near_ties.py)
BIAS = "e_score_correction_bias"  # a buffer, without a gradient


def tiny_config(name: str) -> dict:
    """Return the config.json of a tiny model of the family."""
    return json.loads((ROOT / "configs" / "model" / f"{name}_tiny.json").read_text())


def make_model(name: str, folder: Path) -> Path:
    """Make a tiny model of the family in `folder` and return the folder."""
    from verl_patches.model.tiny import make_tiny_model

    return make_tiny_model(folder, SEEDS[name], tiny_config(name))


def stored_figures(name: str) -> dict:
    """Return {"shapes": {name: shape}, "logits": [T, 6], "gradients": {name: [7]}} of a model."""
    figures = {key.removeprefix(f"{name}."): tensor for key, tensor in load_file(FILE).items()}
    shapes = {n: tuple(s) for n, s in json.loads(zlib.decompress(bytes(figures["shapes"].tolist()))).items()}
    trained = [parameter for parameter in shapes if not parameter.endswith(BIAS)]
    gradients = dict(zip(trained, figures["gradients"], strict=True))
    return {"shapes": shapes, "logits": figures["logits"], "gradients": gradients}


def make_figures(name: str, folder: Path) -> dict[str, torch.Tensor]:
    """Return the figures of a model, which is made in `folder`."""
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    config = DeepseekV3Config(**{key: value for key, value in tiny_config(name).items() if key != "model_type"})
    options = {"config": config, "torch_dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(make_model(name, folder), **options)
    ids, mask, _ = make_batch()
    rows = [model(ids[i, m][None]).logits[0] for i, m in enumerate(mask)]
    logits = torch.zeros(*ids.shape, rows[0].shape[-1])
    logits[mask] = torch.cat(rows)
    next_token_loss(logits, ids, mask).backward()
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    parameters = [model.get_parameter(n) for n in shapes if not n.endswith(BIAS)]
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]  # None: an expert without token
    return {
        "shapes": torch.tensor(list(zlib.compress(json.dumps(shapes).encode(), 9)), dtype=torch.uint8),
        "logits": sketch(logits[mask].detach()),
        "gradients": torch.stack([torch.cat([g.norm()[None], sketch(g.flatten())]) for g in gradients]),
    }


def main() -> None:
    """Store the figures of all models."""
    import transformers

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in SEEDS:
            figures = make_figures(name, Path(folder, name))
            found |= {f"{name}.{key}": tensor for key, tensor in figures.items()}
    save_file(found, FILE, {"torch": torch.__version__, "transformers": transformers.__version__})
    sys.stdout.write(f"{FILE}: {FILE.stat().st_size} bytes\n")


if __name__ == "__main__":
    main()
