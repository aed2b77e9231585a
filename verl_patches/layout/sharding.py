"""Compute which part of each tensor a rank holds in each library, from a table of axes and a table of libraries.

LIBRARIES lists the differences between libraries, which are, with their sources:
- megatron-core 0.12.2 (`models/gpt/gpt_layer_specs.py`) makes q and kv down projections ColumnParallelLinear in its
  local spec and TEColumnParallelLinear in its Transformer Engine spec: both cut them by rows (576/tp rows of kv_a and
  so on).
- MindSpeed-LLM 2.0.0 (`multi_head_latent_attention.py`, linear_qkv in `deepseek_spec.py`) keeps them whole on every
  TP rank, as does vLLM 0.9.1 (`deepseek_v2.py`, ReplicatedLinear).
- vLLM pads the vocabulary to a multiple of 64 before it splits it, and keeps the correction bias in the model's dtype
  instead of fp32 (`DeepseekV2MoE.__init__`: torch.empty without a dtype).
- vllm-ascend in graph mode with multi-stream MoE also keeps the shared experts whole
  (`force_replicate=self.enable_multistream_moe` in its deepseek models), which gives the published 25.81 GB a die for
  the EP256 rollout. Without that switch the library is "vllm".
All other cuts follow from the kind: rows (axis 0) or columns (axis 1) over tp, or over etp for routed experts.

MEGATRON_NAMES has the name of Megatron's parameter for each kind.

`static_bytes` of a training rank are weights, gradients and optimizer state, without activations. With n dense and m
routed-expert trainable elements on the rank, as Megatron's distributed optimizer splits them (bf16):
    param     = bytes of the weights: 2 (n + m), and 4 for each value of the correction bias
    grad      = 4 (n + m): fp32 main gradients, whole on every rank
    optimizer = 12 n / (dp * cp) + 12 m / edp: fp32 master weight and two Adam moments, sharded over the replicas
Swapping the optimizer to the host removes its term from the die. At TP4 PP8 EP32 on 256 dies this gives 54.99 GB on
the worst stage, and 20.32 GB with the optimizer swapped. No torch.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import DTYPE_BYTES, Inventory, Parameter
from verl_patches.layout.parallel import ParallelLayout

# kind -> axis that tensor parallelism cuts; None is a copy on every rank
AXES: dict[str, int | None] = {
    "embedding": 0, "head": 0, "value_head": None, "value_bias": None,
    "final_norm": None, "input_norm": None, "post_attention_norm": None,
    "q_proj": 0, "q_a_proj": 0, "q_a_norm": None, "q_b_proj": 0, "kv_a_proj": 0, "kv_a_norm": None, "kv_b_proj": 0,
    "o_proj": 1,
    "router": None, "router_bias": None,
    "dense_mlp_gate": 0, "dense_mlp_up": 0, "dense_mlp_down": 1,
    "shared_expert_gate": 0, "shared_expert_up": 0, "shared_expert_down": 1,
    "routed_expert_gate": 0, "routed_expert_up": 0, "routed_expert_down": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Library:
    """Describe one library: kinds that it keeps whole although AXES cuts them, vocabulary multiple, bias dtype.

    `experts_rest_on_last`: where ep does not divide the experts, the last rank holds the remainder (else it is
    refused).
    """

    whole: frozenset[str] = frozenset()
    vocabulary_multiple: int = 1
    bias_in_model_dtype: bool = False
    experts_rest_on_last: bool = False


_DOWN_PROJECTIONS = frozenset({"q_a_proj", "kv_a_proj"})
_VLLM = Library(_DOWN_PROJECTIONS, vocabulary_multiple=64, bias_in_model_dtype=True, experts_rest_on_last=True)
_SHARED_EXPERT = frozenset({"shared_expert_gate", "shared_expert_up", "shared_expert_down"})
LIBRARIES: dict[str, Library] = {
    "megatron-local": Library(),
    "mindspeed": Library(_DOWN_PROJECTIONS),
    "vllm": _VLLM,
    "vllm-ascend": replace(_VLLM, whole=_DOWN_PROJECTIONS | _SHARED_EXPERT),
}


def train_library(line: str) -> str:
    """Return the key of LIBRARIES of a line's training."""
    return "mindspeed" if line == "a3" else "megatron-local"


