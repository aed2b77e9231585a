"""Hold sizes of models of DeepSeek-V3's family, from each model's published config.json, beside DeepSeek-V3's own."""

import json
from pathlib import Path
from typing import Any

DEEPSEEK_V3 = Path(__file__).resolve().parents[1] / "configs" / "model" / "deepseekv3_671b.json"
_ONE_GROUP = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "vocab_size": 163_840}
MOONLIGHT = _ONE_GROUP | {
    "hidden_size": 2048,
    "intermediate_size": 11_264,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.446,
    "rope_scaling": None,
    "max_position_embeddings": 8192,
}
KIMI_K2 = _ONE_GROUP | {
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "routed_scaling_factor": 2.827,
    "max_position_embeddings": 131_072,
}


def family_config(sizes: dict[str, Any]) -> dict[str, Any]:
    """Return DeepSeek-V3's config.json with `sizes`."""
    return json.loads(DEEPSEEK_V3.read_text()) | sizes
