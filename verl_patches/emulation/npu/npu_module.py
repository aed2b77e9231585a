"""Build the stand-in for torch_npu.npu, which is torch.npu too, on the emulated device.

It has the names of platform cpu's stand-in, which training uses, and those that vllm-ascend uses. The patch of
torch.npu imports this file at the end of torch's own import, so it is separate from packages.py.
"""

from __future__ import annotations

import os
from types import ModuleType, SimpleNamespace
from typing import Any

from verl_patches.emulation.ascend import packages as training
from verl_patches.emulation.ascend.packages import stand_in
from verl_patches.emulation.cpu import torch_on_cpu
from verl_patches.emulation.npu import device, memory_pool
from verl_patches.platform.npu import VISIBLE_DEVICES

_MODULE_ATTRIBUTES = ("__version__", "__file__")
SOC_VERSION = 250  # an Atlas A3 (vllm_ascend.utils.init_ascend_soc_version)
DEVICES = 16  # dies of a node


def extended_stand_in(base: ModuleType, **names: Any) -> ModuleType:
    """Return a copy of stand-in `base` in which `names` are added or replaced."""
    known = {key: value for key, value in vars(base).items() if not key.startswith("__") or key in _MODULE_ATTRIBUTES}
    return stand_in(base.__name__, base.__doc__, **{**known, **names})


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Accept any call and do nothing."""


class NPUGraph:
    """Stand in for the class of captured graphs, which vllm-ascend names in annotations only."""


def device_count() -> int:
    """Return how many dies Ray made visible to this process; all of a node's if the variable is not set."""
    visible = os.environ.get(VISIBLE_DEVICES)
    return DEVICES if visible is None else len(visible.split(","))


def _properties(device_number: Any = None) -> SimpleNamespace:
    return SimpleNamespace(name=training.get_soc_name(), total_memory=device.TOTAL_BYTES)


npu = extended_stand_in(
    training.npu,
    config=SimpleNamespace(allow_internal_format=True), current_blas_handle=do_nothing,
    device_count=device_count, empty_cache=memory_pool.empty_cache,
    get_device_name=lambda device=None: training.get_soc_name(), get_device_properties=_properties,
    get_soc_version=lambda: SOC_VERSION, graph=do_nothing, init=do_nothing, is_initialized=lambda: True,
    _is_in_bad_fork=lambda: False, _lazy_init=do_nothing, mem_get_info=device.mem_get_info,
    memory=stand_in("torch_npu.npu.memory", "A pluggable allocator.", MemPool=memory_pool.MemPool,
                    NPUPluggableAllocator=memory_pool.NPUPluggableAllocator, use_mem_pool=memory_pool.use_mem_pool,
                    _record_memory_history=memory_pool.record_memory_history, _snapshot=memory_pool.snapshot),
    memory_allocated=memory_pool.allocated_bytes, memory_reserved=memory_pool.reserved_bytes,
    memory_snapshot=memory_pool.memory_snapshot, memory_stats=device.memory_stats, NPUGraph=NPUGraph,
    reset_peak_memory_stats=do_nothing, set_stream=do_nothing,
    streams=stand_in("torch_npu.npu.streams", "Streams and events.", Event=torch_on_cpu.Event,
                     Stream=torch_on_cpu.Stream),
)  # fmt: skip
