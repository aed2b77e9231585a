"""Rows that let torch.cuda and NCCL code run on a CPU with gloo. Each `why` names the upstream place that needs it."""

from __future__ import annotations

from verl_patches.patching.spec import PatchSpec

_OURS = "verl_patches.platform.cpu.torch_cuda"
_EXIT = "upstream asks torch.accelerator, or a CPU device of its own, instead of torch.cuda"

# id suffix, target, kind, provider, bindings, why
_TABLE = (
    ("is_available", "torch.cuda:is_available", "replace", "is_available", (),
     "verl picks its device by it (verl/utils/device.py:28) and has no CPU path for the Megatron worker"),
    ("device_count", "torch.cuda:device_count", "replace", "device_count", ("torch.cuda.random:device_count",),
     "verl seeds Megatron's random numbers only if there is a device (verl/workers/megatron_workers.py:62)"),
    ("current_device", "torch.cuda:current_device", "replace", "current_device", ("torch.cuda.random:current_device",),
     "Megatron makes and moves tensors there (megatron/core/tensor_parallel/layers.py:234 and 40 more)"),
    ("set_device", "torch.cuda:set_device", "replace", "set_device", (),
     "verl/workers/megatron_workers.py:91, verl/single_controller/base/worker.py:232"),
    ("synchronize", "torch.cuda:synchronize", "replace", "synchronize", (),
     "megatron/core/pipeline_parallel/p2p_communication.py:403 waits for it after every exchange between stages"),
    ("device_properties", "torch.cuda:get_device_properties", "replace", "get_device_properties", (),
     "verl/utils/flops_counter.py:33 looks up peak FLOPS by the device's name; with a CUDA build of torch, vLLM "
     "reads gcnArchName while it is imported"),
    ("mem_get_info", "torch.cuda.memory:mem_get_info", "replace", "mem_get_info", ("torch.cuda:mem_get_info",),
     "verl/utils/debug/performance.py:35 logs it around every phase"),
    ("stream_class", "torch.cuda:Stream", "replace", "Stream", (),
     "megatron/core/transformer/moe/token_dispatcher.py:327 keeps a side stream"),
    ("current_stream", "torch.cuda:current_stream", "replace", "current_stream", (),
     "megatron/core/transformer/moe/token_dispatcher.py:678"),
    ("stream", "torch.cuda:stream", "replace", "stream", (), "megatron/core/transformer/moe/token_dispatcher.py:681"),
    ("get_rng_state", "torch.cuda.random:get_rng_state", "replace", "get_rng_state", ("torch.cuda:get_rng_state",),
     "megatron/core/tensor_parallel/random.py:53 and :194 keep one state per kind of parallelism"),
    ("set_rng_state", "torch.cuda.random:set_rng_state", "replace", "set_rng_state", ("torch.cuda:set_rng_state",),
     "verl/utils/checkpoint/megatron_checkpoint_manager.py:192 restores it"),
    ("manual_seed", "torch.cuda.random:manual_seed", "replace", "manual_seed", ("torch.cuda:manual_seed",),
     "megatron/core/tensor_parallel/random.py:196 makes each state by it; without a device torch only queues the call"),
    ("zeros", "torch:zeros", "wrap", "on_cpu", (),
     'device="cuda" at megatron/core/pipeline_parallel/schedules.py:477'),
    ("tensor", "torch:tensor", "wrap", "on_cpu", (),
     'device="cuda" at megatron/core/optimizer/optimizer.py:776 and clip_grads.py:90'),
    ("tensor_cuda", "torch:Tensor.cuda", "replace", "cuda", (),
     "verl/workers/megatron_workers.py:157 (Module.cuda ends here too) and "
     "megatron/core/pipeline_parallel/schedules.py:765"),
    ("tensor_type", "torch:Tensor.type", "wrap", "type_on_cuda", (),
     "Megatron's optimizers take torch.cuda.FloatTensor and the like only "
     "(megatron/core/optimizer/distrib_optimizer.py:335, :387, optimizer.py:548, clip_grads.py:167)"),
    ("pin_memory", "torch:Tensor.pin_memory", "replace", "pin_memory", (),
     "verl/utils/megatron_utils.py:255 offloads into pinned memory and frees the original: on a CPU both are the "
     "same memory unless pinning copies, and the weights would be lost"),
    ("init_process_group", "torch.distributed.distributed_c10d:init_process_group", "wrap",
     "init_process_group_with_gloo",
     ("torch.distributed:init_process_group", "torch.distributed.device_mesh:init_process_group"),
     'backend="nccl" at verl/workers/megatron_workers.py:90'),
    ("init_device_mesh", "torch.distributed.device_mesh:init_device_mesh", "wrap", "init_device_mesh_on_cpu",
     ("torch.distributed:init_device_mesh", "verl.workers.fsdp_workers:init_device_mesh",
      "verl.workers.rollout.sglang_rollout.sglang_rollout:init_device_mesh",
      "verl.workers.rollout.sglang_rollout.async_sglang_rollout:init_device_mesh@a3",
      "verl.trainer.fsdp_sft_trainer:init_device_mesh"),
     'a "cuda" mesh at verl/workers/megatron_workers.py:228'),
    ("optimizer_health", "torch.optim:Optimizer._accelerator_graph_capture_health_check", "replace",
     "skip_health_check", (),
     "with a CUDA build of torch it asks the driver, which is not there, at every step"),
)  # fmt: skip

_NOT_A3 = {"tensor_type"}  # MindSpeed stands there itself: rows_npu.py

ROWS: tuple[PatchSpec, ...] = tuple(
    PatchSpec(
        id=f"platform.torch_{name}", stage="platform", target=target, kind=kind, provider=f"{_OURS}:{provider}",
        bindings=bindings, why=why, exit=_EXIT, platforms=frozenset({"cpu"}),
        lines=frozenset({"pypi"} if name in _NOT_A3 else {"pypi", "a3"}),
    )
    for name, target, kind, provider, bindings, why in _TABLE
)  # fmt: skip
