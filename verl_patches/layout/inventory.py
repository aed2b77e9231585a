"""Compute every tensor of a DeepSeek-V3 checkpoint from its HF config: name, shape, dtype, layer, expert, kind, part.

The router's correction bias is a tensor too (fp32, adjusted by load and not by the optimizer, so not trainable) and IS
in the totals: the published 671,026,419,200 includes its 58 x 256 values. Multi-token prediction layers are not
counted, as no recipe here trains or serves them. Weights count in `torch_dtype`; an fp8 checkpoint's block scales
are not counted. Names and shapes follow `transformers.models.deepseek_v3.modeling_deepseek_v3`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

from verl_patches.errors import ConfigError
from verl_patches.layout.model_folder import config_mismatches, read_config
from verl_patches.values import Count, Natural, field_types, value_faults

SCORE, SCORE_BIAS = "score.weight", "score.bias"  # a value model's head; HF's ...ForSequenceClassification has no bias
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
MODEL_DTYPES = ("float32", "bfloat16", "float16")  # dtypes of a model; single tensors of it may be fp8
# keys that tell DeepSeek-V3's family from other models with such names; the names of tensors depend on the last two
_FAMILY_KEYS = ("model_type", "scoring_func", "tie_word_embeddings", "attention_bias")


class Parameter(NamedTuple):
    """Describe one HF tensor. `kind` is the key of the sharding table; `layer`, `expert` are None if they do not apply.

    `part`: embedding, head, attention, norm, router, dense_mlp, shared_expert or routed_expert.
    """

    name: str
    kind: str
    part: str
    shape: tuple[int, ...]
    dtype: str
    layer: int | None = None
    expert: int | None = None

    @property
    def count(self) -> int:  # type: ignore[override]  # hides tuple.count, which no caller uses
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def trainable(self) -> bool:
        """Return False only for the router's correction bias, which has no gradient and no optimizer state."""
        return self.kind != "router_bias"


@dataclass(frozen=True)
class ModelShape:
    """Hold the numbers of an HF config that decide tensor names and shapes; field names are the config's own keys."""

    hidden_size: Count
    num_hidden_layers: Count
    first_k_dense_replace: Natural
    n_routed_experts: Count
    num_experts_per_tok: Count
    moe_intermediate_size: Count
    intermediate_size: Count
    num_attention_heads: Count
    kv_lora_rank: Count
    qk_nope_head_dim: Count
    qk_rope_head_dim: Count
    v_head_dim: Count
    vocab_size: Count
    q_lora_rank: Count | None = None
    n_shared_experts: Natural = 0
    moe_layer_freq: Count = 1
    topk_method: str = "noaux_tc"
    torch_dtype: str = "bfloat16"

    def is_moe(self, layer: int) -> bool:
        """Return whether `layer` has routed experts (vLLM's and transformers' rule)."""
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of a token in the KV cache of all layers: MLA's latent and its rotary part."""
        return (self.kv_lora_rank + self.qk_rope_head_dim) * DTYPE_BYTES[self.torch_dtype] * self.num_hidden_layers


def read_model_shape(config: Mapping | str | Path) -> ModelShape:
    """Read the model's sizes from an HF config: a dict, a config.json, or the folder that holds one.

    Raises ConfigError for a file that cannot be read, a missing key, a wrong size, and a model other than DeepSeek-V3
    (model_folder.REQUIRED_VALUES).
    """
    where = "HF config"
    if not isinstance(config, Mapping):
        where, config = str(config), read_config(config)
    if fault := config_mismatches({"model_type": "none", **config}, _FAMILY_KEYS):
        raise ConfigError(f"{where} does not describe a DeepSeek-V3 model: {fault}")
    types = field_types(ModelShape)
    required = dict.fromkeys(field.name for field in fields(ModelShape) if field.default is MISSING)
    values = required | {key: value for key, value in config.items() if key in types and value is not None}
    if faults := value_faults(types, values):
        raise ConfigError(f"{where}: {'; '.join(faults)}. Take sizes from the model's own config.json")
    shape = ModelShape(**values)
    if shape.torch_dtype not in MODEL_DTYPES:
        raise ConfigError(f"{where}: torch_dtype must be one of {', '.join(MODEL_DTYPES)}, found {shape.torch_dtype!r}")
    if shape.num_experts_per_tok > shape.n_routed_experts:
        raise ConfigError(
            f"{where}: num_experts_per_tok is {shape.num_experts_per_tok}; expected at most n_routed_experts "
            f"{shape.n_routed_experts}"
        )
    return shape


def first_layers(model: ModelShape, layers: int | None) -> ModelShape:
    """Return `model` with at most its first `layers` layers (recipe.num_hidden_layers); None keeps all."""
    return model if layers is None else replace(model, num_hidden_layers=min(layers, model.num_hidden_layers))


def size_differences(found: ModelShape, expected: ModelShape) -> str:
    """Return the sizes in which two models differ, as text; empty where they do not."""
    names = [field.name for field in fields(ModelShape)]
    unequal = [name for name in names if getattr(found, name) != getattr(expected, name)]
    return ", ".join(f"{name} {getattr(found, name)} (expected {getattr(expected, name)})" for name in unequal)


