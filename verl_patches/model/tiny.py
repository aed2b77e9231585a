"""Write the tiny DeepSeek-V3: a Hugging Face folder that has all that makes V3 hard in about a million random weights.

It differs from a checkpoint that one would download: the weights are drawn so that the logits are not flat (std >=
1), the correction bias is drawn so that it changes a good part of the routing, and yarn starts at 64 tokens instead
of 4096. Weights are stored in bf16 and the correction bias in fp32, as DeepSeek stores them, so an fp32 and a bf16
reader see equal weights.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import build_inventory
from verl_patches.upstream.pins import CONFIGS_DIR

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

CONFIG_FILE = CONFIGS_DIR / "model" / "deepseekv3_tiny.json"
RECIPE_FILE = "tiny_model.json"  # written beside the weights; holds the seed and config that they were made from
SPECIAL_TOKENS = ("<|begin|>", "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_FORMAT_VERSION = 2  # increase it when the same seed and config would give other files
_SHARD_BYTES = "1MB"  # more than one shard, so that readers must follow the index


def make_tiny_model(folder: Path, seed: int = 0, overrides: Mapping[str, Any] | None = None) -> Path:
    """Write the tiny DeepSeek-V3 (configs, safetensors with index, tokenizer) to `folder` and return the folder.

    The write is atomic: the folder appears whole or not at all. A folder made from the same seed and config is left
    as it is. `overrides` replace keys of configs/model/deepseekv3_tiny.json (`rope_scaling` is merged). The value of
    a tensor depends on its name, its shape and the seed only. Needs transformers, but neither verl nor Megatron nor
    patches.

    Raises ConfigError for an unknown override, for a vocabulary that the tokenizer does not have, and for a folder that
    holds something else.
    """
    folder = Path(folder)
    config = tiny_config(overrides)
    recipe = {"format": _FORMAT_VERSION, "seed": seed, "config": config}
    if folder.exists() and any(folder.iterdir()):
        return _reuse_folder(folder, recipe)
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _write_files(building, config, seed)
        (building / RECIPE_FILE).write_text(json.dumps(recipe, indent=1) + "\n")
        building.chmod(0o755)  # mkdtemp makes it for this user alone
        try:
            os.replace(building, folder)
        except OSError:  # another process has made the folder meanwhile
            return _reuse_folder(folder, recipe)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


def tiny_config(overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the tiny model's HF config as a dict, with `overrides` applied; an unknown key raises ConfigError."""
    config = json.loads(CONFIG_FILE.read_text())
    for key, value in (overrides or {}).items():
        if key not in config:
            raise ConfigError(f"tiny model: unknown config key {key!r}; expected one of {', '.join(sorted(config))}")
        if key == "rope_scaling" and value:
            value = {**config[key], **value}
        config[key] = value
    return config


def _reuse_folder(folder: Path, recipe: dict[str, Any]) -> Path:
    mark = folder / RECIPE_FILE
    found = json.loads(mark.read_text()) if mark.is_file() else None
    if found != recipe:
        what = "another tiny model" if found else "files that are not a tiny model"
        raise ConfigError(f"tiny model: {folder} holds {what}: remove it or choose another folder")
    return folder


def _write_files(folder: Path, config: dict[str, Any], seed: int) -> None:
    from huggingface_hub import save_torch_state_dict
    from transformers import GenerationConfig

    tokenizer = _make_tokenizer(config)
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    GenerationConfig(**ids).save_pretrained(folder)
    save_torch_state_dict(dict(_tensors(folder, seed)), folder, max_shard_size=_SHARD_BYTES, is_main_process=True)


def _tensors(folder: Path, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of each weight of the model in `folder`; a value depends on name, shape and `seed` alone."""
    import torch

    for name, shape in ((parameter.name, parameter.shape) for parameter in build_inventory(folder).parameters):
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode(), seed))  # 32 bits of `seed` count
        if name.endswith("e_score_correction_bias"):
            # Never negative: transformers marks an excluded group's experts with 0.0, Megatron and vLLM with -inf, and
            # the two agree only while every score + bias is above 0.
            yield name, torch.rand(shape, generator=generator) * 0.5
        elif name.endswith("norm.weight"):
            yield name, (1 + 0.1 * torch.randn(shape, generator=generator)).to(torch.bfloat16)
        else:
            gain = 1.2 if name == "lm_head.weight" else 1.0  # std of the logits: the final norm scales to 1
            if ".mlp.experts." in name and "down_proj" in name:
                gain = 0.5  # a routed expert moves the residual stream by less than its size, as in a trained model
            std = gain if "embed_tokens" in name else gain / math.sqrt(shape[-1])
            yield name, (std * torch.randn(shape, generator=generator)).to(torch.bfloat16)


def _make_tokenizer(config: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with exactly `vocab_size` entries, trained on _SENTENCES; digits stay apart."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config["vocab_size"],
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=1,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    if (size := tokenizer.get_vocab_size()) != config["vocab_size"]:
        raise ConfigError(f"tiny model: vocab_size is {config['vocab_size']}; expected {size}, as in its tokenizer")
    bos, eos, pad = SPECIAL_TOKENS[:3]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        additional_special_tokens=list(SPECIAL_TOKENS[3:]),
        clean_up_tokenization_spaces=False,
        model_max_length=config["max_position_embeddings"],
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


_SENTENCES = (
    "Solve the problem. Think step by step and put the final answer in \\boxed{}.",
    "What is the sum of these two numbers? What is the difference, the product, the remainder?",
    "A shop sells apples for three coins each. How many coins do seven apples cost?",
    "Each of the children has four books and gives one away. How many books are left altogether?",
    "The train leaves at noon and travels sixty miles every hour; how far is it after a quarter of an hour?",
    "First we multiply, then we add, so the answer is therefore equal to the total number of pages.",
    "Let us write the equation, subtract from both sides, divide by the number of people, and check the result.",
    "There were some red, green and blue marbles in the box before she took half of them out again.",
    "Thus \\frac{a}{b} + \\sqrt{c} = d, hence x = y and the answer is \\boxed{x}.",
)
