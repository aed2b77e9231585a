"""DeepSeek-V3 weights in Megatron: parameter names, and which HF tensors each parameter of a model chunk holds.

Names: Megatron has two spellings, that of its own modules ("local", tabulated in layout/sharding.py) and Transformer
Engine's, which fuses norms into the next projection and stacks experts. verl's weight converter knows the second only.
`parse_name` reads both, `te_name` turns the first into the second. Layer and expert numbers in Megatron names are local
to the pipeline chunk and to the expert-parallel rank.

What a parameter holds is read from the model itself: its own layers and experts (uneven pipelines and any expert
placement included), by the HF names of the inventory. weights/load.py fills them from a folder.

Megatron is imported inside functions: the resharder uses the names where Megatron must not be imported yet.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import Inventory, Parameter
from verl_patches.layout.sharding import AXES, MEGATRON_NAMES

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
    while name.startswith("module."):
        name = name[len("module.") :]
    return name


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


# ---- what the parameters of a model hold


class Source(NamedTuple):
    """Where one Megatron tensor comes from: HF tensors to be joined along axis 0, and this rank's part of each."""

    parameters: tuple[Parameter, ...]
    axis: int | None
    part: int
    parts: int

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the joined tensors before they are split over ranks."""
        return sum(p.shape[0] for p in self.parameters), *self.parameters[0].shape[1:]


def named_weights(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of everything in a GPTModel chunk that a checkpoint holds: parameters and correction biases."""
    yield from chunk.named_parameters()
    for name, buffer in chunk.named_buffers():
        if name.endswith(".expert_bias"):
            yield name, buffer


def source_of(chunk: torch.nn.Module, name: str, inventory: Inventory) -> Source:
    """What the parameter `name` of a GPTModel chunk is made of on this rank. Raises ConfigError for an unknown name."""
    from megatron.core import parallel_state

    parsed = parse_name(name)
    axis = AXES[parsed.kinds[0]]
    if parsed.expert is not None:
        part = parallel_state.get_expert_tensor_parallel_rank()
        parts = parallel_state.get_expert_tensor_parallel_world_size()
    else:
        part = parallel_state.get_tensor_model_parallel_rank()
        parts = parallel_state.get_tensor_model_parallel_world_size()
    layer = expert = None
    if parsed.layer is not None:
        block = chunk.decoder.layers[parsed.layer]
        layer = block.layer_number - 1  # Megatron counts from 1, over the whole model
        expert = None if parsed.expert is None else block.mlp.local_expert_indices[parsed.expert]
    return Source(hf_tensors_of(name, parsed.kinds, inventory, layer, expert), axis, part, parts)


def hf_tensors_of(
    name: str, kinds: tuple[str, ...], inventory: Inventory, layer: int | None, expert: int | None
) -> tuple[Parameter, ...]:
    """The HF tensors of `kinds`, in order, of a layer and expert of the whole model (None: outside of them).

    Raises ConfigError, with the Megatron parameter's `name`, where the inventory has none.
    """
    found = inventory.at(layer, expert)
    missing = [kind for kind in kinds if kind not in found]
    if missing:
        raise ConfigError(
            f"Megatron parameter {name!r} is {missing[0]} of layer {layer}, expert {expert}, "
            "which config.json's model does not have: the Megatron model was built from another config"
        )
    return tuple(found[kind] for kind in kinds)


class Part(NamedTuple):
    """What a live parameter holds of one HF tensor: [start, stop) along `axis`, in `view`, in HF orientation."""

    parameter: Parameter
    axis: int
    start: int
    stop: int
    view: torch.Tensor


def parts_of(chunk: torch.nn.Module, name: str, tensor: torch.Tensor, inventory: Inventory) -> list[Part]:
    """The HF tensors that `tensor`, the parameter or buffer `name` of a GPTModel chunk, holds on this rank."""
    return parts_of_source(source_of(chunk, name, inventory), tensor, name)


def parts_of_source(source: Source, tensor: torch.Tensor, name: str) -> list[Part]:
    """The parts in `tensor`, which holds `source` in HF orientation; ConfigError where its shape is another."""
    shape, axis, parts = tuple(tensor.shape), source.axis, source.parts
    if axis is None or source.whole_shape == shape:  # one part, or a module that is not split
        axis, parts = 0, 1
    sizes = [parameter.shape[axis] for parameter in source.parameters]
    part = source.part if parts > 1 else 0
    shares = [range(size // parts * part, size // parts * (part + 1)) for size in sizes]
    rows = [len(share) for share in shares] if axis == 0 else [p.shape[0] for p in source.parameters]
    joined = list(source.whole_shape)
    joined[axis] = len(shares[0]) if axis else sum(rows)
    if any(size % parts for size in sizes) or tuple(joined) != shape:
        raise ConfigError(
            f"Megatron parameter {name!r}: expected shape {tuple(joined)}, part {part} of {parts} along axis {axis} of "
            f"{', '.join(f'{p.name} {p.shape}' for p in source.parameters)}, found {shape}: TP or ETP differs from the "
            "model's, or the model was built from another config"
        )
    views = tensor.detach().split(rows)
    return [Part(p, axis, s.start, s.stop, v) for p, s, v in zip(source.parameters, shares, views, strict=True)]


def keep_bias_fp32(chunk: torch.nn.Module) -> None:
    """Undo what Float16Module did to the correction biases, before values are lost by it.

    Megatron does the same at each forward (moe/router.py:131), which is too late for a value that was loaded in bf16.
    """
    for module in chunk.modules():
        if hasattr(module, "_maintain_float32_expert_bias"):
            module._maintain_float32_expert_bias()
