"""What `import torch_npu`, `apex`, `acl` and `torchair` give on platform cpu, line a3: one module object each.

Each has the names that MindSpeed, MindSpeed-LLM and verl use. NAMES lists what the pinned sources use where
DeepSeek-V3's training never comes: the name (one that ends with a dot covers all below it), the reason, and the files
that use it, as beginnings of their paths. A test reads the sources and finds every name either in a stand-in, or here
and used in these files only. On platform npu nothing of this is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import torch

from verl_patches.emulation.ascend import attention, ops
from verl_patches.emulation.cpu import torch_on_cpu
from verl_patches.emulation.op_schemas import VERSION, WITH_REFERENCE

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
    "torch_npu.npu_fusion_attention_grad":
        ("context parallelism and ampipe, which the recipe does not set",
         ("mindspeed/core/context_parallel/", "mindspeed/moe/ampipe/")),
    "torch_npu.npu_incre_flash_attention": ("generation with MindSpeed-LLM; here vLLM generates", _KV_CACHE),
    "torch_npu.npu_prompt_flash_attention": ("generation with MindSpeed-LLM; here vLLM generates", _KV_CACHE),
    "torch_npu.npu_scaled_masked_softmax":
        ("a softmax outside of attention (--no-masked-softmax-fusion)", ("mindspeed/core/fusions/fused_softmax.py",)),
    "torch_npu.npu_swiglu_backward": ("use_ascend_mc2 and the fused MLP, which the recipe does not set", _MC2),
    "torch_npu.profiler.": ("profiling of a device (--profile, --auto-parallel)", _PROFILE),
    "torch_npu.unsupported_dtype": ("multi-modal models", ("mindspeed/multi_modal/",)),
    "torch_npu.utils.flops_count.": ("counting of operations on a device (--op-cal-tflops)", _PROFILE),
    "torch_npu.utils.register_asd_hook":
        ("NPU_ASD_ENABLE=1, the device's check for silent errors",
         ("mindspeed/core/fusions/rms_norm.py", "mindspeed_llm/legacy/model/rms_norm.py")),
    "torchair.ge.custom_op": ("called only while a graph is compiled", _BUILDERS),
    "torchair.ge_concrete_graph.": ("torchair of torch_npu before 2.3", _BUILDERS),
}  # fmt: skip


def listed(name: str) -> tuple[str, tuple[str, ...]] | None:
    """(why a dotted name is not there, beginnings of the paths of the files that may use it); None if not in NAMES."""
    parts = name.split(".")
    above = (".".join(parts[:end]) + "." for end in range(len(parts), 0, -1))
    return next((NAMES[key] for key in (name, *above) if key in NAMES), None)


def stand_in(real: str, doc: str, **names: Any) -> ModuleType:
    """A module object that stands for module `real`: it has `names`, modules inside it among them, and no others."""
    module = ModuleType(real, doc)
    vars(module).update(names, __getattr__=refuse_unknown(real))
    return module


def refuse_unknown(real: str) -> Callable[[str], NoReturn]:
    """`__getattr__` of the stand-in for module `real`: AttributeError that says why, or where to add the name."""

    def __getattr__(name: str) -> NoReturn:
        hint = f"nothing was seen to use it. If the pinned package has it and it is needed, add it to {__name__}"
        if entry := listed(f"{real}.{name}"):
            hint = f"not on our paths ({entry[0]})"
        raise AttributeError(f"the stand-in for {real} has no {name!r}: {hint}", name=name)

    return __getattr__


# -- torch_npu.npu, which is torch.npu too: the device is the CPU, as for torch.cuda ----------------------------------


def _current_stream(device: Any = None) -> torch_on_cpu.Stream:
    """The one that `stream` entered, or the default one."""
    entered = torch_on_cpu.current_stream()
    return entered if isinstance(entered, torch_on_cpu.Stream) else _STREAM


def _default_stream(device: Any = None) -> torch_on_cpu.Stream:
    """The one that all work is in at first."""
    return _STREAM


class _Generators:
    """One device, whose random numbers are the CPU's; MindSpeed's index is here torch.device("cpu")."""

    def __getitem__(self, index: Any) -> torch.Generator:
        return torch.default_generator


class _Device:
    """Context manager that chooses a device; there is one."""

    def __init__(self, device: Any):
        self.idx = device

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: Any) -> None:
        pass


def _lazy_call(callable: Callable[[], Any], **kwargs: Any) -> None:
    """torch_npu queues the call until the device is ready; the CPU is always ready, so call now."""
    callable()


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Nothing is compiled, cached or counted."""


def _no_bytes(device: Any = None) -> int:
    """No byte is on a device."""
    return 0


_STREAM = torch_on_cpu.Stream()
_AS_CUDA = """
Event Stream current_device device_count get_device_properties get_rng_state is_available manual_seed mem_get_info
set_device set_rng_state stream synchronize
""".split()
_MEMORY = "memory_allocated max_memory_allocated memory_reserved max_memory_reserved".split()
npu = stand_in(
    "torch_npu.npu", "The device.", FloatTensor=torch.FloatTensor, current_stream=_current_stream,
    default_generators=_Generators(), default_stream=_default_stream, device=_Device, _lazy_call=_lazy_call,
    manual_seed_all=torch_on_cpu.manual_seed, empty_cache=_nothing, reset_max_memory_allocated=_nothing,
    set_compile_mode=_nothing, **{name: getattr(torch_on_cpu, name) for name in _AS_CUDA},
    **dict.fromkeys(_MEMORY, _no_bytes),
)  # fmt: skip

