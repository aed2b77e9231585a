"""What `import torch_npu`, `apex`, `acl` and `torchair` give on platform cpu, line a3: one module object each.

Each has the names that MindSpeed, MindSpeed-LLM and verl use; missing.py answers for any other. On platform npu nothing
of this is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from verl_patches.platform.cpu.ascend import attention, elementwise, experts, npu
from verl_patches.platform.cpu.ascend.missing import stand_in
from verl_patches.platform.npu.op_schemas import VERSION, WITH_REFERENCE

# -- torch_npu ---------------------------------------------------------------------------------------------------------


class _Options:
    """Options of an HCCL process group: none, as no group here is HCCL's.

    MindSpeed-LLM asks whether they have hccl_config before it names its groups (its core/parallel_state.py:330).
    """


def get_cann_version() -> str:
    """CANN of the pinned image; MindSpeed's dispatcher takes another path for 8.0.RC2 and older, or unknown ones."""
    return "8.2.RC1"


def analyse(*args: Any, **kwargs: Any) -> None:
    """Refuses: mindspeed/core/auto_parallel imports it while MindSpeed's adaptor is imported, and never gets here."""
    raise RuntimeError("torch_npu.profiler's analyse was called: there is no NPU whose profile could be read")


def _reference(name: str) -> Callable:
    return next(vars(module)[name] for module in (attention, elementwise, experts) if name in vars(module))


torch_npu = stand_in(
    "torch_npu", f"torch_npu {VERSION}: the functions that are called on our paths, as plain-torch references.",
    __version__=VERSION, __file__=__file__,
    **{name: _reference(name) for name in WITH_REFERENCE},
    _C=stand_in("torch_npu._C", "Options of process groups.", _distributed_c10d=SimpleNamespace(
        ProcessGroupHCCL=SimpleNamespace(Options=_Options))),
    contrib=stand_in("torch_npu.contrib", "transfer_to_npu.", transfer_to_npu=stand_in(
        "torch_npu.contrib.transfer_to_npu",
        "Imported to make torch.cuda mean the device: here rows make it mean the CPU, and this changes nothing.")),
    npu=npu,
    profiler=stand_in("torch_npu.profiler", "MindSpeed profiles only when told to (--profile).", profiler=stand_in(
        "torch_npu.profiler.profiler", "Imported by MindSpeed's adaptor.", analyse=analyse)),
    utils=stand_in("torch_npu.utils", "collect_env.", collect_env=stand_in(
        "torch_npu.utils.collect_env", "CANN's version.", get_cann_version=get_cann_version)),
)  # fmt: skip

# -- apex --------------------------------------------------------------------------------------------------------------


class _NotReplaced(torch.optim.Optimizer):
    def __init__(self, *args, **kwargs):
        raise RuntimeError(
            f"apex.optimizers.{type(self).__name__} was built: its kernel needs a device. On line a3 the optimizer is "
            "MindSpeed's AdamW, put here by its adaptor: import mindspeed.megatron_adaptor before megatron"
        )


class FusedAdam(_NotReplaced):
    """Refuses to be built."""


class FusedSGD(_NotReplaced):
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


acl = stand_in(
    "acl",
    "CANN's own package. It has no rt: Ray counts devices through acl.rt, and there are none.",
    get_soc_name=get_soc_name,
)


class Tensor:
    """A node of a graph; none is ever made here."""


class TensorSpec:
    """Shape and dtype of a node; none is ever made here."""


class DataType:
    """Element types of nodes; looked at only while a graph is compiled."""


def register_fx_node_ge_converter(aten_op: Any) -> Callable[[Callable], Callable]:
    """Decorator for what a graph compiler would call; nothing is compiled here, so nothing is kept."""
    return lambda converter: converter


torchair = stand_in(
    "torchair", "Ascend's graph compiler: MindSpeed's op builders register converters while they are built.",
    register_fx_node_ge_converter=register_fx_node_ge_converter,
    ge=stand_in("torchair.ge", "Names in the signatures of converters.", DataType=DataType, Tensor=Tensor,
                TensorSpec=TensorSpec),
)  # fmt: skip
