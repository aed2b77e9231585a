"""Replace torch's functions for a device ("cuda", "npu", NCCL) by ones that use the CPU and gloo.

Upstream never checks which device it runs on. torch's CPU counterpart is used where there is one (torch.cpu.stream,
torch.default_generator). This module may be imported before torch's own import has ended, so it reads torch only
inside functions.
"""

from __future__ import annotations

import functools
import importlib
import time
from types import SimpleNamespace
from typing import Any

import torch

from verl_patches.emulation.npu.torch_names import is_device

# -- torch.cuda --------------------------------------------------------------------------------------------------------


def is_available() -> bool:
    """Return True: verl treats the CPU as its one device."""
    return True


def device_count() -> int:
    """Return 1: each process has a device of its own."""
    return 1


def current_device() -> torch.device:
    """Return the CPU, so that tensors "on the current device" are made there."""
    return torch.device("cpu")


# Each torch name has a function of its own: torch._dynamo keys its rules by the object that it finds at a name.
def set_device(device: Any) -> None:
    """Do nothing: there is only one device."""


def synchronize(device: Any = None) -> None:
    """Do nothing: work on a CPU is done when a call returns."""


def skip_health_check(optimizer: Any) -> None:
    """Skip the check: there is no driver to ask."""


def get_device_properties(device: Any = None) -> SimpleNamespace:
    """Return the properties that verl and vLLM read; the name "cpu" is in no table of peak FLOPS."""
    return SimpleNamespace(
        name="cpu", total_memory=mem_get_info()[1], major=0, minor=0, multi_processor_count=1, gcnArchName=""
    )


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Return (available, total) bytes of this machine's memory."""
    import psutil

    memory = psutil.virtual_memory()
    return memory.available, memory.total


def current_stream(device: Any = None):
    """Return torch.cpu's current stream."""
    return torch.cpu.current_stream()


def stream(stream: Any):
    """Return torch.cpu's context manager of a stream."""
    return torch.cpu.stream(stream)


def get_rng_state(device: Any = "cuda") -> torch.Tensor:
    """Return the state of the CPU generator, which random functions really use here."""
    return torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    """Set the CPU generator's state."""
    torch.set_rng_state(new_state)


def manual_seed(seed: int) -> None:
    """Seed the CPU generator."""
    torch.default_generator.manual_seed(int(seed))


class _FinishedWork:
    """Answer queries and waits at once: work on a CPU is done when a call returns."""

    def query(self) -> bool:
        """Return True: all work is done."""
        return True

    def synchronize(self, *other) -> None:
        """Return at once."""

    wait = wait_stream = wait_event = synchronize


class Event(_FinishedWork):
    """Stand in for torch.cuda.Event; all work before an event is done when it is recorded."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False):
        self._at_s: float | None = None

    def record(self, stream: Any = None) -> None:
        """Record the time."""
        self._at_s = time.perf_counter()

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds from this event to another; raise RuntimeError if one was not recorded."""
        if self._at_s is None or end_event._at_s is None:
            raise RuntimeError("Event.elapsed_time: an event has no time; call record() on both events first")
        return (end_event._at_s - self._at_s) * 1000


class Stream(_FinishedWork):
    """Stand in for torch.cuda.Stream, a queue of work."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs):
        pass

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event and return it."""
        event = event or Event()
        event.record(self)
        return event


if hasattr(torch, "_streambase"):  # torch 2.5: torch._dynamo asserts that a device's classes derive from these
    torch._streambase._EventBase.register(Event)
    torch._streambase._StreamBase.register(Stream)


# -- tensors -----------------------------------------------------------------------------------------------------------


def factory_on_cpu(factory):
    """Wrap a tensor factory: device "cuda" or "npu" means the CPU, and no memory is pinned (no device copies it)."""

    @functools.wraps(factory)
    def make(*args, **kwargs):
        kwargs.pop("pin_memory", None)
        if is_device(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return make


def stay_on_cpu(self, *args, **kwargs):
    """Replace Tensor.cuda, Tensor.npu and TensorDict.cuda: the tensor stays where it is."""
    return self


def move_to_cpu(original):
    """Wrap Tensor.to and DataProto.to: "cuda" and "npu" mean the CPU."""

    @functools.wraps(original)
    def to(self, *args, **kwargs):
        if args and is_device(args[0]):
            args = ("cpu", *args[1:])
        if is_device(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return original(self, *args, **kwargs)

    return to


def pin_memory(self, *args, **kwargs):
    """Return a copy, as on a GPU: verl's offload frees the original's storage after it."""
    return self.clone()


def cuda_type_name(original):
    """Wrap Tensor.type: without a dtype a CPU tensor is torch.cuda.FloatTensor; with one it is converted."""

    @functools.wraps(original)
    def type(self, *args, **kwargs):
        found = original(self, *args, **kwargs)
        if isinstance(found, str) and not found.startswith("torch.cuda."):  # a TorchFunctionMode calls this twice
            return found.replace("torch.", "torch.cuda.", 1)
        return found

    return type


def type_wrapper_on_cuda(type_wrapper):
    """Wrap MindSpeed's `type_wrapper`, its wrapper of Tensor.type, to apply `cuda_type_name` below it."""

    @functools.wraps(type_wrapper)
    def wrap(fn):
        return type_wrapper(cuda_type_name(fn))

    return wrap


def histc_of_integers(original):
    """Wrap torch.histc to count integers too, as a device does."""

    @functools.wraps(original)
    def histc(input, *args, **kwargs):
        if input.is_floating_point():
            return original(input, *args, **kwargs)
        return original(input.double(), *args, **kwargs).to(input.dtype)

    return histc


# -- the rest of torch -------------------------------------------------------------------------------------------------


def init_process_group_with_gloo(original):
    """Wrap init_process_group to use gloo for NCCL and drop the device id."""

    @functools.wraps(original)
    def init_process_group(backend=None, *args, **kwargs):
        kwargs.pop("device_id", None)
        return original("gloo" if backend and "nccl" in backend else backend, *args, **kwargs)

    return init_process_group


def init_device_mesh_on_cpu(original):
    """Wrap init_device_mesh to make a mesh of CPUs for one of cuda devices."""

    @functools.wraps(original)
    def init_device_mesh(device_type, *args, **kwargs):
        return original("cpu" if is_device(device_type) else device_type, *args, **kwargs)

    return init_device_mesh


def skip_script(
    obj: Any, optimize: Any = None, _frames_up: int = 0, _rcb: Any = None, example_inputs: Any = None
) -> Any:
    """Replace torch.jit.script: return the object as it is."""
    return obj


def reduce_to_name(self: Any, protocol: int | None = None) -> tuple:
    """Replace ConfigModule.__reduce_ex__: pickle torch's configuration modules by name, as ordinary modules are."""
    return importlib.import_module, (self.__name__,)
