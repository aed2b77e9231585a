"""Which die a Ray worker is on: the device runtime is asked only after Ray has set ASCEND_RT_VISIBLE_DEVICES."""

from __future__ import annotations

import os
import socket
import sys

from verl_patches.errors import ConfigError
from verl_patches.patching.engine import current

VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
NOT_SET_BY_RAY = "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"


def refuse_early_device_runtime() -> None:
    """ConfigError where platform npu has torch_npu imported before Ray has set ASCEND_RT_VISIBLE_DEVICES."""
    if current().switches.platform == "npu" and "torch_npu" in sys.modules:
        raise ConfigError(
            f"{_place()}: torch_npu is imported in Ray's worker set-up hook, before Ray sets {VISIBLE}; expected only "
            "after that, as the device runtime reads the variable once. If recipe.worker_process_setup_hook imports "
            "torch or verl, let it do so later: verl_patches.patching.hooks.after_import(module, function)"
        )


def check_visible_die(visible: int) -> None:
    """ConfigError where this worker of verl's would run on another die than Ray gave it; before any process group.

    visible: number of devices that the device runtime sees in this process (torch.npu.device_count()). A process that
    Ray did not start chose its device itself: nothing is checked there.
    """
    import ray

    if not ray.is_initialized():
        return
    given = [str(number) for number in ray.get_runtime_context().get_accelerator_ids()["NPU"]]
    found = os.environ.get(VISIBLE)
    fault = None
    if len(given) != 1:
        fault = f"expected one die from Ray, found ids {given}: the actor asks for no NPU, or for more than one"
    elif found != given[0]:
        fault = (
            f"{VISIBLE} is {found!r}, expected {given[0]!r}, the id that Ray gave. {NOT_SET_BY_RAY} is "
            f"{os.environ.get(NOT_SET_BY_RAY)!r} (set, it keeps Ray from choosing): unset it where Ray is "
            f"started, and set {VISIBLE} neither in a runtime_env nor in a set-up hook"
        )
    elif visible != 1:
        fault = (
            f"the device runtime sees {visible} devices, expected 1, with {VISIBLE}={found}: it was started "
            "before Ray set the variable. Find what calls torch.npu before `import verl`, a set-up hook for one"
        )
    if fault:
        raise ConfigError(f"{_place()}: {fault}")


def _place() -> str:
    return f"rank {os.environ.get('RANK')} (pid {os.getpid()} on {socket.gethostname()})"
