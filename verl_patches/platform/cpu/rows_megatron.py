"""Rows that let megatron-core 0.12.2 run without Transformer Engine, apex and CUDA, by verl 0.4.0's path."""

from __future__ import annotations

from verl_patches.patching.spec import PatchSpec

_OURS = "verl_patches.platform.cpu.megatron"
_NO_TE = "Transformer Engine for CPU, or verl asks Megatron for its local modules"
_NO_CUDA = "megatron-core asks its tensors for their device"
_DOT = "megatron.core.transformer.dot_product_attention:DotProductAttention"

# id suffix, target, kind, provider, bindings, why, exit
_TABLE = (
    ("local_spec", "megatron.core.models.gpt.gpt_layer_specs:get_gpt_decoder_block_spec", "wrap", "local_block_spec",
     ("verl.models.mcore.model_initializer:get_gpt_decoder_block_spec",),
     "verl always asks for Transformer Engine's modules (verl/models/mcore/model_initializer.py:163)", _NO_TE),
    ("config", "verl.models.mcore.config_converter:_get_base_transformer_config", "wrap",
     "without_transformer_engine", (),
     "verl switches on grouped GEMM, overlapped shared experts and fused kernels "
     "(verl/models/mcore/config_converter.py:77, :235, :237, :262) that Megatron's own modules lack", _NO_TE),
    ("norm", "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__", "wrap", "torch_norm", (),
     "Megatron's own norm refuses sequence parallelism, which verl uses with TP "
     "(megatron/core/transformer/torch_norm.py:32)",
     _NO_TE),
    ("attention_init", f"{_DOT}.__init__", "wrap", "accept_mla_channels", (),
     "MLA names k_channels and v_channels (megatron/core/transformer/multi_latent_attention.py:117), which "
     "DotProductAttention does not take (dot_product_attention.py:36)", _NO_TE),
    ("attention", f"{_DOT}.forward", "replace", "causal_attention", (),
     "DotProductAttention refuses packed sequences, which verl always sends (dot_product_attention.py:109), and "
     "takes v for as wide as k", _NO_TE),
    ("splits_to_cpu", "megatron.core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu", "wrap", "as_if_moved_to_cpu",
     ("megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu",),
     "only tensors of a GPU become the lists of split sizes that all_to_all takes (moe_utils.py:754)", _NO_CUDA),
    ("set_rng_state", "megatron.core.tensor_parallel.random:_set_cuda_rng_state", "replace", "set_rng_state", (),
     "torch queues the call until a device is there (megatron/core/tensor_parallel/random.py:109)", _NO_CUDA),
    ("quantize", "megatron.core.fp8_utils:quantize_param_shard", "wrap", "quantize_nothing",
     ("megatron.core.optimizer.distrib_optimizer:quantize_param_shard",
      "megatron.core.distributed.custom_fsdp.param_and_grad_buffer:quantize_param_shard"),
     "without Transformer Engine the distributed optimizer's step fails even when nothing is fp8 "
     "(fp8_utils.py:302)", _NO_TE),
)  # fmt: skip

ROWS: tuple[PatchSpec, ...] = tuple(
    PatchSpec(
        id=f"platform.megatron_{name}", stage="platform", target=target, kind=kind, provider=f"{_OURS}:{provider}",
        bindings=bindings, why=why, exit=exit, platforms=frozenset({"cpu"}), processes=frozenset({"worker"}),
        lines=frozenset({"pypi"}),
    )
    for name, target, kind, provider, bindings, why, exit in _TABLE
)  # fmt: skip
