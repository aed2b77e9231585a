"""Map names of DeepSeek-V3 parameters in Megatron and MindSpeed-LLM to kinds of HF tensors, and read a chunk's weights.

Megatron has two spellings, that of its own modules ("local", tabulated in layout/sharding.py) and Transformer Engine's,
which verl's weight converter knows only. `te_name` turns the first, which our lines build, into the second. Layer and
expert numbers in Megatron names are local to the pipeline chunk and to the expert-parallel rank.

In MindSpeed-LLM 2.0.0 multi_head_latent_attention.py makes `linear_qkv` of q's and kv's down projections, rows of q
first, and names the up projections linear_qb and linear_kvb and the norms q_layernorm and k_layernorm. Experts are
Megatron's GroupedMLP: weight1 [H, e * 2F] (gate and up) and weight2 [e * F, H] (down) of all local experts. weight1 is
read as `view(e, H, 2F)` (mindspeed/core/transformer/moe/experts.py, groupedmlp_forward), a different order of the same
memory than the shape suggests: an expert is a slice of the view, not a slice of columns. H hidden, F this rank's part
of an expert's intermediate size, e local experts. All other parameters have the names of megatron-core 0.12.2.

reshard/train_tensors.py says which parts of which HF tensors a parameter holds.

Megatron is imported inside functions: the resharder uses the names where Megatron must not be imported yet.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from verl_patches.errors import ConfigError
from verl_patches.layout.sharding import MEGATRON_NAMES

# (pattern of one spelling, template of the other spelling)
_TE_SPELLINGS = (
    (r"(.*\.mlp\.experts)\.local_experts\.(\d+)\.(linear_fc[12])\.weight", r"{0}.{2}.weight{1}"),
    (r"(.*\.self_attention)\.q_layernorm\.weight", r"{0}.linear_q_up_proj.layer_norm_weight"),
    (r"(.*\.self_attention)\.kv_layernorm\.weight", r"{0}.linear_kv_up_proj.layer_norm_weight"),
)
_ATTENTION, _EXPERTS = "decoder.layers.{layer}.self_attention.", "decoder.layers.{layer}.mlp.experts."
# kind -> MindSpeed's name, with the local layer; a model has q_a_proj and q_b_proj, or q_proj (mindspeed/model.py)
MINDSPEED_NAMES = MEGATRON_NAMES | {
    "q_proj": _ATTENTION + "linear_qb.weight",
    "q_a_proj": _ATTENTION + "linear_qkv.weight",
    "kv_a_proj": _ATTENTION + "linear_qkv.weight",
    "q_b_proj": _ATTENTION + "linear_qb.weight",
    "kv_a_norm": _ATTENTION + "k_layernorm.weight",
    "kv_b_proj": _ATTENTION + "linear_kvb.weight",
    "routed_expert_gate": _EXPERTS + "weight1",
    "routed_expert_up": _EXPERTS + "weight1",
    "routed_expert_down": _EXPERTS + "weight2",
}
# library of layout/sharding.py -> (its names, unsupported settings that give other names)
NAMES_BY_LIBRARY = {
    "megatron-local": (MEGATRON_NAMES, "Transformer Engine, and grouped GEMM: set moe_grouped_gemm=False"),
    "mindspeed": (MINDSPEED_NAMES, "mla_mm_split, multi-token prediction, SequentialMLP"),
}


# ---- parameter names


UNSTACKED, UP_STACK, DOWN_STACK = "as HF", "[H, e * 2F] used as view(e, H, 2F)", "[e * F, H] used as view(e, F, H)"
_STACKS = {".mlp.experts.weight1": UP_STACK, ".mlp.experts.weight2": DOWN_STACK}


class ParameterContents(NamedTuple):
    """Describe what a parameter holds: HF kinds joined along rows (gate, up), local layer and local expert, or None.

    Of the query's kinds (q_proj; q_a_proj, q_b_proj) a model has those that its q_lora_rank gives. `stacking`:
    UNSTACKED, or the stack of experts as which the parameter holds them: UP_STACK or DOWN_STACK.
    """

    kinds: tuple[str, ...]
    layer: int | None
    expert: int | None
    stacking: str

    def shape(self, hf_shape: Sequence[int], count: int) -> tuple[int, ...]:
        """Return the parameter's shape; `hf_shape`: that of its joined HF tensors, in a stack those of one expert."""
        if self.stacking == UNSTACKED:
            return tuple(hf_shape)
        rows, columns = hf_shape
        return (columns, count * rows) if self.stacking == UP_STACK else (count * columns, rows)

    def hf_views(self, tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
        """Return views of the parameter in HF orientation: one for each of `count` local experts if stacked, else one.

        Expects the parameter's own shape (see `shape`).
        """
        if self.stacking == UNSTACKED:
            return [tensor]
        shape = (tensor.shape[0], -1) if self.stacking == UP_STACK else (-1, tensor.shape[1])
        return [expert.t() for expert in tensor.view(count, *shape)]


def te_name(name: str) -> str:
    """Return the name of a parameter in Transformer Engine's spelling; names that are equal in both stay."""
    for pattern, template in _TE_SPELLINGS:
        match = re.fullmatch(pattern, name)
        if match:
            return template.format(*match.groups())
    return name


def parse_name(name: str, library: str) -> ParameterContents:
    """Return what the parameter or buffer `name` of a GPTModel chunk holds.

    The name may have the prefixes ("module.") of DDP and Float16Module. `library`: a key of NAMES_BY_LIBRARY.
    Raises ConfigError for a name that no DeepSeek-V3 parameter of the library has.
    """
    bare = re.sub(r"^(module\.)*", "", name)
    for pattern, kinds in _patterns(library):
        match = pattern.fullmatch(bare)
        if match:
            numbers = {key: int(value) for key, value in match.groupdict().items()}
            stacking = next((stack for end, stack in _STACKS.items() if bare.endswith(end)), UNSTACKED)
            return ParameterContents(kinds, numbers.get("layer"), numbers.get("expert"), stacking)
    names, unsupported = NAMES_BY_LIBRARY[library]
    raise ConfigError(
        f"parameter {name!r} is not a DeepSeek-V3 parameter of library {library}; expected a name such as "
        f"{names['router']!r}.\nThese settings give other names and are not supported: {unsupported}"
    )


@functools.cache
def _patterns(library: str) -> tuple[tuple[re.Pattern[str], tuple[str, ...]], ...]:
    """Return (pattern, kinds) of each parameter; kinds of one name are joined."""
    kinds: dict[str, tuple[str, ...]] = {}
    for kind, template in NAMES_BY_LIBRARY[library][0].items():
        kinds[template] = (*kinds.get(template, ()), kind)
    patterns = []
    for template, joined_kinds in kinds.items():
        text = re.escape(template)
        for number in ("layer", "expert"):
            text = text.replace(re.escape("{" + number + "}"), rf"(?P<{number}>\d+)")
        patterns.append((re.compile(text), joined_kinds))
    return tuple(patterns)


def te_names_for_verl(normalize_model_name):
    """Wrap `verl.utils.model.normalize_model_name` so that its result is in Transformer Engine's spelling.

    verl's per_tensor_generator finds experts by ".mlp.experts.linear_fc" and its DeepSeek-V3 converter knows no other
    spelling, so parameters of Megatron's own modules must pass through here before both.
    """

    @functools.wraps(normalize_model_name)
    def normalize(name, *args, **kwargs):
        return te_name(normalize_model_name(name, *args, **kwargs))

    return normalize


# ---- the tensors of a model chunk


def named_weights(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of all that a checkpoint holds of a GPTModel chunk: parameters and correction biases."""
    yield from chunk.named_parameters()
    for name, buffer in chunk.named_buffers():
        if name.endswith(".expert_bias"):
            yield name, buffer


def keep_bias_fp32(chunk: torch.nn.Module) -> None:
    """Restore the correction biases to fp32 after Float16Module has cast them, before values are loaded.

    Megatron does the same at each forward
    (megatron.core.transformer.moe.router.TopKRouter._maintain_float32_expert_bias), which is too late for a value that
    was loaded in bf16.
    """
    for module in chunk.modules():
        if hasattr(module, "_maintain_float32_expert_bias"):
            module._maintain_float32_expert_bias()