class Shard(NamedTuple):
    """Describe the piece of one HF tensor that one rank holds.

    It is `parameter`'s slice [start, start + shape[axis] - padding) along `axis` (the whole tensor if axis is None),
    followed by `padding` rows without an HF row (vLLM's vocabulary). `shape` includes the padding; `dtype` is the
    library's.
    """

    parameter: Parameter
    shape: tuple[int, ...]
    dtype: str
    axis: int | None = None
    start: int = 0
    padding: int = 0

    @property
    def count(self) -> int:  # type: ignore[override]  # hides tuple.count, as in Parameter
        """Return the number of elements that the rank holds."""
        return math.prod(self.shape)


class LocalParameters(NamedTuple):
    """Hold all shards of one rank, by HF name, in the inventory's order."""

    shards: dict[str, Shard]

    def size_bytes(self) -> int:
        """Return the bytes of the weights that the rank holds, each in its own dtype."""
        return sum(s.count * DTYPE_BYTES[s.dtype] for s in self.shards.values())


def local_parameters(inventory: Inventory, layout: ParallelLayout, rank: int, library: str) -> LocalParameters:
    """Return the shards of the model that `rank` holds under `layout`, as `library` (a key of LIBRARIES) cuts tensors.

    Raises ConfigError for an unknown library or rank, layers that do not fit the layout, and sizes that do not divide.
    """
    rule, model, at = library_rule(inventory, layout, library), inventory.model, layout.coordinates(rank)
    experts = layout.local_experts(rank, model.n_routed_experts, rule.experts_rest_on_last)
    held = [p for p in inventory.outer if p.part == "embedding" and at.pp == 0]
    for layer in layout.stage_layers(at.pp, model.num_hidden_layers):
        held += inventory.layers[layer]
        if inventory.experts[layer]:
            held += itertools.chain.from_iterable(inventory.experts[layer][expert] for expert in experts)
    held += [p for p in inventory.outer if p.part != "embedding" and at.pp == layout.pp - 1]
    shards = {}
    for parameter in held:
        index = at.tp if parameter.expert is None else at.etp
        shards[parameter.name] = _shard(parameter, layout, index, rule, model.torch_dtype)
    return LocalParameters(shards)


def tensor_shards(
    inventory: Inventory, layout: ParallelLayout, library: str, parameter: Parameter
) -> tuple[Shard, ...]:
    """Return the pieces of one tensor: the shard of each tp index, or of each etp index for a routed expert.

    Raises ConfigError as `local_parameters`.
    """
    rule = library_rule(inventory, layout, library)
    parts = layout.tp if parameter.expert is None else layout.etp
    return tuple(_shard(parameter, layout, index, rule, inventory.model.torch_dtype) for index in range(parts))


def library_rule(inventory: Inventory, layout: ParallelLayout, library: str) -> Library:
    """Return the library of LIBRARIES; ConfigError where it is unknown or cannot split this model by `layout`'s tp."""
    if library not in LIBRARIES:
        raise ConfigError(f"sharding: unknown library {library!r}; expected one of {', '.join(LIBRARIES)}")
    model, tp = inventory.model, layout.tp
    if model.num_attention_heads % tp:
        raise ConfigError(
            f"sharding: tp={tp} must divide num_attention_heads {model.num_attention_heads}; choose another tp"
        )
    return LIBRARIES[library]


