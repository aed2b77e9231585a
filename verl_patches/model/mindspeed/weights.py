"""DeepSeek-V3 weights in MindSpeed-LLM's model: parameter names, and views of stacked experts.

Facts (MindSpeed-LLM 2.0.0): multi_head_latent_attention.py makes `linear_qkv` of q's and kv's down projections, rows of
q first, and names the up projections linear_qb and linear_kvb and the norms q_layernorm and k_layernorm. Everything
else but experts has the name that megatron-core 0.12.2 gives it.

Experts are Megatron's GroupedMLP: weight1 [H, e * 2F] (gate and up) and weight2 [e * F, H] (down) of all local experts.
MindSpeed reads weight1 as `view(e, H, 2F)` (mindspeed/core/transformer/moe/experts.py, groupedmlp_forward), which is
another order of the same memory than the shape says: an expert is a slice of the view, never a slice of columns. Shape
letters: H hidden, F this rank's part of an expert's intermediate size, e local experts.
"""

from __future__ import annotations

import functools

import torch

from verl_patches.errors import ConfigError
from verl_patches.layout.sharding import MEGATRON_NAMES
from verl_patches.model import weights as megatron
from verl_patches.model.weights import ParsedName

_LAYER = "decoder.layers.{layer}."
_ATTENTION = _LAYER + "self_attention."
_EXPERTS_UP, _EXPERTS_DOWN = _LAYER + "mlp.experts.weight1", _LAYER + "mlp.experts.weight2"
_DIFFERENT = {
    "q_a_proj": _ATTENTION + "linear_qkv.weight",
    "kv_a_proj": _ATTENTION + "linear_qkv.weight",
    "q_b_proj": _ATTENTION + "linear_qb.weight",
    "kv_a_norm": _ATTENTION + "k_layernorm.weight",
    "kv_b_proj": _ATTENTION + "linear_kvb.weight",
    "routed_expert_gate": _EXPERTS_UP,
    "routed_expert_up": _EXPERTS_UP,
    "routed_expert_down": _EXPERTS_DOWN,
}
# kind -> name in one pipeline stage, {layer} counted from the stage's first; q_proj: no low-rank q here (arguments.py)
NAMES = {kind: name for kind, name in {**MEGATRON_NAMES, **_DIFFERENT}.items() if kind != "q_proj"}


def parse_name(name: str) -> ParsedName:
    """What the parameter or buffer `name` of a stage is: kinds in the order they are joined, and its layer.

    Wrapper prefixes ("module.") are allowed; `expert` is always None. Raises ConfigError for an unknown name.
    """
    found = megatron.match_name(megatron.without_wrappers(name), _patterns())
    if found is None:
        raise ConfigError(
            f"MindSpeed parameter {name!r} is not one of DeepSeek-V3's: expected names as {NAMES['q_b_proj']}; "
            "mla_mm_split, multi-token prediction and SequentialMLP give others and are not supported here"
        )
    return found


@functools.cache
def _patterns() -> megatron.NamePatterns:
    return megatron.name_patterns(NAMES)


def split_up(weight1: torch.Tensor, count: int) -> list[torch.Tensor]:
    """[2F, H] of each of `count` experts in weight1 [H, e * 2F], rows of gate first and then of up, as views."""
    return [expert.t() for expert in weight1.view(count, weight1.shape[0], -1)]


def split_down(weight2: torch.Tensor, count: int) -> list[torch.Tensor]:
    """[H, F] of each of `count` experts in weight2 [e * F, H], as views."""
    return [expert.t() for expert in weight2.view(count, -1, weight2.shape[1])]
