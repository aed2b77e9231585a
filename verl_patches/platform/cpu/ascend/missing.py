"""Stand-in modules, and what the names that they lack are answered with.

NAMES and BUILDERS list what the pinned sources use where DeepSeek-V3's training never comes. An entry of NAMES: the
name (one that ends with a dot covers all below it), the reason, and the files that use it, as beginnings of their
paths. A test reads the sources and finds every name either in a stand-in, or here and used in these files only. Op
builders are listed by class.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

_FOLDER = "verl_patches/platform/cpu/ascend"


def stand_in(real: str, doc: str, **names: Any) -> ModuleType:
    """A module object that stands for module `real`: it has `names`, modules inside it among them, and no others."""
    module = ModuleType(real, doc)
    vars(module).update(names, __getattr__=refuse_unknown(real, "packages.py"))
    return module


def refuse_unknown(real: str, file: str) -> Callable[[str], NoReturn]:
    """`__getattr__` of the stand-in for module `real`: AttributeError that says why, or in which file to add it."""

    def __getattr__(name: str) -> NoReturn:
        why = reason(f"{real}.{name}")
        hint = f"not on our paths ({why})"
        if why is None:
            hint = (
                f"nothing was seen to use it. If the pinned package has it and it is needed, add it to {_FOLDER}/{file}"
            )
        raise AttributeError(f"the stand-in for {real} has no {name!r}: {hint}", name=name)

    return __getattr__


_ADAPTIVE = ("mindspeed/core/memory/adaptive_", "mindspeed/core/memory/auto_pipeline/", "mindspeed/auto_tuning/")
_OWN_ALLOCATOR = ("mindspeed/core/memory/", "mindspeed/ops/csrc/pluggable_allocator/")
_MC2 = (
    "mindspeed/core/tensor_parallel/", "mindspeed_llm/tasks/models/transformer/fast_mlp.py",
    "mindspeed_llm/tasks/posttrain/lora/",
)  # fmt: skip
_KV_CACHE = ("mindspeed_llm/core/transformer/dot_product_attention.py", "mindspeed_llm/legacy/model/transformer.py")
_PROFILE = ("mindspeed/core/training.py", "mindspeed_llm/training/training.py", "mindspeed/core/auto_parallel/")
_BUILDERS = ("mindspeed/op_builder/",)

NAMES: dict[str, tuple[str, tuple[str, ...]]] = {
    "acl.rt.": ("automatic tuning and adaptive recompute, which the recipe does not set", _ADAPTIVE),
    "apex.contrib.": ("Megatron does without it where it cannot be imported", ("megatron/",)),
    "apex.normalization.fused_layer_norm.FusedLayerNormAffineFunction":
        ("MindSpeed's adaptor puts its own into Megatron; DeepSeek-V3 has RMS norms", ("megatron/",)),
    "apex.normalization.fused_layer_norm.fused_layer_norm_affine":
        ("Megatron's legacy models only; DeepSeek-V3 has RMS norms", ("megatron/legacy/",)),
    "apex.parallel.": ("Megatron's legacy vision models", ("megatron/legacy/vision/", "megatron/legacy/model/vision/")),
    "apex.transformer.": ("Megatron does without it where it cannot be imported", ("megatron/core/",)),
    "torch_npu.npu.init": ("adaptive recompute, which the recipe does not set", _ADAPTIVE),
    "torch_npu.npu.memory.": ("MindSpeed's own memory allocators, which the recipe does not set", _OWN_ALLOCATOR),
    "torch_npu.npu.memory_stats": ("adaptive recompute and memory, which the recipe does not set", _ADAPTIVE),
    "torch_npu.npu.set_option": ("smart swap, which the recipe does not set", ("mindspeed/core/memory/smart_swap/",)),
    "torch_npu.npu.set_per_process_memory_fraction":
        ("a test of MindSpeed's", ("mindspeed/ops/csrc/pluggable_allocator/",)),
    "torch_npu.npu_all_gather_base_mm": ("use_ascend_mc2 and the fused MLP, which the recipe does not set", _MC2),
    "torch_npu.npu_mm_reduce_scatter_base": ("use_ascend_mc2 and the fused MLP, which the recipe does not set", _MC2),
    "torch_npu.npu_incre_flash_attention": ("generation with MindSpeed-LLM; here vLLM generates", _KV_CACHE),
    "torch_npu.npu_prompt_flash_attention": ("generation with MindSpeed-LLM; here vLLM generates", _KV_CACHE),
    "torch_npu.profiler.": ("profiling of a device (--profile, --auto-parallel)", _PROFILE),
    "torch_npu.unsupported_dtype": ("multi-modal models", ("mindspeed/multi_modal/",)),
    "torch_npu.utils.flops_count.": ("counting of operations on a device (--op-cal-tflops)", _PROFILE),
    "torch_npu.utils.register_asd_hook":
        ("NPU_ASD_ENABLE=1, the device's check for silent errors",
         ("mindspeed/core/fusions/rms_norm.py", "mindspeed_llm/legacy/model/rms_norm.py")),
    "torchair.ge.custom_op": ("called only while a graph is compiled", _BUILDERS),
    "torchair.ge_concrete_graph.": ("torchair of torch_npu before 2.3", _BUILDERS),
}  # fmt: skip

BUILDERS: dict[str, str] = {
    "AdaptiveCpOpBuilder": "adaptive context parallelism with masks (--context-parallel-algo adaptive_cp_algo)",
    "AdaptiveRecomputingPluggableAllocatorBuilder": "adaptive recompute",
    "AlgorithmOpBuilder": "--reuse-fp32-param, which shares memory between bf16 and fp32 parameters",
    "AllToAllAllGatherBatchMatMulOpBuilder": "--moe-bmm-mc2",
    "BatchMatMulReduceScatterAlltoAllOpBuilder": "--moe-bmm-mc2",
    "FFNOpBuilder": "a fused FFN that no module of the two calls",
    "FusedEmaAdamWOpBuilder": "--optimizer-selection fused_ema_adamw",
    "GroupedMatMulAllReduceOpBuilder": "a fused product and all-reduce that no module of the two calls",
    "InplaceMatmulAllReduceAddRmsNormOpBuilder": "inference",
    "LcalOpBuilder": "--use-ascend-coc",
    "MatmulAllReduceAddRmsNormOpBuilder": "inference",
    "MemoryFragmentationBuilder": "--memory-fragmentation",
    "NpuDropoutAddLayerNormOpBuilder": "a fused dropout and norm that no module of the two calls",
    "QuantGMMOpBuilder": "quantised experts",
    "SmartSwapBuilder": "--smart-swap",
    "WeightQuantGMMOpBuilder": "quantised experts",
}


def reason(name: str) -> str | None:
    """Why a dotted name is not there, or None."""
    entry = _entry(name)
    return entry and entry[0]


def users(name: str) -> tuple[str, ...]:
    """Beginnings of the paths of the files that may use it."""
    entry = _entry(name)
    return entry[1] if entry else ()


def _entry(name: str) -> tuple[str, tuple[str, ...]] | None:
    parts = name.split(".")
    above = (".".join(parts[:end]) + "." for end in range(len(parts), 0, -1))
    return next((NAMES[key] for key in (name, *above) if key in NAMES), None)
