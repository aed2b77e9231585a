"""Compute the FLOPs of DeepSeek-V3 from token counts, and the model FLOPs of a GRPO step (for MFU). No torch.

plan/step_model.py uses these formulas for seconds, trainer/step_record.py for MFU.

    forward of a token    2 FLOPs for each parameter that it passes (top-k of the routed experts, the head, but not
                          the embedding), and 2 for each product of causal attention: a sequence of L tokens has
                          L^2/2 pairs, each with qk + v products a head and layer
    backward              2 x forward
    model FLOPs of a step (passes) x forward of all tokens of all sequences, prompts and responses, without padding

Passes that count, each once however a run computes it: 1 for the rollout (prefill and decode), 1 for the reference
where there is one, 1 for old log-probs where the update cannot take its own (several mini batches or epochs, or KL in
the reward), 3 for each epoch of the update. Not counted, as in PaLM's MFU (Chowdhery et al. 2022, appendix B):
recomputed layers, padding, absorbed projections of MLA's decode, the exchange of experts, and passes that only check
or record. So MFU rises only where a run avoids needless work.

MFU = model FLOPs / (seconds x ranks x peak FLOP/s of a die in bf16).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from verl_patches.layout.inventory import ModelShape, Parameter, build_inventory
from verl_patches.layout.sharding import AXES, LIBRARIES

# dense FLOP/s in bf16 of one device, by platform: an Atlas A3 die, half of an Ascend 910C, as the step model takes it
PEAK_FLOPS_PER_S = {"npu": 353.9e12}


class LayerSizes(NamedTuple):
    """Count the elements of a layer: split under TP, whole on each rank, in one routed and in all shared experts."""

    split: int
    whole: int
    expert: int
    shared: int

    @property
    def dense(self) -> int:
        """Return the number of elements outside of routed experts."""
        return self.split + self.whole + self.shared

    def active(self, top_k: int) -> int:
        """Return the number of elements that a token passes."""
        return self.dense + top_k * self.expert


@functools.lru_cache(256)
def layer_sizes(model: ModelShape, moe: bool, library: str) -> LayerSizes:
    """Return the sizes of a dense or MoE layer in a library of layout/sharding.py, from the inventory of one layer."""
    first = 0 if moe else 1
    one = replace(model, num_hidden_layers=1, first_k_dense_replace=first, n_routed_experts=1, num_experts_per_tok=1)
    inventory, rule = build_inventory(one), LIBRARIES[library]
    router = {"router": model.n_routed_experts}  # the model has a row of it for each expert, `one` a single row

    def count(parameters: tuple[Parameter, ...]) -> int:
        return sum(p.count * router.get(p.kind, 1) for p in parameters)

    held = inventory.layers[0]
    shared = tuple(p for p in held if p.part == "shared_expert")
    rest = [p for p in held if p.part != "shared_expert" and p.trainable]
    split = tuple(p for p in rest if AXES[p.kind] is not None and p.kind not in rule.whole)
    whole = tuple(p for p in rest if p not in split)
    expert = count(inventory.experts[0][0]) if moe else 0
    return LayerSizes(count(split), count(whole), expert, count(shared))


@functools.lru_cache(256)
def layer_kinds(model: ModelShape) -> tuple[tuple[bool, int], ...]:
    """Return ((False, number of dense layers), (True, number of MoE layers))."""
    moe = sum(map(model.is_moe, range(model.num_hidden_layers)))
    return (False, model.num_hidden_layers - moe), (True, moe)


def balanced_layers(model: ModelShape, stages: int) -> list[int]:
    """Return layers of each pipeline stage that make the slowest as fast as possible; each stage has an MoE layer.

    The first stage has all dense layers, the last one the head. A model needs as many MoE layers as there are stages.
    """
    active = layer_sizes(model, True, "vllm").active(model.num_experts_per_tok)
    counts = [model.first_k_dense_replace + 1] + [1] * (stages - 1)
    loads = [float(count) for count in counts]
    loads[-1] += model.vocab_size * model.hidden_size / active
    for _ in range(model.num_hidden_layers - sum(counts)):
        stage = min(range(stages), key=lambda s: (loads[s], s))
        loads[stage] += 1
        counts[stage] += 1
    return counts


def layer_flops(model: ModelShape, moe: bool, tokens: float, length: float) -> float:
    """Return the FLOPs of a forward pass of one layer over `tokens` of sequences of `length` tokens."""
    active = layer_sizes(model, moe, "vllm").active(model.num_experts_per_tok if moe else 0)
    width = model.qk_nope_head_dim + model.qk_rope_head_dim + model.v_head_dim
    # causal attention scores and weighted values are over half of the square
    return 2 * active * tokens + tokens * length * model.num_attention_heads * width


def forward_flops(model: ModelShape, tokens: float, length: float) -> float:
    """Return the FLOPs of a forward pass of the layers and the head over `tokens` of sequences of `length` tokens."""
    layers = sum(count * layer_flops(model, moe, tokens, length) for moe, count in layer_kinds(model))
    return 2 * model.vocab_size * model.hidden_size * tokens + layers


def batch_forward_flops(model: ModelShape, lengths: Sequence[int]) -> float:
    """Return the FLOPs of a forward pass over sequences of these lengths, whose squares count for attention."""
    tokens = sum(lengths)
    if not tokens:
        return 0.0
    return forward_flops(model, tokens, sum(length * length for length in lengths) / tokens)


def passes(
    *, rollout: bool, ref: bool, old_log_prob: bool, epochs: int, critic_epochs: int = 0, scores: int = 0
) -> dict[str, int]:
    """Return {phase: number of forward passes that its model FLOPs equal}, without phases that do not count.

    `rollout`: responses are sampled, not replayed; `ref`: there is a reference; `old_log_prob`: the update cannot take
    its own log-probs as old ones; `critic_epochs`: epochs of a critic's update, 0 without one; `scores`: number of
    reward models. A value model's head counts as if it were the vocabulary's.
    """
    counts = {
        "rollout": int(rollout),
        "log_prob": int(old_log_prob),
        "ref": int(ref),
        "update": 3 * epochs,
        "reward": scores,
    }
    counts |= {"values": int(critic_epochs > 0), "update_critic": 3 * critic_epochs}
    return {phase: count for phase, count in counts.items() if count}
