"""Configure DeepSeek-V3 on megatron-core 0.12.2, and correct its optimizer's dtype and MLA's rotary-key gradient.

verl 0.4.0's `verl.models.mcore.config_converter.hf_to_mcore_config_dpskv3` converts MLA and yarn correctly, but drops
group-limited routing and assumes certain values of HF keys, which Megatron's modules have built in. These are checked
here: a model with other values would run and be wrong.

verl and Megatron are imported inside functions, because both may be half imported when a patch is applied.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from verl_patches.errors import ConfigError
from verl_patches.layout.model_folder import config_mismatches, edit_for_training

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def deepseekv3_config(hf_config, dtype: torch.dtype, **overrides: Any):
    """Return the MLATransformerConfig of a DeepSeek-V3 HF config, for parameters of `dtype`.

    `overrides` are fields of MLATransformerConfig and replace what is set here. Unlike verl's converter this one sets
    group-limited routing, computes the router in fp32 instead of fp64 (as the model was trained, and NPUs have no
    fp64), and switches balancing off: no auxiliary loss, and a correction bias that training does not change (both
    would change the model by something that is not the RL loss). Removes fp8 and MTP entries from `hf_config` in place
    (layout/model_folder.py). Raises ConfigError where the HF config is not what verl's converter assumes.
    """
    from verl.models.mcore.config_converter import hf_to_mcore_config_dpskv3

    edit_for_training(hf_config)
    check_hf_config(hf_config)
    defaults: dict[str, Any] = {
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_bias_update_rate": 0.0,
    }
    if (getattr(hf_config, "n_group", None) or 1) > 1:
        defaults["moe_router_num_groups"] = hf_config.n_group
        defaults["moe_router_group_topk"] = hf_config.topk_group
    return hf_to_mcore_config_dpskv3(hf_config, dtype, **{**defaults, **overrides})


def check_hf_config(hf_config) -> None:
    """Refuse an `hf_config` that verl's converter and Megatron would not compute as DeepSeek-V3, with ConfigError."""
    if fault := config_mismatches(hf_config.to_dict()):
        raise ConfigError(f"HF config: {fault}: Megatron would compute a different model")
    if getattr(hf_config, "moe_layer_freq", 1) != 1:
        raise ConfigError(f"HF config: moe_layer_freq is {hf_config.moe_layer_freq}, expected 1 on Megatron")
    groups, topk_group = getattr(hf_config, "n_group", None) or 1, getattr(hf_config, "topk_group", None) or 1
    if groups > 1 and hf_config.num_experts_per_tok != 2 * topk_group:
        raise ConfigError(
            "HF config: num_experts_per_tok must be 2 * topk_group, "
            f"found {hf_config.num_experts_per_tok} and topk_group {topk_group}: Megatron scores a group of experts by "
            "its best num_experts_per_tok // topk_group, transformers and vLLM by its best 2"
        )
    yarn = getattr(hf_config, "rope_scaling", None)
    if not yarn:
        return
    if yarn.get("type") != "yarn":  # verl reads only "type" and would silently use plain rope
        raise ConfigError(f'HF config: rope_scaling must hold "type": "yarn", found {yarn}')
    if yarn.get("mscale") is None or yarn["mscale"] != yarn.get("mscale_all_dim"):
        raise ConfigError(
            "HF config: rope_scaling.mscale and mscale_all_dim must be given and equal, "
            f"found {yarn.get('mscale')} and {yarn.get('mscale_all_dim')}: "
            "Megatron scales the softmax by mscale, transformers and vLLM by mscale_all_dim"
        )


def converters() -> dict[Any, Any]:
    """Return DeepSeek-V3's entry for verl's MODEL_CONFIG_CONVERTER_REGISTRY."""
    from verl.models.mcore.registry import SupportedModel

    return {SupportedModel.DEEPSEEK_V3: deepseekv3_config}


def optimizer_in_model_dtype(get_megatron_optimizer):
    """Wrap verl's `get_megatron_optimizer` so that only a bf16 model gets a bf16 optimizer.

    verl 0.4.0's optimizer config sets bf16 for every model (verl.utils.megatron_utils.init_megatron_optim_config).
    """

    @functools.wraps(get_megatron_optimizer)
    def get(model, config, *args, **kwargs):
        transformer_config = model[0].config
        if not transformer_config.bf16:
            config.bf16 = False
            config.params_dtype = transformer_config.params_dtype
        return get_megatron_optimizer(model, config, *args, **kwargs)

    return get


def sum_k_pe_grad(original_init):
    """Wrap `MLASelfAttention.__init__` so that the rotary key's gradient is summed over TP ranks.

    All heads share the rotary key, which is one head. megatron-core 0.12.2 (multi_latent_attention.py, and verl's copy
    in patch_v012.py) gathers the key/value latent that contains it with an operator whose backward only splits, so each
    TP rank has only its own heads' share of that gradient. Upstream has a second branch, for a down projection that is
    not split: there the rotary key is gathered over the sequence, with a backward that sums. A forward hook on the down
    projection returns the latent as that branch expects it, [S/tp, B, kv_lora_rank + qk_pos_emb_head_dim]; both
    upstream versions then use the branch. It exists for sequence parallelism only: TP without it raises ConfigError.
    """

    @functools.wraps(original_init)
    def __init__(self, config, *args, **kwargs):
        from megatron.core import parallel_state

        original_init(self, config, *args, **kwargs)
        tp = parallel_state.get_tensor_model_parallel_world_size()
        if tp == 1:
            return
        if not config.sequence_parallel:
            raise ConfigError(
                f"multi-latent attention at tensor_model_parallel_size={tp} needs sequence_parallel=True "
                "(found False): without it megatron-core loses part of the rotary key's gradient. "
                "Set it, or switch this correction off: recipe.patches=[-model.mla_k_pe_grad]"
            )
        width = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj.register_forward_hook(functools.partial(_whole_latent, width))

    return __init__


def _whole_latent(width, module, inputs, output):
    from megatron.core.tensor_parallel import mappings

    latent, bias = output
    if latent.size(-1) == width:
        return output
    whole = mappings.gather_from_tensor_model_parallel_region(latent)
    return mappings.scatter_to_sequence_parallel_region(whole), bias
