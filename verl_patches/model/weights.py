"""DeepSeek-V3 weights in Megatron: parameter names, and what a model chunk holds that is loaded and saved.

Names: Megatron has two spellings, that of its own modules ("local", tabulated in layout/sharding.py) and Transformer
Engine's, which fuses norms into the next projection and stacks experts. verl's weight converter knows the second only.
`parse_name` reads both, `te_name` turns the first into the second. Layer and expert numbers in Megatron names are local
to the pipeline chunk and to the expert-parallel rank.

Which parts of which HF tensors a parameter holds is in reshard/train_tensors.py.

Megatron is imported inside functions: the resharder uses the names where Megatron must not be imported yet.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from verl_patches.errors import ConfigError
from verl_patches.layout.sharding import MEGATRON_NAMES

# (local spelling, Transformer Engine spelling), as regular expression and template of each other
_TO_TE = (
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


# ---- parameter names


class ParsedName(NamedTuple):
    """What a Megatron parameter is: inventory kinds in the order they are joined (gate, up), local layer and expert."""

    kinds: tuple[str, ...]
    layer: int | None
    expert: int | None


def te_name(name: str) -> str:
    """The name that Transformer Engine modules would give this parameter; names that are equal in both stay."""
    return _respell(name, _TO_TE)


def local_name(name: str) -> str:
    """The name that Megatron's own modules would give this parameter: the inverse of `te_name`."""
    return _respell(name, _FROM_TE)


def _respell(name: str, spellings: tuple[tuple[str, str], ...]) -> str:
    for pattern, template in spellings:
        match = re.fullmatch(pattern, name)
        if match:
            return template.format(*match.groups())
    return name


def parse_name(name: str) -> ParsedName:
    """What the parameter (or buffer) `name` of one GPTModel chunk is; either spelling, wrapper prefixes allowed.

    Raises ConfigError for a name that no DeepSeek-V3 parameter has.
    """
    found = match_name(local_name(without_wrappers(name)), _patterns())
    if found is None:
        raise ConfigError(
            f"Megatron parameter {name!r} is not one of DeepSeek-V3's: "
            "expected names as decoder.layers.0.mlp.router.weight; a grouped GEMM without Transformer Engine "
            "(weight1, weight2) is not supported here: set moe_grouped_gemm=False"
        )
    return found


def without_wrappers(name: str) -> str:
    """`name` without the prefixes ("module.") of DDP and Float16Module."""
    return re.sub(r"^(module\.)*", "", name)


NamePatterns = tuple[tuple[re.Pattern[str], tuple[str, ...]], ...]


def name_patterns(names: Mapping[str, str]) -> NamePatterns:
    """(pattern, kinds) of each parameter, from kind -> name with {layer} and {expert}; kinds of one name are joined."""
    kinds: dict[str, tuple[str, ...]] = {}
    for kind, template in names.items():
        kinds[template] = (*kinds.get(template, ()), kind)
    found = []
    for template, joined in kinds.items():
        text = re.escape(template)
        for number in ("layer", "expert"):
            text = text.replace(re.escape("{" + number + "}"), rf"(?P<{number}>\d+)")
        found.append((re.compile(text), joined))
    return tuple(found)


def match_name(name: str, patterns: NamePatterns) -> ParsedName | None:
    """The first of `patterns` (of `name_patterns`) that is `name`; None if none is."""
    for pattern, kinds in patterns:
        match = pattern.fullmatch(name)
        if match:
            numbers = {key: int(value) for key, value in match.groupdict().items()}
            return ParsedName(kinds, numbers.get("layer"), numbers.get("expert"))
    return None


@functools.cache
def _patterns() -> NamePatterns:
    return name_patterns(MEGATRON_NAMES)


def te_names_for_verl(normalize_model_name):
    """Row provider: verl's `normalize_model_name` (verl/utils/model.py:208), its result in Transformer Engine spelling.

    verl's per_tensor_generator finds experts by ".mlp.experts.linear_fc" and its DeepSeek-V3 converter knows no other
    spelling, so parameters of Megatron's own modules must pass through here before both.
    """

    @functools.wraps(normalize_model_name)
    def normalize(name, *args, **kwargs):
        return te_name(normalize_model_name(name, *args, **kwargs))

    return normalize


# ---- the tensors of a model chunk


def named_weights(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of everything in a GPTModel chunk that a checkpoint holds: parameters and correction biases."""
    yield from chunk.named_parameters()
    for name, buffer in chunk.named_buffers():
        if name.endswith(".expert_bias"):
            yield name, buffer


def keep_bias_fp32(chunk: torch.nn.Module) -> None:
    """Undo what Float16Module did to the correction biases, before values are lost by it.

    Megatron does the same at each forward (moe/router.py:131), which is too late for a value that was loaded in bf16.
    """
    for module in chunk.modules():
        if hasattr(module, "_maintain_float32_expert_bias"):
            module._maintain_float32_expert_bias()
