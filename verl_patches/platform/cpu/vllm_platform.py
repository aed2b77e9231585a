"""vLLM's CPU platform with what an in-process rollout beside training needs; imports vLLM, so nothing imports it early.

vLLM 0.9.1's own CpuPlatform is kept and subclassed. It is installed through `vllm.platforms.builtin_platform_plugins`,
the registry in which vLLM looks for platforms, so that worker class, communicator and config checks all follow from it.
The worker is in a module of its own: importing vLLM's workers asks for the platform.
"""

from __future__ import annotations

from vllm.platforms.cpu import CpuPlatform

_HERE = "verl_patches.platform.cpu"
_WORKERS = {"vllm.worker.cpu_worker.CPUWorker": f"{_HERE}.vllm_worker.RolloutCpuWorker"}


class RolloutCpuPlatform(CpuPlatform):
    """CpuPlatform that keeps the external launcher and needs no compiled operation."""

    simple_compile_backend: str = "eager"  # upstream: "inductor", which would start a C++ compiler per function

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """CpuCommunicator plus the exchange of tokens between data-parallel ranks that share experts."""
        return f"{_HERE}.vllm_worker.RolloutCpuCommunicator"

    @classmethod
    def check_and_update_config(cls, vllm_config) -> None:
        """CpuPlatform's checks, minus the fall-back to its own processes, plus what MLA and missing kernels need.

        - external_launcher is kept (platforms/cpu.py:146 turns it into "mp" when tp > 1).
        - Operations with a Python version use it (`custom_ops=["none"]`): the wheel's compiled ones do not load.
        - MLA: prefix caching off. platforms/cpu.py:233 says so in its log but only turns chunked prefill off, and
          cpu_mla.py:88 refuses either (verl always asks for prefix caching, vllm_rollout_spmd.py:167).
        """
        parallel = vllm_config.parallel_config
        backend = parallel.distributed_executor_backend
        super().check_and_update_config(vllm_config)
        if backend == "external_launcher":
            parallel.distributed_executor_backend = backend
        parallel.worker_cls = _WORKERS.get(parallel.worker_cls, parallel.worker_cls)
        vllm_config.compilation_config.custom_ops = ["none"]
        if vllm_config.model_config is not None and vllm_config.model_config.use_mla:
            vllm_config.cache_config.enable_prefix_caching = False