@dataclass(frozen=True)
class Inventory:
    """List all tensors of one model: `outer` holds those outside layers, `layers[i]` those of layer i.

    Routed experts are in `experts[i][e]` (empty for dense layers), so that a rank's share is found without a search.
    """

    model: ModelShape
    outer: tuple[Parameter, ...]
    layers: tuple[tuple[Parameter, ...], ...]
    experts: tuple[tuple[tuple[Parameter, ...], ...], ...]

    @functools.cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """Return every tensor once: the embedding, layer by layer, then the final norm and the head."""
        parameters = [p for p in self.outer if p.part == "embedding"]
        for layer, experts in zip(self.layers, self.experts, strict=True):
            parameters += itertools.chain(layer, *experts)
        return (*parameters, *(p for p in self.outer if p.part != "embedding"))

    @functools.cached_property
    def kinds(self) -> frozenset[str]:
        """Return the kinds of all tensors."""
        return frozenset(p.kind for p in self.parameters)

    @functools.cached_property
    def by_name(self) -> dict[str, Parameter]:
        """Return {HF name: tensor}."""
        return {p.name: p for p in self.parameters}


def build_inventory(config: ModelShape | Mapping | str | Path, value: bool = False) -> Inventory:
    """Return the inventory of the model that `config` describes, which may be anything that `read_model_shape` reads.

    With `value` it is a value model, which has a head of one number in place of the vocabulary's.
    """
    return _cached_inventory(config if isinstance(config, ModelShape) else read_model_shape(config), value)


@functools.lru_cache(4)  # a command reads its model's inventory many times, in two dtypes
def _cached_inventory(model: ModelShape, value: bool) -> Inventory:
    h, v, dtype = model.hidden_size, model.vocab_size, model.torch_dtype
    heads = [Parameter("lm_head.weight", "head", "head", (v, h), dtype)]
    if value:
        heads = [Parameter(SCORE, "value_head", "head", (1, h), dtype)]
        heads += [Parameter(SCORE_BIAS, "value_bias", "head", (1,), dtype)]
    outer = (
        Parameter("model.embed_tokens.weight", "embedding", "embedding", (v, h), dtype),
        Parameter("model.norm.weight", "final_norm", "norm", (h,), dtype),
        *heads,
    )
    ids = range(model.num_hidden_layers)
    layers = tuple(tuple(_attention(model, i)) + tuple(_mlp_outside_experts(model, i)) for i in ids)
    return Inventory(model, outer, layers, tuple(tuple(_experts(model, i)) for i in ids))


def _attention(model: ModelShape, layer: int) -> Iterable[Parameter]:
    h, heads, q_rank, kv_rank = model.hidden_size, model.num_attention_heads, model.q_lora_rank, model.kv_lora_rank
    q_dim = heads * (model.qk_nope_head_dim + model.qk_rope_head_dim)
    kv_dim = heads * (model.qk_nope_head_dim + model.v_head_dim)
    q_rows: list[tuple[str, str, tuple[int, ...]]] = [("self_attn.q_proj", "q_proj", (q_dim, h))]
    if q_rank is not None:
        q_rows = [
            ("self_attn.q_a_proj", "q_a_proj", (q_rank, h)),
            ("self_attn.q_a_layernorm", "q_a_norm", (q_rank,)),
            ("self_attn.q_b_proj", "q_b_proj", (q_dim, q_rank)),
        ]
    rows = [
        ("input_layernorm", "input_norm", (h,)),
        *q_rows,
        ("self_attn.kv_a_proj_with_mqa", "kv_a_proj", (kv_rank + model.qk_rope_head_dim, h)),
        ("self_attn.kv_a_layernorm", "kv_a_norm", (kv_rank,)),
        ("self_attn.kv_b_proj", "kv_b_proj", (kv_dim, kv_rank)),
        ("self_attn.o_proj", "o_proj", (h, heads * model.v_head_dim)),
        ("post_attention_layernorm", "post_attention_norm", (h,)),
    ]
    for name, kind, shape in rows:
        part = "attention" if name.startswith("self_attn") else "norm"
        yield Parameter(f"model.layers.{layer}.{name}.weight", kind, part, shape, model.torch_dtype, layer)


def _gated_mlp(
    model: ModelShape, prefix: str, part: str, width: int, layer: int, expert: int | None = None
) -> Iterable[Parameter]:
    h, dtype = model.hidden_size, model.torch_dtype
    for piece, shape in (("gate", (width, h)), ("up", (width, h)), ("down", (h, width))):
        yield Parameter(f"{prefix}.{piece}_proj.weight", f"{part}_{piece}", part, shape, dtype, layer, expert)


def _mlp_outside_experts(model: ModelShape, layer: int) -> Iterable[Parameter]:
    prefix = f"model.layers.{layer}.mlp"
    if not model.is_moe(layer):
        yield from _gated_mlp(model, prefix, "dense_mlp", model.intermediate_size, layer)
        return
    e, h = model.n_routed_experts, model.hidden_size
    yield Parameter(f"{prefix}.gate.weight", "router", "router", (e, h), model.torch_dtype, layer)
    if model.topk_method == "noaux_tc":
        yield Parameter(f"{prefix}.gate.e_score_correction_bias", "router_bias", "router", (e,), "float32", layer)
    if model.n_shared_experts:
        width = model.moe_intermediate_size * model.n_shared_experts
        yield from _gated_mlp(model, f"{prefix}.shared_experts", "shared_expert", width, layer)


def _experts(model: ModelShape, layer: int) -> Iterable[tuple[Parameter, ...]]:
    if not model.is_moe(layer):
        return
    for expert in range(model.n_routed_experts):
        prefix = f"model.layers.{layer}.mlp.experts.{expert}"
        yield tuple(_gated_mlp(model, prefix, "routed_expert", model.moe_intermediate_size, layer, expert))