# -- torch_npu ---------------------------------------------------------------------------------------------------------


class _Options:
    """Options of an HCCL process group: none, as no group here is HCCL's.

    MindSpeed-LLM checks whether they have hccl_config before it names its groups (its core/parallel_state.py:330).
    """


def get_cann_version() -> str:
    """CANN of the pinned image; MindSpeed's dispatcher takes another path for 8.0.RC2 and older, or unknown ones."""
    return "8.2.RC1"


def analyse(*args: Any, **kwargs: Any) -> None:
    """Refuses: mindspeed/core/auto_parallel imports it while MindSpeed's adaptor is imported, and never gets here."""
    raise RuntimeError("torch_npu.profiler's analyse was called: there is no NPU whose profile could be read")


_OPS = {**vars(attention), **vars(ops)}
torch_npu = stand_in(
    "torch_npu", f"torch_npu {VERSION}: the functions that are called on our paths, as plain-torch references.",
    __version__=VERSION, __file__=__file__,
    **{name: _OPS[name] for name in WITH_REFERENCE},
    _C=stand_in("torch_npu._C", "Options of process groups.", _distributed_c10d=SimpleNamespace(
        ProcessGroupHCCL=SimpleNamespace(Options=_Options))),
    contrib=stand_in("torch_npu.contrib", "transfer_to_npu.", transfer_to_npu=stand_in(
        "torch_npu.contrib.transfer_to_npu",
        "Imported to make torch.cuda mean the device: here rows make it mean the CPU, and this changes nothing.")),
    npu=npu,
    profiler=stand_in("torch_npu.profiler", "MindSpeed profiles with --profile only.", profiler=stand_in(
        "torch_npu.profiler.profiler", "Imported by MindSpeed's adaptor.", analyse=analyse)),
    utils=stand_in("torch_npu.utils", "collect_env.", collect_env=stand_in(
        "torch_npu.utils.collect_env", "CANN's version.", get_cann_version=get_cann_version)),
)  # fmt: skip

# -- apex --------------------------------------------------------------------------------------------------------------


class FusedAdam(torch.optim.Optimizer):
    """Refuses to be built."""

    def __init__(self, *args, **kwargs):
        raise RuntimeError(
            f"apex.optimizers.{type(self).__name__} was built: its kernel needs a device. On line a3 the optimizer is "
            "MindSpeed's AdamW, put here by its adaptor: import mindspeed.megatron_adaptor before megatron"
        )


class FusedSGD(FusedAdam):
    """Refuses to be built."""


def multi_tensor_applier(op: Any, noop_flag_buffer: Any, tensor_lists: Any, *args: Any) -> Any:
    """Call `op` on all tensors at once, as apex does without its chunks."""
    return op(noop_flag_buffer, tensor_lists, *args)


def fused_rms_norm_affine(*args: Any, **kwargs: Any) -> Any:
    """Refuses: only verl's Llama and Qwen2 call it (verl/models/llama/megatron/layers/parallel_rmsnorm.py:18)."""
    raise RuntimeError(
        "apex's fused_rms_norm_affine was called: its kernel needs a device, and only verl's own Llama and Qwen2 "
        "models use it; on line a3 the model is MindSpeed-LLM's"
    )


apex = stand_in(
    "apex", "Ascend's build of apex: Megatron and verl import it, MindSpeed puts its own functions in these places.",
    multi_tensor_apply=stand_in("apex.multi_tensor_apply", "As apex's.", multi_tensor_applier=multi_tensor_applier),
    normalization=stand_in("apex.normalization", "fused_layer_norm.", fused_layer_norm=stand_in(
        "apex.normalization.fused_layer_norm", "fused_rms_norm_affine.", fused_rms_norm_affine=fused_rms_norm_affine)),
    optimizers=stand_in("apex.optimizers", "MindSpeed's adaptor replaces FusedAdam by its AdamW.", FusedAdam=FusedAdam,
                        FusedSGD=FusedSGD),
)  # fmt: skip

# -- acl and torchair --------------------------------------------------------------------------------------------------


def get_soc_name() -> str:
    """Name of an Atlas A3 die; MindSpeed looks for 910B in it (mindspeed/core/transformer/moe/layers.py:127)."""
    return "Ascend910_9391"


_NO_RT = "CANN's own package. It has no rt: Ray counts devices through acl.rt, and there are none."
acl = stand_in("acl", _NO_RT, get_soc_name=get_soc_name)


# classes in the signatures of converters; none is ever made here
_NODES = {name: type(name, (), {}) for name in ("DataType", "Tensor", "TensorSpec")}


def register_fx_node_ge_converter(aten_op: Any) -> Callable[[Callable], Callable]:
    """Decorator for what a graph compiler would call; nothing is compiled here."""
    return lambda converter: converter


torchair = stand_in(
    "torchair", "Ascend's graph compiler: MindSpeed's op builders register converters while they are built.",
    register_fx_node_ge_converter=register_fx_node_ge_converter,
    ge=stand_in("torchair.ge", "Names in the signatures of converters.", **_NODES),
)  # fmt: skip
