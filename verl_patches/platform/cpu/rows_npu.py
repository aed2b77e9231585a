"""Rows that let line a3's Python run on a CPU: stand-ins for torch_npu, apex, acl, torchair and compiled op builders.

Each stand-in module lies in `ascend/`, under the name that upstream imports.
"""

from __future__ import annotations

from verl_patches.patching.spec import PatchSpec

_HERE = "verl_patches.platform.cpu"
_NO_CPU = "torch_npu, apex and CANN for a machine without an NPU"
_NO_BUILD = "MindSpeed's op builders have a version in plain torch"

# module -> why it must be importable
_MODULES = {
    "torch_npu": "MindSpeed and MindSpeed-LLM import it in 80 modules (mindspeed/op_builder/builder.py:7)",
    "torch_npu.npu": "mindspeed/core/tensor_parallel/random.py:6 imports from it",
    "torch_npu.contrib": "mindspeed/megatron_adaptor.py:10 imports transfer_to_npu from it",
    "torch_npu.contrib.transfer_to_npu": "mindspeed/megatron_adaptor.py:10, mindspeed_llm/tasks/megatron_adaptor.py:22",
    "torch_npu.utils": "its collect_env is imported",
    "torch_npu.utils.collect_env": "mindspeed/core/transformer/moe/token_dispatcher.py:4 asks for CANN's version",
    "torch_npu.profiler": "the next is in it",
    "torch_npu.profiler.profiler": "the adaptor imports mindspeed/core/auto_parallel/auto_parallel_profiling.py (:32)",
    "apex": "megatron/core/models/gpt/gpt_layer_specs.py:30 chooses its norm by it",
    "apex.optimizers": "megatron/core/optimizer/__init__.py:12, mindspeed_llm/core/optimizer/__init__.py:9",
    "apex.multi_tensor_apply": "megatron/core/optimizer/optimizer.py:18, mindspeed_llm/core/optimizer/clip_grads.py:11",
    "apex.normalization": "MindSpeed's adaptor puts its layer norm into fused_layer_norm of it",
    "apex.normalization.fused_layer_norm": "verl/models/llama/megatron/layers/parallel_rmsnorm.py:18",
    "acl": "mindspeed/core/transformer/moe/layers.py:8",
    "torchair": "mindspeed/op_builder/gmm_builder.py:4",
    "torchair.ge": "mindspeed/op_builder/gmm_builder.py:12",
}  # fmt: skip

# id suffix, target, kind, provider, why
_TABLE = (
    ("device", "torch:npu", "extend", f"{_HERE}.ascend.torch_npu:npu",
     "torch_npu puts its device there; MindSpeed's dispatcher and optimizers use torch.npu (50 times current_device)"),
    ("stream", "torch.cuda:Stream", "wrap", f"{_HERE}.ascend.streams:stream_of_npu",
     "torch.cuda's streams are the NPU's there; the swap optimizer records events in them "
     "(mindspeed/core/optimizer/swap_optimizer.py:94, :117, :140)"),
    ("tensor_npu", "torch:Tensor.npu", "extend", f"{_HERE}.ascend.device_names:npu",
     "mindspeed/core/fusions/fused_softmax.py:12 and the causal mask of mindspeed_llm/core/transformer/"
     "dot_product_attention.py:436 move tensors by it"),
    ("tensor_to", "torch:Tensor.to", "wrap", f"{_HERE}.ascend.device_names:to_on_cpu",
     '.to("npu") at mindspeed/core/transformer/moe/grouped_gemm_util.py:29'),
    ("empty", "torch:empty", "wrap", f"{_HERE}.ascend.device_names:unpinned",
     "pin_memory=True at mindspeed/core/transformer/moe/unpermute_without_activation.py:89"),
    ("empty_like", "torch:empty_like", "wrap", f"{_HERE}.ascend.device_names:unpinned",
     "the swap optimizer's host copies are pinned (mindspeed/core/optimizer/swap_optimizer.py:70, :77)"),
    ("tensor", "torch:tensor", "wrap", f"{_HERE}.ascend.device_names:unpinned",
     "pin_memory=True at mindspeed/core/models/common/embeddings/rotary_pos_embedding.py:212 under context "
     'parallelism, device="npu" at mindspeed/utils.py:208'),
    ("histc", "torch:histc", "wrap", f"{_HERE}.ascend.device_names:histc_of_integers",
     "tokens of each expert are counted by it (mindspeed/core/transformer/moe/token_dispatcher.py:265); on a CPU torch "
     "takes no integers"),
    ("jit_script", "torch.jit:script", "replace", f"{_HERE}.ascend.device_names:script_nothing",
     "torch_npu's transfer_to_npu turns it off, and MindSpeed puts it where torch.compile was "
     "(mindspeed/megatron_adaptor.py:131): what it cannot compile must run as it is"),
    ("library", "torch.library:Library.impl", "wrap", f"{_HERE}.ascend.device_names:implement_on_cpu",
     "grouped matmul is registered for PrivateUse1, the NPU's key, only (mindspeed/ops/gmm.py:153)"),
    ("tensor_type", "mindspeed.megatron_adaptor:type_wrapper", "wrap",
     f"{_HERE}.ascend.device_names:type_as_on_a_device",
     "Megatron's optimizers take torch.cuda.FloatTensor and the like only "
     "(megatron/core/optimizer/distrib_optimizer.py:347); MindSpeed goes over Tensor.type itself"),
    ("builder", "mindspeed.op_builder.builder:MindSpeedOpBuilder.load", "replace",
     f"{_HERE}.mindspeed_ops.loader:load", "it compiles C++ against CANN (mindspeed/op_builder/builder.py:65)"),
    ("atb_builder", "mindspeed.op_builder.atb_builder:AtbOpBuilder.load", "replace",
     f"{_HERE}.mindspeed_ops.loader:load", "it asks for CANN's transformer library first "
     "(mindspeed/op_builder/atb_builder.py:45)"),
)  # fmt: skip

# rows of rows_torch.py that stand on the same place, below these
_OVER = {"tensor": ("platform.torch_tensor",), "stream": ("platform.torch_stream_class",)}


def _row(suffix: str, target: str, kind: str, provider: str, why: str, exit: str) -> PatchSpec:
    return PatchSpec(
        id=f"platform.npu_{suffix}", stage="platform", target=target, kind=kind, provider=provider, why=why, exit=exit,
        lines=frozenset({"a3"}), platforms=frozenset({"cpu"}), needs=_OVER.get(suffix, ()),
        processes=frozenset({"worker"} if target.startswith("mindspeed") else {"controller", "worker"}),
    )


ROWS: tuple[PatchSpec, ...] = (
    *(_row(f"module_{name.replace('.', '_')}", name, "stub", f"{_HERE}.ascend.{name}", why, _NO_CPU)
      for name, why in _MODULES.items()),
    *(_row(*entry, _NO_BUILD if "builder" in entry[0] else _NO_CPU) for entry in _TABLE),
)  # fmt: skip
