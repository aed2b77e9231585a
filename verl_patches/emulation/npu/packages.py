"""Build the stand-in modules for torch_npu, torchair, acl and numba on platform npu_emulated.

They have the names of platform cpu's stand-ins (emulation/ascend/packages.py), which training uses, and those that
vllm-ascend uses for DeepSeek-V3. Any other name raises an AttributeError that says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from verl_patches.emulation.ascend import packages as training
from verl_patches.emulation.ascend.packages import stand_in
from verl_patches.emulation.npu import engine_ops, hccl, memory_pool, profiler
from verl_patches.emulation.npu.hccl import GraphState
from verl_patches.emulation.npu.npu_module import do_nothing, extended_stand_in, npu
from verl_patches.emulation.op_schemas import ATB_FUNCTIONS, FUNCTIONS


def npu_format_cast(input: torch.Tensor, acl_format: int) -> torch.Tensor:
    """Refuse to cast to a private format, whose layout is not emulated."""
    raise RuntimeError(f"npu_format_cast: expected no private format, found {acl_format}; turn NZ formats off")


_REFERENCES = {**vars(training.torch_npu), **engine_ops.OPERATORS}
_GRAPH_NODES = [value for key, value in _REFERENCES.items() if key in FUNCTIONS]  # each is one node of a traced graph

torch_npu = extended_stand_in(
    training.torch_npu, **engine_ops.OPERATORS, npu_format_cast=npu_format_cast,
    atb=stand_in("torch_npu.atb", "ATB.", **{name: _REFERENCES[name] for name in ATB_FUNCTIONS if name[0] != "_"}),
    npu=npu, profiler=extended_stand_in(training.torch_npu.profiler, profile=profiler.profile,
                                ProfilerActivity=profiler.ProfilerActivity,
                                tensorboard_trace_handler=profiler.tensorboard_trace_handler),
    _C=stand_in("torch_npu._C", "Process groups.", _npu_get_soc_version=npu.get_soc_version,
                _distributed_c10d=stand_in("torch_npu._C._distributed_c10d", "HCCL.",
                                           ProcessGroupHCCL=hccl.ProcessGroupHCCL)),
    op_plugin=stand_in("torch_npu.op_plugin", "ATB.", atb=stand_in("torch_npu.op_plugin.atb", "ATB.", _atb_ops=stand_in(
        "torch_npu.op_plugin.atb._atb_ops", "ATB's functions.", _register_atb_extensions=do_nothing))),
)  # fmt: skip

acl = extended_stand_in(training.acl, rt=stand_in("acl.rt", "The runtime.", memcpy=memory_pool.memcpy))
vllm_ascend_C = stand_in(
    "vllm_ascend.vllm_ascend_C", "The allocator of sleep mode; the custom ops are not here.",
    init_module=memory_pool.init_module, python_create_and_map=memory_pool.python_create_and_map,
    python_unmap_and_release=memory_pool.python_unmap_and_release,
)  # fmt: skip

# -- torchair: Dynamo traces as on a device, and the graph is run node by node -----------------------------------------


class CompilerConfig:
    """Accept all options of torchair's graph compiler; only frozen_parameter has an effect."""

    def __init__(self) -> None:
        self.experimental_config, self.debug, self.mode = SimpleNamespace(), SimpleNamespace(), None


class Graphs:
    """Count what torchair traced in this process, and hold its state."""

    traced: list[int] = []  # nodes of each graph
    configs: list[CompilerConfig] = []  # options of each graph
    stream_switches = 0
    stream: str | None = None  # tag of the stream that npu_stream_switch has entered


def get_npu_backend(*, compiler_config: Any = None) -> Callable:
    """Return a backend of torch.compile that runs the traced graph node by node.

    With Dynamo off (TORCHDYNAMO_DISABLE=1) torch.compile returns the model itself, and nothing is traced.
    """
    for reference in _GRAPH_NODES:
        torch._dynamo.allow_in_graph(reference)

    def backend(traced: torch.fx.GraphModule, example_inputs: Any) -> Callable:
        Graphs.traced.append(len(traced.graph.nodes))
        Graphs.configs.append(compiler_config)
        return _graph_function(traced, compiler_config.experimental_config)

    return backend


def _graph_function(traced: torch.fx.GraphModule, options: SimpleNamespace) -> Callable:
    """Return the graph's function; with frozen_parameter it refuses Parameters that moved since its first call.

    It raises ValueError then: on a device the graph would read memory that may hold other data by now.
    """
    first: dict[str, int] = {}
    names = [node.name for node in traced.graph.nodes if node.op == "placeholder"]

    def run(*inputs: Any) -> Any:
        for name, value in zip(names, inputs, strict=True):
            if isinstance(value, torch.nn.Parameter):
                moved = first.setdefault(name, value.data_ptr()) != value.data_ptr()
                if moved and getattr(options, "frozen_parameter", False):
                    raise ValueError(f"torchair: {name} has moved since the graph's first call (frozen_parameter)")
        GraphState.running = True
        try:
            return traced.forward(*inputs)
        finally:
            GraphState.running = False

    return run


def cache_compile(func: Callable, *, config: Any = None, dynamic: bool = True, fullgraph: bool = True, **_: Any):
    """Compile one method with torch.compile; torchair's own also stores the compiled graph in a folder."""
    compiled = torch.compile(
        func, dynamic=dynamic, fullgraph=fullgraph, backend=get_npu_backend(compiler_config=config)
    )

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.overrides._pop_mode_temporarily():
            return compiled(*args, **kwargs)

    return call


class _Stream:
    """Switch the graph's stream in a `with` block; a class, as Dynamo of torch 2.5 traces no contextlib generator."""

    def __init__(self, stream_tag: str):
        self.stream_tag = stream_tag

    def __enter__(self) -> None:
        if (
            not torch.compiler.is_compiling()
        ):  # Dynamo would take the count for a constant, and trace again when it changes
            Graphs.stream_switches += 1
            Graphs.stream = self.stream_tag

    def __exit__(self, *error: Any) -> None:
        if not torch.compiler.is_compiling():
            Graphs.stream = None


def npu_stream_switch(stream_tag: str, stream_priority: int = 0) -> _Stream:
    """Return a context for work on another stream of the graph, which is done at once here."""
    return _Stream(stream_tag)


def npu_wait_tensor(input: torch.Tensor, dependency: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself: `dependency` is computed already."""
    return input


_scope = {"npu_stream_switch": npu_stream_switch, "npu_wait_tensor": npu_wait_tensor}
torchair = extended_stand_in(
    training.torchair, CompilerConfig=CompilerConfig, get_npu_backend=get_npu_backend, patch_for_hcom=do_nothing,
    inference=stand_in("torchair.inference", "Cached graphs.", cache_compile=cache_compile),
    scope=stand_in("torchair.scope", "Streams of a graph.", **_scope),
    ops=stand_in("torchair.ops", "Streams of a graph, by older names.", NpuStreamSwitch=npu_stream_switch,
                 npu_wait_tensor=npu_wait_tensor),
    _contrib=stand_in("torchair._contrib", "Converters.", custom_torch_ops=stand_in(
        "torchair._contrib.custom_torch_ops", "Imported for its effect.")),
)  # fmt: skip

# -- numba -------------------------------------------------------------------------------------------------------------


def jit(*args: Any, **kwargs: Any) -> Any:
    """Return the function as it is: vLLM's n-gram proposer decorates its loops, which never run here."""
    return args[0] if args and callable(args[0]) else lambda function: function


numba = stand_in("numba", "vllm.v1.spec_decode.ngram_proposer imports it.", jit=jit, njit=jit)
