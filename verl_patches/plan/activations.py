"""Model the bytes of activations on line a3: what a layer saves for backward, and what a pass holds at once; no torch.

They are counted as in "Reducing Activation Recomputation in Large Transformer Models" (Korthikanti et al. 2022, arXiv
2205.05198), for MLA and routed experts: every tensor that an op saves for its backward, once. They were read from the
pins: in MindSpeed-LLM's multi_head_latent_attention.py, router.py, token_dispatcher.py, experts.py, and for
compiled ops in their C++ (mindspeed/ops/csrc/cann) or in torch_npu's derivatives (npu_fusion_attention: query, key,
value, output, maximum and sum; npu_rms_norm: input and rstd; npu_swiglu: input). tests/plan/test_activations.py
measures them with a real layer.

Letters: b bytes of a value, T tokens of a micro batch, s = T / tp of a rank outside attention and MLP (sequence
parallelism), n heads of a rank, k experts of a token, R = s * k * etp rows that a rank's experts get at balanced
routing, H hidden, F and f width of the dense and of one expert's MLP, E experts.

    term       bytes                                       of
    norms      4 b s H + 8 s                               input, residual, output of both norms
    latents    b s (2 q_lora + 2 kv_lora + rope) + 8 s     down projection, norms of it; H for 2 q_lora without q_lora
    rotary     4 b T rope                                  cosine and sine, of query and key
    attention  4 b T n w + 64 T n, b T n v if w is not v   q, k, v and output of width w, statistics
    dense_mlp  3 b T F / tp                                gate and up, their product
    router     4 s H + 4 E H + T (5 E + 20 k + 64)         fp32 input and weight, scores and choices of all TP ranks
    experts    b R (2 H + 3 f / etp) + b s k H             rows in and out, gate, up, product
    shared     3 b T f shared / tp                         as dense_mlp

w is the head width padded to a multiple of 128, 256 at 671B; with `unpadded` q and k have their own width and v is a
part of kv_b_proj's output. Under context parallelism T is a rank's part of the tokens: Ulysses has all tokens of 1/CP
of the heads in attention. moe_alltoall_overlap_comm saves the same bytes; those that it holds at once are not
modelled, nor are dynamic batches and fragmentation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from verl_patches.layout.inventory import DTYPE_BYTES, ModelShape
from verl_patches.layout.parallel import ParallelLayout

CHUNK_BYTES = 8 << 20  # size of a chunk of fp32 logits in model/log_prob.py
# Rows of the busiest rank's experts, as a multiple of the mean, without balanced routing: assumed, not measured here
UNBALANCED_RATIO = 2.0
_FLASH_WIDTH = 128  # MindSpeed-LLM's --padded-base-length
_STATISTICS_BYTES = 2 * 8 * 4  # maximum and sum of a query, each eight times in fp32
_ATTENTION_TERMS = ("norms", "latents", "rotary", "attention")


PerStage = int | tuple[int, ...]  # one number for all stages, or one for each


def recomputed_layers(layers: PerStage, stage: int) -> int:
    """Return the number of recomputed layers of `stage`."""
    return layers if isinstance(layers, int) else layers[stage]


@dataclass(frozen=True)
class Passes:
    """Hold what decides a run's activations beside model and layout.

    `update_tokens`, `log_prob_tokens`, `ref_tokens`: most tokens of a micro batch on a rank. `micro_batches`: of an
    update on one replica. `recompute_layers`: layers of a stage whose activations are recomputed in backward, one
    number for all stages or one for each; `recompute_together`: how many of them at once (method uniform), 1 for method
    block. `imbalance`: rows of the busiest rank's experts over the mean. `unpadded`: recipe.train.unpadded_attention.
    `entropy`: whether the update's loss has it. `chunked_logits`: whether log-probs are computed in chunks (rows
    logprob.*). `recorded_tokens`: tokens of a replica's step whose routed experts are recorded
    (recipe.train.routing_replay). `gemm_gradient_accumulation_fusion`, `gradient_accumulation_fusion`: whether weight
    gradients are added in place. `critic_tokens`, `critic_batches`: as `update_tokens` and `micro_batches`, of a
    critic; `reward_tokens`: of a reward model.
    """

    update_tokens: int
    log_prob_tokens: int
    ref_tokens: int
    micro_batches: int
    recompute_layers: PerStage = 0
    recompute_together: int = 1
    imbalance: float = UNBALANCED_RATIO
    unpadded: bool = False
    entropy: bool = False
    chunked_logits: bool = True
    recorded_tokens: int = 0
    gemm_gradient_accumulation_fusion: bool = False
    gradient_accumulation_fusion: bool = False
    critic_tokens: int = 0
    critic_batches: int = 0
    reward_tokens: int = 0


def layer_terms(
    model: ModelShape, moe: bool, tokens: int, layout: ParallelLayout, imbalance: float = 1.0, unpadded: bool = False
) -> dict[str, int]:
    """Return {term: bytes} that one layer saves for the backward pass of a micro batch of `tokens`, by the table above.

    Values have the dtype of `model`; in fp32 the router saves no copies.
    """
    b, hidden, tp = DTYPE_BYTES[model.torch_dtype], model.hidden_size, layout.tp
    s, heads = -(-tokens // tp), model.num_attention_heads // tp
    query = hidden if model.q_lora_rank is None else 2 * model.q_lora_rank
    latent, rope = model.kv_lora_rank, model.qk_rope_head_dim
    terms = {
        "norms": 4 * b * s * hidden + 8 * s,
        "latents": b * s * (query + 2 * latent + rope) + 8 * s,
        "rotary": 4 * b * tokens * rope,
        "attention": tokens * heads * (b * _attention_width(model, unpadded) + _STATISTICS_BYTES),
    }
    if not moe:
        return terms | {"dense_mlp": 3 * b * tokens * model.intermediate_size // tp}
    experts, k, width = model.n_routed_experts, model.num_experts_per_tok, model.moe_intermediate_size
    rows = math.ceil(s * k * layout.etp * imbalance)
    copies = 4 * s * hidden + 4 * experts * hidden if b == 2 else 0
    return terms | {
        "router": copies + tokens * (5 * experts + 20 * k + 64),
        "experts": b * rows * (2 * hidden + 3 * width // layout.etp) + b * s * k * hidden,
        "shared": 3 * b * tokens * width * model.n_shared_experts // tp,
    }


def _attention_width(model: ModelShape, unpadded: bool) -> int:
    """Return the number of values that attention saves for each token and head."""
    qk, v = model.qk_nope_head_dim + model.qk_rope_head_dim, model.v_head_dim
    if unpadded:
        return 2 * qk + (model.qk_nope_head_dim + v) + v
    width = math.ceil(max(qk, v) / _FLASH_WIDTH) * _FLASH_WIDTH
    return 4 * width + (v if width != v else 0)


def update_bytes(model: ModelShape, layout: ParallelLayout, stage: int, routed: int, passes: Passes) -> dict[str, int]:
    """Return {kept_activations, working_activations, logits, weight_gradient} bytes of an update on a rank of `stage`.

    `routed`: routed experts of a layer on this rank. kept: of all micro batches in flight, min(pp - stage, micro
    batches) with 1F1B (megatron/core/pipeline_parallel/schedules.py, num_warmup_microbatches): a recomputed group of
    layers saves its input, another layer saves all. working: the recomputed group, the experts' send and receive
    buffers, and gradients of the activations of half a layer (attention or MLP), an upper bound. The last stage's
    logits and the layers' work do not exist at once, so that the smaller is left out.
    """
    tokens, size = passes.update_tokens, DTYPE_BYTES[model.torch_dtype]
    layers = layout.stage_layers(stage, model.num_hidden_layers)
    terms = _stage_terms(model, layers, tokens, layout, passes)
    hidden = size * -(-tokens // layout.tp) * model.hidden_size
    recomputed = min(recomputed_layers(passes.recompute_layers, stage), len(layers))
    groups = [terms[i : i + passes.recompute_together] for i in range(0, recomputed, passes.recompute_together)]
    saved = len(groups) * hidden + sum(sum(layer.values()) for layer in terms[recomputed:])
    last = stage == layout.pp - 1
    if last:
        saved += 2 * hidden  # input of the final norm, and of the head
    working = max((sum(sum(layer.values()) for layer in group) for group in groups), default=0)
    working += max((_half_bytes(layer) for layer in terms), default=0)
    working += _dispatch_bytes(model, tokens, layout, passes, layers)
    logits = logits_bytes(model, tokens, layout, passes, gradient=True, entropy=passes.entropy) if last else 0
    return {
        "kept_activations": min(layout.pp - stage, passes.micro_batches) * saved,
        **_larger_term(working, logits),
        "weight_gradient": _weight_gradient_bytes(model, layout, stage, routed, passes),
    }


def forward_bytes(
    model: ModelShape, layout: ParallelLayout, stage: int, tokens: int, passes: Passes, entropy: bool
) -> dict[str, int]:
    """Return {working_activations, logits} of a forward pass; working: half a layer, experts' buffers (upper bound)."""
    layers = layout.stage_layers(stage, model.num_hidden_layers)
    terms = _stage_terms(model, layers, tokens, layout, passes)
    working = max((_half_bytes(layer) for layer in terms), default=0)
    working += _dispatch_bytes(model, tokens, layout, passes, layers)
    last = stage == layout.pp - 1
    logits = logits_bytes(model, tokens, layout, passes, gradient=False, entropy=entropy) if last else 0
    return _larger_term(working, logits)


