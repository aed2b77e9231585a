"""What `import torch_npu`, `torchair`, `acl` and numba give on platform npu_emulated: one module object each.

They have the names of platform cpu's stand-ins (platform/cpu/ascend/packages.py), which training uses, and those that
vllm-ascend uses on DeepSeek-V3's path. Other names are an AttributeError that says so.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from verl_patches.platform.cpu import torch_on_cpu
from verl_patches.platform.cpu.ascend import packages as training
from verl_patches.platform.cpu.ascend.packages import stand_in
from verl_patches.platform.npu import VISIBLE
from verl_patches.platform.npu.op_schemas import ATB_FUNCTIONS, FUNCTIONS, WITH_EMULATION
from verl_patches.platform.npu_emulated import attention_ops, device, expert_ops, hccl, memory_pool

_KEPT = ("__version__", "__file__")
SOC_VERSION = 250  # an Atlas A3 (vllm_ascend/utils.py:298)
DEVICES = 16  # dies of a node


def with_more(base: ModuleType, **names: Any) -> ModuleType:
    """A stand-in with the names of `base` and `names` over them."""
    known = {key: value for key, value in vars(base).items() if not key.startswith("__") or key in _KEPT}
    return stand_in(base.__name__, base.__doc__, **{**known, **names})


def _nothing(*args: Any, **kwargs: Any) -> None:
    """There is nothing to do."""


@contextmanager
def _entered(*args: Any, **kwargs: Any):
    """Work is done where it is called."""
    yield


class NPUGraph:
    """A captured graph; vllm-ascend names it in annotations."""


def device_count() -> int:
    """Dies that Ray made visible to this process; without that variable all of a node."""
    visible = os.environ.get(VISIBLE)
    return DEVICES if visible is None else len(visible.split(","))


npu = with_more(
    training.npu,
    config=SimpleNamespace(allow_internal_format=True), current_blas_handle=_nothing,
    device_count=device_count, get_device_name=lambda device=None: training.get_soc_name(),
    get_device_properties=lambda device=None: SimpleNamespace(
        name=training.get_soc_name(), total_memory=device_bytes()),
    get_soc_version=lambda: SOC_VERSION, graph=_nothing, init=_nothing, is_initialized=lambda: True,
    _is_in_bad_fork=lambda: False, _lazy_init=_nothing, mem_get_info=device.mem_get_info,
    memory=stand_in("torch_npu.npu.memory", "A pluggable allocator.", MemPool=memory_pool.MemPool,
                    NPUPluggableAllocator=memory_pool.NPUPluggableAllocator, use_mem_pool=memory_pool.use_mem_pool),
    memory_snapshot=memory_pool.memory_snapshot, memory_stats=device.memory_stats, NPUGraph=NPUGraph,
    reset_peak_memory_stats=_nothing, set_stream=_nothing,
    streams=stand_in("torch_npu.npu.streams", "Streams and events.", Event=torch_on_cpu.Event,
                     Stream=torch_on_cpu.Stream),
)  # fmt: skip


def device_bytes() -> int:
    """Bytes of the emulated device."""
    return device.TOTAL_BYTES


def npu_format_cast(input: torch.Tensor, acl_format: int) -> torch.Tensor:
    """A private format: refused, as nothing here would know how it is laid out."""
    raise RuntimeError(f"npu_format_cast to format {acl_format}: private formats are not emulated; leave NZ off")


def get_soc_version() -> int:
    """torch_npu._C's."""
    return SOC_VERSION


_OPS = {**vars(training.torch_npu), **vars(attention_ops), **vars(expert_ops)}
_NAMES = ["npu_grouped_matmul", *WITH_EMULATION, *ATB_FUNCTIONS]
_OWN = {name: _OPS[name] for name in _NAMES}
_NODES = [value for key, value in _OPS.items() if key in FUNCTIONS]  # one node each in a traced graph

