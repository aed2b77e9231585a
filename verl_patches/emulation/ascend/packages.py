"""Build the stand-in modules for torch_npu, apex, acl and torchair on platform cpu, line a3.

Each has the names that MindSpeed, MindSpeed-LLM and verl use to train DeepSeek-V3; another name raises an error that
says where to add it. Platform npu installs none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import torch

from verl_patches.emulation.cpu import torch_on_cpu
from verl_patches.emulation.op_schemas import TORCH_NPU_VERSION, TRAINING_FUNCTIONS, torch_npu_op
from verl_patches.reference import attention, experts, layers


def stand_in(real: str, doc: str | None, **names: Any) -> ModuleType:
    """Return a module object in place of module `real`: it has `names`, submodules included, and no others."""
    module = ModuleType(real, doc)
    vars(module).update(names, __getattr__=refuse_unknown_names(real))
    return module


def refuse_unknown_names(real: str) -> Callable[[str], NoReturn]:
    """Return `__getattr__` of the stand-in for module `real`, which raises an error that says where to add the name."""

    def __getattr__(name: str) -> NoReturn:
        hint = f"if the pinned package has it and training needs it, add it to {__name__}"
        raise AttributeError(f"stand-in module {real} has no attribute {name!r}; {hint}", name=name)

    return __getattr__


# -- torch_npu.npu, which is torch.npu too: the device is the CPU, as for torch.cuda ----------------------------------


def _current_stream(device: Any = None) -> torch_on_cpu.Stream:
    """Return the stream that `stream` entered, or the default one."""
    entered = torch_on_cpu.current_stream()
    return entered if isinstance(entered, torch_on_cpu.Stream) else _STREAM


def _default_stream(device: Any = None) -> torch_on_cpu.Stream:
    """Return the stream in which all work starts."""
    return _STREAM


class _Generators:
    """Return the CPU's generator for every device index; MindSpeed's index is torch.device("cpu") here."""

    def __getitem__(self, index: Any) -> torch.Generator:
        return torch.default_generator


class _Device:
    """Choose a device in a `with` block; there is only one."""

    def __init__(self, device: Any):
        self.idx = device

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: Any) -> None:
        pass


def _lazy_call(callable: Callable[[], Any], **kwargs: Any) -> None:
    """Call at once: torch_npu queues the call until the device is ready, and the CPU always is."""
    callable()


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing: nothing is compiled, cached or counted here."""


def _no_bytes(device: Any = None) -> int:
    """Return 0: no byte is on a device."""
    return 0


_STREAM = torch_on_cpu.Stream()
_CUDA_NAMES = """
Event Stream current_device device_count get_device_properties get_rng_state is_available manual_seed mem_get_info
set_device set_rng_state stream synchronize
""".split()
_MEMORY_NAMES = "memory_allocated max_memory_allocated memory_reserved max_memory_reserved".split()
npu = stand_in(
    "torch_npu.npu", "The device.", FloatTensor=torch.FloatTensor, current_stream=_current_stream,
    default_generators=_Generators(), default_stream=_default_stream, device=_Device, _lazy_call=_lazy_call,
    manual_seed_all=torch_on_cpu.manual_seed, empty_cache=_do_nothing, reset_max_memory_allocated=_do_nothing,
    set_compile_mode=_do_nothing, **{name: getattr(torch_on_cpu, name) for name in _CUDA_NAMES},
    **dict.fromkeys(_MEMORY_NAMES, _no_bytes),
)  # fmt: skip

# -- torch_npu ---------------------------------------------------------------------------------------------------------


class _Options:
    """Hold no options of an HCCL process group, as no group here is HCCL's.

    mindspeed_llm.core.parallel_state.get_nccl_options_wrapper names groups only if their options have hccl_config.
    """


def get_cann_version() -> str:
    """Return the pinned image's CANN version; for 8.0.RC2, older or unknown ones MindSpeed's dispatcher differs."""
    return "8.2.RC1"


def analyse(*args: Any, **kwargs: Any) -> None:
    """Refuse to run: mindspeed/core/auto_parallel only imports this while MindSpeed's adaptor is imported."""
    raise RuntimeError("torch_npu.profiler.profiler.analyse needs an NPU, found platform cpu; do not call it")


_REFERENCES = {**vars(attention), **vars(experts), **vars(layers)}
torch_npu = stand_in(
    "torch_npu", f"torch_npu {TORCH_NPU_VERSION}: functions that are called on our paths, as plain-torch references.",
    __version__=TORCH_NPU_VERSION, __file__=__file__,
    **{name: torch_npu_op(_REFERENCES[name]) for name in TRAINING_FUNCTIONS},
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
    """Refuse to be built, as apex's kernel needs a device."""

    def __init__(self, *args, **kwargs):
        raise RuntimeError(
            f"apex.optimizers.{type(self).__name__} needs a device, found platform cpu. On line a3 MindSpeed's adaptor "
            "replaces it by MindSpeed's AdamW; import mindspeed.megatron_adaptor before megatron"
        )


class FusedSGD(FusedAdam):
    """Refuse to be built, as apex's kernel needs a device."""


def multi_tensor_applier(op: Any, noop_flag_buffer: Any, tensor_lists: Any, *args: Any) -> Any:
    """Call `op` on all tensors at once, as apex does without its chunks."""
    return op(noop_flag_buffer, tensor_lists, *args)


def fused_rms_norm_affine(*args: Any, **kwargs: Any) -> Any:
    """Refuse the call: only verl's Llama and Qwen2 make it (verl.models.llama.megatron.layers.parallel_rmsnorm)."""
    raise RuntimeError(
        "apex.normalization.fused_layer_norm.fused_rms_norm_affine needs a device, found platform cpu; only verl's "
        "Llama and Qwen2 models call it, so use MindSpeed-LLM's model on line a3"
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
    """Return the name of an Atlas A3 die, in which mindspeed.core.transformer.moe.layers looks for 910B."""
    return "Ascend910_9391"


_ACL_DOC = "CANN's own package. It has no rt: Ray counts devices through acl.rt, and there are none."
acl = stand_in("acl", _ACL_DOC, get_soc_name=get_soc_name)


# Classes in the signatures of converters; no object of them is made here.
_GE_CLASSES = {name: type(name, (), {}) for name in ("DataType", "Tensor", "TensorSpec")}


def register_fx_node_ge_converter(aten_op: Any) -> Callable[[Callable], Callable]:
    """Return a decorator that leaves a converter unregistered, as nothing is compiled here."""
    return lambda converter: converter


torchair = stand_in(
    "torchair", "Ascend's graph compiler: MindSpeed's op builders register converters while they are built.",
    register_fx_node_ge_converter=register_fx_node_ge_converter,
    ge=stand_in("torchair.ge", "Names in the signatures of converters.", **_GE_CLASSES),
)  # fmt: skip