def engine_bytes(model: ModelShape, rollout: ParallelLayout, tokens: int) -> int:
    """Return the most bytes of a rollout rank's eager batch of `tokens`, counted as a forward pass of Megatron.

    The rows of its experts are balanced, as vllm-ascend draws them in the profile run that sizes the KV cache.
    """
    passes = Passes(tokens, tokens, tokens, 1, imbalance=1.0)
    return sum(forward_bytes(model, rollout, 0, tokens, passes, entropy=False).values())


def graph_bytes(model: ModelShape, rollout: ParallelLayout, batch_sizes: Iterable[int]) -> int:
    """Return the bytes that captured decode graphs keep: of each, a layer's experts and the logits (upper bound).

    MC2 gives a rank room for the tokens of all ranks of its group at min(local experts, top-k) experts
    (torch_npu.npu_moe_distribute_dispatch): rows in and out, gate, up, product. Without MC2 there are fewer.
    """
    size, total = DTYPE_BYTES[model.torch_dtype], 0
    for batch in batch_sizes:
        tokens = -(-batch // rollout.tp)
        rows = rollout.ep * tokens * min(model.n_routed_experts // rollout.ep, model.num_experts_per_tok)
        total += size * rows * (2 * model.hidden_size + 3 * model.moe_intermediate_size)
        total += (4 + size) * batch * -(-model.vocab_size // rollout.tp)
    return total


def _larger_term(working: int, logits: int) -> dict[str, int]:
    return {"working_activations": working if working >= logits else 0, "logits": logits if logits > working else 0}


def logits_bytes(
    model: ModelShape, tokens: int, layout: ParallelLayout, passes: Passes, *, gradient: bool, entropy: bool
) -> int:
    """Return the bytes of the last stage's logits, with the gathered input of the head and the buffers of log-probs.

    Logits of bf16 are converted to fp32 (megatron/core/transformer/module.py, float16_to_fp32): both exist at once, as
    do their gradients, of which with chunks the fp32 one is written over the fp32 logits. The buffers are two chunks
    for each of log-prob and entropy, or without chunks one more fp32 tensor for log-probs, two with entropy.
    """
    size = DTYPE_BYTES[model.torch_dtype]
    values = tokens * -(-model.vocab_size // layout.tp)
    passed = 2 if entropy else 1
    beside = 2 * passed * CHUNK_BYTES if passes.chunked_logits else passed * 4 * values
    both = values * (4 + (size if size < 4 else 0))
    more = 0 if passes.chunked_logits or not gradient or size == 4 else 4 * values  # gradient of the fp32 logits
    return both + beside + more + size * tokens * model.hidden_size


def _stage_terms(
    model: ModelShape, layers: tuple[int, ...], tokens: int, layout: ParallelLayout, passes: Passes
) -> list[dict[str, int]]:
    """Return `layer_terms` of each of `layers`."""
    kinds = {model.is_moe(layer) for layer in layers}
    kind_terms = {moe: layer_terms(model, moe, tokens, layout, passes.imbalance, passes.unpadded) for moe in kinds}
    return [kind_terms[model.is_moe(layer)] for layer in layers]


def _half_bytes(layer: dict[str, int]) -> int:
    """Return the bytes of the larger half of a layer: attention, or MLP."""
    attention = sum(layer[term] for term in _ATTENTION_TERMS)
    return max(attention, sum(layer.values()) - attention)


def _dispatch_bytes(
    model: ModelShape, tokens: int, layout: ParallelLayout, passes: Passes, layers: tuple[int, ...]
) -> int:
    """Return the bytes that the experts' exchange holds on the busiest rank: sent and received rows."""
    if not any(model.is_moe(layer) for layer in layers):
        return 0
    sent = -(-tokens // layout.tp) * model.num_experts_per_tok
    received = math.ceil(sent * layout.etp * passes.imbalance)
    return DTYPE_BYTES[model.torch_dtype] * model.hidden_size * (sent + received)


def _weight_gradient_bytes(model: ModelShape, layout: ParallelLayout, stage: int, routed: int, passes: Passes) -> int:
    """Return the bytes of the largest weight gradient in the model's dtype, before it joins the fp32 gradients."""
    size, hidden = DTYPE_BYTES[model.torch_dtype], model.hidden_size
    moe = any(model.is_moe(layer) for layer in layout.stage_layers(stage, model.num_hidden_layers))
    experts = (
        0 if passes.gemm_gradient_accumulation_fusion or not moe else routed * hidden * 2 * model.moe_intermediate_size
    )
    vocabulary = -(-model.vocab_size // layout.tp) * hidden
    has_head = stage == layout.pp - 1 and not passes.gradient_accumulation_fusion
    outer = vocabulary if stage == 0 or has_head else 0
    return size * max(experts // layout.etp, outer)
