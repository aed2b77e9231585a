"""Which HF tensors a MindSpeed-LLM parameter of DeepSeek-V3 is made of, by name, both ways.

Facts (MindSpeed-LLM 2.0.0): multi_head_latent_attention.py makes `linear_qkv` of q's and kv's down projections, rows of
q first, and names the up projections linear_qb and linear_kvb and the norms q_layernorm and k_layernorm. Experts are
Megatron's GroupedMLP: `weight1` (gate and up) and `weight2` (down) of all local experts, see experts.py. Everything
else has the name that megatron-core 0.12.2 gives it.
"""

from __future__ import annotations

import functools
import re

from verl_patches.errors import ConfigError
from verl_patches.layout.sharding import MEGATRON_NAMES
from verl_patches.model.names import Place

_LAYER = "decoder.layers.{layer}."
_ATTENTION = _LAYER + "self_attention."
EXPERTS_UP, EXPERTS_DOWN = _LAYER + "mlp.experts.weight1", _LAYER + "mlp.experts.weight2"
_DIFFERENT = {
    "q_a_proj": _ATTENTION + "linear_qkv.weight",
    "kv_a_proj": _ATTENTION + "linear_qkv.weight",
    "q_b_proj": _ATTENTION + "linear_qb.weight",
    "kv_a_norm": _ATTENTION + "k_layernorm.weight",
    "kv_b_proj": _ATTENTION + "linear_kvb.weight",
    "routed_expert_gate": EXPERTS_UP,
    "routed_expert_up": EXPERTS_UP,
    "routed_expert_down": EXPERTS_DOWN,
}
# kind -> name in one pipeline stage, {layer} counted from the stage's first; q_proj: no low-rank q here (arguments.py)
NAMES = {kind: name for kind, name in {**MEGATRON_NAMES, **_DIFFERENT}.items() if kind != "q_proj"}


def is_expert_stack(kinds: tuple[str, ...]) -> bool:
    """Whether a parameter of these kinds holds all local experts."""
    return kinds[0].startswith("routed_expert")


def place(name: str) -> Place:
    """What the parameter or buffer `name` of a stage is: kinds in the order they are joined, and its layer.

    Wrapper prefixes ("module.") are allowed; `expert` is always None. Raises ConfigError for an unknown name.
    """
    while name.startswith("module."):
        name = name[len("module.") :]
    for pattern, kinds in _patterns():
        match = pattern.fullmatch(name)
        if match:
            layer = match.groupdict().get("layer")
            return Place(kinds, None if layer is None else int(layer), None)
    raise ConfigError(
        f"MindSpeed parameter {name!r} is not one of DeepSeek-V3's: expected names as {NAMES['q_b_proj']}; "
        "mla_mm_split, multi-token prediction and SequentialMLP give others and are not supported here"
    )


@functools.cache
def _patterns() -> tuple[tuple[re.Pattern[str], tuple[str, ...]], ...]:
    kinds: dict[str, tuple[str, ...]] = {}
    for kind, template in NAMES.items():
        kinds[template] = (*kinds.get(template, ()), kind)
    return tuple(
        (re.compile(re.escape(template).replace(re.escape("{layer}"), r"(?P<layer>\d+)")), joined)
        for template, joined in kinds.items()
    )
