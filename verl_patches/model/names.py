"""Which HF tensors a Megatron parameter of DeepSeek-V3 is made of, by name, both ways.

Megatron has two spellings: modules of its own ("local", the one that layout/sharding.py tabulates) and Transformer
Engine's, which fuses norms into the next projection and stacks experts. verl's weight converter knows the second only.
Both are read here; `te_name` turns the first into the second. Layer and expert numbers in Megatron names are local to
the pipeline chunk and to the expert-parallel rank.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from verl_patches.errors import ConfigError
from verl_patches.layout.sharding import MEGATRON_NAMES

# (local spelling, Transformer Engine spelling), as regular expression and template of each other
_SPELLINGS = (
    (r"(.*\.mlp\.experts)\.local_experts\.(\d+)\.(linear_fc[12])\.weight", r"{0}.{2}.weight{1}"),
    (r"(.*\.self_attention)\.q_layernorm\.weight", r"{0}.linear_q_up_proj.layer_norm_weight"),
    (r"(.*\.self_attention)\.kv_layernorm\.weight", r"{0}.linear_kv_up_proj.layer_norm_weight"),
)
_FROM_TE = (
    (r"(.*\.mlp\.experts)\.(linear_fc[12])\.weight(\d+)", r"{0}.local_experts.{2}.{1}.weight"),
    (r"(.*\.self_attention)\.linear_q_up_proj\.layer_norm_weight", r"{0}.q_layernorm.weight"),
    (r"(.*\.self_attention)\.linear_kv_up_proj\.layer_norm_weight", r"{0}.kv_layernorm.weight"),
    (r"(.*)\.mlp\.linear_fc1\.layer_norm_weight", r"{0}.pre_mlp_layernorm.weight"),  # dense layers
)


class Place(NamedTuple):
    """What a Megatron parameter is: inventory kinds in the order they are joined (gate, up), local layer and expert."""

    kinds: tuple[str, ...]
    layer: int | None
    expert: int | None


def te_name(name: str) -> str:
    """The name that Transformer Engine modules would give this parameter; names that are equal in both stay."""
    return _respell(name, _SPELLINGS)


def local_name(name: str) -> str:
    """The name that Megatron's own modules would give this parameter: the inverse of `te_name`."""
    return _respell(name, _FROM_TE)


def place(name: str) -> Place:
    """What the parameter (or buffer) `name` of one GPTModel chunk is; either spelling, wrapper prefixes allowed.

    Raises ConfigError for a name that no DeepSeek-V3 parameter has.
    """
    while name.startswith("module."):
        name = name[len("module.") :]
    local = local_name(name)
    for pattern, kinds in _patterns():
        match = pattern.fullmatch(local)
        if match:
            numbers = {key: int(value) for key, value in match.groupdict().items()}
            return Place(kinds, numbers.get("layer"), numbers.get("expert"))
    raise ConfigError(
        f"Megatron parameter {name!r} is not one of DeepSeek-V3's: "
        "expected names as decoder.layers.0.mlp.router.weight; a grouped GEMM without Transformer Engine "
        "(weight1, weight2) is not supported here: set moe_grouped_gemm=False"
    )


@functools.cache
def _patterns() -> tuple[tuple[re.Pattern[str], tuple[str, ...]], ...]:
    kinds: dict[str, tuple[str, ...]] = {}
    for kind, template in MEGATRON_NAMES.items():
        kinds[template] = (*kinds.get(template, ()), kind)
    found = []
    for template, joined in kinds.items():
        text = re.escape(template)
        for number in ("layer", "expert"):
            text = text.replace(re.escape("{" + number + "}"), rf"(?P<{number}>\d+)")
        found.append((re.compile(text), joined))
    return tuple(found)


def _respell(name: str, spellings: tuple[tuple[str, str], ...]) -> str:
    for pattern, template in spellings:
        match = re.fullmatch(pattern, name)
        if match:
            return template.format(*match.groups())
    return name


def te_names_for_verl(normalize_model_name):
    """Row provider: verl's `normalize_model_name` (verl/utils/model.py:208), its result in Transformer Engine spelling.

    verl's per_tensor_generator finds experts by ".mlp.experts.linear_fc" and its DeepSeek-V3 converter knows no other
    spelling, so parameters of Megatron's own modules must pass through here before both.
    """

    @functools.wraps(normalize_model_name)
    def normalize(name, *args, **kwargs):
        return te_name(normalize_model_name(name, *args, **kwargs))

    return normalize
