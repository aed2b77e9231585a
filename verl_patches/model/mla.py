"""Multi-latent attention under tensor parallelism: the gradient of the rotary key, summed over all heads."""

from __future__ import annotations

import functools

from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)

from verl_patches.errors import ConfigError


def sum_k_pe_grad(original_init):
    """Row provider for `MLASelfAttention.__init__`: hand the attention a key/value latent that is already whole.

    The rotary key is one head that all heads share. megatron-core 0.12.2 (multi_latent_attention.py, and verl's copy
    in patch_v012.py) gathers the latent it sits in with an operator whose backward only splits, so each TP rank keeps
    its own heads' share of that gradient. Upstream has a second branch, for a down projection that is not split:
    there the rotary key is gathered over the sequence, with a backward that sums. A forward hook on the down
    projection returns the latent as that branch wants it, [S/tp, B, kv_lora_rank + qk_pos_emb_head_dim]; both
    upstream versions then take it. The branch exists for sequence parallelism only: ConfigError where TP is used
    without it.
    """

    @functools.wraps(original_init)
    def __init__(self, config, *args, **kwargs):
        original_init(self, config, *args, **kwargs)
        tp = parallel_state.get_tensor_model_parallel_world_size()
        if tp == 1:
            return
        if not config.sequence_parallel:
            raise ConfigError(
                f"multi-latent attention at tensor_model_parallel_size={tp} needs sequence_parallel=True "
                "(found False): without it megatron-core loses part of the rotary key's gradient. "
                "Set it, or switch the row off with -model.mla_k_pe_grad"
            )
        width = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj.register_forward_hook(functools.partial(_whole_latent, width))

    return __init__


def _whole_latent(width, module, inputs, output):
    latent, bias = output
    if latent.size(-1) == width:
        return output
    return scatter_to_sequence_parallel_region(gather_from_tensor_model_parallel_region(latent)), bias
