"""The torch_npu functions whose schemas are kept: all that MindSpeed, MindSpeed-LLM and vllm-ascend call at the pins.

ATB's functions (torch_npu._npu_flash_attention and the like) are declared elsewhere than in the wheel's yaml.
"""

WITH_REFERENCE = (
    "npu_apply_adam_w",
    "npu_confusion_transpose",
    "npu_dtype_cast",
    "npu_format_cast",
    "npu_fusion_attention",
    "npu_fusion_attention_grad",
    "npu_grouped_matmul",
    "npu_moe_gating_top_k",
    "npu_moe_gating_top_k_softmax",
    "npu_moe_token_permute",
    "npu_moe_token_unpermute",
    "npu_rms_norm",
    "npu_rotary_mul",
    "npu_scaled_masked_softmax",
    "npu_swiglu",
    "npu_swiglu_backward",
)
# called by vllm-ascend, which runs on devices only, or by what is listed in platform/cpu/ascend/not_on_our_paths.py
WITHOUT_REFERENCE = (
    "npu_add_rms_norm",
    "npu_all_gather_base_mm",
    "npu_convert_weight_to_int4pack",
    "npu_dequant_swiglu_quant",
    "npu_dynamic_quant",
    "npu_fast_gelu",
    "npu_fused_infer_attention_score",
    "npu_incre_flash_attention",
    "npu_interleave_rope",
    "npu_kv_rmsnorm_rope_cache",
    "npu_mm_reduce_scatter_base",
    "npu_moe_compute_expert_tokens",
    "npu_moe_distribute_combine",
    "npu_moe_distribute_dispatch",
    "npu_moe_finalize_routing",
    "npu_moe_init_routing",
    "npu_prompt_flash_attention",
    "npu_quant_matmul",
    "npu_quantize",
    "npu_weight_quant_batchmatmul",
)
FUNCTIONS = tuple(sorted((*WITH_REFERENCE, *WITHOUT_REFERENCE)))