torch_npu = with_more(
    training.torch_npu, **_OWN, npu_format_cast=npu_format_cast,
    atb=stand_in("torch_npu.atb", "ATB.", **{name: _OPS[name] for name in ATB_FUNCTIONS if name[0] != "_"}),
    npu=npu, profiler=with_more(training.torch_npu.profiler),
    _C=stand_in("torch_npu._C", "Process groups.", _npu_get_soc_version=get_soc_version,
                _distributed_c10d=stand_in("torch_npu._C._distributed_c10d", "HCCL.",
                                           ProcessGroupHCCL=hccl.ProcessGroupHCCL)),
    op_plugin=stand_in("torch_npu.op_plugin", "ATB.", atb=stand_in("torch_npu.op_plugin.atb", "ATB.", _atb_ops=stand_in(
        "torch_npu.op_plugin.atb._atb_ops", "ATB's functions.", _register_atb_extensions=_nothing))),
)  # fmt: skip

acl = with_more(training.acl, rt=stand_in("acl.rt", "The runtime.", memcpy=memory_pool.memcpy))
vllm_ascend_C = stand_in(
    "vllm_ascend.vllm_ascend_C", "The allocator of sleep mode; the custom ops are not here.",
    init_module=memory_pool.init_module, python_create_and_map=memory_pool.python_create_and_map,
    python_unmap_and_release=memory_pool.python_unmap_and_release,
)  # fmt: skip

# -- torchair: Dynamo traces as on a device, and the graph is run node by node -----------------------------------------


class CompilerConfig:
    """Options of the graph compiler, all of which are taken and none used."""

    def __init__(self) -> None:
        self.experimental_config, self.debug, self.mode = SimpleNamespace(), SimpleNamespace(), None


class Graphs:
    """Counts of this process."""

    traced: list[int] = []  # nodes of each graph
    stream_switches = 0


def get_npu_backend(*, compiler_config: Any = None) -> Callable:
    """A backend of torch.compile that runs the traced graph by its nodes.

    Where Dynamo is off (TORCHDYNAMO_DISABLE=1) torch.compile returns the model itself, and nothing is traced.
    """
    for reference in _NODES:
        torch._dynamo.allow_in_graph(reference)

    def backend(traced: torch.fx.GraphModule, example_inputs: Any) -> Callable:
        Graphs.traced.append(len(traced.graph.nodes))
        return traced.forward

    return backend


def cache_compile(func: Callable, *, config: Any = None, dynamic: bool = True, fullgraph: bool = True, **_: Any):
    """torch.compile of one method; the real one also keeps the compiled graph in a folder."""
    compiled = torch.compile(
        func, dynamic=dynamic, fullgraph=fullgraph, backend=get_npu_backend(compiler_config=config)
    )
    return functools.wraps(func)(lambda *args, **kwargs: compiled(*args, **kwargs))


@contextmanager
def npu_stream_switch(stream_tag: str, stream_priority: int = 0):
    """Work of another stream of the graph: done at once."""
    Graphs.stream_switches += 1
    yield


def npu_wait_tensor(input: torch.Tensor, dependency: torch.Tensor) -> torch.Tensor:
    """The same tensor, after `dependency`."""
    return input


_scope = {"npu_stream_switch": npu_stream_switch, "npu_wait_tensor": npu_wait_tensor}
torchair = with_more(
    training.torchair, CompilerConfig=CompilerConfig, get_npu_backend=get_npu_backend, patch_for_hcom=_nothing,
    inference=stand_in("torchair.inference", "Cached graphs.", cache_compile=cache_compile),
    scope=stand_in("torchair.scope", "Streams of a graph.", **_scope),
    ops=stand_in("torchair.ops", "Streams of a graph, by older names.", NpuStreamSwitch=npu_stream_switch,
                 npu_wait_tensor=npu_wait_tensor),
    _contrib=stand_in("torchair._contrib", "Converters.", custom_torch_ops=stand_in(
        "torchair._contrib.custom_torch_ops", "Imported for its effect.")),
)  # fmt: skip

# -- numba -------------------------------------------------------------------------------------------------------------


def jit(*args: Any, **kwargs: Any) -> Any:
    """The function as it is: vLLM's n-gram proposer decorates its loops, which never run here."""
    return args[0] if args and callable(args[0]) else lambda function: function


numba = stand_in("numba", "vllm/v1/spec_decode/ngram_proposer.py imports it.", jit=jit, njit=jit)
