"""Compute yarn's frequencies and scales by each library, for test_family.py.

A case is (rotary dimensions of a head, rope_theta, rope_scaling). Each function returns of each case (frequencies,
scale of the rotated part, scale of the softmax).
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from verl_patches.layout.parallel import ParallelLayout

Case = tuple[int, float, dict]


def by_megatron(cases: list[Case]) -> list[tuple]:
    from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding as module

    from tests.model.megatron_model import start_parallel

    start_parallel(ParallelLayout(1))
    found = []
    for dim, base, yarn in cases:
        options = {key: value for key, value in yarn.items() if key not in ("factor", "type")}
        made = module.YarnRotaryEmbedding(dim, rotary_base=base, scaling_factor=yarn["factor"], **options)
        angles, scale = made(2)
        softmax = module._yarn_get_mscale(yarn["factor"], yarn["mscale"])
        found.append((angles[1, 0, 0, : dim // 2], scale, softmax))
    return found


def by_mindspeed(folder, config, cases: list[Case], args) -> list[tuple]:
    from mindspeed_llm.core.models.common.embeddings import rotary_pos_embedding as module

    found = []
    for dim, base, yarn in cases:
        vars(args).update({f"rope_scaling_{key}": value for key, value in yarn.items()})
        args.qk_rope_head_dim, args.rotary_base = dim, base
        scale, softmax = (module.yarn_get_mscale(yarn["factor"], yarn[key]) for key in ("mscale", "mscale_all_dim"))
        found.append((module.apply_yarn_scaling(torch.empty(0)), scale / softmax, softmax))
    return found


def by_vllm(cases: list[Case]) -> list[tuple]:
    from vllm.model_executor.layers import rotary_embedding as module

    found = []
    for dim, base, yarn in cases:
        fields = {"rotary_dim": dim, "base": base, "extrapolation_factor": 1, **yarn}  # an instance needs an engine
        fields["max_position_embeddings"] = yarn["original_max_position_embeddings"]
        compute = module.DeepseekScalingRotaryEmbedding._compute_inv_freq
        scale, softmax = (module.yarn_get_mscale(yarn["factor"], yarn[key]) for key in ("mscale", "mscale_all_dim"))
        found.append((compute(SimpleNamespace(**fields), yarn["factor"]), scale / softmax, softmax))
    return found
