"""torch.cuda and NCCL, answered by the CPU and gloo, for code that never asks which device it is on.

Where torch has a CPU counterpart (torch.cpu.stream, torch.default_generator) that is used. This module may be imported
while torch is half built, so it looks at torch only inside functions.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch


def is_cuda(device: Any) -> bool:
    """True for "cuda", "cuda:1", torch.device("cuda")."""
    return isinstance(device, (str, torch.device)) and str(device).startswith("cuda")


def is_available() -> bool:
    """One device, as far as verl asks."""
    return True


def device_count() -> int:
    """One: each process has its own."""
    return 1


def current_device() -> torch.device:
    """The CPU: whatever is made "on the current device" is then made there."""
    return torch.device("cpu")


# One function a symbol: torch._dynamo keys its rules by the object that it finds at each torch name.
def set_device(device: Any) -> None:
    """There is only one."""


def synchronize(device: Any = None) -> None:
    """Nothing runs behind the caller's back."""


def skip_health_check(optimizer: Any) -> None:
    """No driver to ask."""


def get_device_properties(device: Any = None) -> SimpleNamespace:
    """What verl and vLLM read of a device; its name is in no table of peak FLOPS."""
    return SimpleNamespace(
        name="cpu", total_memory=mem_get_info()[1], major=0, minor=0, multi_processor_count=1, gcnArchName=""
    )


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """(available, total) bytes of this machine's memory."""
    import psutil

    memory = psutil.virtual_memory()
    return memory.available, memory.total


def do_nothing(*args, **kwargs) -> None:
    """For methods that have no meaning on a CPU."""


class Stream:
    """torch.cpu.Stream with what Megatron calls besides: all work is done when a call returns, so nothing waits."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs):
        pass

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


def current_stream(device: Any = None):
    """torch.cpu's."""
    return torch.cpu.current_stream()


def stream(stream: Any):
    """torch.cpu's context manager."""
    return torch.cpu.stream(stream)


def get_rng_state(device: Any = "cuda") -> torch.Tensor:
    """State of the generator that random functions really use here: the CPU's."""
    return torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    """Set the CPU generator's state."""
    torch.set_rng_state(new_state)


def manual_seed(seed: int) -> None:
    """Seed the CPU generator."""
    torch.default_generator.manual_seed(int(seed))


def on_cpu(factory):
    """Wrap a tensor factory: device="cuda" means the CPU."""

    @functools.wraps(factory)
    def make(*args, **kwargs):
        if is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return make


def cuda(self, *args, **kwargs):
    """Tensor.cuda: it is there already."""
    return self


def pin_memory(self, *args, **kwargs):
    """A copy, as on a GPU: verl's offload frees the original's storage after it."""
    return self.clone()


def type_on_cuda(original):
    """Wrap Tensor.type: a CPU tensor calls itself torch.cuda.FloatTensor when asked, and still converts when told."""

    @functools.wraps(original)
    def type(self, *args, **kwargs):
        found = original(self, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found

    return type


def init_process_group_with_gloo(original):
    """Wrap init_process_group: gloo for NCCL, no device id."""

    @functools.wraps(original)
    def init_process_group(backend=None, *args, **kwargs):
        kwargs.pop("device_id", None)
        return original("gloo" if backend and "nccl" in backend else backend, *args, **kwargs)

    return init_process_group


def init_device_mesh_on_cpu(original):
    """Wrap init_device_mesh: a mesh of cuda devices is one of CPUs."""

    @functools.wraps(original)
    def init_device_mesh(device_type, *args, **kwargs):
        return original("cpu" if is_cuda(device_type) else device_type, *args, **kwargs)

    return init_device_mesh