def _shard(parameter: Parameter, layout: ParallelLayout, index: int, rule: Library, model_dtype: str) -> Shard:
    kind, shape = parameter.kind, parameter.shape
    dtype = model_dtype if kind == "router_bias" and rule.bias_in_model_dtype else parameter.dtype
    axis = None if kind in rule.whole else AXES[kind]
    if axis is None:
        return Shard(parameter, shape, dtype)
    split = "tp" if parameter.expert is None else "etp"
    parts, full = layout.size(split), shape[axis]
    padded = full
    if kind in ("embedding", "head"):
        padded = -(-full // rule.vocabulary_multiple) * rule.vocabulary_multiple
    if padded % parts:
        raise ConfigError(
            f"sharding: {split}={parts} must divide {padded}, dimension {axis} of {parameter.name}; "
            f"choose another {split}"
        )
    size = padded // parts
    start = index * size
    padding = min(size, max(0, start + size - full))
    local = tuple(size if i == axis else n for i, n in enumerate(shape))
    return Shard(parameter, local, dtype, axis, min(start, full), padding)


_MEGATRON_LAYER = "decoder.layers.{layer}."
# kind -> parameter of megatron-core 0.12.2's local spec with SequentialMLP, which joins gate and up into linear_fc1;
# layers and experts are numbered on each rank
MEGATRON_NAMES = {
    "embedding": "embedding.word_embeddings.weight",
    "final_norm": "decoder.final_layernorm.weight",
    "head": "output_layer.weight",
    "value_head": "output_layer.score.weight",  # model/value_head.py
    "value_bias": "output_layer.score.bias",
    "input_norm": _MEGATRON_LAYER + "input_layernorm.weight",
    "q_proj": _MEGATRON_LAYER + "self_attention.linear_q_proj.weight",
    "q_a_proj": _MEGATRON_LAYER + "self_attention.linear_q_down_proj.weight",
    "q_a_norm": _MEGATRON_LAYER + "self_attention.q_layernorm.weight",
    "q_b_proj": _MEGATRON_LAYER + "self_attention.linear_q_up_proj.weight",
    "kv_a_proj": _MEGATRON_LAYER + "self_attention.linear_kv_down_proj.weight",
    "kv_a_norm": _MEGATRON_LAYER + "self_attention.kv_layernorm.weight",
    "kv_b_proj": _MEGATRON_LAYER + "self_attention.linear_kv_up_proj.weight",
    "o_proj": _MEGATRON_LAYER + "self_attention.linear_proj.weight",
    "post_attention_norm": _MEGATRON_LAYER + "pre_mlp_layernorm.weight",
    "router": _MEGATRON_LAYER + "mlp.router.weight",
    "router_bias": _MEGATRON_LAYER + "mlp.router.expert_bias",
    "dense_mlp_gate": _MEGATRON_LAYER + "mlp.linear_fc1.weight",
    "dense_mlp_up": _MEGATRON_LAYER + "mlp.linear_fc1.weight",
    "dense_mlp_down": _MEGATRON_LAYER + "mlp.linear_fc2.weight",
    "shared_expert_gate": _MEGATRON_LAYER + "mlp.shared_experts.linear_fc1.weight",
    "shared_expert_up": _MEGATRON_LAYER + "mlp.shared_experts.linear_fc1.weight",
    "shared_expert_down": _MEGATRON_LAYER + "mlp.shared_experts.linear_fc2.weight",
    "routed_expert_gate": _MEGATRON_LAYER + "mlp.experts.local_experts.{expert}.linear_fc1.weight",
    "routed_expert_up": _MEGATRON_LAYER + "mlp.experts.local_experts.{expert}.linear_fc1.weight",
    "routed_expert_down": _MEGATRON_LAYER + "mlp.experts.local_experts.{expert}.linear_fc2.weight",
}


GRAD_BYTES, OPTIMIZER_BYTES = 4, 12  # per trainable element


class StaticBytes(NamedTuple):
    """Hold the static bytes of one training rank."""

    param_bytes: int
    grad_bytes: int
    optimizer_bytes: int


def static_bytes(inventory: Inventory, layout: ParallelLayout, rank: int, library: str = "mindspeed") -> StaticBytes:
    """Return the static bytes of `rank` (formula: module docstring); optimizer shards are rounded up to whole elements.

    Raises ConfigError as `local_parameters` does.
    """
    held = local_parameters(inventory, layout, rank, library)
    trained = [shard for shard in held.shards.values() if shard.parameter.trainable]
    routed = sum(shard.count for shard in trained if shard.parameter.expert is not None)
    dense = sum(shard.count for shard in trained) - routed
    optimizer = OPTIMIZER_BYTES * (-(-dense // (layout.dp * layout.cp)) + -(-routed // layout.edp))
    return StaticBytes(held.size_bytes(), GRAD_BYTES * (dense + routed), optimizer)
